"""examples/locks.py with one difference from examples/one_file.py at a time: package.md.

    python research/locks/package.py run [--workers 2]   trains what package.jsonl does not have yet
    python research/locks/package.py table               the tables of package.md

A cell is the example with other settings, responses, observations or another model; its arms are
GRPO, PaW and the placebo. Nothing of the package changes: a cell replaces functions of the example.
Success is computed exactly from the policy's probabilities, as in one_file.
"""

import argparse
import json
import math
import multiprocessing
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache, partial
from io import StringIO
from itertools import product
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch
from filelock import FileLock
from transformers import GPT2Config, GPT2LMHeadModel

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent.parent))  # the repository, for examples and paw_min

from examples import locks, one_file  # noqa: E402
from examples.one_file import TOOLS, Size, World, make_world  # noqa: E402
from paw_min import train, update  # noqa: E402
from paw_min.config import Config  # noqa: E402
from paw_min.envs.benchmarks import BENCHMARKS  # noqa: E402
from paw_min.envs.interface import Command  # noqa: E402
from paw_min.model.batches import collate  # noqa: E402
from paw_min.model.policy import Policy  # noqa: E402
from paw_min.model.sampler import HFSampler  # noqa: E402
from paw_min.rows import TokenRow  # noqa: E402
from paw_min.running import session  # noqa: E402
from paw_min.running.runs import Run  # noqa: E402
from paw_min.toy import standins  # noqa: E402
from research.locks import study  # noqa: E402
from research.paper.table import markdown_table  # noqa: E402

RUNS = FOLDER / "package.jsonl"
SCRATCH = Path("runs/locks-package")  # start models and run folders
PROTOCOL_SEEDS = range(3000, 3016)
ECHO = dict(wm_loss="ce", select_ratio=1.0, lambda_mode="constant", wm_scale=0.05)
ARMS = {"grpo": dict(paw=False), "paw": {}, "placebo": dict(wm_target="shuffled"), "echo": ECHO}


# ---- other responses, observations and models ----


def tagged(tool: str) -> str:
    return f"<action>{tool}</action>"


def parse_tagged(response: str) -> Command:
    """Three tokens besides the end, as in the benchmarks."""
    found = re.fullmatch(r"<action>\s*(\w+)\s*</action>", response.strip())
    tool = found[1] if found else response[-20:]
    return Command(tool, valid=tool in TOOLS)


class Sentence(World):
    """Observations with the words of a template around the two facts."""

    def observation(self, name: str, tool: str) -> list[str]:
        opens, material = super().observation(name, tool)
        return ["it", "opens" if opens == "opens" else "stays shut", ":", material, "."]


class Chat(World):
    """For one_file: prompts with the two tokens that the package's chat template adds to them."""

    def prompt(self, name: str) -> list[str]:
        return ["<user>", *super().prompt(name), "<agent>"]

    def words(self) -> list[str]:
        return ["<user>", "<agent>", *super().words()]


class PackagesHead(one_file.Model):
    """one_file's model with the head of the package's models: no bias, initialized with 0.02."""

    def __init__(self, words: list[str], size: Size):
        super().__init__(words, size)
        self.head = torch.nn.Linear(size.width, len(words), bias=False)
        torch.nn.init.normal_(self.head.weight, std=0.02)


def without_template(policy: Policy, message: str) -> list[int]:
    """For Policy.encode_chat: the prompt alone, as in one_file."""
    return policy.encode(message)


def without_end(policy: Policy, text: str) -> list[int]:
    """For Policy.encode_response: a response of one token, the tool."""
    return policy.encode(text)


def make_standin(tokenizer, seed: int):
    """The stand-ins' model, as small: Qwen3 with 4 layers, tied embeddings, all weights at 0.02."""
    return standins.make_model(tokenizer, seed, width=64, positions=64)


make_example = locks.make_model


def make_tied(tokenizer, seed: int):
    """The example's model with one matrix for embeddings and head."""
    model = make_example(tokenizer, seed)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def make_small(tokenizer, seed: int):
    """The example's model with the matrices of its layers at transformers' 0.02."""
    model = make_example(tokenizer, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.get_decoder().modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.02)
                torch.nn.init.zeros_(module.bias)
    return model


def make_gpt2(tokenizer, seed: int):
    """The example's model with learned positions, as in one_file."""
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=Size.width, n_layer=Size.layers,
        n_head=Size.heads, n_positions=64, tie_word_embeddings=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        intermediate_size=4 * Size.width,  # which running/memory.py looks for
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and ("attn" in name or "mlp" in name):
                torch.nn.init.uniform_(weight, -(weight.shape[0] ** -0.5), weight.shape[0] ** -0.5)
    return model


