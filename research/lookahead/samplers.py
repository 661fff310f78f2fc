"""Samplers of the lookahead experiment (lookahead.py).

    SharedDraws          generates each response once, for all rules and values of K
    WorldModelSampler    lookahead whose outcomes another model predicts
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.model.policy import Policy
from paw_min.model.sampler import HFSampler, Request, Response
from paw_min.model.vllm_sampler import VLLMSampler
from paw_min.rows import TokenRow
from paw_min.running.lookahead import LookaheadSampler, predicts_text
from paw_min.world_models.trajectories import ACTIONS, Recorder, said
from paw_min.world_models.world_model import WorldModel


class SharedDraws:
    """A sampler that generates each response once (sampler.py), for one model at one temperature.

    The seed of candidate n of a step does not depend on the rule or on K. So until two of them make
    different choices, they ask for the same responses to the same prompts.
    """

    def __init__(self, sampler: HFSampler | VLLMSampler):
        self.sampler = sampler
        self.drawn: dict[tuple, Response] = {}  # (prompt, seed) -> response

    def sync(self, policy: Policy):
        return self.sampler.sync(policy)

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        missing: deque[Request] = deque()  # what the other sampler generates next
        asked: dict[int, tuple] = {}  # slot -> key of its missing response

        def known() -> list[Response]:
            found = []
            while queue:
                request = queue.popleft()
                key = (tuple(request.prompt_ids), request.seed)
                if key in self.drawn:
                    found.append(replace(self.drawn[key], slot=request.slot))
                else:
                    missing.append(request)
                    asked[request.slot] = key
            return found

        def all_known() -> Iterator[list[Response]]:
            # An answer may bring new requests, which may be known, too.
            while found := known():
                yield found

        yield from all_known()
        while missing:
            for finished in self.sampler.generate(missing, temperature, max_tokens):
                for response in finished:
                    self.drawn[asked.pop(response.slot)] = response
                yield finished
                # New requests join before the other sampler looks for its next unit of work.
                yield from all_known()


class WorldModelSampler(LookaheadSampler):
    """Lookahead whose outcomes a separate Word2World model predicts.

    Its cost is a lower bound: that this model reads the chat and the command is not counted.
    episodes: the pool that the panel is played in. It has the chat of each episode so far.
    veto_at: least probability of the text of no effect for a veto; None: it is the greedy one.
    """

    def __init__(
        self, cfg: Config, sampler: HFSampler | SharedDraws, k: int, world_model: WorldModel,
        episodes: Recorder, veto_at: float | None = None,
    ):  # fmt: skip
        super().__init__(cfg, sampler, k)
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
