"""A policy that is its own world model: look ahead before acting (--lookahead K). Not in the paper.

    h ──> K candidates a ──> what follows (h, a), by the same weights? ──> drop "no effect"
                                                                       ──> act on the most likely

For each step, K responses are drawn. The policy that PaW has trained to predict observations then
predicts what each of them would change:

    veto        greedy decoding after (h, a) would write what the environment shows if a command
                does nothing: "Nothing happens." in ALFWorld, the observation unchanged elsewhere
                (`unchanged` in envs/interface.py)
    choice      the candidate of the highest likelihood among those without a veto; among all, if
                every one has a veto

Nothing is decoded. Greedy decoding writes a given text exactly if each of its tokens is the argmax
given the tokens before it, and one forward pass over [h, a, separator, text] shows that. This is
the sequence of PaW's training. What would follow the text is not looked at, since PaW trains no end
of the observation. A text without tokens gives no veto.

The likelihood is the sum of the log-probabilities of a response's tokens at the sampling
temperature. The first candidate is the response of plain sampling, so K = 1 is plain sampling.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from paw_min.base.seeds import request_seed
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.model.batches import collate, split
from paw_min.model.policy import Policy
from paw_min.model.sampler import HFSampler, Request, Response
from paw_min.model.vllm_sampler import VLLMSampler
from paw_min.rows import TokenRow

CANDIDATE = -3  # first part of the key of a candidate's seed


@dataclass
class Candidate:
    response: Response
    unchanged: bool = False  # is it predicted to change nothing?
    scored: int = 0  # tokens of separator and text in a pass of its own; 0: it had none

    @property
    def logp(self) -> float:
        """log pi(a | h) at the sampling temperature."""
        return sum(self.response.logps)


@dataclass
class Decision:
    """One step: its candidates, and which of them was played."""

    seed: int  # of the request, which names the episode and the turn
    candidates: list[Candidate]
    chosen: int


@dataclass
class Costs:
    """Of a step, averaged over the steps; `vetoed` is a share of the candidates.

    Tokens of the prompt are not counted. `passes`: of one sequence each, one for every generated
    token and one for every candidate whose outcome was predicted.
    """

    vetoed: float
    step_generated: float  # tokens of all candidates
    step_scored: float  # tokens of separator and text
    step_passes: float


def choose(candidates: list[Candidate]) -> int:
    """The most likely candidate without a veto, or of all if every one has one.

    Repeats count once: the first of equal candidates is taken.
    """
    ids = [candidate.response.ids for candidate in candidates]
    distinct = [n for n in range(len(ids)) if ids.index(ids[n]) == n]
    allowed = [n for n in distinct if not candidates[n].unchanged]
    return max(allowed or distinct, key=lambda n: candidates[n].logp)


@torch.no_grad()
def predicts_text(
    cfg: Config, policy: Policy, rows: list[TokenRow], at_least: float | None = None
) -> list[bool]:
    """For each row: does greedy decoding after (h_t, a_t) write obs_ids?

    With at_least: is the probability of obs_ids at least that?
    """
    # Not micro_batches, which splits rows between the ranks: each rank plays episodes of its own.
    lengths = []
    for row in rows:
        tokens = (row.prompt_ids, row.response_ids, row.separator_ids, row.obs_ids)
        lengths.append(sum(len(part) for part in tokens))
    found = [False] * len(rows)
    for part in split(lengths, cfg.micro_tokens) if rows else []:
        part_rows = [rows[i] for i in part]
        batch = collate(part_rows, [True] * len(part), policy.pad_id, policy.device)
        if at_least is None:
            written = policy.is_greedy(batch) | ~batch.obs_mask  # (B, S)
            predicted = written.all(-1)  # (B,)
        else:
            logp, _ = policy(batch)  # (B, S)
            probability = (logp * batch.obs_mask).sum(-1).exp()  # (B,)
            predicted = probability >= at_least  # (B,)
        for i, is_predicted in zip(part, predicted.tolist(), strict=True):
            found[i] = is_predicted
    return found


def unchanged_row(cfg: Config, policy: Policy, request: Request, response: Response) -> TokenRow:
    """The row that PaW would train on if this response changed nothing (rollout.py)."""
    text = BENCHMARKS[cfg.env].unchanged(request.observation)
    separator_ids = policy.separator(response.ids) if cfg.wm_separator == "turn" else []
    obs_ids = policy.encode(text)[: cfg.max_obs_tokens]
    return TokenRow(request.prompt_ids, response.ids, obs_ids, separator_ids=separator_ids)


def costs(decisions: list[Decision]) -> Costs:
    """Shares and means over these decisions."""
    steps = len(decisions)
    candidates = [candidate for decision in decisions for candidate in decision.candidates]
    generated = sum(len(candidate.response.ids) for candidate in candidates)
    predicted = [candidate for candidate in candidates if candidate.scored]
    return Costs(
        vetoed=sum(candidate.unchanged for candidate in candidates) / len(candidates),
        step_generated=generated / steps,
        step_scored=sum(candidate.scored for candidate in predicted) / steps,
        step_passes=(generated + len(predicted)) / steps,
    )


class LookaheadSampler:
    """Answers each request with the chosen one of k responses of another sampler (sampler.py).

    veto: False is best of k by likelihood, without any prediction. `decisions` has all steps.
    """

    def __init__(self, cfg: Config, sampler: HFSampler | VLLMSampler, k: int, veto: bool = True):
        self.cfg = cfg
        self.sampler = sampler
        self.k = k
        self.veto = veto
        self.decisions: list[Decision] = []

    @contextmanager
    def sync(self, policy: Policy):
        self.policy = policy
        with self.sampler.sync(policy):
            yield

    def close(self) -> None:
        self.sampler.close()

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """Like HFSampler.generate. A request is answered when its k responses are there."""
        asked: deque[Request] = deque()  # what the other sampler generates next
        waiting: dict[int, Request] = {}  # by slot
        drawn: dict[int, dict[int, Response]] = {}  # slot -> number of the candidate -> response

        def ask() -> None:
            while queue:
                request = queue.popleft()
                waiting[request.slot] = request
                drawn[request.slot] = {}
                asked.extend(self.one_per_candidate(request))

        ask()
        for finished in self.sampler.generate(asked, temperature, max_tokens):
            for response in finished:
                slot, number = divmod(response.slot, self.k)
                drawn[slot][number] = replace(response, slot=slot)
            complete = [slot for slot in drawn if len(drawn[slot]) == self.k]
            requests = [waiting.pop(slot) for slot in complete]
            responses = [[drawn[slot][n] for n in range(self.k)] for slot in complete]
            for slot in complete:
                del drawn[slot]
            yield self.decide(requests, responses)
            # New requests join before the other sampler looks for its next unit of work.
            ask()

    def one_per_candidate(self, request: Request) -> list[Request]:
        """The k requests for one, each with a slot of its own. The first keeps the seed."""
        found = [replace(request, slot=request.slot * self.k)]
        for number in range(1, self.k):
            seed = request_seed(CANDIDATE, request.seed, number)
            found.append(replace(request, slot=request.slot * self.k + number, seed=seed))
        return found

    def decide(self, requests: list[Request], drawn: list[list[Response]]) -> list[Response]:
        """Choose one of the k responses drawn for each of these requests."""
        groups = [[Candidate(response) for response in responses] for responses in drawn]
        # With one candidate there is nothing to choose.
        if self.veto and self.k > 1:
            self.mark_vetoes(requests, groups)
        answers = []
        for request, candidates in zip(requests, groups, strict=True):
            chosen = choose(candidates)
            self.decisions.append(Decision(request.seed, candidates, chosen))
            answers.append(candidates[chosen].response)
        return answers

    def mark_vetoes(self, requests: list[Request], groups: list[list[Candidate]]) -> None:
        """Set `unchanged` and `scored` of these candidates; equal ones share one pass."""
        rows = []
        owners = []  # the equal candidates of each row
        for request, candidates in zip(requests, groups, strict=True):
            equals: dict[tuple, list[Candidate]] = {}
            for candidate in candidates:
                equals.setdefault(tuple(candidate.response.ids), []).append(candidate)
            for same in equals.values():
                row = self.outcome_row(request, same[0].response)
                if row.obs_ids:
                    rows.append(row)
                    owners.append(same)
        for row, same, unchanged in zip(rows, owners, self.will_follow(rows), strict=True):
            same[0].scored = len(row.separator_ids) + len(row.obs_ids)
            for candidate in same:
                candidate.unchanged = unchanged

    # The experiment overrides both: there, another model predicts.

    def will_follow(self, rows: list[TokenRow]) -> list[bool]:
        """For each row: will obs_ids follow?"""
        return predicts_text(self.cfg, self.policy, rows)

    def outcome_row(self, request: Request, response: Response) -> TokenRow:
        return unchanged_row(self.cfg, self.policy, request, response)
