"""Samplers that look ahead before they act. Each answers a request as model/sampler.py does.

    LookaheadSampler     a policy that is its own world model
    WorldModelSampler    a separate Word2World model predicts

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
from torch import Tensor

from paw_min.base.seeds import request_seed
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.model.batches import Batch, collate, split
from paw_min.model.policy import Policy
from paw_min.model.sampler import HFSampler, Request, Response
from paw_min.model.vllm_sampler import VLLMSampler
from paw_min.rows import TokenRow
from paw_min.world_models.trajectories import ACTIONS, Recorder, said
from paw_min.world_models.world_model import WorldModel

CANDIDATE = -3  # first part of the key of a candidate's seed

Drawn = dict[tuple, Response]  # by prompt and seed


@dataclass
class Candidate:
    response: Response
    unchanged: bool = False  # is it predicted to change nothing?
    scored: int = 0  # tokens of separator and text in a pass of its own; 0: it had none

    @property
    def logp(self) -> float:
        """log pi(a | h) at the sampling temperature."""
        return sum(self.response.logps)


def key(request: Request) -> tuple:
    """What a response depends on, for one model at one temperature."""
    return (tuple(request.prompt_ids), request.seed)


def choose(candidates: list[Candidate]) -> Candidate:
    """The most likely candidate without a veto, or of all if every one has one.

    Of equal candidates, the first counts.
    """
    distinct: dict[tuple, Candidate] = {}
    for one in candidates:
        distinct.setdefault(tuple(one.response.ids), one)
    allowed = [one for one in distinct.values() if not one.unchanged]
    return max(allowed or distinct.values(), key=lambda one: one.logp)


def is_greedy(policy: Policy, batch: Batch) -> Tensor:
    """Whether greedy decoding would write each observation token -> (B, S) bool.

    Given the tokens before it. False on all other tokens.
    """
    observation = slice(batch.n_response, None)
    logits = policy.model(batch.ids).logits.flatten(0, 1)  # (B * L, V)
    best = logits[batch.before[observation]].argmax(-1)  # (observation tokens,)
    greedy = best == batch.ids.flatten()[batch.at[observation]]
    place = (batch.row[observation], batch.column[observation])
    return torch.zeros_like(batch.obs_mask).index_put(place, greedy)


@torch.no_grad()
def predicts_text(
    cfg: Config, policy: Policy, rows: list[TokenRow], at_least: float | None = None
) -> list[bool]:
    """For each row: does greedy decoding after (h_t, a_t) write obs_ids?

    With at_least: is the probability of obs_ids at least that?
    """
    lengths = []
    for row in rows:
        tokens = (row.prompt_ids, row.response_ids, row.separator_ids, row.obs_ids)
        lengths.append(sum(len(part) for part in tokens))
    found = [False] * len(rows)
    for part in split(lengths, cfg.micro_tokens) if rows else []:
        part_rows = [rows[i] for i in part]
        batch = collate(part_rows, [True] * len(part), policy.pad_id, policy.device)
        if at_least is None:
            written = is_greedy(policy, batch) | ~batch.obs_mask  # (B, S)
            predicted = written.all(-1)  # (B,)
        else:
            logp, _ = policy(batch)  # (B, S)
            probability = (logp * batch.obs_mask).sum(-1).exp()  # (B,)
            predicted = probability >= at_least  # (B,)
        for i, is_predicted in zip(part, predicted.tolist(), strict=True):
            found[i] = is_predicted
    return found


class LookaheadSampler:
    """Answers each request with the chosen one of k responses of another sampler.

    veto: False is best of k by likelihood, without any prediction.
    drawn: responses that are not generated again. Candidate n of a step has
    the same seed for all rules and all k. So until two of them make different choices, they can
    share what was drawn from one model at one temperature.
    candidates: those of all steps, by the seed of the request, which names episode and turn.
    """

    def __init__(
        self, cfg: Config, sampler: HFSampler | VLLMSampler, k: int, veto: bool = True,
        drawn: Drawn | None = None,
    ):
        self.cfg = cfg
        self.sampler = sampler
        self.k = k
        self.veto = veto
        self.drawn = {} if drawn is None else drawn
        self.candidates: dict[int, list[Candidate]] = {}

    @contextmanager
    def sync(self, policy: Policy):
        self.policy = policy
        with self.sampler.sync(policy):
            yield

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """Like HFSampler.generate. A request is answered when its k responses are there."""
        asked: deque[Request] = deque()  # what the other sampler generates next
        waiting: dict[int, list[Request]] = {}  # slot -> the requests of its candidates
        units = self.sampler.generate(asked, temperature, max_tokens)
        while True:
            while queue:
                request = queue.popleft()
                waiting[request.slot] = self.one_per_candidate(request)
                asked += [one for one in waiting[request.slot] if key(one) not in self.drawn]
            answers = self.decide(waiting)
            if answers:  # they may bring new requests, which may be known, too
                yield answers
                continue
            finished = next(units, None)
            if finished is None:
                return
            for response in finished:
                slot, number = divmod(response.slot, self.k)
                self.drawn[key(waiting[slot][number])] = response
            yield []  # new requests join before the other sampler's next unit of work

    def decide(self, waiting: dict[int, list[Request]]) -> list[Response]:
        """Answer the requests whose k responses are there; they wait no longer."""
        asked = []
        groups = []
        for slot, requests in list(waiting.items()):
            if all(key(one) in self.drawn for one in requests):
                asked.append(replace(requests[0], slot=slot))
                groups.append([Candidate(self.drawn[key(one)]) for one in requests])
                del waiting[slot]
        # With one candidate there is nothing to choose.
        if self.veto and self.k > 1:
            self.mark_vetoes(asked, groups)
        for request, candidates in zip(asked, groups, strict=True):
            self.candidates[request.seed] = candidates
        chosen = [choose(candidates).response for candidates in groups]
        return [replace(one, slot=request.slot) for request, one in zip(asked, chosen)]

    def one_per_candidate(self, request: Request) -> list[Request]:
        """The k requests for one, each with a slot of its own. The first keeps the seed."""
        found = [replace(request, slot=request.slot * self.k)]
        for number in range(1, self.k):
            seed = request_seed(CANDIDATE, request.seed, number)
            found.append(replace(request, slot=request.slot * self.k + number, seed=seed))
        return found

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

    # WorldModelSampler overrides both.

    def will_follow(self, rows: list[TokenRow]) -> list[bool]:
        """For each row: will obs_ids follow?"""
        return predicts_text(self.cfg, self.policy, rows)

    def outcome_row(self, request: Request, response: Response) -> TokenRow:
        """The row that PaW would train on if this response changed nothing (rollout.py)."""
        text = BENCHMARKS[self.cfg.env].unchanged(request.observation)
        obs_ids = self.policy.encode(text)[: self.cfg.max_obs_tokens]
        separator_ids = []
        if self.cfg.wm_separator == "turn":
            separator_ids = self.policy.separator(response.ids)
        return TokenRow(request.prompt_ids, response.ids, obs_ids, separator_ids=separator_ids)


class WorldModelSampler(LookaheadSampler):
    """Lookahead whose outcomes a separate Word2World model predicts.

    Its cost is a lower bound: that this model reads the chat and the command is not counted.
    episodes: the pool that the panel is played in. It has the chat of each episode so far.
    veto_at: least probability of the text of no effect for a veto; None: it is the greedy one.
    """

    def __init__(
        self, cfg: Config, sampler: HFSampler | VLLMSampler, k: int, world_model: WorldModel,
        episodes: Recorder, veto_at: float | None = None, drawn: Drawn | None = None,
    ):
        super().__init__(cfg, sampler, k, drawn=drawn)
        self.world_model = world_model
        self.episodes = episodes
        self.veto_at = veto_at

    def will_follow(self, rows: list[TokenRow]) -> list[bool]:
        return predicts_text(self.cfg, self.world_model.policy, rows, self.veto_at)

    def outcome_row(self, request: Request, response: Response) -> TokenRow:
        """The chat up to this response's command, and the text of no effect as its answer."""
        benchmark = BENCHMARKS[self.cfg.env]
        command = benchmark.parse(self.policy.decode(response.ids)).text
        chat = [*self.episodes.current[request.slot].messages, said("user", command)]
        chat_ids, _ = self.world_model.tokens(chat)
        answer_ids = self.beginning(benchmark.unchanged(request.observation))
        if len(chat_ids) + len(answer_ids) > self.world_model.context:
            answer_ids = []  # too long to read: no veto
        return TokenRow(chat_ids, [], answer_ids)

    def beginning(self, text: str) -> list[int]:
        """The tokens of `text` where an answer begins with it and a list of actions follows.

        A token that spans the end of the text, such as ".\n", is left out.
        """
        encode = self.world_model.policy.encode
        ids = encode(text)
        answer_ids = encode(text + ACTIONS)
        shared = 0
        while shared < len(ids) and ids[shared] == answer_ids[shared]:
            shared += 1
        return ids[:shared]
