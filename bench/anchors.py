"""Time of GiGPO's similarity anchors, with plain difflib and with paw_min.envs.anchors.

    python bench/anchors.py [--quick] [--out bench/results/anchors.json]

Episodes of search-augmented QA in the paper's numbers: 256 questions in groups of 5, at most 4
turns, similarity 0.9. Anchors are questions and information blocks of three passages, about 500
words, of English text (the help texts that come with Python). Members of a group ask similar
queries, so their blocks are often equal and even more often share passages; a few turns are invalid
and have the anchor "".

    plain   every row is compared with the first member of every cluster of its group by difflib
    ours    envs/anchors.py

Both must give the same clusters. Times are CPU seconds of one process (`time.process_time`); ours
is the mean of three passes. They are compared with the time of an update, which is computed, not
measured: 8 operations per parameter and token (6 for the forward and backward pass, 2 for the old
log-probs) of a model with 3 billion parameters, on 4 H100 at 40 % of their bf16 peak. --quick: 16
groups. Takes one to two minutes.
"""

import argparse
import json
import platform
import random
import re
import sys
from difflib import SequenceMatcher
from pathlib import Path
from pydoc_data.topics import topics
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paw_min.envs.anchors import similar_anchors

GROUPS, QUICK_GROUPS, GROUP_SIZE, TURNS, THRESHOLD = 256, 16, 5, 4, 0.9
PASSAGE_WORDS, TOP_K = 165, 3
PARAMETERS, GPUS, FLOPS = 3e9, 4, 0.4 * 989e12
LETTERS_PER_TOKEN, MORE_TOKENS = 4, 400  # MORE_TOKENS: instructions and response of a row


def make_rows(groups: int, seed: int) -> list[tuple[int, str, int]]:
    """(group, anchor, letters in the prompt) of every row, episode by episode."""
    rng = random.Random(seed)
    words = re.findall(r"[A-Za-z][A-Za-z'.,]*", " ".join(topics[t] for t in sorted(topics)))

    def passage() -> str:
        start = rng.randrange(len(words) - PASSAGE_WORDS)
        text = words[start : start + PASSAGE_WORDS]
        return f'"{text[0]} {text[1]}"\n{" ".join(text)}'

    rows = []
    for group in range(groups):
        question = " ".join(passage().split()[:12]) + "?"
        hops = [[passage() for _ in range(12)] for _ in range(2)]  # by rank
        if rng.random() < 0.2:  # a near copy of a passage
            hops[0].append(hops[0][1].replace(" the ", " this "))
        for _ in range(GROUP_SIZE):
            rows.append((group, question, len(question)))
            for turn in range(1, rng.choice([2, TURNS - 1, TURNS])):
                anchor = "" if rng.random() < 0.05 else information(rng, hops[turn > 1])
                rows.append((group, anchor, rows[-1][2] + len(anchor)))
    return rows


def information(rng: random.Random, passages: list[str]) -> str:
    """The block for a query; in half of the queries, other words change the ranks a little."""
    noise = rng.choice([0.0, 1.5])
    ranks = {p: i % 12 + rng.gauss(0.0, noise) for i, p in enumerate(passages)}
    best = sorted(passages, key=ranks.get)[:TOP_K]
    text = "".join(f"Doc {i}: {p}\n" for i, p in enumerate(best, start=1))
    return f"<information>{json.dumps({'result': text})}</information>"


def plain_anchors(group: list[int], anchor: list[str], threshold: float) -> list[int]:
    """Greedy first-fit clusters, written without regard to speed."""
    representatives, clusters = {}, []
    for g, text in zip(group, anchor):
        known = representatives.setdefault(g, [])
        for number, other in enumerate(known):
            if SequenceMatcher(None, text, other).ratio() >= threshold:
                break
        else:
            number = len(known)
            known.append(text)
        clusters.append(number)
    return clusters


def timed(function, *arguments):
    start = process_time()
    result = function(*arguments)
    return result, process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_GROUPS} groups")
    parser.add_argument("--out", default="bench/results/anchors.json")
    args = parser.parse_args()

    group, anchor, letters = zip(*make_rows(QUICK_GROUPS if args.quick else GROUPS, seed=0))
    plain, plain_seconds = timed(plain_anchors, group, anchor, THRESHOLD)
    results, times = zip(*(timed(similar_anchors, group, anchor, THRESHOLD) for _ in range(3)))
    if any(result != plain for result in results):
        raise SystemExit("The two clusterings differ: see tests/test_advantages.py.")

    seconds = sum(times) / len(times)
    tokens = sum(letters) / LETTERS_PER_TOKEN + MORE_TOKENS * len(anchor)
    update_seconds = 8 * PARAMETERS * tokens / (GPUS * FLOPS)
    blocks = [text for text in anchor if text.startswith("<information>")]
    report = {
        "command": "python bench/anchors.py" + " --quick" * args.quick,
        "episodes": GROUP_SIZE * (group[-1] + 1),
        "rows": len(anchor),
        "texts": len({*zip(group, anchor)}),
        "clusters": len({*zip(group, plain)}),
        "words_per_block": round(sum(len(text.split()) for text in blocks) / len(blocks)),
        "same_clusters": True,
        "plain_cpu_s": round(plain_seconds, 2),
        "ours_cpu_s": round(seconds, 3),
        "ratio": round(plain_seconds / seconds, 1),
        "update_tokens": round(tokens),
        "update_s_computed": round(update_seconds, 2),
        "share_of_update": round(seconds / update_seconds, 4),
        "share_of_update_plain": round(plain_seconds / update_seconds, 4),
        "versions": {"python": platform.python_version()},
    }
    for name, value in report.items():
        print(f"{name:24}{value}")
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nWritten to {args.out}")


if __name__ == "__main__":
    main()
