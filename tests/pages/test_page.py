"""The page of a run, paw_min.page: what training stores for it, its numbers, and a real browser.

The run is a small one on ALFWorld with a random model, whose p lie on both sides of its rho; the
page is compared with its own logits. Without chromium, the test in a browser is left out.
"""

import html
import json
import math
import os
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.page.__main__ import main, pieces, render, score
from paw_min.rows import Episode, flatten
from paw_min.running import episodes
from paw_min.toy import standins
from paw_min.update import prepare
from tests.helpers import (
    BASE,
    BROWSER,
    EPISODES,
    HOSTILE_TEXT,
    ROOT,
    ROWS,
    SMALL,
    SMOLLM2,
    TEXTS,
    TOKEN_ROWS,
    make_policy,
)
from tests.model_kinds import PIECES, make_tokenizer

RHO = 0.06
LAST = "checkpoint-000002"
STORED = ROOT / "research/runs/page.html"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model, games_root) -> Path:
    """The folder of a run of two updates, with its page: read only."""
    out = tmp_path_factory.mktemp("inspected")
    settings = SMALL | dict(updates=2, eval_every=0, rho=RHO, lr=1e-4)
    train.train(Config(data=str(games_root), model=model, out=str(out), **settings))
    first = out / "r/samples/000001.json"
    first.write_text(first.read_text().replace('"reward":0.0', '"reward":0.5', 1))
    (out / "r/samples/000003.json").touch()  # ahead of the checkpoint, as after a kill
    main([str(out / "r"), "--against", str(out / "r")])
    return out / "r"


def data_of(page: Path) -> dict:
    return json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])


def test_stored_episodes_are_what_training_used(monkeypatch):
    rows = prepare(Config(**BASE), make_policy(), None, flatten(EPISODES))
    stored = json.loads(episodes.stored_episodes(3, EPISODES, rows))
    candidates = [i for i, row in enumerate(ROWS) if row.obs_ids]
    # Stable: ties in order.
    by_entropy = sorted(candidates, key=lambda i: -rows.entropy[i].item())
    kept = by_entropy[: math.ceil(0.75 * len(candidates))]  # the default alpha
    assert stored["update"] == 3 and stored["candidates"] == len(candidates) < len(ROWS)
    for e in stored["episodes"]:
        returns = [other.episode_return for other in EPISODES if other.group == e["group"]]
        assert e["lambda_g"] == pytest.approx(1 - mean(returns) / 10)
    steps = [step for e in stored["episodes"] for step in e["steps"]]
    for i, (row, s) in enumerate(zip(ROWS, steps, strict=True)):
        assert [row.prompt_ids, row.response_ids, row.obs_ids] == [
            s["prompt_ids"], s["response_ids"], s["obs_ids"]
        ]
        assert s["rank"] == (by_entropy.index(i) + 1 if i in candidates else None)
        assert s["selected"] == (i in kept)
    monkeypatch.setattr(episodes, "LIMIT", 1)
    assert len(episodes.choose(EPISODES)) == 1  # the first is stored, however long it is


def test_the_first_won_and_lost_episode_of_each_group_come_before_others(monkeypatch):
    outcomes = [(0, False), (0, False), (0, True), (1, True), (1, True), (1, False)]
    step = ROWS[0]
    played = [Episode("task", group, number, [step], won=won)
              for number, (group, won) in enumerate(outcomes)]
    monkeypatch.setattr(episodes, "LIMIT", 5)  # steps, so episodes here
    chosen = episodes.choose(played)
    assert [e.trajectory for e in chosen] == [0, 1, 2, 3, 5]  # all but one of the others


# ---- the numbers of the page ----


