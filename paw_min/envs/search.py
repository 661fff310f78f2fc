"""Search-augmented QA: questions, exact match, and many episodes that search together.

What it computes: the list of questions of a file, the score of an answer, and `SearchPool`, which
plays any number of episodes at once. In a turn the agent either searches, and the best passages
come back, or answers, which ends the episode.

Source: the search environment of verl-agent, on which PaW builds (A.1: at most 4 turns, reward 1
or 0), and exact match as in Search-R1 and SQuAD. The rules, where they might surprise:

- The last turn ends the episode whatever it is: a search in it is not executed.
- A response without a readable action costs its turn; the observation is then empty, as it is at
  the end of an episode. An empty observation is nothing that a world model could learn from.
- The answer is the last <answer> block of the episode, even one in a passage. Exact match does not
  fold Unicode: Beyonce is not Beyoncé.
- The information block is JSON: line ends, quotes and accents in passages appear escaped.

Deviations:

- There, each environment asks the retriever by itself; here, all searches that wait are one call.
- There, a retriever that fails becomes an observation ("Search error: ..."), which the world model
  would then learn. Here the error stops the run, which goes on from its last checkpoint.
"""

import json
import re
import string
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from paw_min.envs import corpus
from paw_min.envs.pool import LockStep
from paw_min.envs.retrievers import open_retriever
from paw_min.envs.search_thread import SearchThread

COLUMNS = ("question", "golden_answers", "data_source", "env_kwargs", "reward_model")
PUNCTUATION = str.maketrans("", "", string.punctuation)
FOUND_NOTHING = "No search results found."


@dataclass(frozen=True)
class Question:
    question: str
    answers: tuple[str, ...]  # any of them is right
    source: str  # the data set it comes from: evaluation is reported for each


def load_questions(path: str | Path, split: str = "") -> list[Question]:
    """The questions of a .parquet or .jsonl file, in its order.

    path: the file, or the folder that holds <split>.parquet or <split>.jsonl. A row has
    `question`, `golden_answers` and `data_source`, as Search-R1 published them, or verl-agent's
    `env_kwargs` with the same content; without data_source the file's name takes its place.
    Raises FileNotFoundError and ValueError.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = [path / f"{split}.parquet", path / f"{split}.jsonl"]
        found = [file for file in files if file.is_file()]
        if not found:
            raise FileNotFoundError(f"The folder {path} has neither {files[0].name} nor "
                                    f"{files[1].name}: give the folder of the questions.")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"The question file {path} does not exist: give a .parquet or "
                                ".jsonl file, or the folder that holds one per split.")
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"The question file {path} is neither .parquet nor .jsonl: convert it.")
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    questions = [_question(row, f"{path}, row {n}", path.stem) for n, row in enumerate(rows, 1)]
    if not questions:
        raise ValueError(f"{path} holds no question: get the file again.")
    return questions


def _read_parquet(path: Path) -> list[dict]:
    import pyarrow  # needed for published data only
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        # Not the column `prompt`, the largest: prompts are made by prompts.py.
        columns = [name for name in file.schema_arrow.names if name in COLUMNS]
        return file.read(columns=columns).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a readable parquet file ({reason}): get it again.") from (
            error)


def _read_jsonl(path: Path) -> list[dict]:
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}): "
                                 "mend or delete it.") from error
    return rows


def _question(row, where: str, default_source: str) -> Question:
    """One row of either layout; in both, reward_model repeats the right answers."""
    row = row if isinstance(row, dict) else {}
    row = row | (row.get("env_kwargs") or {})
    truth = row.get("ground_truth") or (row.get("reward_model") or {}).get("ground_truth") or {}
    answers = row.get("golden_answers") or truth.get("target") or []
    answers = tuple([answers] if isinstance(answers, str) else answers)
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where} has no question: a row needs `question` and `golden_answers`, "
                         "or verl-agent's `env_kwargs`.")
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"{where} has no answers: `golden_answers` must be a list with at least "
                         "one text; mend the row or delete it.")
    return Question(question.strip(), answers, row.get("data_source") or default_source)


def normalize(text: str) -> str:
    """SQuAD's order: lower case, punctuation away, articles away, single spaces."""
    text = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str | None, answers: tuple[str, ...] | list[str]) -> bool:
    """Is the prediction one of the answers, up to normalisation? None is no prediction."""
    if prediction is None:
        return False
    return normalize(prediction) in {normalize(answer) for answer in answers}


def last_answer(text: str) -> str | None:
    blocks = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return blocks[-1].strip() if blocks else None


def search_query(action: str) -> str | None:
    block = re.search(r"<search>(.*?)</search>", action, re.DOTALL)
    return block.group(1) if block else None


def information(hits: list[dict]) -> str:
    """The observation after a search: what `search` of a retriever found for one query."""
    passages = [hit["document"]["contents"].strip() for hit in hits]
    text = "".join(f"Doc {n}: {passage}\n" for n, passage in enumerate(passages, start=1))
    return f"<information>{json.dumps({'result': text or FOUND_NOTHING})}</information>"


@dataclass
class _Episode:
    question: Question
    messages: str = ""  # actions and observations so far
    turns: int = 0
    done: bool = False


def generated_data(root: Path = Path("data") / "search") -> Path:
    """The default data: an invented world's passages and questions, made on first use."""
    return corpus.generate(root, seed=0)


