"""A retrieval server with the protocols of Search-R1 and verl-agent.

    python -m paw_min.retrieval.server --corpus corpus.jsonl
    python -m paw_min.retrieval.server --corpus wiki-18.jsonl --retriever dense \\
        --encoder intfloat/e5-base-v2 --index e5_Flat.index

POST /retrieve takes {"queries": [..]} or {"query": ".."}, with `topk` (default 3) and
`return_scores`. It answers {"result": [[{"document": {"id", "contents"}, "score"}, ..] per query]},
or only the documents if `return_scores` is false, where Search-R1's server fails. GET /health
answers 200 if the corpus is loaded and 503 while it is loading. The port is open from the start,
where the published servers are silent for minutes. A request may ask for MAX_HITS hits at most. It
may have MAX_BODY bytes, and MAX_QUERY characters in each query. The search of a client that hung up
is dropped. Needs fastapi and uvicorn.
"""

import argparse
import asyncio
import json
import socket
import sys
import threading
import time
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as Connection
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field

from paw_min.retrieval import MAX_HITS, Hit
from paw_min.retrieval.bm25 import LexicalRetriever
from paw_min.retrieval.corpus import Corpus

SLICE = 64  # queries per search; other requests take their turns between the slices of a large one
MAX_BODY = 32 << 20  # bytes of a request; 6,667 queries of 512 tokens are about 16 MB
MAX_QUERY = 100_000  # characters; a query is part of a response, in general of 512 tokens
LOADING = "still loading: try again later"


Query = Annotated[str, Field(max_length=MAX_QUERY)]


class Request(BaseModel):
    queries: list[Query] | None = None  # Search-R1
    query: Query | None = None  # verl-agent
    topk: int | None = Field(3, ge=1, le=1000)
    return_scores: bool = False


class State:
    """The retriever, once it is loaded, or the error of loading it."""

    def __init__(self):
        self.retriever = None  # LexicalRetriever or Dense
        self.error = "error: loading failed, see above"
        # One search at a time: each uses all cores already. asyncio's lock is fair: between two
        # slices of a large request, the requests that wait have their turns.
        self.turn = asyncio.Lock()

    async def search(self, queries: list[str], k: int, connection: Connection) -> list[list[Hit]]:
        found = []
        for start in range(0, len(queries), SLICE):
            part = queries[start : start + SLICE]
            async with self.turn:
                # Checked after the wait, in which a client may have given up.
                if await connection.is_disconnected():
                    raise HTTPException(499, "the client has hung up")
                found += await asyncio.to_thread(self.retriever.search, part, k)
        return found


class BodyLimit:
    """Stops reading a request after MAX_BODY bytes; a wrapper of an ASGI application."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        n_bytes = 0

        async def receive_some():
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > MAX_BODY:
                raise HTTPException(
                    413, f"the request has more than {MAX_BODY} bytes: send fewer queries at once"
                )
            return message

        await self.app(scope, receive_some, send)


async def refuse(_, error: RequestValidationError | HTTPException) -> Response:
    """The answer to a request that is malformed, or that an application refuses."""
    malformed = isinstance(error, RequestValidationError)
    detail = error.errors() if malformed else error.detail
    if isinstance(detail, list):
        # FastAPI repeats the rejected input. It may be large, or NaN or half of a surrogate pair,
        # which end in a 500.
        detail = [{key: part[key] for key in ("type", "loc", "msg")} for part in detail]
    status = 422 if malformed else error.status_code
    return Response(json.dumps({"detail": detail}), status, media_type="application/json")


def make_app(state: State) -> FastAPI:
    app = FastAPI()
    app.add_middleware(BodyLimit)
    app.add_exception_handler(RequestValidationError, refuse)

    @app.get("/health")
    async def health():
        if state.retriever is None:
            raise HTTPException(503, LOADING)
        return {"status": "ready", "passages": len(state.retriever.corpus)}

    @app.post("/retrieve")
    async def retrieve(request: Request, connection: Connection):
        if (request.queries is None) == (request.query is None):
            raise HTTPException(422, "give either `queries`, a list of texts, or `query`, a text")
        queries = [request.query] if request.queries is None else request.queries
        topk = request.topk or 3
        if len(queries) * topk > MAX_HITS:
            raise HTTPException(
                422,
                f"{len(queries)} queries x topk {topk} exceed {MAX_HITS} hits: send fewer queries "
                "per request, or a smaller topk",
            )
        if state.retriever is None:
            raise HTTPException(503, LOADING)
        found = await state.search(queries, topk, connection)
        if not request.return_scores:
            found = [[hit["document"] for hit in hits] for hits in found]
        # In a thread: FastAPI would do it in the event loop, which blocks the others.
        text = await asyncio.to_thread(json.dumps, {"result": found})
        return Response(text, media_type="application/json")

    return app


def load(args: argparse.Namespace):
    corpus = Corpus(args.corpus)
    print(f"{len(corpus):,} passages in {corpus.path}", flush=True)
    if args.retriever == "bm25":
        return LexicalRetriever(corpus)
    from paw_min.retrieval.dense import Dense  # imports torch and transformers

    return Dense(
        corpus,
        args.encoder,
        index=args.index,
        query_prefix=args.query_prefix,
        passage_prefix=args.passage_prefix,
        device=args.device,
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", required=True, help="jsonl file, one passage per line")
    add("--retriever", choices=("bm25", "dense"), default="bm25")
    add("--encoder", default="intfloat/e5-base-v2", help="folder or hub name")
    add("--index", default="", help="FAISS file; default: compute the vectors")
    add("--query-prefix", default="query: ", help="E5's; '' for other encoders")
    add("--passage-prefix", default="passage: ", help="E5's; '' for others")
    add("--device", default="cpu", help="of the encoder: cpu, cuda, cuda:0 ...")
    add("--host", default="127.0.0.1", help="0.0.0.0: reachable from elsewhere")
    add("--port", type=int, default=8000, help="0: any free port")
    return parser.parse_args(argv)


def listen(host: str, port: int) -> socket.socket:
    """An open port; ends the process with one sentence if it cannot be opened."""
    # asyncio disables Nagle's algorithm, which delays each answer by 40 ms, only where it sees TCP.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rebind at once after a crash
    try:
        listener.bind((host, port))
        listener.listen()  # requests that arrive before uvicorn starts wait in the queue
    except (OSError, OverflowError, TypeError) as error:  # a port above 65535; a host like é..b
        reason = getattr(error, "strerror", error)
        sys.exit(
            f"error: port {port} of {host} cannot be opened ({reason}): choose another --port, or "
            "stop the server that uses it."
        )
    return listener


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    start = time.monotonic()
    listener = listen(args.host, args.port)
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
            seconds = time.monotonic() - start
            print(f"ready after {seconds:.1f} s: {args.retriever} at {url}/retrieve", flush=True)
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
