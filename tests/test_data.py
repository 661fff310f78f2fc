"""The stored questions of search, and what a teacher shows in the stored shop.

test_games.py has ALFWorld's games.
"""

import hashlib
import json
from pathlib import Path

import pytest

from paw_min.base.errors import UserError
from paw_min.toy import default_data, default_model
from world_models import teachers


def test_no_fact_behind_a_test_question_is_behind_a_training_question():
    """Two parts of the passages without a common name: the questions begin in different ones."""
    folder = Path(default_data("search"))
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    passages = {row["contents"].split('"')[1]: row["contents"] for row in rows}
    part = dict.fromkeys(passages)

    def spread(name: str, split: str) -> None:
        names = [name]
        while names:
            name = names.pop()
            if part[name] is None:
                part[name] = split
                names += [other for other in passages if other in passages[name]]
            assert part[name] == split

    for split in ("train", "test"):
        for line in (folder / f"{split}.jsonl").read_text().splitlines():
            row = json.loads(line)
            named = [name for name in passages if name in row["question"]]
            assert len(named) == 1
            spread(named[0], split)
            assert part[row["golden_answers"][0]] == split


def test_an_environment_without_data_says_so():
    with pytest.raises(UserError, match="chess has no data of its own: give --data"):
        default_data("chess")


@pytest.mark.slow
def test_the_demonstrations_are_those_of_the_stand_in():
    """Steps, slips and haste. test_train.py trains on ALFWorld's, too."""
    tasks = teachers.TEACHERS["webshop"].training_tasks()[:12]
    rows = teachers.demonstrations("webshop", tasks, seed=0)
    record = json.loads((Path(default_model("webshop")) / "record.json").read_text())
    found = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert found == record["demonstrations"]
