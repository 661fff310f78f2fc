"""The package works without its clone: a wheel, installed elsewhere, trains from its own files."""

import shutil

import pytest

from paw_min.running.runs import read_metrics
from tests.helpers import ROOT, SMALL, argv, python

BUILT_FROM = ("paw_min", "world_models", "pyproject.toml", "README.md", "LICENSE")


@pytest.mark.slow
def test_a_wheel_trains_outside_of_the_clone(tmp_path):
    """Presets, data, weights and both packages are in it; nothing is read from the clone."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in (*BUILT_FROM, *(path.name for path in ROOT.glob("requirements*.txt"))):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = ["-m", "pip", "-q"]
    python(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    python(*pip, "install", "--no-deps", "--target", site, wheel)
    settings = SMALL | dict(eval_split="test", updates=2, max_turns=2, max_prompt_tokens=600)
    flags = argv(settings | dict(out=str(tmp_path / "runs")))
    script = tmp_path / "script.py"
    script.write_text(
        "from paw_min import cli\nfrom paw_min.envs.search.presets import PRESETS\n"
        "from paw_min.page.__main__ import TEMPLATE\nassert TEMPLATE.is_file()\n"
        f"assert cli.__file__.startswith({str(site)!r})\ncli.main('search', PRESETS, '')\n"
    )
    env = {"PYTHONPATH": str(site)}
    python(script, *flags, cwd=tmp_path, env=env)
    assert [line["update"] for line in read_metrics(tmp_path / "runs" / "r")] == [0, 1, 2]
    words = ["-m", "world_models.rwml", "--help"]
    assert "a benchmark" in python(*words, cwd=tmp_path, env=env).stdout
