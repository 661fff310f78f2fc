"""Questions of search QA: reading the published files, and exact match.

Exact match is that of Search-R1 and SQuAD. It does not fold Unicode: Beyonce is not Beyoncé.
Deviations: there, "The", "A", "+" and "!!!" are empty texts, which match each other and an empty
answer. Here, articles and punctuation stay where nothing else is left, and an empty text matches
nothing. And an answer may be in any form of Unicode, of which a tokenizer writes one.
"""

import re
import reprlib
import string
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paw_min.base.files import damaged, expanded, parse_json
from paw_min.envs.prompting import composed, forms

# Columns read from parquet files. `prompt`, the largest, is not needed: prompts.py makes prompts.
COLUMNS = ("question", "golden_answers", "data_source", "env_kwargs", "reward_model")
PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    question: str
    answers: tuple[str, ...]  # any of them is correct
    source: str  # its data set; evaluation is reported for each


def load_questions(path: str | Path, split: str = "") -> list[Question]:
    """The questions of a .parquet or .jsonl file, in its order.

    path: the file, or the folder that contains <split>.parquet or <split>.jsonl. A row has the keys
    `question`, `golden_answers` and `data_source`, as in Search-R1's files, or verl-agent's
    `env_kwargs` with the same content. Without data_source, the name of the file is used.
    Raises FileNotFoundError and ValueError.
    """
    path = question_file(path, split)
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        rows = _read_jsonl(path)
    questions = []
    for number, row in enumerate(rows, start=1):
        with damaged(f"{path}, row {number}", "a row needs `question` and `golden_answers`, one or "
                     "more texts, or verl-agent's `env_kwargs`; fix or delete it"):
            questions.append(_question(row, default_source=path.stem))
    if not questions:
        raise ValueError(f"{path} has no questions: download the file again.")
    return questions


def question_file(path: str | Path, split: str) -> Path:
    """The file of `load_questions`."""
    path = expanded(path)
    if path.is_dir():
        files = [path / f"{split}.parquet", path / f"{split}.jsonl"]
        found = [file for file in files if file.is_file()]
        if not found:
            raise FileNotFoundError(f"The folder {path} has neither {files[0].name} nor "
                                    f"{files[1].name}: give the folder of the questions, or "
                                    "another --eval-split.")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"The question file {path} does not exist: give a .parquet or "
                                ".jsonl file, or the folder that has one per split.")
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"The question file {path} is neither .parquet nor .jsonl: convert it.")
    return path


def _read_parquet(path: Path) -> list[dict]:
    try:
        from pyarrow import parquet  # 170 MB, for published data only: not in requirements.txt
    except ImportError:
        raise ValueError(f"{path} needs pyarrow: pip install pyarrow.") from None
    with damaged(str(path), "download it again"):
        file = parquet.ParquetFile(path)
        columns = [name for name in file.schema_arrow.names if name in COLUMNS]
        return file.read(columns=columns).to_pylist()


def _read_jsonl(path: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            with damaged(f"{path}, line {number}", "fix or delete it"):
                rows.append(parse_json(line))
    return rows


def _question(row: dict, default_source: str) -> Question:
    """Convert one row of either layout; in both, reward_model repeats the answers."""
    row = row | (row.get("env_kwargs") or {})  # verl-agent: the same keys, one level down
    question = row["question"]
    source = row.get("data_source") or default_source
    answers = row.get("golden_answers")
    if not answers:
        truth = row.get("ground_truth") or row["reward_model"]["ground_truth"]
        answers = truth["target"]
    if isinstance(answers, str):  # one answer, or a list that was stored as JSON text
        answers = parse_json(answers.encode()) if answers.strip().startswith("[") else [answers]
    if isinstance(answers, list):  # An alias may be blank: it equals no answer.
        answers = [text for text in answers if not isinstance(text, str) or text.strip()]
    if not isinstance(answers, list) or not answers:
        raise TypeError(f"the answers are {reprlib.repr(answers)}")
    for text in (question, source, *answers):
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"{reprlib.repr(text)} instead of a text")
    return Question(question.strip(), tuple(answers), source)


def normalize(text: str) -> str:
    """Normalize as SQuAD: lower case, remove punctuation, then articles, then extra spaces.

    In this order: without punctuation, "the-end" is one word and keeps its article. A text that has
    nothing but articles keeps them, and one that has nothing but punctuation keeps that.
    """
    text = text.lower()
    without_punctuation = text.translate(PUNCTUATION)
    without_articles = re.sub(r"\b(a|an|the)\b", " ", without_punctuation)
    return " ".join(without_articles.split() or without_punctuation.split() or text.split())


def exact_match(prediction: str | None, answers: Iterable[str]) -> bool:
    """Whether the prediction equals one of the answers after normalization.

    None and a text that is empty after normalization equal nothing.
    """
    normalized = normalize(composed(prediction or ""))
    known = {normalize(form) for answer in answers for form in forms(answer)}
    return bool(normalized) and normalized in known
