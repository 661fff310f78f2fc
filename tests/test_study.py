"""What a policy knows and how it fails, counted by hand, and the tables of the study.

python -m pytest tests/test_study.py
"""

import json
import shutil
from types import SimpleNamespace

import pytest

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.rows import Episode
from paw_min.running.runs import read_metrics
from research import knowledge
from research.study import analyze as study

PAW, PLACEBO = "GRPO w/ PaW", "placebo: shuffled targets"


def test_failures_are_shares_of_the_steps():
    log = [  # (o_t, response, o_{t+1})
        ("a", "<think>x</think><action>open box</action>", "Nothing happens."),
        ("Nothing happens.", "<think>x</think><action>open box</action>", "Nothing happens."),
        ("Nothing happens.", "<think>x</think><action>open box</action>", "b"),  # repeated
        ("b", "<think>x</think><action>heat egg 1 with microwave 1</action>", "c"),
        ("c", "<think>x</think><action>cool egg 1 with fridge 1</action>", "d"),  # wrong tool
    ]
    episode = Episode("t", 0, 0, log=log, task_type="pick_heat_then_place_in_recep")
    assert knowledge.failures(Config(), [episode]) == (2 / 5, 1 / 5, 1 / 5)


@pytest.fixture
def sweep(config, tmp_path):
    """Three arms, two seeds, one update each."""
    entries = []
    arms = {"GRPO": {"paw": False}, PAW: {}, PLACEBO: {"wm_target": "shuffled"}}
    for number, (label, flags) in enumerate(arms.items()):
        for seed in (0, 1):
            name = f"arm{number}-{seed}"
            train.train(config(name=name, seed=seed, updates=1, eval_every=0, max_turns=2,
                               conflict_every=1, **flags))
            entries.append({"label": label, "seed": seed, "folder": name})
    path = tmp_path / "study-alfworld.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.mark.slow
def test_from_runs_to_table_and_picture(sweep, tmp_path, monkeypatch):
    file, out = tmp_path / "study-alfworld-knowledge.json", tmp_path / "out"
    evaluate, temperatures = knowledge.evaluate, []

    def spy(cfg, *args):
        temperatures.append(cfg.eval_temperature)
        return evaluate(cfg, *args)

    monkeypatch.setattr(knowledge, "evaluate", spy)
    # These few steps of a random model have no effect, all of them: nothing to tell apart.
    known = SimpleNamespace(p_branch=0.25, auc=0.75)
    monkeypatch.setattr(knowledge.outcomes, "measure", lambda *_: known)
    knowledge.main([sweep], file)
    # Transitions as training meets them; then all seven are compared at the same temperature.
    assert temperatures == [1.0, *7 * [0.4]]
    reports = {(r["label"], r["seed"]): r for r in json.loads(file.read_text())}
    assert len(reports) == 7
    start, trained = reports["start model", 0], reports[PAW, 1]
    assert 0 < start["p"] < 1 and start["p"] != trained["p"]  # of random weights, one update
    assert (start["branch"], start["auc"]) == (0.25, 0.75)
    # Other weights in a folder of the same name are measured, too.
    elsewhere = tmp_path / "elsewhere" / "arm0-1"
    shutil.copytree(tmp_path / "arm1-1", elsewhere)
    again = tmp_path / "again.json"
    again.write_text(file.read_text())
    knowledge.main([elsewhere], again)
    _, other = json.loads(again.read_text())
    assert other["p"] == trained["p"] != reports["GRPO", 1]["p"]
    # A file that cannot be written ends the command at once.
    temperatures.clear()
    with pytest.raises(UserError, match="x.json cannot be written"):
        knowledge.main([sweep], tmp_path / "no" / "x.json")
    assert not temperatures
    study.main([sweep], out)
    (setting,) = json.loads((out / "study.json").read_text())
    one, other = (read_metrics(tmp_path / f"arm1-{seed}")[1] for seed in (0, 1))
    assert setting["seeds"][PAW]["area"][1] == pytest.approx(100 * other["success"])
    cell = setting["cells"][PAW]["p"]
    by_hand = [100 * reports[PAW, s]["p"] - 100 * reports["GRPO", s]["p"] for s in (0, 1)]
    assert cell["difference"] == pytest.approx(sum(by_hand) / 2)
    placebo = [100 * reports[PLACEBO, s]["p"] for s in (0, 1)]
    to_placebo = setting["pairs"][PAW]["p"]["difference"]
    assert to_placebo == pytest.approx(cell["mean"] - sum(placebo) / 2) != cell["difference"]
    means = {key: (one[key] + other[key]) / 2 for key in study.GRADIENTS}
    means["grad_norm, update 1"] = (one["grad_norm"] + other["grad_norm"]) / 2
    means["ref_kl, update 2"] = means["ref_kl, last"] = (one["ref_kl"] + other["ref_kl"]) / 2
    assert setting["training"][PAW] == pytest.approx(means)
    assert (out / "study.png").stat().st_size > 5000
    assert "difference to GRPO" in (out / "study.md").read_text()
