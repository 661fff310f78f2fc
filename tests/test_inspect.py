"""The page of paw_min.inspect: what training stores for it, its numbers, and a real browser.

Needs Debian's package chromium. The run is a small one on ALFWorld with a random model, whose p lie
on both sides of its rho; the page is compared with its own logits and the package's equations.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from paw_min import balance, losses, select, train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.inspect import __main__ as inspect
from paw_min.rows import flatten
from paw_min.running import samples
from paw_min.toy import standins
from paw_min.update import observation_loss, prepare
from tests.browser import Browser
from tests.helpers import HOSTILE_TEXT, SMALL, TEXTS
from tests.model_kinds import TOKENIZER, write

RHO = 0.06
LAST = "checkpoint-000002"


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
def folder(trained, tmp_path_factory) -> Path:
    """The same run with a constant lambda_g, as if some had won, without one of its episodes."""
    folder = Path(shutil.copytree(trained, tmp_path_factory.mktemp("edited") / "r"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"adaptive"', '"constant"'))
    for name, group, returns in (("000001", 1, [10.0, 0.0]), ("000002", 0, [10.0, 10.0])):
        file = folder / "samples" / f"{name}.json"
        stored = json.loads(file.read_text())
        stored["groups"][group]["returns"] = returns
        del stored["episodes"][1]
        file.write_text(json.dumps(stored))
    return folder


@pytest.fixture(scope="module")
def page(folder) -> Path:
    """Its page, against its own weights."""
    inspect.main([str(folder), "--against", str(folder)])
    return folder / "inspect.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    assert browser.problems == []
    browser.close()


def stored_steps(folder: Path) -> list[dict]:
    files = sorted((folder / "samples").iterdir())
    return [s for f in files for e in json.loads(f.read_text())["episodes"] for s in e["steps"]]


def data_of(page: Path) -> dict:
    return json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])


def own_numbers(weights, step: dict) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Entropies of the response, logits of the observation (|o|, V) and its tokens (|o|, 1)."""
    parts = ("prompt", "response", "separator", "obs")
    prompt, response, separator, obs = (step[f"{part}_ids"] for part in parts)
    assert separator  # --wm-separator turn
    ids = torch.tensor([prompt + response + separator + obs])
    with torch.no_grad():
        logits = weights(ids).logits[0].float()  # (L, V); temperature 1
    first = len(prompt) - 1
    entropy = torch.special.entr(logits[first : first + len(response)].softmax(-1)).sum(-1)
    return entropy.tolist(), logits[-len(obs) - 1 : -1], ids[0, -len(obs) :, None]


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


# ---- the numbers of the page ----


def test_numbers_are_those_of_the_models_own_logits(page, folder, model):
    everything = []
    for k, weights in enumerate((model, folder / LAST)):
        weights = AutoModelForCausalLM.from_pretrained(weights)
        for s, step in zip(data_of(page)["steps"], stored_steps(folder), strict=True):
            entropy, logits, tokens = own_numbers(weights, step)
            p = logits.softmax(-1).gather(-1, tokens)[:, 0].tolist()
            assert s["seen"][k]["entropy"] == pytest.approx(entropy, abs=1e-4)
            assert s["seen"][k]["p"] == pytest.approx(p, rel=1e-3)
            everything += p
    assert min(everything) < RHO < max(everything) and len(everything) > 100


# ---- errors ----


def test_errors_are_one_sentence(trained, tmp_path):
    """Those of values and flags are in test_errors.py."""
    folder = Path(shutil.copytree(trained, tmp_path / "r"))

    def fails(match, *flags):
        with pytest.raises(UserError, match=match):
            inspect.main([str(folder), *flags])

    shutil.copytree(folder, tmp_path / "other")
    standins.make_tokenizer(TEXTS[:1]).save_pretrained(tmp_path / "other" / LAST)
    fails("has another tokenizer than", "--against", str(tmp_path / "other"))
    shutil.rmtree(folder / "samples")
    fails("has no samples of its updates.*train it again")
    shutil.rmtree(folder / LAST)
    fails("has no checkpoint yet")


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
    return dict(browser.run(cells + ".map(x => [x.dataset.count, parseFloat(x.textContent)])"))


def place(browser) -> str:
    return browser.run("document.getElementById('place').textContent")


def choose(browser, name: str, value) -> None:
    browser.run(f"input = document.querySelector('[name={name}]'); input.value = '{value}'; "
                "input.dispatchEvent(new Event('input', {bubbles: true}))")


# Each observation token, by transition and column: alpha of its color, struck?, share in %.
TOKENS = """D.steps.map((s, i) => (show(i), D.weights.map((w, k) => [...document.querySelectorAll(
    `#observation [data-weights=${w.label}] [data-i]`)].map(span => {
        read(span);
        const style = getComputedStyle(span), alpha = style.backgroundColor.split(/[ ,)]+/)[3];
        const share = $('readout').textContent.split(' · ')[k].match(/, ([0-9.]+) %/);
        return [+alpha, style.textDecorationLine === 'line-through', share && +share[1]];
    }))))"""


