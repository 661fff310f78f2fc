"""Questions of search QA: reading the published files, and exact match.

Exact match is that of Search-R1 and SQuAD. It does not fold Unicode: Beyonce is not Beyoncé.
Deviation: there, "The" and "A" are empty texts, which match each other and an empty answer. Here,
articles stay where nothing else is left, and an empty text matches nothing.
"""

import re
import reprlib
import string
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paw_min.base.files import expanded, parse_json

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
    path = expanded(path)
    if path.is_dir():
        files = [path / f"{split}.parquet", path / f"{split}.jsonl"]
        found = [file for file in files if file.is_file()]
        if not found:
            raise FileNotFoundError(f"The folder {path} has neither {files[0].name} nor "
                                    f"{files[1].name}: give the folder of the questions.")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"The question file {path} does not exist: give a .parquet or "
                                ".jsonl file, or the folder that has one per split.")
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"The question file {path} is neither .parquet nor .jsonl: convert it.")
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        rows = _read_jsonl(path)
    questions = []
    for number, row in enumerate(rows, start=1):
        questions.append(_question(row, f"{path}, row {number}", default_source=path.stem))
    if not questions:
        raise ValueError(f"{path} has no questions: download the file again.")
    return questions


def _read_parquet(path: Path) -> list[dict]:
    import pyarrow  # needed for published data only
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in file.schema_arrow.names if name in COLUMNS]
        return file.read(columns=columns).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: text not in UTF-8
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a readable parquet file ({reason}): download it "
                         "again.") from error


def _read_jsonl(path: Path) -> list[dict]:
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(parse_json(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}): fix or delete "
                                 "it.") from error
    return rows


def _question(row, where: str, default_source: str) -> Question:
    """Convert one row of either layout; in both, reward_model repeats the answers."""
    if not isinstance(row, dict):
        row = {}  # reported below as a row without a question
    # verl-agent: the same keys, one level down.
    row = row | _nested(row, "env_kwargs", where)
    reward_model = _nested(row, "reward_model", where)
    answers = row.get("golden_answers")
    if not answers:
        truth = _nested(row, "ground_truth", where)
        if not truth:
            truth = _nested(reward_model, "ground_truth", where)
        answers = truth.get("target") or []
    if isinstance(answers, str):
        answers = _listed(answers, where)
    question = row.get("question")
    source = row.get("data_source") or default_source
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where} has no question: a row needs `question` and `golden_answers`, "
                         "or verl-agent's `env_kwargs`.")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError(f"{where} has no answers (found {reprlib.repr(answers)}): "
                         "`golden_answers` must be a list of one or more strings; fix the row or "
                         "delete it.")
    if not all(answer.strip() for answer in answers):
        raise ValueError(f"{where} has an empty answer among {reprlib.repr(answers)}: fix the row "
                         "or delete it.")
    if not isinstance(source, str):
        raise ValueError(f"{where} has the data_source {reprlib.repr(source)}: it must be a "
                         "string; fix the row or delete it.")
    return Question(question.strip(), tuple(answers), source)


def _listed(answers: str, where: str) -> list:
    """The answers in a column of text: one answer, or a list that was stored as JSON text."""
    if not answers.strip().startswith("["):
        return [answers]
    try:
        return parse_json(answers.encode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} has the golden_answers {reprlib.repr(answers)}, which begin as "
                         "a list but are not JSON: store a list of strings.") from error


def _nested(row: dict, key: str, where: str) -> dict:
    """row[key]; {} if it is missing or null."""
    value = row.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{where} has the {key} {reprlib.repr(value)}: it must be a JSON object; "
                         "fix the row or delete it.")
    return value


def normalize(text: str) -> str:
    """Normalize as SQuAD: lower case, remove punctuation, then articles, then extra spaces.

    In this order: without punctuation, "the-end" is one word and keeps its article. A text that has
    nothing but articles keeps them.
    """
    text = text.lower().translate(PUNCTUATION)
    without_articles = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(without_articles.split() or text.split())


def exact_match(prediction: str | None, answers: Iterable[str]) -> bool:
    """Whether the prediction equals one of the answers after normalization.

    None and a text that is empty after normalization equal nothing.
    """
    normalized = normalize(prediction or "")
    return bool(normalized) and normalized in {normalize(answer) for answer in answers}