def setup(cfg) -> tuple:
    """(make_pool, training questions, held-out questions) of a run; all that is wrong at once."""
    data = Path(cfg.data) if cfg.data else generated_data()
    source = cfg.retriever or data
    found, wrong = [], []
    for load in (
        lambda: load_questions(data, cfg.train_split),
        lambda: load_questions(data, cfg.eval_split),
        lambda: open_retriever(source, cfg.encoder),
    ):
        try:
            found.append(load())
        except (ValueError, OSError) as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError(" Also: ".join(dict.fromkeys(wrong)))
    train, held_out, retriever = found
    tasks = [str(i) for i in range(len(train) + len(held_out))]
    remote = str(source).startswith(("http://", "https://"))

    def make_pool(n_envs):
        return SearchPool(train + held_out, retriever, n_envs, cfg.max_turns, cfg.topk, remote)

    return make_pool, tasks[: len(train)], tasks[len(train) :]


class SearchPool(LockStep):
    """n_envs slots that play questions; the methods are those of envs/pool.py: EnvPool.

    questions: a task is the position of its question in this list, as a string.
    retriever: see envs/retrievers.py. A `recv` serves everything sent before it, with one call of
        the retriever for all searches, in which equal queries are asked once.
    remote: the retriever waits for a server; a thread asks it then, and `recv` answers others
        meanwhile.

    info: task (the question), task_type (its data set), admissible (always []: free text), won.
    """

    def __init__(self, questions, retriever, n_envs, max_turns=4, topk=3, remote=False):
        if min(n_envs, max_turns, topk) < 1:
            raise ValueError(f"n_envs={n_envs}, max_turns={max_turns}, topk={topk}: each must be 1 "
                             "or more.")
        self.n_envs = n_envs
        self._questions, self._retriever = questions, retriever
        self._max_turns, self._topk = max_turns, topk
        self._episodes = {}  # slot -> _Episode
        self._open = {}  # slot -> its unanswered ("reset", task) or ("step", action)
        self._ready = deque()  # (slot, result) for recv
        self._thread = SearchThread(self._search) if remote else None
        self._away = set()  # open slots whose searches the thread has

    def send(self, slot, method, argument):
        """Ask for "reset" (argument: a task) or "step" (argument: an action); does not wait."""
        if not 0 <= slot < self.n_envs or method not in ("reset", "step"):
            raise ValueError(f"{method!r} of slot {slot!r}: need reset or step of 0 to n_envs-1.")
        if slot in self._open or any(slot == waiting for waiting, _ in self._ready):
            raise RuntimeError(f"Slot {slot} still owes an answer: call recv before send.")
        if method == "reset":
            if not str(argument).isdecimal() or int(argument) >= len(self._questions):
                raise ValueError(f"There is no question {argument!r}: a task is a number from 0 "
                                 f"to {len(self._questions) - 1}, as a string.")
        elif slot not in self._episodes or self._episodes[slot].done:
            raise RuntimeError(f"Step of slot {slot} without a running episode (none started, or "
                               "over): call reset first.")
        self._open[slot] = method, argument

    def recv(self, timeout=None):
        """(slot, result) of one request: (obs, info) or (obs, reward, done, info).

        timeout: seconds after which None is returned if nothing has come; 0: no waiting, though
            what is not asked of a thread is served.
        """
        if not self._open and not self._ready:
            if timeout is None:
                raise RuntimeError("recv would wait for ever: every request has been answered.")
            return None
        if not self._ready:
            self._serve(timeout)
        return self._ready.popleft() if self._ready else None

    def close(self):
        if self._thread:
            self._thread.close()

    def _serve(self, timeout):
        """Answer all open requests but those away; if the retriever fails, no episode changes."""
        queries = {slot: search_query(action) for slot, (method, action) in self._open.items()
                   if slot not in self._away and method == "step" and not self._ends(slot, action)}
        queries = {slot: query for slot, query in queries.items() if query is not None}
        hits = self._search_apart(queries, timeout) if self._thread else self._search(queries)
        for slot in [slot for slot in self._open if slot not in self._away]:
            method, argument = self._open.pop(slot)
            if method == "reset":
                self._ready.append((slot, self._reset(slot, int(argument))))
            else:
                observation = information(hits[slot]) if slot in hits else ""
                self._ready.append((slot, self._step(slot, argument, observation)))

    def _search(self, queries: dict) -> dict:
        """{slot: query} -> {slot: hits}, one call for all; equal queries are asked once."""
        asked = list(dict.fromkeys(queries.values()))
        found = self._retriever.search(asked, self._topk) if asked else []
        hits = dict(zip(asked, found, strict=True))
        return {slot: hits[query] for slot, query in queries.items()}

    def _search_apart(self, queries: dict, timeout) -> dict:
        """Hand the queries to the thread; {slot: hits} of what it has found meanwhile."""
        if queries:
            self._thread.ask(queries)
            self._away |= queries.keys()
        others = self._open.keys() - self._away  # are there any, their answers need no waiting
        slots, hits = self._thread.take(0 if others else timeout)
        self._away -= set(slots)  # after an error, the next recv asks again
        if isinstance(hits, Exception):
            raise hits
        return hits

    def _ends(self, slot: int, action: str) -> bool:
        last_turn = self._episodes[slot].turns + 1 >= self._max_turns
        return last_turn or ("<answer>" in action and "</answer>" in action)

    def _reset(self, slot: int, number: int) -> tuple:
        self._episodes[slot] = episode = _Episode(self._questions[number])
        return episode.question.question, self._info(episode, won=False)

    def _step(self, slot: int, action: str, observation: str) -> tuple:
        """observation: the information block, "" where nothing was searched"""
        episode = self._episodes[slot]
        episode.done = self._ends(slot, action)
        episode.turns += 1
        episode.messages += action + observation
        won = episode.done and exact_match(last_answer(episode.messages), episode.question.answers)
        return observation, float(won), episode.done, self._info(episode, won)

    def _info(self, episode: _Episode, won: bool) -> dict:
        question = episode.question
        return {"task": question.question, "task_type": question.source, "admissible": [],
                "won": won}
