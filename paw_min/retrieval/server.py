"""A retrieval server with the protocols of Search-R1 and verl-agent.

    python -m paw_min.retrieval.server --corpus corpus.jsonl
    python -m paw_min.retrieval.server --corpus wiki-18.jsonl --retriever dense \\
        --encoder intfloat/e5-base-v2 --index e5_Flat.index

POST /retrieve takes {"queries": [..]} or {"query": ".."}, with `topk` (default 3) and
`return_scores`. It answers {"result": [[{"document": {"id", "contents"}, "score"}, ..] per query]},
or only the documents if `return_scores` is false, where Search-R1's server fails. GET /health
answers 200. The port is open from the start: requests that come while the corpus is loaded wait. A
request has MAX_BODY bytes at most. Needs fastapi and uvicorn.
"""

import argparse
import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field

from paw_min.base.errors import Parser, UserError, masked, user_errors
from paw_min.base.files import is_url
from paw_min.retrieval.bm25 import LexicalRetriever
from paw_min.retrieval.corpus import Corpus

E5 = "intfloat/e5-base-v2"
MAX_BODY = 32 << 20  # bytes of a request; 6,667 queries of 512 tokens are about 16 MB


class RetrieveRequest(BaseModel):
    queries: list[str] | None = None  # Search-R1
    query: str | None = None  # verl-agent
    topk: int | None = Field(3, ge=1, le=1000)
    return_scores: bool = False


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
                raise HTTPException(413, f"the request has more than {MAX_BODY} bytes: send less")
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


def guard(app: FastAPI) -> FastAPI:
    """The same application, which a malformed or endless request does not harm."""
    app.add_middleware(BodyLimit)
    for kind in (RequestValidationError, HTTPException):
        app.add_exception_handler(kind, refuse)
    return app


def make_app(retriever) -> FastAPI:
    """retriever: a LexicalRetriever or a Dense."""
    app = guard(FastAPI())
    turn = Lock()  # one search at a time: each uses all cores already

    @app.get("/health")
    async def health():  # It runs in the event loop: searches may have taken all threads.
        return {"status": "ready", "passages": len(retriever.corpus)}

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest):  # FastAPI calls it in a thread.
        if (request.queries is None) == (request.query is None):
            raise HTTPException(422, "give either `queries`, a list of texts, or `query`, a text")
        queries = [request.query] if request.queries is None else request.queries
        topk = request.topk or 3
        with turn:
            found = retriever.search(queries, topk)
        if not request.return_scores:
            found = [[hit["document"] for hit in hits] for hits in found]
        # Return a text: FastAPI would convert the objects in the event loop and block the others.
        return Response(json.dumps({"result": found}), media_type="application/json")

    return app


def load(args: argparse.Namespace):
    for flag in ("corpus", "index", "encoder"):
        value = getattr(args, flag)
        if is_url(value):
            raise UserError(f"--{flag} {masked(value)} is a URL: give a path, or "
                            "for --encoder a hub name.")
    if args.retriever == "bm25" and (args.encoder or args.index):
        raise UserError("--encoder and --index are for dense vectors, and --retriever is bm25: add "
                        "--retriever dense, or omit them.")
    if args.index and not Path(args.index).is_file():  # look before a corpus of 14 GB is scanned
        raise UserError(f"The index {args.index} does not exist: give a FAISS file (join its parts "
                        "with `cat`), or none to have the vectors computed.")
    corpus = Corpus(args.corpus)
    print(f"{len(corpus):,} passages in {corpus.path}", flush=True)
    if args.retriever == "bm25":
        return LexicalRetriever(corpus)
    from paw_min.retrieval.dense import Dense  # imports torch and transformers

    return Dense(
        corpus,
        args.encoder or E5,
        index=args.index,
        query_prefix=args.query_prefix,
        passage_prefix=args.passage_prefix,
        device=args.device,
    )


def prefix(text: str) -> str:
    return "" if text == "none" else text


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--corpus", required=True, help="jsonl file, one passage per line")
    add("--retriever", choices=("bm25", "dense"), default="bm25")
    add("--encoder", default="", help=f"folder or hub name; default: {E5}")
    add("--index", default="", help="FAISS file; default: compute the vectors")
    add("--query-prefix", type=prefix, default="query: ", help="default: E5's; none: no prefix")
    add("--passage-prefix", type=prefix, default="passage: ", help="default: E5's; none: no prefix")
    add("--device", default="cpu", help="of the encoder: cpu, cuda, cuda:0 ...")
    add("--host", default="127.0.0.1", help="0.0.0.0: reachable from elsewhere")
    add("--port", type=int, default=8000, help="0: any free port")
    return parser.parse_args(argv)


def listen(host: str, port: int) -> socket.socket:
    """An open port; UserError if it cannot be opened."""
    # asyncio disables Nagle's algorithm, which delays each answer by 40 ms, only where it sees TCP.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rebind at once after a crash
    try:
        listener.bind((host, port))
        listener.listen()  # requests that arrive before uvicorn starts wait in the queue
    except (OSError, OverflowError, TypeError) as error:  # a port above 65535; a host like é..b
        reason = getattr(error, "strerror", error)
        raise UserError(
            f"port {port} of {host} cannot be opened ({reason}): choose another --host or "
            "--port, or stop the server that uses it."
        ) from error
    return listener


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    start = time.monotonic()
    listener = listen(args.host, args.port)
    url = f"http://{args.host}:{listener.getsockname()[1]}"
    print(f"{url}: loading", flush=True)
    try:
        app = make_app(load(args))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    seconds = time.monotonic() - start
    print(f"ready after {seconds:.1f} s: {args.retriever} at {url}/retrieve", flush=True)
    serve(app, listener)


def serve(app, listener: socket.socket, **options) -> None:
    """Answer requests until Ctrl-C, without an access log."""
    # h11 limits the headers of a request, httptools does not. Without lifespan="off", a second
    # Ctrl-C prints a traceback.
    config = uvicorn.Config(app, log_level="warning", lifespan="off", http="h11", **options)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    with user_errors():
        main()
