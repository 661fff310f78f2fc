"""LoRA (arXiv 2106.09685): two low-rank matrices per linear layer are trained, not its weight.

    y = (W + s B A) x      W (D_out, D_in) frozen, A (r, D_in) random, B (D_out, r) starts at zero

r is --lora-rank, s = alpha / r = 2. Adapters (peft's, fp32, without dropout) are on the linear
layers of the decoder; embeddings, norms and head stay those of the start model. So there is

    in the optimizer     A and B only
    as reference         the policy with its adapters off (adapters_off), no second model
    in a checkpoint      an adapter in peft's format, which names the start model
    for vLLM             the merged weights W + s B A at every sync (full_weights), in a bf16 engine
                         rounded at random (round_bf16)
    as a start model     merged weights (loading.load_policy), for bf16 passes rounded in this way
    after training       a plain Hugging Face folder with merged weights, rounded in this way
                         (running/export.py)

Use about ten times the learning rate of full training. PPO's critic, a model of its own, is trained
in full, at this same rate (critic.py).

With bf16 passes, each frozen W is stored in bf16: the passes round it to that anyway, so no
log-probability changes. Early in training, s B A is far smaller than the distance of two bf16
numbers where W is, and s B A x where W x is: a sum of two rounded numbers is the first of them. So
the trainer's passes add before they round (sum_rounded_once), and merged weights are rounded at
random (round_bf16). research/bench/README.md has what each of the two is for.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MethodType

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paw_min.base.distributed import whole
from paw_min.base.errors import UserError
from paw_min.base.files import reading
from paw_min.base.seeds import generator

SCALE = 2  # s; peft's lora_alpha is s r
PREFIX = "base_model.model."  # what names in peft's files begin with


def check_installed() -> None:
    if find_spec("peft") is None:
        raise UserError("LoRA needs peft: pip install 'peft>=0.21,<0.22', or omit --lora-rank, "
                        "with another --name.")


def attach(model, rank: int, precision: str, seed: int, checkpoint: Path | None) -> None:
    """Freeze a model of transformers and add adapters: new ones, or those of a checkpoint."""
    from peft import LoraConfig, set_peft_model_state_dict

    # The name is stored in checkpoints. A relative one also works in another clone, if it is used
    # from the same working folder. With ./ it is not taken for a name on the hub.
    if os.path.isdir(model.name_or_path):
        model.name_or_path = os.path.join(".", os.path.relpath(model.name_or_path))
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)  # A is drawn on the CPU: the same on every rank
        names = list(linear_layers(model))
        model.add_adapter(LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=names))
    if checkpoint:
        with reading(checkpoint / "adapter_model.safetensors") as path:
            stored = load_file(path)
            weights = {name.removeprefix(PREFIX): weight for name, weight in stored.items()}
            found = set_peft_model_state_dict(model, weights)
            # peft leaves new adapters where the file has none.
            missing = [name for name in found.missing_keys if ".lora_" in name]
            if missing or found.unexpected_keys:
                one = min(missing or found.unexpected_keys)
                raise UserError(f"{path} has adapters of other layers ({one}): restore it, or "
                                "start anew with another --name.")
    if precision == "bf16":
        for layer in adapted_layers(model):
            layer.base_layer.to(torch.bfloat16)
            layer.forward = MethodType(sum_rounded_once, layer)


def sum_rounded_once(layer, x: Tensor) -> Tensor:
    """y = W x + s B A x + bias, in place of the forward method of peft's layer, in bf16 passes.

    peft's rounds W x before it adds s B A x. Here the product with W takes it as its start, so that
    both are summed in fp32. The bias comes last with and without adapters: new ones, with B = 0,
    change nothing.
    """
    base = layer.base_layer
    tokens = x.flatten(0, -2)  # (N, D_in)
    if layer.disable_adapters:
        y = tokens @ base.weight.T
    else:
        learned = SCALE * layer.lora_B["default"](layer.lora_A["default"](tokens))  # (N, D_out)
        y = torch.addmm(learned, tokens, base.weight.T)
    if base.bias is not None:
        y = y + base.bias
    return y.unflatten(0, x.shape[:-1])


def linear_layers(model) -> dict[str, nn.Linear]:
    """Name and module of each linear layer of the decoder: the head is not one of them."""
    decoder = set(model.get_decoder().modules())
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in decoder
    }


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


@contextmanager
def adapters_off(policy: nn.Module):
    """In this block, a policy with adapters is the start model; any other stays what it is."""
    for layer in adapted_layers(policy):
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapted_layers(policy):
            layer.enable_adapters(True)


def base_model(folder: str) -> str | None:
    """The start model of the adapter in `folder`; None if there is no adapter in it."""
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        return None
    return json.loads(path.read_text("utf-8"))["base_model_name_or_path"]


@torch.no_grad()
def merge(model, folder: str):
    """The start model with the adapter in `folder` added to its weights.

    UserError unless this model is what peft makes of the two: an adapter may also repeat layers,
    wait for a token, or change an embedding that is the head, too.
    """
    check_installed()
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    names = parameter_names(model)
    # Where an adapter is of other layers, peft warns of those that it lacks, and is silent on the
    # others: the start model would stay as it is there.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        adapted = PeftModel.from_pretrained(model, folder)
    stored = load_peft_weights(folder, device="cpu")
    if unused := stored.keys() - get_peft_model_state_dict(adapted).keys():
        raise UserError(f"the adapter {folder} has {min(unused)}, which its start model does not: "
                        "use the start model that it was trained on.")
    ids = torch.arange(8, device=model.device)[None]  # (1, L)
    expected = adapted(ids, use_cache=False).logits  # (1, L, V)
    merged = adapted.merge_and_unload()
    logits = merged(ids, use_cache=False).logits
    if parameter_names(merged) != names or not torch.allclose(logits, expected, atol=1e-2):
        raise UserError(f"the adapter {folder} cannot be added to the weights of its start model, "
                        "as its adapter_config.json says: use another, or its merged model.")
    merged.name_or_path = folder
    return merged.requires_grad_(True)


def parameter_names(model) -> list[str]:
    """Their names, without a head that is tied to the embedding."""
    return [name for name, _ in model.named_parameters()]


def full_weights(model: nn.Module, precision: str = "fp32") -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight, unsharded, merged. Collective: every rank must iterate.

    precision: of the engine that gets them. For "bf16", merged weights are rounded here.
    """
    # named_parameters() omits a head that is tied to the embedding; vLLM's CPU build needs it.
    weights = model.state_dict()
    for name, stored in weights.items():
        if ".lora_" in name:
            continue  # added to its layer's weight below
        weight = whole(stored)
        merged_name = name.replace(".base_layer", "")
        if name.endswith("base_layer.weight"):
            layer = name.removesuffix("base_layer.weight")
            a = whole(weights[f"{layer}lora_A.default.weight"])  # (r, D_in)
            b = whole(weights[f"{layer}lora_B.default.weight"])  # (D_out, r)
            weight = torch.addmm(weight.float(), b, a, alpha=SCALE)  # W + s B A
            if precision == "bf16":
                weight = round_bf16(weight, merged_name)
        yield merged_name, weight


def round_layers(model: nn.Module) -> None:
    """Round the linear layers of a merged model as full_weights does: it plays as its run did."""
    for name, layer in linear_layers(model).items():
        layer.weight.data = round_bf16(layer.weight.data, f"{name}.weight").float()


def round_bf16(weight: Tensor, name: str) -> Tensor:
    """Each number of a merged fp32 weight, rounded at random to one of its two bf16 neighbors.

    The nearer one is the likelier, so that the expectation is the number itself. The price is noise
    of at most half the distance of the two (standard deviation), without a direction.

    name: of the weight, the seed of the draws. So rollouts, evaluations and every rank get the same
    weights from the same adapters, whenever they ask, and small steps change few of them.
    """
    seed = generator("round_bf16", name).getrandbits(63)
    draws = torch.Generator(weight.device).manual_seed(seed)
    # A bf16 number is the upper half of an fp32 number. The lower half is its part of the distance
    # to the next one: a random half is added, and what is left of the sum's lower half is cut off.
    half = torch.randint(
        2**16, weight.shape, generator=draws, dtype=torch.int32, device=weight.device
    )
    cut = (weight.view(torch.int32) + half) & ~0xFFFF
    return cut.view(torch.float32).bfloat16()
