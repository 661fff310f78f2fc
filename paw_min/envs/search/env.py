"""Search-augmented QA: the rules of an episode, and a pool that batches the searches of all.

In each turn the agent either searches and observes the best passages, or answers, which ends the
episode.

Source: the search environment of verl-agent, on which PaW builds (A.1: at most 4 turns, reward 1 or
0). Its less obvious rules:

- The last turn ends the episode in any case; a search in it is not executed.
- A response without a readable command uses up its turn. Its observation is empty, like the last
  one of an episode, and an empty observation is not a world-model target.
- The answer is the last <answer> block of the episode, even if that is in a passage.
- The information block is JSON: newlines and quotes in passages are escaped.

Deviations:

- verl-agent calls the retriever once per environment; here all waiting searches are one call.
- verl-agent turns a retriever error into an observation ("Search error: ..."), which the world
  model would learn. Here a query that the server refuses uses up its turn, like a response without
  a command. A server that is gone stops the run, and the same command resumes it from its last
  checkpoint.
"""

import json
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Thread

from paw_min.base.files import expanded, is_url
from paw_min.config import Config
from paw_min.envs.interface import Answer, Step, Tasks
from paw_min.envs.search.questions import Question, exact_match, load_questions
from paw_min.retrieval import open_retriever
from paw_min.retrieval.interface import Hit, Retriever


def load(cfg: Config, data: str) -> Tasks:
    """The questions of a run and their pool."""
    if expanded(data).is_file() and cfg.eval_split != "train":
        raise ValueError(f"{data} is one file, so training and test would have the same questions: "
                         "give a folder with one file per split, or --eval-split train.")
    source = cfg.retriever or data
    held_out = load_questions(data, cfg.eval_split)
    train = load_questions(data, "train")
    retriever = open_retriever(source)

    def make_pool(n_envs: int) -> SearchPool:
        return SearchPool(
            questions=train + held_out,
            retriever=retriever,
            n_envs=n_envs,
            max_turns=cfg.max_turns,
            topk=cfg.topk,
            remote=is_url(source),
        )

    # A task is an index into train + held_out, as a string.
    tasks = [str(i) for i in range(len(train) + len(held_out))]
    return Tasks(tasks[: len(train)], tasks[len(train) :], make_pool)


def blocks(text: str, tag: str) -> list[str]:
    """What re.findall("<tag>(.*?)</tag>", text, re.DOTALL) finds, in linear time.

    The regex reads the rest of the text for each opening tag that nothing closes.
    """
    found = []
    *closed, _ = text.split(f"</{tag}>")
    for part in closed:
        _, opened, inside = part.partition(f"<{tag}>")
        if opened:
            found.append(inside)
    return found


def last_answer(text: str) -> str | None:
    """The text of the last <answer> block; None if there is none."""
    found = blocks(text, "answer")
    return found[-1].strip() if found else None


def information(hits: list[Hit]) -> str:
    """The observation after a search."""
    passages = [hit["document"]["contents"].strip() for hit in hits]
    text = "".join(f"Doc {n}: {passage}\n" for n, passage in enumerate(passages, start=1))
    result = json.dumps({"result": text or "No search results found."}, ensure_ascii=False)
    return f"<information>{result}</information>"


@dataclass
class _Episode:
    question: Question
    text: str = ""  # all commands and observations so far
    turns: int = 0