def make_gpt2_with_the_files_head(tokenizer, seed: int):
    """That model with PyTorch's default initialization of the head, about 0.07."""
    model = make_gpt2(tokenizer, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.lm_head.reset_parameters()
    return model


@dataclass(frozen=True)
class Cell:
    """The example, changed."""

    settings: dict = field(default_factory=dict)  # of the package
    names: int = 128
    warm_rows: int = Size.warm_rows
    end: bool = True  # whether a response has an end token
    template: bool = True  # whether a prompt has the tokens of the chat template
    tags: bool = False
    world: type[World] = World
    model: Callable = make_example
    malformed: bool = True  # whether the world model learns from malformed responses, too
    model_of_file: type[one_file.Model] = one_file.Model  # in the cells of one_file itself

    def make_world(self, seed: int) -> World:
        world = make_world(seed, self.names)
        return self.world(world.material_of, world.tool_of, world.locks)

    def start(self, seed: int) -> Path:
        """The start model; cells that differ only in settings share it."""
        kind = (
            self.names, self.warm_rows, self.end, self.template, self.tags, self.world, self.model,
            seed,
        )
        return SCRATCH / "-".join(str(getattr(part, "__name__", part)) for part in kind)


NO_KL = dict(kl_coef=0.0)
SHORT = NO_KL | dict(lr=1e-3, updates=80, eval_every=20)
TAGS = SHORT | dict(max_response_tokens=4)
SENTENCE = dict(max_obs_tokens=6)
KL = dict(kl_coef=0.01)
PENALTY = dict(invalid_penalty=0.1, statistics="rows")
LONG = dict(updates=160)
short = partial(Cell, names=64, warm_rows=64)
TRIES = short(TAGS | SENTENCE, tags=True, world=Sentence, model=make_standin)
CELLS = {
    "file": Cell(),
    "nearest": Cell(NO_KL | dict(max_response_tokens=1), end=False, model=make_gpt2),
    "file, chat tokens": Cell(world=Chat),
    "file, the package's head": Cell(model_of_file=PackagesHead),
    "nearest, no chat tokens": Cell(
        NO_KL | dict(max_response_tokens=1), end=False, model=make_gpt2, template=False
    ),
    "nearest, the file's head, no chat tokens": Cell(
        NO_KL | dict(max_response_tokens=1), end=False, model=make_gpt2_with_the_files_head,
        template=False,
    ),
    "nearest, the file's head": Cell(
        NO_KL | dict(max_response_tokens=1), end=False, model=make_gpt2_with_the_files_head
    ),
    "example": Cell(),
    "protocol": Cell(),  # the same, on PROTOCOL_SEEDS: protocol-worlds.md
    "example, no kl": Cell(NO_KL),
    "example, no kl, learned positions": Cell(NO_KL, model=make_gpt2),
    "example, one token": Cell(NO_KL | dict(max_response_tokens=1), end=False),
    "file, short": short(SHORT),
    "one token": short(SHORT | dict(max_response_tokens=1), end=False),
    "end": short(SHORT),
    "tags": short(TAGS, tags=True),
    "sentence": short(SHORT | SENTENCE, world=Sentence),
    "stand-in": short(SHORT, model=make_standin),
    "learned positions": short(SHORT, model=make_gpt2),
    "end, kl": short(SHORT | KL),
    "end, penalty": short(SHORT | PENALTY),
    "end, lr 5e-4": short(SHORT | dict(lr=5e-4)),
    "end, turn": short(SHORT | dict(wm_separator="turn")),
    "end, well formed": short(SHORT, malformed=False),
    "tags, kl": short(TAGS | KL, tags=True),
    "tags, well formed": short(TAGS, tags=True, malformed=False),
    "stand-in, kl": short(SHORT | KL | LONG, model=make_standin),
    "tied, kl": short(SHORT | KL | LONG, model=make_tied),
    "small, kl": short(SHORT | KL | LONG, model=make_small),
    "tries": TRIES,
    "tries, penalty": replace(TRIES, settings=TRIES.settings | PENALTY),
    "tries, kl": replace(TRIES, settings=TRIES.settings | KL | LONG),
    "tries, example's model": replace(TRIES, model=make_example),
    "tries, example's model, kl": replace(TRIES, settings=TRIES.settings | KL, model=make_example),
}


# ---- a run ----


@torch.no_grad()
def measure(policy: Policy, world: World) -> dict[str, float]:
    """Success, well-formed responses and p(material), as probabilities, without sampling."""
    names = list(world.material_of)
    rows, places = [], []
    for name in names:
        (material,) = policy.encode(world.material_of[name])
        for tool in TOOLS:
            said = policy.encode(" ".join(world.observation(name, tool)))
            response = policy.encode_response(locks.respond(tool))
            chat = policy.encode_chat(" ".join(world.prompt(name)))
            rows.append(TokenRow(chat, response, said))
            places.append(len(response) + said.index(material))
    batch = collate(rows, [True] * len(rows), policy.pad_id)
    logp, _ = policy(batch)  # (B, S), B: names times tools
    p = (logp * batch.response_mask).sum(1).exp().view(len(names), -1)  # (names, tools)
    right = [TOOLS.index(world.right_tool(name)) for name in names]
    p_right = p[torch.arange(len(names)), right].mean().item()
    p_material = logp[torch.arange(len(rows)), places].exp().mean().item()
    return {"success": p_right**world.locks, "valid": p.sum(1).mean().item(),
            "material": p_material}


KEPT = ("entropy", "grad_norm", "wm_loss", "wm_clipped_tokens", "approx_kl", "no_variance")


def run_package(cell: Cell, arm: str, seed: int, out: Path) -> list[dict]:
    """One run of paw_min.train -> its evaluations."""
    curve = []
    recent = []  # metrics of the updates since the last evaluation
    said = Counter()  # malformed responses since then

    def play_panel(cfg, opened, done):
        point = {"update": done} | measure(opened.policy, cell.make_world(seed))
        for name in KEPT:
            values = [line[name] for line in recent if name in line]
            if values:
                point[name] = mean(values)
        curve.append({key: float(f"{value:.5g}") for key, value in point.items()})
        curve[-1]["malformed"] = said.most_common(5)
        recent.clear()
        said.clear()
        return {"eval_success": point["success"]}

    usual_update = train.run_update
    usual_flatten = train.flatten

    def run_update(*args):
        recent.append(usual_update(*args))
        return recent[-1]

    def flatten(episodes):
        for episode in episodes:
            for step, transition in zip(episode.log, episode.transitions):
                if not transition.valid:
                    said[step.response] += 1
        return usual_flatten(episodes)

    def well_formed(_, rows):
        return torch.tensor([row.valid for row in rows])

    with ExitStack() as replaced:

        def instead(owner, name, value):
            replaced.enter_context(patch.object(owner, name, value))

        instead(locks, "make_world", cell.make_world)
        instead(locks, "make_model", cell.model)
        if cell.tags:
            instead(locks, "respond", tagged)
            usual = BENCHMARKS["locks"]
            replaced.enter_context(
                patch.dict(BENCHMARKS, {"locks": replace(usual, parse=parse_tagged)})
            )
        if not cell.end:
            instead(Policy, "encode_response", without_end)
        if not cell.template:
            instead(Policy, "encode_chat", without_template)
        start = cell.start(seed)
        start.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{start}.lock"):  # the arms of a seed share it
            if not start.exists():
                locks.warm_start(start, seed, Size(warm_rows=cell.warm_rows))
        instead(train, "play_panel", play_panel)
        instead(train, "run_update", run_update)
        instead(train, "flatten", flatten)
        if not cell.malformed:
            instead(update, "world_model_candidates", well_formed)
        # For speed only: no files for people, and each text is encoded once.
        instead(train, "draw", lambda *_: None)
        instead(Run, "write", lambda *_: None)
        instead(session, "HFSampler", partial(HFSampler, batch_size=128))
        for name in ("encode_chat", "encode"):
            instead(Policy, name, cache(getattr(Policy, name)))
        settings = locks.PRESETS["tiny"] | dict(
            env="locks", name=f"{arm} {seed}", out=str(out), model=str(start), seed=seed,
            save_every=10**6,
        )
        train.train(Config(**settings | cell.settings | ARMS[arm]))
    return curve


def run_file(cell: Cell, arm: str, seed: int) -> list[dict]:
    """The same setting in one_file itself."""
    used = locks.PRESETS["tiny"] | cell.settings
    valid = []
    usual = one_file.evaluate

    @torch.no_grad()
    def evaluate(model, world: World, update: int):
        logp = model(model.encode([world.prompt(name) for name in world.material_of]))[:, -1]
        tools = [model.id_of[tool] for tool in TOOLS]
        valid.append(logp.exp()[:, tools].sum(1).mean().item())
        return usual(model, world, update)

    size = Size(
        lr=used["lr"], updates=used["updates"], evaluate_every=used["eval_every"],
        warm_rows=cell.warm_rows,
    )
    with patch.multiple(one_file, evaluate=evaluate, Model=cell.model_of_file):
        arms = one_file.make_arms(one_file.Arm())
        points = one_file.run(seed, arms[arm], cell.make_world(seed), size)
    curve = [vars(point) | {"valid": share} for point, share in zip(points, valid, strict=True)]
    return [{key: float(f"{value:.5g}") for key, value in point.items()} for point in curve]


def job(key: tuple[str, str, int]) -> dict:
    """One run -> its line in package.jsonl."""
    name, arm, seed = key
    torch.set_num_threads(1)
    if name.startswith("file"):
        curve = run_file(CELLS[name], arm, seed)
        return {"cell": name, "arm": arm, "seed": seed, "curve": curve}
    shutil.rmtree(SCRATCH / name / f"{arm} {seed}", ignore_errors=True)  # of a killed command
    with redirect_stdout(StringIO()):
        curve = run_package(CELLS[name], arm, seed, SCRATCH / name)
    return {"cell": name, "arm": arm, "seed": seed, "curve": curve}


def read_runs() -> dict[tuple[str, str, int], list[dict]]:
    """{(cell, arm, seed): curve}."""
    if not RUNS.exists():
        return {}
    lines = [json.loads(line) for line in RUNS.read_text().splitlines()]
    return {(line["cell"], line["arm"], line["seed"]): line["curve"] for line in lines}


def run(cells: list[str], arms: list[str], seeds: list[int], workers: int) -> None:
    from tqdm import tqdm

    known = read_runs()
    wanted = [(cell, arm, seed) for cell in cells for seed in seeds for arm in arms]
    jobs = [key for key in wanted if key not in known]
    with multiprocessing.get_context("spawn").Pool(workers) as pool, RUNS.open("a") as file:
        for line in tqdm(pool.imap(job, jobs), total=len(jobs), unit="run"):
            file.write(json.dumps(line) + "\n")
            file.flush()


def compare() -> str:
    """one_file without a KL term and the package with it, and differences to GRPO and PaW."""
    own = study.read_runs()
    trained = {(arm, seed): curve for (cell, arm, seed), curve in read_runs().items()
               if cell == "protocol"}
    lines = []
    for kl, known, seeds, echo in (
        ("without", own, study.SEEDS, "ce 0.05"), ("with", trained, PROTOCOL_SEEDS, "echo")
    ):
        complete = {
            arm for arm in (*ARMS, echo) if all((arm, seed) in known for seed in seeds)
        }
        for arm in ("grpo", "paw", "placebo", echo):
            cells = [kl, arm]
            for measure in (study.area, study.end):
                runs = [known[arm, seed] for seed in seeds] if arm in complete else []
                cells.append(f"{mean(map(measure, runs)):.1f}" if runs else "not run")
                for base in ("grpo", "paw"):
                    both = arm != base and {arm, base} <= complete
                    found = study.difference(known, arm, base, seeds, measure) if both else ""
                    cells.append(found.split(" | ")[0])
            lines.append(cells)
    header = ["KL term", "arm", "mean of the curve", "minus GRPO", "minus PaW"]
    return markdown_table([*header, "at the end", "minus GRPO", "minus PaW"], lines)


def table(cells: Iterable[str]) -> None:
    """A row for each of these cells and arm: means over its seeds, in percent."""
    by_arm = {}
    for (cell, arm, _), curve in read_runs().items():
        by_arm.setdefault((cell, arm), []).append(curve)
    print("| cell | arm | seeds | mean of the curve | at the end | well formed | p(material) |")
    print("|---" * 7 + "|")
    for cell, arm in product(cells, ARMS):
        curves = by_arm.get((cell, arm), [])
        if curves:
            during = 100 * mean(point["success"] for curve in curves for point in curve[1:])
            end, valid, material = (
                mean(curve[-1].get(name, math.nan) for curve in curves)
                for name in ("success", "valid", "material")
            )
            form = "-" if math.isnan(valid) else f"{100 * valid:.1f}"
            print(f"| {cell} | {arm} | {len(curves)} | {during:.1f} | {100 * end:.1f} "
                  f"| {form} | {material:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS, metavar="CELL")
    parser.add_argument("--arms", nargs="+", default=["grpo", "paw"], choices=ARMS)
    parser.add_argument("--seeds", nargs="+", default=[1000], type=int)
    parser.add_argument("--workers", type=int, default=2, help="processes, one core each (2)")
    args = parser.parse_args()
    if args.command == "run":
        run(args.cells, args.arms, args.seeds, args.workers)
    else:
        table(args.cells)
