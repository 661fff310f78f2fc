"""The numbers of research/bench/README.md are those of research/bench/results.

A section has tables and other text. Its table rows must be those that its function makes from the
recorded file. Its text must have the numbers of the function, and no other decimal number except
CONSTANTS. How the text is worded does not matter.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "research/bench/README.md").read_text()
# Decimals that are not measured: targets, the paper's two, names, thresholds.
CONSTANTS = {"0.3", "1.0", "+2.1", "+2.4", "2.5", "1.16"}
# +1.5, -0.25, 151,936, 8.4e-06, 12; not the 2 of "TRL2" or the 3 of "2-3".
NUMBER = re.compile(r"(?<![\w.-])[+-]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?![\w-])")


@dataclass
class Expected:
    """What a section shows of its file."""

    rows: list[str]
    numbers: list[str] = field(default_factory=list)  # of its text


@dataclass
class Section:
    rows: list[str]  # of the tables, without their headers
    numbers: set[str]  # of the other text


def load(name: str) -> dict:
    return json.loads((ROOT / f"research/bench/results/{name}.json").read_text())


def section(title: str) -> Section:
    text = README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    text = re.sub(r"\|.*\|\n\|-.*\|\n", "", text)  # the headers
    lines = text.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    prose = " ".join(line for line in lines if not line.startswith("|"))
    return Section(rows, set(NUMBER.findall(prose)))


def overhead() -> Expected:
    report = load("overhead")
    rows = []
    for env, name in (("alfworld", "ALFWorld"), ("webshop", "WebShop")):
        p = report[env]["percent"]
        rows.append(f"| {name} | {p['observation_tokens']:.1f} | {p['aim']:.1f} | "
                    f"{p['time']:+.1f} | {p['operations']:+.1f} | {p['memory']:+.1f} |")
    for which, name in (("grpo", "GRPO"), ("paw", "with PaW")):
        seconds = report["alfworld"]["seconds"][which].values()
        rows.append(f"| {name} | {' | '.join(f'{s:.2f}' for s in seconds)} |")
    draws = report["webshop"]["memory_draws"]
    return Expected(rows, [f"{min(draws):+.1f}", f"{max(draws):+.1f}"])


PROGRAMS = {
    "plain": "plain trainer",
    "trl": "TRL, head at all positions",
    "trl_valid": "TRL, head at completions",
    "ours": "paw_min",
}


def update() -> Expected:
    report = load("update")
    rows = []
    differences = []
    for shape, title in (("alfworld", "ALFWorld"), ("webshop", "WebShop"), ("search", "search")):
        r = report[shape]
        for program, speed in r["tokens_per_s"].items():
            row = f"| {title} | {PROGRAMS[program]} | {speed:.1f} | {r['peak_mb'][program]:,} |"
            if program == "ours":
                row += " |"
            else:
                row += f" {r['speed_ratio'][program]:.2f} | {r['memory_ratio'][program]:.2f} |"
            rows.append(row)
        assert max(r["loss_difference"].values()) < 1e-6
        differences += r["gradient_difference"].values()
    return Expected(rows, [f"{report['vocabulary']:,}", f"{max(differences):g}"])


def memory() -> Expected:
    mb = 1e6
    rows = []
    errors = {"passes": [], "all": []}  # in percent
    for r in load("memory")["rows"]:
        settings = {"precision": "fp32", "micro_tokens": 2000} | r["settings"]
        names = [r["model"], settings["precision"]]
        if "lora_rank" in settings:
            names.append(f"LoRA {settings['lora_rank']}")
        if "grad_checkpointing" in settings:
            names.append("checkpointing")
        planned = r["plan"]["peak"] - r["held"]
        assert r["peak"] == r["held"] + max(r["passes"], r["scoring"])
        assert r["error"]["passes"] == planned / r["passes"] - 1
        assert r["error"]["all"] == r["plan"]["peak"] / r["peak"] - 1
        for part, error in r["error"].items():
            errors[part].append(100 * error)
        rows.append(f"| {', '.join(names)} | {settings['micro_tokens']:,} | "
                    f"{r['held'] / mb:.0f} | {planned / mb:.0f} | {r['passes'] / mb:.0f} | "
                    f"{errors['passes'][-1]:+.1f} | {errors['all'][-1]:+.1f} |")
    ranges = [f"{extreme(part):+.1f}" for part in errors.values() for extreme in (min, max)]
    return Expected(rows, ranges)


def rollout() -> Expected:
    report = load("rollout")
    rows = []
    numbers = [str(report["episodes"]), str(report["rounds"][1])]
    for r in report["results"]:
        speed, idle, mean = r["steps_per_s"], r["idle"], r["mean_delay_s"]
        delay = f"mean {mean:.1f} s, heavy tail" if mean else "none"
        rows.append(f"| {r['sampler']} | {delay} | {speed['lock-step']:.1f} | {speed['ours']:.1f} "
                    f"| {r['ratio']:.2f} | {100 * idle['lock-step']:.0f} % | "
                    f"{100 * idle['ours']:.0f} % |")
        if not mean:
            numbers += [f"{ratio:.2f}" for ratio in r["ratio_range"]]
    return Expected(rows, numbers)


def scaling() -> Expected:
    r = load("scaling")
    assert r["rows"]["1"] == r["rows"]["2"] and r["tokens"]["1"] == r["tokens"]["2"]
    names = {
        "rollout": "rollout",
        "update": "update",
        "whole": "whole",
        "large_update": "update of a larger model",
    }
    rows = [
        f"| {name} | {r[f'{part}_seconds']['1']:.2f} | {r[f'{part}_seconds']['2']:.2f} | "
        f"{r[f'{part}_ratio']:.2f} |"
        for part, name in names.items()
    ]
    ratios = [r["large_update_limit"], *r["whole_ratios"]]
    return Expected(rows, [f"{ratio:.2f}" for ratio in ratios])


def engine() -> Expected:
    report = load("engine")
    assert report["same_texts"]
    rows = [
        f"| {name} | {r['stock']['mean']:.3g} | {r['fast']['mean']:.3g} | {r['ratio']:g} |"
        for name, r in report["cpu_ms"].items()
    ]
    return Expected(rows)


def webshop() -> Expected:
    report = load("webshop")
    rows = []
    for name, f in report["steps"]["figures"].items():
        if name != "reset":
            (low, high), (least, most) = f["recorded_ms"], f["ratio"]
            rows.append(f"| {name} | {f['ms']:.3g} | {low:g}-{high:g} | {least}-{most} |")
            assert name == "buy" or least > 100
    for r in report["shops"]:
        resident, peak = (r[key] - r["imports_mb"] for key in ("resident_mb", "peak_mb"))
        rows.append(f"| {r['products']:,} | {r['envs']} | {r['load_s']:.1f} | {resident:.0f} | "
                    f"{peak:.0f} | {r['search_cpu_ms']:.2f} |")
    return Expected(rows, [f"{report['steps']['products']:,}"])


def retrievers() -> Expected:
    r = load("retrievers")
    http = r["http_p50_ms"]
    rows = [f"| {r['load_s']} | {r['peak_mb']} | {r['resident_mb']} | {r['query_cpu_ms']} |"]
    rows += [f"| {n} | {http['nagle'][n]:.1f} | {http['no_delay'][n]:.1f} |" for n in ("1", "16")]
    gb = 1e9
    wiki_18 = 21e6  # passages
    vector = 768 * 4  # bytes
    computed = [
        f"{1e5 * vector / gb:.1f}",
        f"{wiki_18 * 16 / gb:.2f}",
        f"{wiki_18 * vector / gb:.0f}",
    ]
    return Expected(rows, [f"{r['passages']:,}", str(r["words_per_passage"]), *computed])


def serve() -> Expected:
    rows = []
    for env, title in (("alfworld", "ALFWorld"), ("webshop", "WebShop"), ("search", "search")):
        speeds = load("serve")["steps_per_s"][env].values()
        rows.append(f"| {title} | {' | '.join(f'{speed:,.0f}' for speed in speeds)} |")
    step = 1000 / load("serve")["steps_per_s"]["webshop"]["sessions 1"]
    official = load("webshop")["steps"]["figures"]["all steps"]["recorded_ms"]
    return Expected(rows, [f"{step:.2f}", *(f"{ms:g}" for ms in official)])


SECTIONS = {
    "Overhead of PaW": overhead,
    "Forward and backward passes": update,
    "Memory before the start": memory,
    "Asynchronous rollout": rollout,
    "Scaling": scaling,
    "ALFWorld engine": engine,
    "WebShop": webshop,
    "OpenEnv server": serve,
    "BM25": retrievers,
}


@pytest.mark.parametrize("title", SECTIONS)
def test_numbers_are_in_the_files(title):
    expected = SECTIONS[title]()
    shown = section(title)
    assert sorted(shown.rows) == sorted(expected.rows)
    assert set(expected.numbers) <= shown.numbers
    decimals = {number for number in shown.numbers if "." in number}
    assert decimals <= {*expected.numbers, *CONSTANTS}


def test_every_result_has_its_section_and_its_command():
    names = {path.stem for path in ROOT.glob("research/bench/results/*.json")}
    assert {function.__name__ for function in SECTIONS.values()} == names
    for title, function in SECTIONS.items():
        report = load(function.__name__)
        section = README.partition(f"\n## {title}\n")[2]
        shown = re.search(r"\n    (python research/bench/.*)\n", section)[1]
        assert shown in report["command"]


def test_wall_times_are_in_the_file():
    recorded = (ROOT / "research/runs/wall_time.txt").read_text()
    for function in SECTIONS.values():
        script = f"{function.__name__}.py"
        (shown,) = re.findall(rf"^\| `{script}` \|.*\| (.*) \|$", README, re.M)
        start = f"command: python research/bench/{script}"
        entry = recorded.partition(start)[2].partition("\n\n")[0]
        times = [(int(m), float(s)) for m, s in re.findall(r"(\d+)m([\d.]+)s", entry)]
        assert set(re.findall(r"(\d+) min (\d+) s", shown)) == {
            (str(m), f"{s:.0f}") for m, s in times
        }
        assert times or shown == "not recorded"
