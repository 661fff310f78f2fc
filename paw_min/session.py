"""What a run consists of (policy, sampler, optimizer, environments, tasks), opened and closed.

The order matters: vLLM measures the free memory, so its engine comes before the trainer's model;
rank 0 creates folders and generated data before the other ranks read them; the ranks close
together, since an early exit would break the others' last collective call.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from paw_min import distributed, toy
from paw_min.config import Config, UserError
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.protocol import Pool, Tasks
from paw_min.model.policy import Policy, load_policy, load_tokenizer
from paw_min.model.sampler import HFSampler
from paw_min.model.vllm_sampler import VLLMSampler, check_installed
from paw_min.runs import Run
from paw_min.tasks import draw_groups, panel

PANEL_SLOTS = 128  # environments that an evaluation uses at most


@dataclass
class Session:
    run: Run
    policy: Policy
    reference: Policy | None  # frozen, of the KL term
    optimizer: torch.optim.Optimizer
    sampler: HFSampler | VLLMSampler
    pool: Pool
    tasks: Tasks  # held_out: the evaluation panel, the same in every run


@contextmanager
def open_session(cfg: Config, eval_only: bool = False) -> Iterator[Session]:
    """Load everything, with the weights of the newest checkpoint or else of the start model."""
    torch.set_num_threads(cfg.threads)
    device = distributed.start(cfg.device)
    precision = cfg.precision
    if precision == "auto":
        precision = "bf16" if device.startswith("cuda") else "fp32"
    start = start_model(cfg)
    if cfg.sampler == "vllm":
        check_installed()
    with distributed.rank_0_first():
        run = Run(cfg)
        load_tokenizer(start)  # raises for a folder that is no model, before data are generated
        tasks = find_tasks(cfg)
    weights = str(run.checkpoint() or start)
    sampler = make_sampler(cfg, weights, precision)
    policy = load_policy(weights, cfg.temperature, device, precision, cfg.attention)
    if cfg.grad_checkpointing:
        policy.model.gradient_checkpointing_enable()
    if cfg.shard:
        distributed.shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    reference = None
    if cfg.kl_coef > 0 and not eval_only:
        where = "cpu" if cfg.ref_offload else device
        reference = load_policy(start, cfg.temperature, where, precision, cfg.attention)
        reference.requires_grad_(False)
    slots = max(cfg.groups * cfg.group_size, min(len(tasks.held_out), PANEL_SLOTS))
    slots = -(-slots // distributed.world())
    with closing(sampler), distributed.leave_together(), closing(tasks.make_pool(slots)) as pool:
        yield Session(run, policy, reference, optimizer, sampler, pool, tasks)


def make_sampler(cfg: Config, folder: str, precision: str) -> HFSampler | VLLMSampler:
    if cfg.sampler == "transformers":
        return HFSampler()
    length = cfg.max_prompt_tokens + cfg.max_response_tokens
    return VLLMSampler(folder, length, precision, cfg.vllm_memory, cfg.seed)


def start_model(cfg: Config) -> str:
    return cfg.model or toy.default_model(cfg.env)


def find_tasks(cfg: Config) -> Tasks:
    """The training tasks and the evaluation panel; UserError for unusable data."""
    try:
        tasks = BENCHMARKS[cfg.env].load(cfg, cfg.data or toy.default_data(cfg.env))
        draw_groups(tasks.train, cfg.groups, cfg.seed, 0)  # raises if there are too few
        n_panel = min(cfg.eval_tasks or len(tasks.held_out), len(tasks.held_out))
        return Tasks(tasks.train, panel(tasks.held_out, n_panel, seed=0), tasks.make_pool)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
