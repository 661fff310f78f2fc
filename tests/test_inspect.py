"""The page of paw_min.inspect: what training stores for it, its numbers, and a real browser.

    python -m pytest tests/test_inspect.py

Needs Debian's package chromium. The run is a small one on ALFWorld with a random model, whose p lie
on both sides of its rho; tests compare the page with that model's own logits.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.inspect import __main__ as inspect
from paw_min.rows import flatten
from paw_min.running import samples
from paw_min.running.runs import Run
from paw_min.update import prepare
from tests.browser import Browser
from tests.helpers import HOSTILE_TEXT, SMALL, make_policy, numbers

RHO = 0.06


def small(out: Path, model: str, games_root, **settings) -> Config:
    base = dict(data=str(games_root), model=model, out=str(out), updates=2, eval_every=0, rho=RHO,
                lr=1e-4)
    return Config(**SMALL | base | settings)


@pytest.fixture(scope="module")
def prepared() -> list:
    """(episodes, rows) of each update of `trained`."""
    return []


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model, games_root, prepared) -> Path:
    """The folder of a run of two updates. Shared: read only."""

    played = []

    def flatten_spy(episodes):
        played.append(episodes)
        return flatten(episodes)

    def prepare_spy(*arguments):
        result = prepare(*arguments)
        prepared.append((played[-1], result))
        return result

    out = tmp_path_factory.mktemp("inspected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "flatten", flatten_spy)
        patch.setattr(train, "prepare", prepare_spy)
        train.train(small(out, model, games_root))
    return out / "r"


@pytest.fixture(scope="module")
def page(trained, tmp_path_factory) -> Path:
    """Its page, against its own weights."""
    out = tmp_path_factory.mktemp("page") / "page.html"
    inspect.main([str(trained), "--against", str(trained), "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def stored_steps(folder: Path) -> list[dict]:
    files = sorted((folder / "samples").iterdir())
    return [s for f in files for e in json.loads(f.read_text())["episodes"] for s in e["steps"]]


def own_numbers(weights, step: dict) -> tuple[list[float], list[float]]:
    """Entropies of the response and p of the observation, from the logits of transformers."""
    parts = ("prompt", "response", "separator", "obs")
    prompt, response, separator, obs = (step[f"{part}_ids"] for part in parts)
    assert separator  # --wm-separator turn
    ids = torch.tensor([prompt + response + separator + obs])
    with torch.no_grad():
        p = weights(ids).logits[0].float().softmax(-1)  # (L, V); temperature 1
    first = len(prompt) - 1
    n = len(response)
    entropy = torch.special.entr(p[first : first + n]).sum(-1)
    first_obs = first + n + len(separator)
    return entropy.tolist(), [p[first_obs + k, token].item() for k, token in enumerate(obs)]


# ---- what training stores ----


def test_the_sample_is_what_training_used(trained, prepared):
    for k, (episodes, rows) in enumerate(prepared, start=1):
        text = (trained / "samples" / f"{k:06d}.json").read_text()
        stored = json.loads(text)
        entropy = rows.entropy.tolist()
        n = len(rows.tokens)
        kept = 0.75 * n  # the default alpha; every row has an observation
        by_entropy = sorted(range(n), key=lambda i: -entropy[i])  # stable: ties in order
        assert stored["update"] == k and stored["candidates"] == n
        assert stored["kept"] == sum(rows.selected.tolist()) == kept
        assert [g["group"] for g in stored["groups"]] == [0, 1]
        for g in stored["groups"]:
            returns = [e.episode_return for e in episodes if e.group == g["group"]]
            assert g["returns"] == returns
            assert g["lambda_g"] == pytest.approx(1 - sum(returns) / len(returns) / 10)
        for e in stored["episodes"]:
            index = [i for i in range(n) if rows.trajectory[i] == e["trajectory"]]
            assert len(e["steps"]) == len(index) == len(episodes[e["trajectory"]].transitions)
            assert e["task"] in episodes[e["trajectory"]].task
            for i, s in zip(index, e["steps"]):
                t = rows.tokens[i]
                ids = [t.prompt_ids, t.response_ids, t.obs_ids]
                assert ids == [s["prompt_ids"], s["response_ids"], s["obs_ids"]]
                assert by_entropy[s["rank"] - 1] == i and s["entropy"] == entropy[i]
                assert s["selected"] == (s["rank"] <= kept) == rows.selected[i].item()
                assert s["weight"] == rows.row_weight[i].item()
        assert text == samples.sample(k, episodes, rows)


def test_no_number_of_training_changes_and_a_redone_update_writes_the_same(
    trained, tmp_path, model, games_root, monkeypatch
):
    cfg = small(tmp_path, model, games_root)
    log = Run.log
    with monkeypatch.context() as patch:  # killed after the sample of update 2, before its metrics
        patch.setattr(train, "sample", lambda *args: "no sample")
        patch.setattr(Run, "log", lambda run, m: log(run, m) if m["update"] < 2 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.train(cfg)
    stored = tmp_path / "r" / "samples"
    assert (stored / "000002.json").read_text() == "no sample"
    (stored / "000002.json.partial").write_text("{")
    train.train(cfg)
    assert sorted(f.name for f in stored.iterdir()) == ["000001.json", "000002.json"]
    expected = (trained / "samples" / "000002.json").read_bytes()
    assert (stored / "000002.json").read_bytes() == expected
    assert numbers(tmp_path / "r") == numbers(trained)


# ---- the numbers of the page ----


@pytest.mark.parametrize("column, name", [(0, "start"), (1, "checkpoint")])
def test_numbers_are_those_of_the_models_own_logits(trained, column, name, model):
    run = inspect.open_run(trained)
    weights = AutoModelForCausalLM.from_pretrained(model if name == "start" else run.checkpoint)
    columns = inspect.weights_of(run, None)
    stored = [samples.read(f, 10_000) for f in inspect.choose_files(run, 2)]
    data = inspect.page_data(run, columns, stored)
    steps = stored_steps(trained)
    assert len(data["steps"]) == len(steps) >= 12
    hard = ""
    for s, step in zip(data["steps"], steps):
        entropy, p = own_numbers(weights, step)
        seen = s["seen"][column]
        assert seen["entropy"] == pytest.approx(entropy, abs=1e-4)
        assert seen["p"] == pytest.approx(p, abs=1e-4)
        assert seen["hard"] == "".join("01"[x <= RHO] for x in p)
        loss = sum(1 - x for x in p if x <= RHO) / len(p)  # Eq. 8
        assert seen["loss"] == pytest.approx(loss, abs=1e-4)
        hard += seen["hard"]
    assert set(hard) == {"0", "1"}


@pytest.mark.slow
def test_no_world_model_and_tokens_that_are_given(tmp_path, model, games_root):
    base = dict(updates=1, max_turns=2, eval_tasks=1, mini_batch=0)
    for name, settings in {
        "base": dict(paw=False), "steps": dict(mini_batch=4),
    }.items():
        train.train(small(tmp_path, model, games_root, **base | settings | {"name": name}))
        run = inspect.open_run(tmp_path / name)
        (stored,) = [samples.read(f, 10_000) for f in inspect.choose_files(run, 4)]
        if name == "steps":  # as targets.multi_step gives the actions between observations
            for step in (s for e in stored.episodes for s in e.steps):
                step.given = [0]
        data = inspect.page_data(run, inspect.weights_of(run, None), [stored])
        hard = "".join(s["seen"][0]["hard"] for s in data["steps"])
        steps = [s for e in stored.episodes for s in e.steps]
        assert any(s.selected and s.weight > 0 for s in steps) == (name == "steps")
        assert all(s.rank is None for s in steps) == (name == "base")
        given = [k for s in steps for k in s.given]
        assert hard.count("-") == len(given) and bool(given) == (name == "steps")
        json.dumps(data, allow_nan=False)


# ---- errors ----


def test_errors_are_one_sentence(trained, tmp_path):
    """Those of values and flags are in test_errors.py."""
    folder = Path(shutil.copytree(trained, tmp_path / "r"))

    def fails(match, *flags):
        with pytest.raises(UserError, match=match) as error:
            inspect.main([str(folder), *flags])
        assert "\n" not in str(error.value) and len(str(error.value)) < 600

    shutil.copytree(folder, tmp_path / "other")
    other = make_policy("qwen3")
    other.tokenizer.add_tokens(["newword"])
    other.tokenizer.save_pretrained(tmp_path / "other" / "checkpoint-000002")
    fails("has another tokenizer than", "--against", str(tmp_path / "other"))
    shutil.rmtree(folder / "samples")
    fails("has no samples of its updates.*train it again")
    shutil.rmtree(folder / "checkpoint-000002")
    fails("has no checkpoint yet")


def test_an_environment_from_elsewhere_can_be_inspected(trained, tmp_path):
    """The module that defines it was not imported, so its R_max is not known."""
    shutil.copytree(trained, tmp_path / "r")
    file = tmp_path / "r" / "config.json"
    file.write_text(file.read_text().replace('"alfworld"', '"own"'))
    inspect.main([str(tmp_path / "r")])
    page = (tmp_path / "r" / "inspect.html").read_text()
    assert '"env":"own"' in page and '"r_max":null' in page


def test_updates_are_spread_and_not_ahead_of_the_checkpoint(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "r")
    run = inspect.open_run(tmp_path / "r")
    for k in range(3, 11):
        shutil.copy(run.folder / "samples" / "000001.json", run.folder / f"samples/{k:06d}.json")
    run.done = 9
    assert [int(f.stem) for f in inspect.choose_files(run, 4)] == [1, 3, 6, 9]


# ---- the browser ----


def counts(browser) -> dict[str, int]:
    cells = "[...document.querySelectorAll('[data-count]')]"
    shown = browser.run(cells + ".map(x => [x.dataset.count, x.textContent])")
    return {name: int(value) for name, value in shown}


def place(browser) -> str:
    return browser.run("document.getElementById('place').textContent")


@pytest.mark.slow
def test_counts_on_the_page_equal_the_tensors(browser, page, trained, model):
    steps = stored_steps(trained)
    trains = [s for s in steps if s["weight"] > 0]
    browser.open(page)
    shown = counts(browser)
    expected = {
        "transitions": len(steps), "kept": sum(s["selected"] for s in steps),
        "trains": len(trains), "tokens": sum(len(s["obs_ids"]) for s in trains),
    }
    checkpoint = str(trained / "checkpoint-000002")
    for label, weights in (("before", model), ("after", checkpoint), ("against", checkpoint)):
        weights = AutoModelForCausalLM.from_pretrained(weights)
        p = [x for s in trains for x in own_numbers(weights, s)[1]]
        expected[f"teach-{label}"] = sum(x <= RHO for x in p)
    assert {key: shown[key] for key in expected} == expected
    assert expected["teach-before"] != expected["teach-after"] and expected["kept"] < len(steps)

    # The same, from the tokens as they are drawn, one transition after another.
    browser.press(*"p" * 10, *["ArrowLeft"] * 20)
    blue = 0
    tokens = 0
    places = []
    for s in steps:
        places.append(place(browser))
        column = "#observation [data-weights=before] .text"
        idle = browser.run(f"document.querySelector('{column}').classList.contains('idle')")
        assert idle == (s["weight"] == 0)
        blue += 0 if idle else browser.run(f"document.querySelectorAll('{column} .teach').length")
        tokens += browser.run("document.querySelectorAll('#response [data-i]').length")
        browser.press("j")
    assert blue == expected["teach-before"] and len(set(places)) == len(steps)
    assert tokens == 3 * sum(len(s["response_ids"]) for s in steps)
    filled = browser.run("document.querySelectorAll('#strip .cell.kept').length")
    assert filled == expected["kept"] and place(browser) == places[-1]  # the end
    assert browser.problems == []


@pytest.mark.slow
def test_the_page_of_another_method(browser, page, tmp_path):
    """It says that the marks are PaW's, and whose run it is."""
    text = page.read_text()
    assert text.count('"learn":"learn_jointly"') == 1
    changed = tmp_path / "page.html"
    changed.write_text(text.replace('"learn":"learn_jointly"', '"learn":"tapo"'))
    browser.open(changed)
    about, *notes = browser.run(
        "[$('about').textContent, ...D.steps.filter(targets).map(s => { note(s); "
        "return $('note').textContent; })]"
    )
    assert "GRPO with tapo" in about and notes
    assert all(note.endswith("this run was trained by tapo.") for note in notes)


