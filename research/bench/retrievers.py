"""Memory and time of the in-process BM25 retriever, and the latency of the retrieval server.

    python research/bench/retrievers.py [--only memory|http] [--out FILE]

The corpus is random: passages of 100 words, drawn from 200,000 words by Zipf's law, in the
published jsonl format. A fresh process measures the seconds to load and index it, the peak resident
memory in excess of the imports, and the milliseconds per query of five words. Takes half a minute;
needs Linux (/proc).

http: the median time of a search by `SearchClient` in a server on the same machine, over 1,000
passages, so that the search itself takes little. "nagle" is the same server with Nagle's algorithm,
which asyncio leaves enabled unless the listening socket is created with IPPROTO_TCP. Takes half
a minute. The results of a part that is not run are kept.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
WORDS = 200_000
LENGTH = 100
QUERIES = 200
HTTP_PASSAGES = 1000
SEARCHES = 100

SERVER = """
import functools, socket, sys, types, uvicorn
from paw_min.retrieval import server
# uvloop, which uvicorn prefers where it is installed, disables Nagle's algorithm on any socket.
uvicorn.Config = functools.partial(uvicorn.Config, loop="asyncio")
if sys.argv.pop(1) == "nagle":
    server.socket = types.SimpleNamespace(**vars(socket) | {"socket": lambda *_: socket.socket()})
server.main()
"""


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

    imports = memory("VmRSS")
    start = time.perf_counter()
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


def measure_http(corpus: Path) -> dict:
    """{listener: {number of queries: median ms of a search}}; the two servers take turns."""
    sys.path.insert(0, str(ROOT))
    from paw_min.retrieval.client import SearchClient

    rng = random.Random(1)
    servers = []
    clients = {}
    try:
        for listener in ("nagle", "no_delay"):
            command = [sys.executable, "-c", SERVER, listener, "--corpus", str(corpus)]
            server = subprocess.Popen([*command, "--port", "0"], cwd=ROOT, text=True,
                                      stdout=subprocess.PIPE)  # fmt: skip
            servers.append(server)
            ready = next(line for line in server.stdout if line.startswith("ready"))
            clients[listener] = SearchClient(ready.split()[-1])
        times = {listener: {1: [], 16: []} for listener in clients}
        for n in (1, 16):
            for _ in range(SEARCHES):
                queries = [f"w{rng.randrange(1, 5000)}" for _ in range(n)]
                for listener, client in clients.items():
                    start = time.perf_counter()
                    client.search(queries, 3)
                    times[listener][n].append(1000 * (time.perf_counter() - start))
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    return {listener: {str(n): round(statistics.median(ms), 2) for n, ms in by_n.items()}
            for listener, by_n in times.items()}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--only", choices=("memory", "http"), help="default: both")
    parser.add_argument("--out", type=Path, default=ROOT / "research/bench/results/retrievers.json")
    parser.add_argument("--corpus", help=argparse.SUPPRESS)  # for the fresh process
    args = parser.parse_args()
    if args.corpus:
        print(json.dumps(measure(args.corpus)))
        sys.exit()
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        if args.only != "http":
            write_corpus(path, args.passages)
            command = [sys.executable, __file__, "--corpus", str(path)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            result |= {"command": "python research/bench/retrievers.py", "passages": args.passages}
            result |= {"words_per_passage": LENGTH} | json.loads(answer)
        if args.only != "memory":
            write_corpus(path, HTTP_PASSAGES)
            result["http_p50_ms"] = measure_http(path)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(f"{key:20s} {value}" for key, value in result.items()))