@pytest.mark.slow
@pytest.mark.parametrize("rho, alpha, loss, lambda_g", [
    (RHO, 0.75, "cmae", "constant"),  # as trained
    (0.05, 0.3, "cmae", "adaptive"),
    (0.5, 0.05, "ce", "constant"),
    (0, 1, "mae", "adaptive"),
])
def test_what_if(browser, page, folder, prepared, model, rho, alpha, loss, lambda_g):
    """Marks, colors and counts are those of the equations, with gradients by autograd."""
    browser.open(page)
    for choice in (("rho", rho), ("alpha", alpha), ("loss", loss), ("lambda", lambda_g)):
        choose(browser, *choice)
    steps, keep, weights, tags = stored_steps(folder), [], [], []  # of all rows; of all groups
    for k, (_, rows) in enumerate(prepared, start=1):
        stored = samples.read(folder / "samples" / f"{k:06d}.json")
        lambdas = {g.group: balance.lambda_g(sum(g.returns) / 2, 10).item() for g in stored.groups}
        if lambda_g == "constant":
            lambdas = dict.fromkeys(lambdas, 1.0)
        tags += [f"group {g} · λ {value:.2f}" for g, value in lambdas.items()]
        shown = [rows.trajectory.index(e.trajectory) + t for e in stored.episodes for t in range(3)]
        selected = select.top_alpha(rows.entropy, alpha)[shown]  # ranked in the whole update
        keep += selected.tolist()
        weights += losses.row_weights([rows.group[i] for i in shown], selected, lambdas).tolist()
    assert browser.run("tags.map(([, tag]) => tag.textContent)") == tags
    assert browser.run("cells.map(x => x.classList.contains('kept'))") == keep
    expected = dict(teach=sum(w > 0 for w in weights), transitions=len(steps), kept=sum(keep))
    drawn = browser.run(TOKENS)
    for k, (label, name) in enumerate({"before": model, "after": folder / LAST}.items()):
        policy = AutoModelForCausalLM.from_pretrained(name)
        teach = []  # of the tokens of transitions that teach: is it counted?
        for step, weight, columns in zip(steps, weights, drawn, strict=True):
            _, logits, tokens = own_numbers(policy, step)
            logp = logits.requires_grad_().log_softmax(-1).gather(-1, tokens).T  # (1, |o|)
            mask = torch.ones_like(logp, dtype=torch.bool)
            batch = SimpleNamespace(obs_mask=mask)
            equation = observation_loss(Config(wm_loss=loss, rho=rho), logp, batch)
            equation.per_row.sum().backward()
            counted = equation.counted[0]
            pull = logits.grad.gather(-1, tokens)[:, 0].abs()  # at the token's own logit
            colors, struck, shares = zip(*columns[k], strict=True)
            assert list(struck) == (~counted).tolist()
            shade = 0.66 * pull / pull.max().clamp(min=1e-12) * (weight > 0)
            assert colors == pytest.approx(shade.tolist(), abs=0.01)
            percent = 100 * pull / pull.sum().clamp(min=1e-12)
            assert [x or 0 for x in shares] == pytest.approx(percent.tolist(), abs=0.1)
            if weight > 0:
                teach += counted.tolist()
        expected["tokens"] = len(teach)
        expected[f"teach-{label}"] = sum(teach)
    numbers = counts(browser)
    assert {name: numbers[name] for name in expected} == expected
    browser.run("$('trained').click()")
    assert browser.run("D.steps.map(kept)") == [s["selected"] for s in steps]
    assert browser.run("D.steps.map(teaches)") == [s["weight"] > 0 for s in steps]


@pytest.mark.slow
def test_runs_that_are_not_paws(browser, tmp_path, model, games_root):
    """Another method in an environment from elsewhere, with given tokens and nothing to rank by."""
    train.train(small(tmp_path, model, games_root, paw=False, updates=1, mini_batch=0))
    run = inspect.open_run(tmp_path / "r")
    run.cfg = replace(run.cfg, method="tapo", env="own", wm_target="shuffled")
    (stored,) = [samples.read(f) for f in inspect.choose_files(run, 4)]
    steps = [s for e in stored.episodes for s in e.steps]
    for s in steps:
        assert not (s.selected or s.weight or s.rank)
        s.context_positions = [0]  # the actions between observations are context (multi_step.py)
    data = inspect.page_data(run, inspect.weights_of(run, None), [stored])
    (tmp_path / "page.html").write_text(inspect.render(data))
    browser.open(tmp_path / "page.html")
    why = browser.run("$('why').textContent")
    sentences = "trained by tapo", "--no-paw", "--wm-target", "α stays at 1", "λ stays at 1"
    assert all(sentence in why for sentence in sentences)
    assert browser.run("inputs.filter(x => x.disabled).map(x => x.value)") == ["1", "constant"]
    n_tokens = sum(len(s.obs_ids) - 1 for s in steps)
    assert counts(browser).items() >= dict(teach=len(steps), tokens=n_tokens).items()
    assert browser.run("document.querySelectorAll('#observation .given').length") == 2


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
    assert browser.run("$('prompting').open && $('help').open")
    browser.press("j")  # the help is open: keys do nothing else
    browser.run("$('help').close(); document.querySelector('[name=rho]').focus()")
    browser.press("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight")  # they move the slider
    assert browser.run("document.querySelector('#what output').value") == "0.08"
    assert place(browser).endswith("step 1 of 3")
    browser.press("n")
    browser.run(f"history.replaceState(null, '', '{link}')")
    browser("Page.reload")
    browser.run("new Promise(resolve => setTimeout(resolve, 500))")
    assert place(browser).startswith("Update 1 · group 1 ·")  # a link opens its transition


