"""Open and close what a run consists of: policy, sampler, optimizer, environments, tasks.

The order matters: rank 0 creates folders and data before the others read them; vLLM measures the
free memory, so its engine comes before the trainer's model; the ranks close together.

A run from a script, as its newest checkpoint left it:

    from pathlib import Path

    from paw_min import train
    from paw_min.running.config_json import read_config
    from paw_min.running.session import open_session

    cfg = read_config(Path("runs/alfworld-tiny-grpo-paw-seed0/config.json"))
    with open_session(cfg) as s:
        episodes = train.collect(cfg, s, k=s.done + 1).episodes
        print(s.done, [episode.won for episode in episodes], s.optimizer)

This opens cfg.out/cfg.name, which for a copied folder is not the folder of its config.json: use
replace(cfg, out=...). If s.done is 0, there was no checkpoint, and it has the start model.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paw_min import toy
from paw_min.base import distributed
from paw_min.base.console import say
from paw_min.base.errors import UserError, masked
from paw_min.base.files import is_url
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS, NAMES
from paw_min.envs.interface import Pool, Tasks
from paw_min.model import lora, vllm_sampler
from paw_min.model.chat import turn_text
from paw_min.model.policy import Policy, load_policy, load_tokenizer
from paw_min.model.reference import make_reference
from paw_min.model.sampler import HFSampler, Sampler
from paw_min.model.shard import shard_policy
from paw_min.model.vllm_sampler import VLLMSampler
from paw_min.ppo import LR_FACTOR, load_critic
from paw_min.running import memory, track
from paw_min.running.runs import Run, updates_done
from paw_min.running.tasks import draw_groups, panel

PANEL_SLOTS = 128  # most slots of the pool that serve the panel
WEIGHT_DECAY = 0.01  # AdamW's; verl-agent


@dataclass
class Session:
    run: Run
    policy: Policy
    reference: Policy | None  # frozen model of the KL term; with LoRA the policy itself
    optimizer: torch.optim.Optimizer
    sampler: Sampler
    pool: Pool
    tasks: Tasks  # held_out: the evaluation panel, the same in every run
    done: int  # updates of the checkpoint that it continues; 0: from the start model


@contextmanager
def open_session(cfg: Config, eval_only: bool = False) -> Iterator[Session]:
    """Everything of a run, ready for update `done` + 1.

    Weights, optimizer and critic are those of the newest checkpoint in cfg.out/cfg.name; without
    one, those of the start model, and `done` is 0. It locks the folder and makes its files agree
    with the checkpoint. eval_only: no optimizer state, no reference, and a trained run's folder
    stays as it is.
    """
    check_machine(cfg)
    device = distributed.join()
    precision = forward_precision(cfg.precision, device)
    with distributed.rank_0_first():
        run = Run(cfg)
        start_folder = start_model(cfg)
        # Check first whether the model can be used: the data may take minutes to generate.
        check_model(cfg, start_folder)
        if not eval_only and distributed.rank() == 0:
            needs = memory.check(cfg, start_folder, precision, device)
            if device.startswith("cuda"):
                say(f"memory    {needs[0]}")
        tasks = find_tasks(cfg)

    checkpoint = run.checkpoint()
    done = updates_done(checkpoint) if checkpoint else 0
    # A rank with other weights would go on unnoticed: its gradients are summed with those of all.
    if len(set(distributed.all_gather([checkpoint and checkpoint.name]))) > 1:
        raise UserError(f"the ranks see different checkpoints in {run.folder}: all machines must "
                        "share this folder; if they do, rerun in a minute.")
    # With LoRA, a checkpoint is an adapter for the start model.
    weights = start_folder if cfg.lora_rank else str(checkpoint or start_folder)
    # A sleeping vLLM must be closed whatever happens, even if this start fails.
    with closing(make_sampler(cfg, weights, precision)) as sampler:
        policy = load_trained(
            cfg, weights, start_folder, checkpoint, precision, device, eval_only
        )
        # The optimizer comes after sharding, which replaces the parameters.
        optimizer = make_optimizer(policy, cfg.lr, cfg.beta2)
        reference = None
        if not eval_only:
            reference = make_reference(cfg, policy, start_folder)

        slots = max(cfg.groups * cfg.group_size, min(len(tasks.held_out), PANEL_SLOTS))
        slots_per_rank = -(-slots // distributed.n_ranks())  # rounded up
        pool = tasks.make_pool(slots_per_rank)
        together = distributed.leave_together()
        # Left in the opposite order: the pool's workers end first, the sampler last.
        with closing(run), together, closing(pool):
            if not eval_only:
                run.load(policy, optimizer)
                run.begin(done)
            yield Session(run, policy, reference, optimizer, sampler, pool, tasks, done)


@contextmanager
def loaded(
    cfg: Config, model: str = ""
) -> Iterator[tuple[Policy, Sampler]]:
    """A model and its sampler without a run, for analyses: no data, no optimizer.

    model: a folder, such as a checkpoint (not an adapter's), or a name; default: the start model.
    """
    check_machine(cfg)
    device = distributed.join()
    precision = forward_precision(cfg.precision, device)
    model = model or start_model(cfg)
    # vLLM measures the free memory, so its engine comes before the trainer's model.
    with closing(make_sampler(cfg, model, precision)) as sampler:
        policy = load_policy(model, cfg.temperature, device, precision)
        yield policy, sampler


def check_machine(cfg: Config) -> None:
    """UserError for a package that these settings need and that is not there."""
    if cfg.sampler == "vllm":
        vllm_sampler.check_installed()
    if cfg.lora_rank:
        lora.check_installed()
    track.check_installed(cfg.track)


def check_model(cfg: Config, folder: str) -> None:
    """UserError for a model whose family, positions or chat template do not suffice."""
    tokenizer = load_tokenizer(folder, cfg.context_length)
    if cfg.wm_separator == "turn":
        turn_text(tokenizer)
    if cfg.sampler == "vllm":
        vllm_sampler.check_model(folder)


def forward_precision(precision: str, device: str) -> str:
    """"fp32" or "bf16", for --precision."""
    if precision == "auto":
        return "bf16" if device.startswith("cuda") else "fp32"
    return precision


def make_sampler(cfg: Config, folder: str, precision: str) -> Sampler:
    if cfg.sampler == "transformers":
        return HFSampler()
    say("starting vLLM, which compiles: minutes without output on a GPU")
    return VLLMSampler(folder, cfg.context_length, precision, cfg.vllm_memory, cfg.seed)


def load_trained(
    cfg: Config, weights: str, start_folder: str, checkpoint: Path | None, precision: str,
    device: str, eval_only: bool,
) -> Policy:
    """The policy as it is trained: with adapters, PPO's critic, and sharded.

    weights: its model. start_folder: that of the critic. checkpoint: of the adapters.
    """
    policy = load_policy(weights, cfg.temperature, device, precision)
    if cfg.lora_rank:
        lora.attach(policy.model, cfg.lora_rank, precision, cfg.seed, checkpoint)
    if cfg.algo == "ppo" and not eval_only:
        policy.critic = load_critic(start_folder, policy)
    if cfg.grad_checkpointing:
        policy.model.gradient_checkpointing_enable()
        if policy.critic:
            policy.critic.decoder.gradient_checkpointing_enable()
    if cfg.shard:
        shard_policy(policy)
    # Gradient checkpointing works in training mode only. Dropout is off (load_policy).
    return policy.train(not eval_only)


def make_optimizer(policy: Policy, lr: float, beta2: float) -> torch.optim.Optimizer:
    """AdamW over the policy, or its adapters, and PPO's critic."""
    policy_parameters = [p for p in policy.model.parameters() if p.requires_grad]
    groups = [{"params": policy_parameters}]
    if policy.critic:
        critic_parameters = list(policy.critic.parameters())
        groups.append({"params": critic_parameters, "lr": LR_FACTOR * lr})
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), weight_decay=WEIGHT_DECAY)


