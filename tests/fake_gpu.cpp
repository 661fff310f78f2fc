// What lets PyTorch work with "cuda" tensors where there is no GPU: hooks and a device guard that
// do nothing. See fake_gpu.py.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct Hooks : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
std::unique_ptr<at::CUDAHooksInterface> make_hooks(at::CUDAHooksArgs) {
  return std::make_unique<Hooks>();
}
namespace at {
// Preferred to those of a build with CUDA.
C10_REGISTER_TYPED_CREATOR_WITH_PRIORITY(
    CUDAHooksRegistry, "CUDAHooks", REGISTRY_PREFERRED, make_hooks)
}

struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, device);
  }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
extern "C" void install_guard() { impl::registerDeviceGuard(DeviceType::CUDA, new Guard); }
