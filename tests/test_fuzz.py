"""Random flags, random damage to the files of a run, random bytes as data: never a traceback.

What a user can cause ends in a UserError, which the run scripts show as one sentence; argparse's
errors end in exit code 1. The examples are the same in every run (derandomize).
"""

import hashlib
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config, flag, parse_args
from paw_min.config import settings as flags
from paw_min.envs.alfworld import AlfworldEnv, list_games
from tests.helpers import SCRIPTS, make_policy
from tests.readers import READERS, write_content

pytestmark = pytest.mark.slow
REFUSED = (UserError, ValueError, OSError)  # session.find_tasks makes UserErrors of the others


def fuzz(examples: int):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=checks
    )


def one_sentence(error: BaseException) -> None:
    assert str(error).strip() and "\n" not in str(error).strip(), repr(error)


VALUES = st.one_of(
    st.integers(-(10**12), 10**12), st.floats(), st.sampled_from([0, 1, -1, 0.5, 1e-300, 1e300]),
    st.text(max_size=20), st.sampled_from(["auto", "cpu", "../x", "", "a/b", "é", "x" * 300]),
).map(str)


@fuzz(150)
@given(env=st.sampled_from(list(SCRIPTS)), data=st.data())
def test_random_flags(env, data):
    chosen = data.draw(st.lists(st.sampled_from(flags(env)), max_size=5, unique=True))
    argv = []
    for f in chosen:
        choices = f.metadata["choices"]
        value = data.draw(st.sampled_from(choices) if choices else VALUES)
        argv += [flag(f.name)] if f.type is bool else [f"{flag(f.name)}={value}"]
    try:
        cfg, mode = parse_args(env, SCRIPTS[env].PRESETS, "", argv)
    except UserError as error:
        one_sentence(error)
    except SystemExit as error:
        assert error.code == 1
    else:
        assert mode == "train" and Path(cfg.name).name == cfg.name


# ---- the files of a run ----


def damage(content: bytes, data) -> bytes:
    """Cut off, overwritten, extended, or other content altogether."""
    kind = data.draw(st.sampled_from(["cut", "flip", "append", "replace"]))
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    known = [b"[]", b"{}", b"null", b"[1]", b"NaN", b'{"update": 1}\n', b"[" * 9999]
    noise = data.draw(st.one_of(st.binary(max_size=40), st.sampled_from(known)))
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + noise + content[at + len(noise) :]
    return content + noise if kind == "append" else noise


@pytest.fixture(scope="module")
def finished(tmp_path_factory, games_root) -> tuple[Config, Path]:
    """A run of one update, and the settings that resume it."""
    root = tmp_path_factory.mktemp("finished")
    make_policy("qwen3").save(root / "model")
    cfg = Config(
        data=str(games_root), model=str(root / "model"), out=str(root), name="r", updates=1,
        groups=1, group_size=2, eval_tasks=1, max_turns=2, mini_batch=0, max_response_tokens=4,
        prompt="compact", kl_coef=0.0, lr=1e-4, max_prompt_tokens=400, max_obs_tokens=64,
    )
    train.train(cfg)
    return cfg, root


def digest(folder: Path) -> str:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return hashlib.sha256(b"".join(str(p).encode() + p.read_bytes() for p in files)).hexdigest()


@fuzz(12)
@given(data=st.data())
def test_damaged_run_folders(finished, games_root, monkeypatch, data):
    cfg, root = finished
    monkeypatch.setattr(train, "draw", lambda folders: None)  # slow, and not what is tested
    spare = root / "spare"
    before = digest(games_root) + digest(root / "model")
    shutil.copytree(root / "r", spare)
    try:
        files = sorted(p for p in (root / "r").rglob("*") if p.is_file() and p.suffix != ".png")
        for victim in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=2)):
            if data.draw(st.integers(0, 5)) == 0:
                victim.unlink(missing_ok=True)
            elif victim.exists():
                victim.write_bytes(damage(victim.read_bytes(), data))
        try:
            train.train(cfg)
        except UserError as error:
            one_sentence(error)
        assert digest(games_root) + digest(root / "model") == before  # only our own files changed
    finally:
        shutil.rmtree(root / "r")
        spare.rename(root / "r")


# ---- data ----


@pytest.fixture(scope="module")
def env() -> AlfworldEnv:
    return AlfworldEnv()


@fuzz(25)
@given(data=st.data())
def test_damaged_games(env, games_root, tmp_path_factory, data):
    source = Path(list_games(games_root, "train")[0]).parent
    root = tmp_path_factory.mktemp("games")
    folder = root / "json_2.1.1" / "train" / source.parent.name / source.name
    shutil.copytree(source, folder)
    victim = folder / data.draw(st.sampled_from(["game.tw-pddl", "traj_data.json"]))
    victim.write_bytes(damage(victim.read_bytes(), data))
    try:
        for game in list_games(root, "train"):
            env.reset(game)
    except REFUSED as error:
        one_sentence(error)
    shutil.rmtree(root)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["\ud800", 10**400, ["x"], {"a": "b"}]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x),
    max_leaves=5,
)


def places(value, here=()) -> list[tuple]:
    """Where the parts of a JSON value are, itself included: the keys from the outside in."""
    parts = []
    if isinstance(value, dict):
        parts = list(value.items())
    if isinstance(value, list):
        parts = list(enumerate(value))
    return [here, *(place for key, part in parts for place in places(part, (*here, key)))]


def changed(value, place: tuple, new):
    """A copy of a JSON value with another part at this place."""
    if not place:
        return new
    key, *rest = place
    copy = value.copy()
    copy[key] = changed(value[key], rest, new)
    return copy


@pytest.mark.parametrize("name", READERS)
@fuzz(60)
@given(data=st.data())
def test_damaged_files(tmp_path_factory, name, data):
    """One file has another value somewhere, or is damaged as bytes."""
    reader = READERS[name]
    folder = tmp_path_factory.mktemp("files")
    reader.write(folder)
    victim = folder / data.draw(st.sampled_from(sorted(reader.files)))
    if data.draw(st.booleans()):
        content = reader.files[victim.name]
        place = data.draw(st.sampled_from(places(content)))
        write_content(victim, changed(content, place, data.draw(JSON)))
    else:
        victim.write_bytes(damage(victim.read_bytes(), data))
    try:
        reader.load(folder)
    except REFUSED as error:
        one_sentence(error)
    shutil.rmtree(folder)