def test_numbers_are_those_of_the_models_own_logits(trained, model):
    shown = data_of(trained / "page.html")["steps"]
    files = sorted((trained / "samples").iterdir())[:2]
    steps = [s for f in files for e in json.loads(f.read_text())["episodes"] for s in e["steps"]]
    for s, step in zip(shown, steps, strict=True):
        for key in ("reward", "valid", "selected", "rank"):
            assert s[key] == step[key]
    everything = []
    for k, weights in enumerate((model, trained / LAST)):
        weights = AutoModelForCausalLM.from_pretrained(weights)
        for s, step in zip(shown, steps, strict=True):
            parts = ("prompt", "response", "separator", "obs")
            prompt, response, separator, obs = (step[f"{part}_ids"] for part in parts)
            assert separator  # --wm-separator turn
            ids = torch.tensor([prompt + response + separator + obs])
            with torch.no_grad():
                probs = weights(ids).logits[0].float().softmax(-1)  # (L, V); temperature 1
            first = len(prompt) - 1
            entropy = torch.special.entr(probs[first : first + len(response)]).sum(-1).tolist()
            p = probs[-len(obs) - 1 : -1].gather(-1, ids[0, -len(obs) :, None])[:, 0].tolist()
            assert s["seen"][k]["entropy"] == pytest.approx(entropy, abs=1e-4)
            assert s["seen"][k]["p"] == pytest.approx(p, rel=1e-3)
            everything += p
    assert min(everything) < RHO < max(everything) and len(everything) > 100


LLAMA_2 = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(PIECES))


@pytest.mark.parametrize("tokenizer, text, expected", [
    (LLAMA_2, "a é😀 b\na", ["a ", "", "é", "", "", "", "😀", " ", "b", "\n", "a"]),
    (AutoTokenizer.from_pretrained(SMOLLM2), " two\n\naf é👩 日本 go",
     [" two", "\n", "\n", "af", " é", "", "", "👩", "", "", " 日", "本", " go"]),
])
def test_each_token_has_its_text(tokenizer, text, expected):
    """A character of several tokens is on the last of them, as are bytes that are none.

    Models have more embeddings than tokens, and may sample one without a text.
    """
    assert pieces(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]) == expected
    draw = random.Random(0)
    parts_of_characters = [k for k in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([k])]
    for _ in range(100):
        ids = [draw.choice([draw.choice(parts_of_characters), draw.randrange(len(tokenizer) + 9)])
               for _ in range(12)]
        found = pieces(tokenizer, ids)
        assert len(found) == 12
        assert "".join(found) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_given_token_has_no_p():
    """Such as an action between two observations (examples/multi_step.py)."""
    row = replace(TOKEN_ROWS[0], context_positions=[1])
    (seen,) = score(make_policy(), [row], 100)
    assert [p is None for p in seen.p] == [False, True, False]


def test_weights_with_another_tokenizer_cannot_score(trained, tmp_path):
    other = shutil.copytree(trained, tmp_path / "other")
    standins.make_tokenizer(TEXTS[:1]).save_pretrained(other / LAST)
    with pytest.raises(UserError, match="has another tokenizer than"):
        main([str(trained), "--against", str(other)])


def test_a_run_without_stored_transitions_has_no_page(trained, tmp_path):
    other = shutil.copytree(trained, tmp_path / "other")
    shutil.rmtree(other / "samples")
    with pytest.raises(UserError, match="has stored no transitions in samples/"):
        main([str(other)])


# ---- the page in a browser ----

FLAGS = [  # no sandbox: tests may run as root, and open only our own file
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
    "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", "--no-first-run",
    "--allow-file-access-from-files",
]


