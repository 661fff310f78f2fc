"""What a run consists of (policy, sampler, optimizer, environments, tasks), opened and closed.

The order matters: rank 0 creates folders and data before the others read them; vLLM measures the
free memory, so its engine comes before the trainer's model; the ranks close together.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from paw_min import toy
from paw_min.config import Config
from paw_min.critic import load_critic
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Pool, Tasks
from paw_min.model import lora
from paw_min.model.policy import Policy, load_policy, load_tokenizer
from paw_min.model.sampler import HFSampler
from paw_min.model.vllm_sampler import VLLMSampler, check_installed
from paw_min.running import distributed, memory, track
from paw_min.running.errors import UserError
from paw_min.running.runs import Run
from paw_min.running.tasks import draw_groups, panel

PANEL_SLOTS = 128  # slots of the pool for the panel, even if training needs fewer


@dataclass
class Session:
    run: Run
    policy: Policy
    reference: Policy | None  # frozen, of the KL term; the policy itself with LoRA
    optimizer: torch.optim.Optimizer
    sampler: HFSampler | VLLMSampler
    pool: Pool
    tasks: Tasks  # held_out: the evaluation panel, the same in every run


@contextmanager
def open_session(cfg: Config, eval_only: bool = False) -> Iterator[Session]:
    """Load everything, with the weights of the newest checkpoint or else of the start model."""
    torch.set_num_threads(cfg.threads)
    device = distributed.start(cfg.device)
    precision = forward_precision(cfg, device)
    check_packages(cfg)
    with distributed.rank_0_first():
        run, start = Run(cfg), start_model(cfg)
        load_tokenizer(start, cfg.max_prompt_tokens + cfg.max_response_tokens)  # before the data
        if not eval_only:
            memory.announce(cfg, start, device)
        tasks = find_tasks(cfg)
    checkpoint = run.checkpoint()
    weights = start if cfg.lora_rank else str(checkpoint or start)
    sampler = make_sampler(cfg, weights, precision)
    policy = load_policy(weights, cfg.temperature, device, precision, cfg.attention)
    if cfg.lora_rank:
        lora.attach(policy.model, cfg.lora_rank, precision, cfg.seed, checkpoint)
    # A generator, read after sharding, which replaces the parameters.
    trained = [{"params": (p for p in policy.model.parameters() if p.requires_grad)}]
    if cfg.algo == "ppo" and not eval_only:
        policy.critic = load_critic(start, policy, cfg.attention)
        trained.append({"params": policy.critic.parameters(), "lr": cfg.critic_lr or 10 * cfg.lr})
    if cfg.grad_checkpointing:
        policy.model.gradient_checkpointing_enable()
        if policy.critic:
            policy.critic.decoder.gradient_checkpointing_enable()
    if cfg.shard:
        distributed.shard(policy)
    optimizer = torch.optim.AdamW(trained, lr=cfg.lr, weight_decay=cfg.weight_decay)
    reference = policy if cfg.kl_coef > 0 and cfg.lora_rank else None
    if cfg.kl_coef > 0 and not (cfg.lora_rank or eval_only):
        where = "cpu" if cfg.ref_offload else device
        reference = load_policy(start, cfg.temperature, where, precision, cfg.attention)
        reference.requires_grad_(False)
    slots = max(cfg.groups * cfg.group_size, min(len(tasks.held_out), PANEL_SLOTS))
    slots = -(-slots // distributed.world())
    together = distributed.leave_together()
    with closing(run), closing(sampler), together, closing(tasks.make_pool(slots)) as pool:
        yield Session(run, policy, reference, optimizer, sampler, pool, tasks)


def check_packages(cfg: Config) -> None:
    """UserError for a package that these settings need and that is not installed."""
    if cfg.sampler == "vllm":
        check_installed()
    if cfg.lora_rank:
        lora.check_installed()
    track.check_installed(cfg.track)


def forward_precision(cfg: Config, device: str) -> str:
    gpu = device.startswith("cuda")
    return {"auto": "bf16" if gpu else "fp32"}.get(cfg.precision, cfg.precision)


def make_sampler(cfg: Config, folder: str, precision: str) -> HFSampler | VLLMSampler:
    if cfg.sampler == "transformers":
        return HFSampler()
    length = cfg.max_prompt_tokens + cfg.max_response_tokens
    return VLLMSampler(folder, length, precision, cfg.vllm_memory, cfg.seed)


def start_model(cfg: Config) -> str:
    own = cfg.model in ("", *toy.STANDINS)
    return toy.default_model(cfg.model or cfg.env) if own else cfg.model


def find_tasks(cfg: Config) -> Tasks:
    """The training tasks and the evaluation panel; UserError for unusable data."""
    try:
        tasks = BENCHMARKS[cfg.env].load(cfg, cfg.data or toy.default_data(cfg.env, cfg.world))
        draw_groups(tasks.train, cfg.groups, cfg.seed, 0)  # raises if there are too few
        n_panel = min(cfg.eval_tasks or len(tasks.held_out), len(tasks.held_out))
        return Tasks(tasks.train, panel(tasks.held_out, n_panel, seed=0), tasks.make_pool)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def dry_run(cfg: Config) -> None:
    """Check model and data, generated if needed, and print the plan; loads no weights."""
    model, missing = start_model(cfg), []
    try:
        check_packages(cfg)
        load_tokenizer(model, cfg.max_prompt_tokens + cfg.max_response_tokens)
        print(f"model     {model}")
        print(f"memory    {memory.check(cfg, model, cfg.device)}")
    except UserError as error:
        missing.append(str(error))
    try:
        tasks = find_tasks(cfg)
        print(f"data      {len(tasks.train)} training tasks, panel of {len(tasks.held_out)}")
    except UserError as error:
        missing.append(str(error))
    episodes = cfg.groups * cfg.group_size
    rows = episodes * cfg.max_turns
    steps = -(-rows // cfg.mini_batch) if cfg.mini_batch else 1
    evaluations = 2 + (cfg.updates - 1) // cfg.eval_every if cfg.eval_every else 2
    print(
        f"updates   {cfg.updates} of {cfg.groups} tasks x {cfg.group_size} = {episodes} episodes, "
        f"at most {cfg.max_turns} turns: up to {rows} rows of up to {memory.row_tokens(cfg)} "
        "tokens\n"
        f"training  {cfg.algo}{' with PaW' if cfg.paw else ''}, up to {steps} optimizer steps per "
        f"update, {cfg.micro_tokens} tokens per pass\n"
        f"panel     {evaluations} times, every {cfg.eval_every or cfg.updates} updates\n"
        f"folder    {Path(cfg.out) / cfg.name}"
    )
    if missing:
        raise UserError(" Also: ".join(missing))
