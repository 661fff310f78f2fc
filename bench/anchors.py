"""What do GiGPO's similarity anchors cost with plain difflib, and with paw_min.advantages?

    python bench/anchors.py [--quick] [--out bench/results/anchors.json]

Episodes of search-augmented QA in the paper's numbers: 256 questions in groups of 5, at most 4
turns, ratio 0.9. Anchors are questions and information blocks of three passages, about 500 words,
in English (the help texts that come with Python). The members of a group ask alike, so that their
blocks are often equal and more often share passages; a few turns are invalid and leave "".

    plain   every row against the first member of every cluster of its group, by difflib's ratio
    ours    advantages.similar_anchors

Both must give the same clusters. CPU seconds of one process (`time.process_time`); ours is the mean
of three passes. They are set against an update that is computed, not measured: 8 operations for
each parameter and token (6 for the forward and backward pass, 2 for the old log-probs) of a model
of 3 billion on 4 H100 at 40 % of their bf16 peak. --quick takes 16 groups. Takes a minute or two.
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

ROOT = Path(__file__).resolve().parents[1]
GROUPS, QUICK_GROUPS, GROUP_SIZE, TURNS, THRESHOLD = 256, 16, 5, 4, 0.9
PASSAGE_WORDS, TOP_K = 165, 3
PARAMETERS, GPUS, FLOPS = 3e9, 4, 0.4 * 989e12
LETTERS_PER_TOKEN, MORE_TOKENS = 4, 400  # of a row: instructions and response, beside its history


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
        hops = [[passage() for _ in range(12)] for _ in range(2)]  # what one looks for, best first
        if rng.random() < 0.2:  # now and then one of them has a near copy
            hops[0].append(hops[0][1].replace(" the ", " this "))
        for _ in range(GROUP_SIZE):
            rows.append((group, question, len(question)))
            for turn in range(1, rng.choice([2, TURNS - 1, TURNS])):
                anchor = "" if rng.random() < 0.05 else information(rng, hops[turn > 1])
                rows.append((group, anchor, rows[-1][2] + len(anchor)))
    return rows


def information(rng: random.Random, passages: list[str]) -> str:
    """The block for a query, either in the usual words or in others: the ranks change a little."""
    noise = rng.choice([0.0, 1.5])
    ranks = {p: i % 12 + rng.gauss(0.0, noise) for i, p in enumerate(passages)}
    best = sorted(passages, key=ranks.get)[:TOP_K]
    text = "".join(f"Doc {i}: {p}\n" for i, p in enumerate(best, start=1))
    return f"<information>{json.dumps({'result': text})}</information>"


def plain_anchors(group: list[int], anchor: list[str], threshold: float) -> list[int]:
    """Greedy first-fit without any thought of time."""
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
    sys.path.insert(0, str(ROOT))
    from paw_min.advantages import similar_anchors

    group, anchor, letters = zip(*make_rows(QUICK_GROUPS if args.quick else GROUPS, seed=0))
    plain, plain_seconds = timed(plain_anchors, group, anchor, THRESHOLD)
    results, times = zip(*(timed(similar_anchors, group, anchor, THRESHOLD) for _ in range(3)))
    if any(result != plain for result in results):
        raise SystemExit("The two differ: see tests/test_advantages.py.")

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