@pytest.mark.slow
def test_keys_and_links(browser, page):
    browser.open(page)
    browser.press(*"p" * 10)
    first = place(browser)
    assert first.startswith("Update 1 · group 0 · episode 0") and first.endswith("step 1 of 3")
    browser.press("ArrowRight")
    assert place(browser).endswith("step 2 of 3")
    browser.press("k")
    assert place(browser) == first
    browser.press("n")
    assert place(browser).startswith("Update 1 · group 1 ·")
    link = browser.run("location.hash")
    browser.press("n", "o", "?")
    assert place(browser).startswith("Update 2 · group 0 ·")
    assert browser.run("document.getElementById('prompting').open")
    assert browser.run("document.getElementById('help').open")
    browser.press("j")  # the help is open: keys do nothing else
    assert place(browser).endswith("step 1 of 3")
    browser.run("document.getElementById('help').close()")
    browser.press("n")
    browser.run(f"history.replaceState(null, '', '{link}')")
    browser("Page.reload")
    browser.run("new Promise(resolve => setTimeout(resolve, 500))")
    assert place(browser).startswith("Update 1 · group 1 ·")  # a link opens its transition
    assert browser.problems == []


@pytest.mark.slow
def test_a_narrow_window(browser, page):
    browser.open(page, width=340)
    for _ in range(3):
        assert browser.run("document.documentElement.scrollWidth") <= 340
        browser.press("j", "o")
    assert browser.problems == []


@pytest.mark.slow
def test_texts_are_only_texts(browser, page, tmp_path):
    """Markup and line separators in an observation neither end the data nor become elements."""
    source = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    data = json.loads(source)
    assert inspect.render(data) == page.read_text()
    step = data["steps"][0]
    step["prompt"] = step["task"] = step["type"] = data["run"] = HOSTILE_TEXT
    step["response"] = [HOSTILE_TEXT] * len(step["response"])
    step["obs"] = [HOSTILE_TEXT] + [""] * (len(step["obs"]) - 1)
    (tmp_path / "page.html").write_text(inspect.render(data))
    assert len(data["steps"]) > 3 and "\u2028" not in (tmp_path / "page.html").read_text()
    browser.open(tmp_path / "page.html")
    browser.press(*"p" * 10)
    shown = browser.run("document.querySelector('#observation .text').textContent")
    assert shown == HOSTILE_TEXT.replace("\x1b", "␛")
    assert "<img src=x" in browser.run("document.title")
    browser.run("document.querySelector('#observation [data-i]').click()")  # its numbers
    assert " p 0." in browser.run("document.getElementById('readout').textContent")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.problems == []
