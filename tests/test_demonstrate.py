"""The demonstrations of the rule-based teachers: steps, slips and haste, to the byte."""

import hashlib
import json
from pathlib import Path

import pytest

from paw_min.toy import default_model, standins


@pytest.mark.slow
@pytest.mark.parametrize("env", ["webshop", "search"])
def test_the_demonstrations_are_those_of_the_stand_ins(env, tmp_path, monkeypatch):
    """test_train.py trains on ALFWorld's, too."""
    monkeypatch.chdir(tmp_path)
    tasks = standins.TEACHERS[env].training_tasks()[:12]
    rows = standins.demonstrations(env, tasks, seed=0)
    record = json.loads((Path(default_model(env)) / "record.json").read_text())
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest == record["miniature"]["demonstrations"]
