"""A retrieval server that speaks the protocols of Search-R1 and of verl-agent.

    python -m paw_min.envs.search_server --corpus corpus.jsonl
    python -m paw_min.envs.search_server --corpus wiki-18.jsonl --retriever dense \\
        --encoder intfloat/e5-base-v2 --index e5_Flat.index

POST /retrieve takes {"queries": [..]} or {"query": ".."}, with `topk` (3) and `return_scores`, and
answers {"result": [[{"document": {"id", "contents"}, "score"}, ..] per query]}; without
return_scores, the bare documents, where Search-R1's server fails. GET /health says whether the
corpus is loaded: 200 or, while it is loading, 503. The port is open from the first second on, where
the published servers are silent for minutes. Needs fastapi and uvicorn.
"""

import argparse
import os
import resource
import socket
import sys
import threading
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: see run_alfworld.py

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from paw_min.envs.retrievers import Corpus, LexicalRetriever

LOADING = "still loading: try again later"


class Request(BaseModel):
    queries: list[str] | None = None  # Search-R1
    query: str | None = None  # verl-agent
    topk: int | None = Field(3, ge=1, le=1000)
    return_scores: bool = False


class State:
    """What the server has loaded so far."""

    def __init__(self):
        self.retriever = None
        self.error = "error: loading failed, see above"
        self.lock = threading.Lock()  # one search at a time: it uses all its threads already


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


def load(args):
    corpus = Corpus(args.corpus)
    print(f"{len(corpus):,} passages in {corpus.path}", flush=True)
    if args.retriever == "bm25":
        return LexicalRetriever(corpus)
    from paw_min.envs.dense import Dense  # imports torch and transformers

    return Dense(corpus, args.encoder, args.index, query_prefix=args.query_prefix,
                 passage_prefix=args.passage_prefix, device=args.device)


def memory() -> float:
    """The most memory this process has had so far, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="jsonl file, one passage per line")
    parser.add_argument("--retriever", choices=("bm25", "dense"), default="bm25")
    parser.add_argument("--encoder", default="intfloat/e5-base-v2", help="folder or hub name")
    parser.add_argument("--index", default="", help="FAISS file; default: the vectors are made")
    parser.add_argument("--query-prefix", default="query: ", help="E5's; '' for other encoders")
    parser.add_argument("--passage-prefix", default="passage: ", help="E5's; '' for others")
    parser.add_argument("--device", default="cpu", help="of the encoder: cpu, cuda, cuda:0 ...")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: also from other machines")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    return parser.parse_args(argv)


def main(argv=None):
    args, start = parse_args(argv), time.monotonic()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # at once after a crash
    try:
        listener.bind((args.host, args.port))
        listener.listen()  # who asks before uvicorn has started waits for a moment
    except OSError as error:
        sys.exit(f"error: port {args.port} of {args.host} cannot be opened ({error.strerror}): "
                 "choose another --port, or end the server that has it.")
    url = f"http://{args.host}:{listener.getsockname()[1]}"
    state = State()
    # Without "off", a second Ctrl-C prints a traceback.
    config = uvicorn.Config(make_app(state), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)

    def load_aside():
        try:
            state.retriever = load(args)
            while not server.started:  # a Ctrl-C from here on is uvicorn's
                time.sleep(0.01)
            print(f"ready after {time.monotonic() - start:.1f} s, {memory():.2f} GB of memory at "
                  f"most: {args.retriever} at {url}/retrieve", flush=True)
        except (ValueError, OSError) as error:
            state.error = f"error: {error}"
        finally:  # whatever happened: no server that would be loading for ever
            if state.retriever is None:  # otherwise not touched: a Ctrl-C may have set it
                server.should_exit = True

    print(f"{url}: loading", flush=True)
    threading.Thread(target=load_aside, daemon=True).start()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return
    if state.retriever is None:
        sys.exit(state.error)


if __name__ == "__main__":
    main()
