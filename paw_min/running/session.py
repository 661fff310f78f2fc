"""Open and close what a run consists of: policy, sampler, optimizer, environments, tasks.

The order matters: rank 0 creates folders and data before the others read them; vLLM measures the
free memory, so its engine comes before the trainer's model; the ranks close together.

A run from a script, as its newest checkpoint left it (of a moved folder, set cfg.out first):

    cfg = read_config(Path("runs/alfworld-tiny-grpo-paw-seed0/config.json"))
    with open_session(cfg) as s:
        episodes = train.collect(cfg, s, k=s.done + 1).episodes
        print(s.done, [episode.won for episode in episodes], s.optimizer)
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import torch

from paw_min import toy
from paw_min.base import distributed
from paw_min.base.console import say
from paw_min.base.errors import UserError, masked
from paw_min.base.files import is_url
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS, NAMES
from paw_min.envs.interface import Context, Pool, Tasks
from paw_min.model import lora, vllm_sampler
from paw_min.model.chat import ChatTokenizer, turn_text
from paw_min.model.critic import LR_FACTOR, load_critic
from paw_min.model.loading import load_policy, load_tokenizer
from paw_min.model.policy import Policy
from paw_min.model.reference import make_reference
from paw_min.model.sampler import HFSampler, Sampler
from paw_min.model.shard import shard_policy
from paw_min.model.vllm_sampler import VLLMSampler
from paw_min.running import memory, track
from paw_min.running.runs import Run, updates_done
from paw_min.running.tasks import draw_groups, panel

FIRST_PROMPTS = 20  # most of them that tell whether a stand-in knows the words of other data
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
    start = start_model(cfg)
    with distributed.rank_0_first():
        run = Run(cfg)
        # Check first whether the model can be used: a large shop takes minutes to load.
        check_model(cfg, start)
        if not eval_only and distributed.rank() == 0:
            memory.check(cfg, start, precision, device)
        tasks = find_tasks(cfg)
    checkpoint = run.checkpoint()
    # A rank with other weights would not be noticed: gradients are summed over the ranks.
    if len(set(distributed.all_gather([checkpoint and checkpoint.name]))) > 1:
        raise UserError(f"the ranks see different checkpoints in {run.folder}: all machines must "
                        "share this folder; if they do, rerun in a minute.")
    done = updates_done(checkpoint) if checkpoint else 0
    # A checkpoint of LoRA is an adapter for the start model.
    weights = start if cfg.lora_rank else str(checkpoint or start)

    with ExitStack() as stack:
        # A sleeping vLLM must be closed whatever happens, even if this start fails.
        sampler = stack.enter_context(closing(make_sampler(cfg, weights, precision)))
        policy = load_policy(weights, cfg.temperature, device, precision)
        if cfg.lora_rank:
            lora.attach(policy.model, cfg.lora_rank, precision, cfg.seed, checkpoint)
        if cfg.algo == "ppo" and not eval_only:
            policy.critic = load_critic(start, policy)
        if cfg.grad_checkpointing:
            policy.model.gradient_checkpointing_enable()
            if policy.critic:
                policy.critic.decoder.gradient_checkpointing_enable()
        if cfg.shard:
            shard_policy(policy)
        # Gradient checkpointing works in training mode only. Dropout is off (load_policy).
        policy.train(not eval_only)
        # The optimizer comes after sharding, which replaces the parameters.
        optimizer = make_optimizer(policy, cfg.lr, cfg.beta2)
        reference = None if eval_only else make_reference(cfg, policy, start)

        slots = max(cfg.groups * cfg.group_size, min(len(tasks.held_out), PANEL_SLOTS))
        pool = tasks.make_pool(-(-slots // distributed.n_ranks()))  # of this rank, rounded up
        # Left in the opposite order: the pool's workers end first, the sampler last.
        stack.enter_context(closing(run))
        stack.enter_context(distributed.leave_together())
        stack.enter_context(closing(pool))
        if not eval_only:
            run.load(policy, optimizer)
            run.begin(done)
        yield Session(run, policy, reference, optimizer, sampler, pool, tasks, done)


@contextmanager
def loaded(cfg: Config, model: str = "") -> Iterator[tuple[Policy, Sampler]]:
    """A model and its sampler without a run, for analyses: no data, no optimizer.

    model: a folder, such as a checkpoint (not an adapter's), or a name; default: the start model.
    """
    check_machine(cfg)
    device = distributed.join()
    precision = forward_precision(cfg.precision, device)
    model = model or start_model(cfg)
    with closing(make_sampler(cfg, model, precision)) as sampler:
        yield load_policy(model, cfg.temperature, device, precision), sampler


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
    """The precision of passes that --precision asks for: "fp32" or "bf16"."""
    if precision == "auto":
        return "bf16" if device.startswith("cuda") else "fp32"
    return precision


def make_sampler(cfg: Config, folder: str, precision: str) -> Sampler:
    if cfg.sampler == "transformers":
        return HFSampler()
    say("starting vLLM, which compiles: minutes without output on a GPU")
    slots = -(-max(cfg.groups * cfg.group_size, PANEL_SLOTS) // distributed.n_ranks())
    return VLLMSampler(folder, cfg.context_length, precision, cfg.vllm_memory, slots)


def make_optimizer(policy: Policy, lr: float, beta2: float) -> torch.optim.Optimizer:
    """AdamW over the policy, or its adapters, and PPO's critic."""
    groups = [{"params": [p for p in policy.model.parameters() if p.requires_grad]}]
    if policy.critic:
        # LoRA has ten times the rate of full training, but the critic is trained in full.
        factor = 1 if lora.adapted_layers(policy.model) else LR_FACTOR
        groups.append({"params": list(policy.critic.parameters()), "lr": factor * lr})
    # One kernel on a GPU: loops over tensors need 4 bytes more per trained parameter there.
    fused = policy.device.type == "cuda"
    return torch.optim.AdamW(
        groups, lr=lr, betas=(0.9, beta2), weight_decay=WEIGHT_DECAY, fused=fused
    )


def start_model(cfg: Config) -> str:
    """The folder or hub name of the model that training starts from."""
    return cfg.model or toy.default_model(cfg.env)


def data_folder(cfg: Config) -> str:
    """The folder of the data: the stored small ones where --data names none."""
    return cfg.data or toy.default_data(cfg.env)


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
        tasks = replace(tasks, held_out=panel(tasks.held_out, cfg.eval_tasks))
        if cfg.data and not cfg.model:
            count_unknown_words(cfg, tasks)
        return tasks
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def count_unknown_words(cfg: Config, tasks: Tasks) -> None:
    """Say how many words of other data than its own a stand-in model does not know."""
    chat = ChatTokenizer(load_tokenizer(start_model(cfg)))
    render = BENCHMARKS[cfg.env].prompts[cfg.prompt]
    ids = []
    with closing(tasks.make_pool(1)) as pool:
        for task in tasks.held_out[:FIRST_PROMPTS]:
            pool.reset(0, task)
            step = pool.recv().step
            if step.failed:
                raise UserError(step.failed)
            context = Context(step.task, step.observation, step.admissible)
            ids += chat.encode_chat(render(context, 0))
    if unknown := ids.count(chat.tokenizer.unk_token_id):
        say(f"the stand-in model reads {unknown} of {len(ids)} words of first prompts as <unk>, "
            f"because {masked(cfg.data)} is not its world: add --model, or omit --data")


def count_tasks(cfg: Config, tasks: Tasks) -> str:
    """The data folder and how many tasks it gives, for the console."""
    return (f"{masked(data_folder(cfg))}: {len(tasks.train)} training tasks, panel of "
            f"{len(tasks.held_out)}")