def start_model(cfg: Config) -> str:
    """The folder or hub name of the model that training starts from."""
    return cfg.model or toy.default_model(cfg.env)


def data_folder(cfg: Config) -> str:
    """The folder of the data, generated on first use where --data names none."""
    return cfg.data or toy.default_data(cfg.env)


def described_data(cfg: Config) -> str:
    """The data folder, with a note where its data are generated; for the console."""
    note = "" if cfg.data else " (generated)"
    return masked(data_folder(cfg)) + note


def find_tasks(cfg: Config) -> Tasks:
    """The training tasks and the evaluation panel; UserError for unusable data."""
    if is_url(cfg.data) and cfg.env in NAMES:
        raise UserError(f"--data {masked(cfg.data)} is a URL: give a folder.")
    try:
        tasks = BENCHMARKS[cfg.env].load(cfg, data_folder(cfg))
        draw_groups(tasks.train, cfg.groups, cfg.seed, 0)  # raises if there are too few
        if not tasks.held_out:
            raise ValueError("the held-out split has no tasks: choose another --eval-split, or "
                             "data that has some.")
        n_panel = min(cfg.eval_tasks or len(tasks.held_out), len(tasks.held_out))
        return replace(tasks, held_out=panel(tasks.held_out, n_panel))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def dry_run(cfg: Config) -> None:
    """Check memory, model and data, and print the plan; each error on its line."""
    missing = []

    @contextmanager
    def noting_errors():
        try:
            yield
        except UserError as error:
            if str(error) not in missing:
                missing.append(str(error))

    device = distributed.usual_device()
    with noting_errors():
        model = start_model(cfg)
        print(f"model     {model}")
        if device == "cpu" and cfg.sampler == "vllm":
            print(f"memory    {memory.on_another_machine(cfg, model)}")
        else:
            precision = forward_precision(cfg.precision, device)
            for place in memory.check(cfg, model, precision, device):
                print(f"memory    {place}")
    with noting_errors():
        check_model(cfg, start_model(cfg))
    with noting_errors():
        check_machine(cfg)
    with noting_errors():
        if cfg.data or toy.folder_of(cfg.env).exists():
            tasks = find_tasks(cfg)
            counts = f"{len(tasks.train)} training tasks, panel of {len(tasks.held_out)}"
            print(f"data      {described_data(cfg)}: {counts}")
        else:
            print(f"data      {toy.folder_of(cfg.env)}: not there, the run generates it")

    episodes = cfg.groups * cfg.group_size
    rows = episodes * cfg.max_turns
    steps = -(-rows // cfg.mini_batch) if cfg.mini_batch else 1
    every = cfg.eval_every or cfg.updates or 1
    evaluations = 1 + -(-cfg.updates // every)  # the start, and the last update whatever `every`
    print(
        f"updates   {cfg.updates} of {cfg.groups} tasks x {cfg.group_size} = {episodes} episodes, "
        f"at most {cfg.max_turns} turns: up to {rows} rows of up to {cfg.row_length} "
        "tokens\n"
        f"training  {cfg.algo}{' with PaW' if cfg.paw else ''}, up to {steps} optimizer steps per "
        f"update, {cfg.micro_tokens} tokens per pass\n"
        f"evaluate  {evaluations} times, every {every} updates\n"
        f"folder    {Path(cfg.out) / cfg.name}"
    )
    if missing:
        raise UserError("\nerror: ".join(f"{one.rstrip('.')}." for one in missing))