class SearchPool:
    """A pool of episodes whose searches are batched; see `Pool` in envs/interface.py.

    One `recv` serves all requests made before it, with one retriever call for all searches; equal
    queries are sent once. If the retriever raises, `recv` does too, no request is lost, and the
    next `recv` tries again.

    questions: a task is the index of its question in this list, as a string.
    remote: the retriever waits for a server. It is then called in a thread, and `recv` answers
        other requests in the meantime. Queries that arrive during a call are merged into the next:
        the number of concurrent requests does not grow with the number of episodes.
    """

    def __init__(
        self,
        questions: list[Question],
        retriever: Retriever,
        n_envs: int,
        max_turns: int = 4,
        topk: int = 3,
        remote: bool = False,
    ):
        self.n_envs = n_envs
        self._questions = questions
        self._retriever = retriever
        self._max_turns = max_turns
        self._topk = topk
        self._episodes: dict[int, _Episode] = {}  # slot -> its episode
        self._open: dict[int, str | None] = {}  # slot -> its unanswered command, None: a reset
        self._answers: deque[Answer] = deque()  # ready for recv
        self._remote = remote
        self._call: Future | None = None  # a search in a thread

    def reset(self, slot: int, task: str) -> None:
        self._episodes[slot] = _Episode(self._questions[int(task)])
        self._open[slot] = None

    def step(self, slot: int, command: str) -> None:
        self._open[slot] = command

    def recv(self, timeout: float | None = None) -> Answer | None:
        """The next answer; None if there is none within `timeout` seconds (None: no limit).

        The timeout limits the wait for the thread; a local retriever is not interrupted.
        """
        if self._open and not self._answers:
            self._serve(timeout)
        if not self._answers:
            return None
        return self._answers.popleft()

    def close(self) -> None:
        """Does not wait for a call in progress: its thread is a daemon."""

    def _serve(self, timeout: float | None) -> None:
        """Answer all open requests, except those that wait for a search in a thread."""
        queries = {}  # slot -> query
        for slot in self._open:
            query = self._query(slot)
            if query is not None:
                queries[slot] = query
        # If the search raises, no request has been changed yet: the next recv tries again.
        if self._remote:
            if len(self._open) > len(queries):
                timeout = 0  # the others need no search: answer them now
            hits = self._search_in_thread(queries, timeout)
        else:
            hits = self._search(queries)
        served = [slot for slot in self._open if slot in hits or slot not in queries]
        for slot in served:
            command = self._open.pop(slot)
            observation = ""
            if hits.get(slot) is not None:
                observation = information(hits[slot])
            self._answers.append(Answer(slot, self._advance(slot, command, observation)))

    def _query(self, slot: int) -> str | None:
        """The query that the open request of a slot has to search for, if any."""
        command = self._open[slot]
        if command is None or self._ends(slot, command):
            return None
        found = blocks(command, "search")
        return found[0] if found else None

    def _ends(self, slot: int, command: str) -> bool:
        # verl-agent looks for both tags, not for a well-formed block.
        last_turn = self._episodes[slot].turns + 1 >= self._max_turns
        return last_turn or ("<answer>" in command and "</answer>" in command)

    def _search(self, queries: dict[int, str]) -> dict[int, list[Hit] | None]:
        """{slot: query} -> {slot: hits}, in one call; None: the server refuses this query."""
        if not queries:
            return {}
        # The episodes of a group often send the same query.
        distinct = list(dict.fromkeys(queries.values()))
        found = self._retriever.search(distinct, self._topk)
        hits = dict(zip(distinct, found, strict=True))
        return {slot: hits[query] for slot, query in queries.items()}

    def _search_in_thread(
        self, queries: dict[int, str], timeout: float | None
    ) -> dict[int, list[Hit] | None]:
        """The hits of the call in progress, or of a new one; {} if it takes over `timeout` s."""
        if self._call is None:
            if not queries:
                return {}
            self._call = self._start(queries)
        wait([self._call], timeout)
        if not self._call.done():
            return {}
        call = self._call
        self._call = None
        return call.result()

    def _start(self, queries: dict[int, str]) -> Future:
        """Search in a daemon thread: Ctrl-C does not wait for it, as it does for an executor's."""
        call = Future()

        def work():
            try:
                call.set_result(self._search(queries))
            except Exception as error:  # call.result raises it
                call.set_exception(error)

        Thread(target=work, daemon=True).start()
        return call

    def _advance(self, slot: int, command: str | None, observation: str) -> Step:
        """Execute a request; observation: the information block, "" if nothing was searched."""
        episode = self._episodes[slot]
        question = episode.question
        done = won = False
        if command is None:  # a reset
            observation = question.question
        else:
            # _ends counts this turn itself, so it has to be called before the count goes up.
            done = self._ends(slot, command)
            episode.turns += 1
            episode.text += command + observation
            won = done and exact_match(last_answer(episode.text), question.answers)
        return Step(
            observation=observation,
            task=question.question,
            task_type=question.source,
            admissible=[],  # free text
            reward=float(won),
            done=done,
            won=won,
        )
