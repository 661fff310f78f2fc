"""Does this run train what it says? Checked by using the model as the run does.

    check_start    before the first evaluation, on about 40 tokens. With LoRA, the adapters have
                   random numbers during the check
    check_panel    a few responses of every evaluation
    check_sync     a few responses of every update, before it learns from them

Each compares the sampler's log-probabilities of its own tokens, log mu, with the trainer's log pi
(Policy.forward). Old weights, another temperature, wrong padding, adapters that did not arrive and
a distribution that is cut off differ by more than rounding explains. Nothing is drawn from torch's
global generators, and no weight changes: a run has the same numbers as without these checks.

Legend: N rows, T tokens of the longest response.
"""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from paw_min import losses
from paw_min.base import distributed
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model.lora import random_adapters
from paw_min.model.policy import Policy
from paw_min.model.sampler import Request, Sampler
from paw_min.model.scoring import response_mask, score_responses
from paw_min.rows import Episode, Rows, TokenRow, logps_of

# Mean |log pi - log mu| in nats per token that rounding can explain; mu is the sampler's policy.
# Measured: 1e-6 in fp32; in bf16 on a CPU 0.008 for the stand-in of ALFWorld, 0.033 for
# SmolLM2-135M; published: about 0.01. A failed sync gives 0.4 and more (tests/test_vllm.py).
MAX_GAP = {"fp32": 1e-3, "bf16": 0.1}
PROMPTS = ("hello", "hello " * 20)  # two lengths, so that the shorter one is padded
TOKENS = 10  # length of a response in check_start
PANEL = 16  # responses of an evaluation that are compared
# s B A beside W, as a ratio of standard deviations. In bf16, SmolLM2-135M then has a gap of 0.05,
# and 1.3 where the adapters are missing.
ADAPTERS = 0.1
REMEDY = {
    "transformers": "this model generates otherwise than it trains: use another --model, or "
    "--sampler vllm",
    "vllm": "vLLM does not use the trainer's weights, temperature or architecture: use --sampler "
    "transformers, or the versions of vLLM and torch in requirements.txt and "
    "requirements-vllm.txt",
}


def check_sync(cfg: Config, policy: Policy, rows: Rows, when: str) -> float:
    """Mean |log pi - log mu| of some responses, in nats per token; see compare.

    The first turn of one episode per group is compared. These prompts begin alike in every update,
    so that a prefix cache of old weights is noticed too.
    """
    first_turn = {}  # trajectory -> its first row
    for i, trajectory in enumerate(rows.trajectory):
        first_turn.setdefault(trajectory, i)
    one_per_group = {rows.group[i]: i for i in first_turn.values()}
    chosen = list(one_per_group.values())
    tokens = [rows.tokens[i] for i in chosen]
    return compare(cfg, policy, tokens, rows.sampler_logp[chosen], policy.temperature, when)


def check_panel(cfg: Config, policy: Policy, episodes: list[Episode], when: str) -> float:
    """The same of the first turns of at most 16 episodes of an evaluation."""
    first = [e.transitions[0] for e in episodes if e.transitions]
    rows = first[:: -(-len(first) // PANEL)]  # spread over the panel
    # Greedy responses have log-probabilities at temperature 1, from both samplers.
    return compare(
        cfg, policy, rows, logps_of([t.response_logps for t in rows]), cfg.eval_temperature or 1.0,
        when,
    )


def check_start(cfg: Config, policy: Policy, sampler: Sampler) -> float:
    """The same of two responses to each of the PROMPTS. Collective: each rank asks its sampler."""
    with random_adapters(policy.model, ADAPTERS):
        try:
            mine = list(ask(cfg, policy, sampler))
        except torch.OutOfMemoryError:
            raise  # cli.py knows the remedy
        # Such as heads of a size that vLLM has no kernel for; an assertion may have no text.
        except (RuntimeError, AssertionError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"start: the sampler cannot run this model ({reason}): {REMEDY[cfg.sampler]}."
            ) from error
        answered = distributed.all_gather(mine)
        rows = [row for row, _ in answered]
        logps = logps_of([logp for _, logp in answered])
        return compare(cfg, policy, rows, logps, policy.temperature, "start")


def ask(
    cfg: Config, policy: Policy, sampler: Sampler
) -> Iterator[tuple[TokenRow, list[float]]]:
    """Two responses to each of the PROMPTS, with the sampler's log-probabilities."""
    prompts = [policy.encode_chat(text)[-cfg.max_prompt_tokens :] for text in 2 * PROMPTS]
    queue = deque(Request(i, ids, seed=i) for i, ids in enumerate(prompts))
    limit = min(TOKENS, cfg.max_response_tokens)
    with sampler.sync(policy):
        for part in sampler.generate(queue, policy.temperature, limit):
            for response in part:
                yield TokenRow(prompts[response.slot], response.ids, []), response.logps


def compare(
    cfg: Config, policy: Policy, rows: list[TokenRow], logps: Tensor, temperature: float, when: str
) -> float:
    """Mean |log pi - log mu| of these responses, in nats per token, both at this temperature.

    logps: log mu, (N, T) or with more columns, as of all rows of an update. when: the part of the
    run, for the UserError if the difference is larger than rounding explains.
    """
    mask = response_mask(rows)  # (N, T)
    # An evaluation samples at another temperature than training: pi takes it for this pass.
    trained_at, policy.temperature = policy.temperature, temperature
    try:
        ours = score_responses(policy, rows, cfg.micro_tokens).logp  # (N, T)
    finally:
        policy.temperature = trained_at
    gap = losses.masked_mean((ours - logps[:, : mask.shape[1]]).abs(), mask).item()
    # A temperature below 1 enlarges rounding where two logits are close, and faults more. Responses
    # of SmolLM2-135M to the prompts of check_start's sizes, in bf16 at 1, 0.4, 0.1, 0.05 and 0.01:
    #     24 attempts with vLLM, at most               0.05  0.11  0.11  0.17  0.96
    #     12 with weights off by 5 %, at least         0.39  0.33  1.09  1.49  4.48
    #     the limit                                    0.10  0.18  0.46  0.74  2.15
    # With transformers, 24 attempts gave at most 0.03 to 0.18. A temperature that is 10 % off shows
    # at 1 only, with 0.12 and more.
    limit = MAX_GAP[policy.precision] / min(1.0, temperature) ** (2 / 3)
    if not gap <= limit:
        raise UserError(
            f"{when}: the sampler's log-probabilities differ from the trainer's by {gap:.4f} nats "
            f"per token (rounding explains {limit:.3g}): {REMEDY[cfg.sampler]}."
        )
    return gap
