"""Memory and time of the in-process BM25 retriever.

    python bench/retrievers.py [--passages 100000] [--out bench/results/retrievers.json]

The corpus is random: passages of 100 words, drawn from 200,000 words by Zipf's law, in the
published jsonl format. A fresh process measures the seconds to load and index it, the peak resident
memory in excess of the imports, and the milliseconds per query of five words. Takes half a minute;
needs Linux (/proc).
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WORDS, LENGTH, QUERIES = 200_000, 100, 200


def write_corpus(path: Path, n: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(n):
            numbers = rng.zipf(1.2, LENGTH) % WORDS
            text = " ".join(f"w{number}" for number in numbers)
            file.write(json.dumps({"id": str(i), "contents": f'"Title {i}"\n{text}'}) + "\n")


def memory(key: str) -> float:
    """Memory of this process in MB; key: VmRSS (now) or VmHWM (peak)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if key in x)
    return int(line.split()[1]) / 1024


def measure(corpus: str) -> dict:
    sys.path.insert(0, str(ROOT))
    import nltk.stem.porter  # noqa: F401 - the retriever imports it on first use

    from paw_min.retrieval.bm25 import LexicalRetriever
    from paw_min.retrieval.corpus import Corpus

    imports, start = memory("VmRSS"), time.perf_counter()
    retriever = LexicalRetriever(Corpus(corpus))
    load_s = time.perf_counter() - start
    rng = random.Random(1)
    queries = [" ".join(f"w{rng.randrange(1, 5000)}" for _ in range(5)) for _ in range(QUERIES)]
    start = time.process_time()
    retriever.search(queries, 3)
    query_ms = 1000 * (time.process_time() - start) / QUERIES
    return {
        "load_s": round(load_s, 1),
        "peak_mb": round(memory("VmHWM") - imports),
        "resident_mb": round(memory("VmRSS") - imports),
        "query_cpu_ms": round(query_ms, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/retrievers.json")
    parser.add_argument("--corpus", help=argparse.SUPPRESS)  # for the fresh process
    args = parser.parse_args()
    if args.corpus:
        print(json.dumps(measure(args.corpus)))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        write_corpus(path, args.passages)
        command = [sys.executable, __file__, "--corpus", str(path)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = {"command": "python bench/retrievers.py", "passages": args.passages}
    result |= {"words_per_passage": LENGTH} | json.loads(answer)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(f"{key:20s} {value}" for key, value in result.items()))