def in_browser(page: str, expression: str, width: int, folder: Path):
    """The value of a JavaScript expression in a page of this width, which has no network.

    What the page writes to its console fails the test.
    """
    (folder / "page.html").write_text(f"{page}<script>parent.found = {expression}</script>")
    # A window has at least 500 pixels, a frame has any number.
    (folder / "around.html").write_text(f"""
        <iframe src="page.html" width={width} height=900></iframe>
        <script>
        onload = () => document.documentElement.textContent = JSON.stringify(found);
        </script>""")
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", folder / "around.html"]
    env = os.environ | {"HOME": str(folder)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert "CONSOLE" not in done.stderr, done.stderr
    return json.loads(html.unescape(re.sub("</?html>", "", done.stdout)))


# Each observation token has, by transition and column: struck?, given?, % of the gradient.
TOKENS = """D.steps.map((s, i) => (show(i), D.weights.map((w, k) => [...document.querySelectorAll(
    `#observation [data-weights=${w.label}] [data-i]`)].map(span => {
        read(span);
        const share = $('readout').textContent.split(' · ')[k].match(/, ([0-9.]+) %/);
        const [struck, given] = ['easy', 'given'].map(name => span.classList.contains(name));
        return [struck, given, share ? +share[1] : 0];
    }))))"""


USE = f"""(() => {{
    const begun = now;
    const choose = rho => {{ slider.value = rho; slider.oninput(); return {TOKENS}; }};
    const drawn = [{RHO}, 0.5].map(choose);
    const taught = cells.map(cell => cell.classList.contains('kept'));
    cells[0].click();
    $('trained').click();
    const text = document.querySelector('#observation [data-i]').textContent;
    const images = document.querySelectorAll('img').length;
    $('next').click();
    return {{drawn, taught, begun, rho, text, images, asked: $('asked').textContent,
        place: $('place').textContent}};
}})()"""


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_in_a_browser(trained, tmp_path):
    data = data_of(trained / "page.html")
    first = data["steps"][0]
    first["prompt"] = first["task"] = first["asked"] = data["run"] = HOSTILE_TEXT
    first["obs"][0] = HOSTILE_TEXT
    for seen in first["seen"]:
        seen["p"][1:3] = None, RHO  # a given token, as in multi_step.py; the boundary teaches
    third, fourth, fifth = data["steps"][2:5]
    for step, p, valid, selected in (  # before, after
        (first, (0.05, 0.05), True, True), (third, (0.05, 0.9), False, True),
        (fourth, (0.01, 0.95), True, False), (fifth, (0.05, 0.3), True, True),
    ):
        step["valid"], step["selected"] = valid, selected
    # It begins where most was learned: not at a malformed response, nor where nothing was taught.
    steps = data["steps"]
    taught = [step["selected"] and step["lambda_g"] > 0 for step in steps]
    idle = steps[taught.index(False)]["seen"]
    idle[0]["p"], idle[1]["p"] = ([p] * len(idle[0]["p"]) for p in (0.01, 0.99))
    for step in steps:
        step["valid"] = True
    rise = [sum((b or 0) - (a or 0) for a, b in zip(*(seen["p"] for seen in step["seen"][:2])))
            for step in steps]
    most, second = sorted((i for i in range(len(steps)) if taught[i]), key=lambda i: -rise[i])[:2]
    steps[most]["valid"] = False
    page = render(data)
    assert "\u2028" not in page
    found = in_browser(page, USE, 1280, tmp_path)
    # The mask is Eq. 7's, and the share is that of |gradient| = p (1 - p), Eq. 6.
    for rho, of_steps in zip((RHO, 0.5), found["drawn"], strict=True):
        for step, drawn in zip(data["steps"], of_steps, strict=True):
            for seen, column in zip(step["seen"], drawn, strict=True):
                kept = [p is not None and p <= rho for p in seen["p"]]
                pull = [p * (1 - p) if keep else 0.0 for p, keep in zip(seen["p"], kept)]
                struck, given, shares = zip(*column)
                assert list(struck) == [p is not None and p > rho for p in seen["p"]]
                assert list(given) == [p is None for p in seen["p"]]
                expected = [100 * x / (sum(pull) or 1) for x in pull]
                assert list(shares) == pytest.approx(expected, abs=0.06)
    assert found["taught"] == taught and found["rho"] == RHO and found["begun"] == second
    # Texts are only texts: markup in them becomes no element, and ends no data.
    assert found["text"] == HOSTILE_TEXT.replace("\x1b", "\u241b")
    assert found["images"] == 0
    assert found["place"].endswith("step 2 of 3")
    assert found["asked"] == steps[1]["asked"] and "trial" not in steps[1]["asked"]
    # No window is too narrow, also for the stored page.
    for narrow in (page, STORED.read_text()):
        width = in_browser(narrow, "document.documentElement.scrollWidth", 340, tmp_path)
        assert width <= 340
