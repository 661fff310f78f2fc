"""A retrieval server with the protocols of Search-R1 and verl-agent.

    python -m paw_min.retrieval.server --corpus corpus.jsonl
    python -m paw_min.retrieval.server --corpus wiki-18.jsonl --retriever dense \\
        --encoder intfloat/e5-base-v2 --index e5_Flat.index

POST /retrieve takes {"queries": [..]} or {"query": ".."}, with `topk` (default 3) and
`return_scores`. It answers {"result": [[{"document": {"id", "contents"}, "score"}, ..] per query]},
or only the documents if `return_scores` is false, where Search-R1's server fails. GET /health
answers 200 if the corpus is loaded and 503 while it is loading. The port is open from the start,
where the published servers are silent for minutes. Needs fastapi and uvicorn.
"""

import argparse
import resource
import socket
import sys
import threading
import time

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from paw_min.retrieval.bm25 import LexicalRetriever
from paw_min.retrieval.corpus import Corpus

LOADING = "still loading: try again later"


class Request(BaseModel):
    queries: list[str] | None = None  # Search-R1
    query: str | None = None  # verl-agent
    topk: int | None = Field(3, ge=1, le=1000)
    return_scores: bool = False


class State:
    """The retriever, once it is loaded, or the error of loading it."""

    def __init__(self):
        self.retriever = None  # LexicalRetriever or Dense
        self.error = "error: loading failed, see above"
        self.lock = threading.Lock()  # one search at a time: each uses all threads already


def make_app(state: State) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health():
        if state.retriever is None:
            raise HTTPException(503, LOADING)
        return {"status": "ready", "passages": len(state.retriever.corpus)}

    @app.post("/retrieve")
    def retrieve(request: Request):
        if (request.queries is None) == (request.query is None):
            raise HTTPException(422, "give either `queries`, a list of texts, or `query`, a text")
        if state.retriever is None:
            raise HTTPException(503, LOADING)
        queries = [request.query] if request.queries is None else request.queries
        with state.lock:
            found = state.retriever.search(queries, request.topk or 3)
        if not request.return_scores:
            found = [[hit["document"] for hit in hits] for hits in found]
        return {"result": found}

    return app


def load(args: argparse.Namespace):
    corpus = Corpus(args.corpus)
    print(f"{len(corpus):,} passages in {corpus.path}", flush=True)
    if args.retriever == "bm25":
        return LexicalRetriever(corpus)
    from paw_min.retrieval.dense import Dense  # imports torch and transformers

    return Dense(corpus, args.encoder, args.index, query_prefix=args.query_prefix,
                 passage_prefix=args.passage_prefix, device=args.device)


def peak_memory() -> float:
    """The peak memory of this process, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="jsonl file, one passage per line")
    parser.add_argument("--retriever", choices=("bm25", "dense"), default="bm25")
    parser.add_argument("--encoder", default="intfloat/e5-base-v2", help="folder or hub name")
    parser.add_argument("--index", default="", help="FAISS file; default: compute the vectors")
    parser.add_argument("--query-prefix", default="query: ", help="E5's; '' for other encoders")
    parser.add_argument("--passage-prefix", default="passage: ", help="E5's; '' for others")
    parser.add_argument("--device", default="cpu", help="of the encoder: cpu, cuda, cuda:0 ...")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: reachable from elsewhere")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args, start = parse_args(argv), time.monotonic()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rebind at once after a crash
    try:
        listener.bind((args.host, args.port))
        listener.listen()  # requests that arrive before uvicorn starts wait in the queue
    except OSError as error:
        sys.exit(f"error: port {args.port} of {args.host} cannot be opened ({error.strerror}): "
                 "choose another --port, or stop the server that uses it.")
    url = f"http://{args.host}:{listener.getsockname()[1]}"
    state = State()
    # Without lifespan="off", a second Ctrl-C prints a traceback.
    config = uvicorn.Config(make_app(state), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)

    def load_in_thread():
        try:
            state.retriever = load(args)
            while not server.started:  # from here on, uvicorn handles Ctrl-C
                time.sleep(0.01)
            print(f"ready after {time.monotonic() - start:.1f} s, peak memory "
                  f"{peak_memory():.2f} GB: {args.retriever} at {url}/retrieve", flush=True)
        except (ValueError, OSError) as error:
            state.error = f"error: {error}"
        finally:  # stop after any failure: the server must not report "loading" forever
            if state.retriever is None:  # after success, leave a Ctrl-C's should_exit as it is
                server.should_exit = True

    print(f"{url}: loading", flush=True)
    threading.Thread(target=load_in_thread, daemon=True).start()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return
    if state.retriever is None:
        sys.exit(state.error)


if __name__ == "__main__":
    main()