@pytest.mark.slow
def test_texts_are_only_texts(browser, page, tmp_path):
    """Markup and line separators in an observation neither end the data nor become elements."""
    data = data_of(page)
    step = data["steps"][0]
    step["prompt"] = step["task"] = step["type"] = data["run"] = HOSTILE_TEXT
    step["response"] = [HOSTILE_TEXT] * len(step["response"])
    step["obs"] = [HOSTILE_TEXT] + [""] * (len(step["obs"]) - 1)
    (tmp_path / "page.html").write_text(inspect.render(data))
    assert "\u2028" not in (tmp_path / "page.html").read_text()
    browser.open(tmp_path / "page.html")
    browser.press(*"p" * 10)
    shown = browser.run("document.querySelector('#observation .text').textContent")
    assert shown == HOSTILE_TEXT.replace("\x1b", "␛")
    assert "<img src=x" in browser.run("document.title")
    browser.run("document.querySelector('#observation [data-i]').click()")  # its numbers
    assert " p 0." in browser.run("$('readout').textContent")
    assert browser.run("document.querySelectorAll('img').length") == 0


# Bottom of the lowest observation token of the chosen transition; top of the fixed line of keys.
ENDS = """[Math.max(...[...document.querySelectorAll('#observation [data-i]')]
    .map(span => span.getBoundingClientRect().bottom)), $('readout').getBoundingClientRect().top]"""


@pytest.mark.slow
def test_the_first_screen_has_the_observation_and_no_row_of_squares_is_cut(browser, page, tmp_path):
    data = data_of(page)
    for step in data["steps"]:
        step["response"] = [" longer"] * 300
        for seen in step["seen"]:
            seen["entropy"] = [0.1] * 300
    (tmp_path / "page.html").write_text(inspect.render(data))
    for file in (tmp_path / "page.html", Path(__file__).parent.parent / "research/runs/page.html"):
        for width in (1280, 390):
            browser.open(file, width=width)
            assert browser.run("$('strip').scrollHeight - $('strip').clientHeight") == 0
            assert browser.run("document.documentElement.scrollWidth") <= width
        browser.open(file)
        browser.run("cells[0].click()")  # a square below brings its transition to the top
        assert browser.run("$('place').getBoundingClientRect().bottom < innerHeight / 2")
        browser.run("scrollTo(0, 0)")
        for k in range(browser.run("D.steps.length")):
            browser.run(f"show({k})")
            lowest, keys = browser.run(ENDS)
            assert lowest < keys
    # The stored page opens, on a phone too, with the colors of before training.
    browser.open(file)
    browser("Emulation.setDeviceMetricsOverride", width=390, height=844, mobile=False,
            deviceScaleFactor=1)
    lowest = """Math.max(...[...document.querySelector('#observation').children[0]
        .querySelectorAll('[data-i]')].map(span => span.getBoundingClientRect().bottom))"""
    assert 0 < browser.run(lowest) < browser.run("$('readout').getBoundingClientRect().top")


@pytest.mark.slow
def test_the_stored_page(browser):
    """It is what the present template makes of its data, and opens, in a narrow window, too."""
    stored = Path(__file__).parent.parent / "research/runs/page.html"
    text = stored.read_text()
    assert inspect.render(data_of(stored)) == text, "the template changed: write this there"
    browser.open(stored, width=340)
    for _ in range(3):
        assert browser.run("document.documentElement.scrollWidth") <= 340
        browser.press("j", "o")
    assert counts(browser)["teach-before"] > 0 and len(text) < 400_000
    choose(browser, "rho", 0)
    assert counts(browser)["teach-before"] == 0


def test_a_token_that_the_tokenizer_does_not_know(tmp_path, games_root):
    """Published models have more embeddings than tokens, and may sample one without a text."""
    folder = write("qwen3", tmp_path / "padded", vocab_size=64, max_position_embeddings=512)
    train.train(small(tmp_path, folder, games_root, updates=1))
    file = tmp_path / "r" / "samples" / "000001.json"
    ids = [i for e in json.loads(file.read_text())["episodes"] for s in e["steps"]
           for i in s["response_ids"]]
    assert len(TOKENIZER) < max(ids) < 64
    inspect.main([str(tmp_path / "r")])
