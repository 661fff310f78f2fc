"""The numbers of bench/README.md are those of bench/results: pytest tests/test_bench_readme.py"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "bench/README.md").read_text()
# Decimals that are not measured: targets, the paper's two, names, thresholds.
CONSTANTS = {"0.1", "0.3", "1.0", "2.1", "2.4", "2.5", "0.9", "1.16"}


def load(name: str) -> dict:
    return json.loads((ROOT / f"bench/results/{name}.json").read_text())


def section(title: str) -> tuple[set[str], str]:
    """The table rows of a section, without the headers, and its other text in one line."""
    text = README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    text = re.sub(r"\|.*\|\n\|-.*\|\n", "", text)
    lines = text.splitlines()
    rows = {line for line in lines if line.startswith("|")}
    return rows, " ".join(" ".join(line for line in lines if line not in rows).split())


def overhead() -> tuple[list[str], list[str]]:
    report, rows = load("overhead"), []
    for env, name in (("alfworld", "ALFWorld"), ("webshop", "WebShop")):
        p = report[env]["percent"]
        rows.append(f"| {name} | {p['observation_tokens']:.1f} | {p['aim']:.1f} | "
                    f"{p['time']:+.1f} | {p['operations']:+.1f} | {p['memory']:+.1f} |")
    for which, name in (("grpo", "GRPO"), ("paw", "with PaW")):
        seconds = report["alfworld"]["seconds"][which].values()
        rows.append(f"| {name} | {' | '.join(f'{s:.2f}' for s in seconds)} |")
    draws = report["webshop"]["memory_draws"]
    return rows, [f"({min(draws):+.1f} to {max(draws):+.1f} % on WebShop's rows)"]


def update() -> tuple[list[str], list[str]]:
    report, rows, worst = load("update"), [], 0.0
    names = {"plain": "plain trainer", "trl": "TRL, head at all positions",
             "trl_valid": "TRL, head at completions", "ours": "paw_min"}  # fmt: skip
    for shape, title in (("alfworld", "ALFWorld"), ("webshop", "WebShop"), ("search", "search")):
        r = report[shape]
        for v, speed in r["tokens_per_s"].items():
            ratios = "| |" if v == "ours" else (
                f"| {r['speed_ratio'][v]:.2f} | {r['memory_ratio'][v]:.2f} |")  # fmt: skip
            rows.append(f"| {title} | {names[v]} | {speed:.1f} | {r['peak_mb'][v]:,} {ratios}")
        assert max(r["loss_difference"].values()) < 1e-6
        worst = max(worst, *r["gradient_difference"].values())
    return rows, [f"{report['vocabulary']:,} tokens", f"differ by {worst:g} at most"]


def memory() -> tuple[list[str], list[str]]:
    rows, mb = [], 1e6
    for r in load("memory")["rows"]:
        settings = {"precision": "fp32", "micro_tokens": 2000} | r["settings"]
        names = [settings["precision"], f"LoRA {settings.get('lora_rank')}",
                 "checkpointing"]  # fmt: skip
        kept = [True, "lora_rank" in settings, "grad_checkpointing" in settings]
        shown = ", ".join(name for name, keep in zip(names, kept) if keep)
        planned = r["plan"]["peak"] - r["held"]
        assert r["error"] == {
            "passes": planned / r["passes"] - 1, "all": r["plan"]["peak"] / r["peak"] - 1,
        } and r["peak"] == r["held"] + max(r["passes"], r["scoring"])  # fmt: skip
        rows.append(f"| {r['model']}, {shown} | {settings['micro_tokens']:,} | "
                    f"{r['held'] / mb:.0f} | {planned / mb:.0f} | {r['passes'] / mb:.0f} | "
                    f"{100 * r['error']['passes']:+.1f} | {100 * r['error']['all']:+.1f} |")
    ranges = [[100 * f(r["error"][k] for r in load("memory")["rows"]) for f in (min, max)]
              for k in ("passes", "all")]  # fmt: skip
    return rows, ["from {:.1f} to {:+.1f} % for the passes".format(*ranges[0]),
                  "from {:.1f} to {:+.1f} % in all".format(*ranges[1])]  # fmt: skip


def rollout() -> tuple[list[str], list[str]]:
    report, rows = load("rollout"), []
    for r in report["results"]:
        speed, idle, mean = r["steps_per_s"], r["idle"], r["mean_delay_s"]
        delay = f"mean {mean:.1f} s, heavy tail" if mean else "none"
        rows.append(f"| {r['sampler']} | {delay} | {speed['lock-step']:.1f} | {speed['ours']:.1f} "
                    f"| {r['ratio']:.2f} | {100 * idle['lock-step']:.0f} % | "
                    f"{100 * idle['ours']:.0f} % |")
    n, rounds = report["episodes"], report["rounds"][1]
    ranges = ["from {:.2f} to {:.2f}".format(*report["results"][k]["ratio_range"]) for k in (1, 3)]
    return rows, [
        f"for {n} episodes in {n} worker processes",
        f"the ratios of {rounds} rounds range {ranges[0]} with transformers, {ranges[1]} with vLLM",
    ]


def scaling() -> tuple[list[str], list[str]]:
    r = load("scaling")
    assert r["rows"]["1"] == r["rows"]["2"] and r["tokens"]["1"] == r["tokens"]["2"]
    names = {"rollout": "rollout", "update": "update", "whole": "whole",
             "large_update": "update of a larger model"}  # fmt: skip
    rows = [
        f"| {name} | {r[f'{part}_seconds']['1']:.2f} | {r[f'{part}_seconds']['2']:.2f} | "
        f"{r[f'{part}_ratio']:.2f} |"
        for part, name in names.items()
    ]
    return rows, [f"reach a speedup of {r['large_update_limit']:.2f},",
                  "the whole were {:.2f} and {:.2f}.".format(*r["whole_ratios"])]  # fmt: skip


def engine() -> tuple[list[str], list[str]]:
    report = load("engine")
    assert report["same_texts"]
    return [
        f"| {name} | {r['stock']['mean']:.3g} | {r['fast']['mean']:.3g} | {r['ratio']:g} |"
        for name, r in report["cpu_ms"].items()
    ], []


def webshop() -> tuple[list[str], list[str]]:
    report, rows = load("webshop"), []
    for name, f in report["steps"]["figures"].items():
        if name != "reset":
            (low, high), (least, most) = f["recorded_ms"], f["ratio"]
            rows.append(f"| {name} | {f['ms']:.3g} | {low:g}-{high:g} | {least}-{most} |")
            assert name == "buy" or least > 100
    for r in report["shops"]:
        resident, peak = (r[key] - r["imports_mb"] for key in ("resident_mb", "peak_mb"))
        rows.append(f"| {r['products']:,} | {r['envs']} | {r['load_s']:.1f} | {resident:.0f} | "
                    f"{peak:.0f} | {r['search_cpu_ms']:.2f} |")
    return rows, [f"a shop of {report['steps']['products']:,} generated products"]


def anchors() -> tuple[list[str], list[str]]:
    r = load("anchors")
    assert r["same_clusters"]
    rows = [
        f"| plain difflib | {r['plain_cpu_s']:.1f} | {100 * r['share_of_update_plain']:.1f} |",
        f"| paw_min | {r['ours_cpu_s']:.1f} | {100 * r['share_of_update']:.1f} |",
    ]
    return rows, [f"an update of {r['episodes']:,} episodes"]


def retrievers() -> tuple[list[str], list[str]]:
    r, passages = load("retrievers"), 21e6  # of wiki-18
    assert (round(1e5 * 768 * 4 / 1e9, 1), round(passages * 16 / 1e9, 2)) == (0.3, 0.34)
    assert round(passages * 768 * 4 / 1e9) == 65
    http = r["http_p50_ms"]
    rows = [
        f"| {r['load_s']} | {r['peak_mb']} | {r['resident_mb']} | {r['query_cpu_ms']} |",
        *(f"| {n} | {http['nagle'][n]:.1f} | {http['no_delay'][n]:.1f} |" for n in ("1", "16")),
        "| vectors in the process, 100,000 x 768, fp32 | 0.3 GB, and the encoder | 4 bytes per "
        "number |",
        "| wiki-18, line offsets (the text stays on disk) | 0.34 GB | 21 million lines, 16 bytes "
        "each |",
        "| wiki-18, E5 FAISS Flat, fp32 | 65 GB | 21 million x 768, 4 bytes per number |",
    ]
    words = f"{r['passages']:,} random passages of {r['words_per_passage']} words"
    return rows, [words]


def soak() -> tuple[list[str], list[str]]:
    names = ("kills", "server_restarts", "runs", "runs_with_equal_sums")
    return ["| " + " | ".join(str(load("soak")[name]) for name in names) + " |"], []


def mutants() -> tuple[list[str], list[str]]:
    files = load("mutants")["files"]
    assert list(files) == ["balance", "cmae", "select", "losses", "advantages", "update"]
    rows = [f"| {name} | {r['mutants']} | {r['killed']} |" for name, r in files.items()]
    total, killed = (sum(r[key] for r in files.values()) for key in ("mutants", "killed"))
    assert all(len(r["survivors"]) == r["mutants"] - r["killed"] for r in files.values())
    return [*rows, f"| all | {total} | {killed} |"], [f"{100 * killed / total:.1f} % are noticed"]


SECTIONS = {
    "Overhead of PaW": overhead,
    "Forward and backward passes": update,
    "Memory before the start": memory,
    "Asynchronous rollout": rollout,
    "Scaling": scaling,
    "ALFWorld engine": engine,
    "WebShop": webshop,
    "GiGPO's similar states": anchors,
    "BM25": retrievers,
    "Soak test": soak,
    "Mutation testing": mutants,
}


@pytest.mark.parametrize("title", SECTIONS)
def test_numbers_are_in_the_files(title):
    expected, phrases = SECTIONS[title]()
    rows, text = section(title)
    assert rows == set(expected)
    for phrase in phrases:
        assert phrase in text
        text = text.replace(phrase, "")
    assert set(re.findall(r"\d+\.\d+", text)) <= CONSTANTS


def test_every_result_has_its_section_and_its_command():
    names = {path.stem for path in ROOT.glob("bench/results/*.json")}
    assert {function.__name__ for function in SECTIONS.values()} == names
    for title, function in SECTIONS.items():
        report = load(function.__name__)
        shown = re.search(r"\n    (python bench/.*)\n", README.partition(f"\n## {title}\n")[2])[1]
        assert shown in report["command"]
    titles = re.findall(r"^## (.*)$", README, re.M)
    assert titles == [*SECTIONS, "Limits of these benchmarks"]


def test_wall_times_are_in_the_file():
    recorded = (ROOT / "results/wall_time.txt").read_text()
    for function in SECTIONS.values():
        script = f"{function.__name__}.py"
        (shown,) = re.findall(rf"^\| `{script}` \|.*\| (.*) \|$", README, re.M)
        entry = recorded.partition(f"command: python bench/{script}")[2].partition("\n\n")[0]
        times = [(int(m), float(s)) for m, s in re.findall(r"(\d+)m([\d.]+)s", entry)]
        assert set(re.findall(r"(\d+) min (\d+) s", shown)) == {
            (str(m), f"{s:.0f}") for m, s in times
        }
        assert times or shown == "not recorded"
