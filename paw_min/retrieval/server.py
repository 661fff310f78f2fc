"""A retrieval server with Search-R1's protocol: BM25, or a sentence encoder with FAISS.

    python -m paw_min.retrieval.server --corpus corpus.jsonl
    python -m paw_min.retrieval.server --corpus wiki-18.jsonl --retriever dense \\
        --encoder intfloat/e5-base-v2 --index e5_Flat.index

POST /retrieve takes {"queries": [..]}, with `topk` (default 3) and `return_scores`. It answers
{"result": [[{"document": {"id", "contents"}, "score"}, ..] for each query]}, or only the documents
if `return_scores` is false. The port is open from the start: requests that come while the corpus is
loaded wait. A request has MAX_BODY bytes at most. Needs fastapi and uvicorn, and for dense vectors
sentence-transformers and faiss-cpu.
"""

import argparse
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, FailFast, Field

from paw_min.base.errors import UserError, masked, user_errors
from paw_min.base.files import is_url
from paw_min.base.flags import Parser
from paw_min.retrieval.bm25 import LexicalRetriever
from paw_min.retrieval.corpus import Corpus
from paw_min.retrieval.interface import Retriever

E5 = "intfloat/e5-base-v2"
MAX_BODY = 32 << 20  # bytes of a request; 6,667 queries of 512 tokens are about 16 MB


class RetrieveRequest(BaseModel):
    # The first error is enough: one for each of ten million numbers would fill the memory.
    queries: Annotated[list[str], FailFast()]
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


async def refuse(_, error: RequestValidationError) -> JSONResponse:
    """HTTP 422, without the rejected input: it may be large, or NaN, which ends in HTTP 500."""
    detail = [{key: part[key] for key in ("type", "loc", "msg")} for part in error.errors()]
    return JSONResponse({"detail": detail}, 422)


def make_app(retriever: Retriever) -> FastAPI:
    """The web application with POST /retrieve, see above."""
    app = FastAPI(exception_handlers={RequestValidationError: refuse})
    app.add_middleware(BodyLimit)

    # It runs in the event loop, one search after another: each uses all cores already.
    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest):
        found = retriever.search(request.queries, request.topk or 3)
        if not request.return_scores:
            found = [[hit["document"] for hit in hits] for hits in found]
        return JSONResponse({"result": found})

    return app


def load(args: argparse.Namespace) -> Retriever:
    """The retriever of these flags; UserError, ValueError or OSError for unusable ones."""
    for value in (args.corpus, args.index, args.encoder):
        if is_url(value):
            raise UserError(f"{masked(value)} is a URL: give a path, or for --encoder a hub name.")
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
    """An open port, at which requests wait until uvicorn starts; UserError without one."""
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError, TypeError) as error:  # a port above 65535; a host like é..b
        raise UserError(
            f"port {port} of {host} cannot be opened ({error}): choose another --host or --port, "
            "or stop the server that uses it."
        ) from error
    # Nagle's algorithm would delay each answer by 40 ms. asyncio does not see that this is TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    listener = listen(args.host, args.port)
    url = f"http://{args.host}:{listener.getsockname()[1]}"
    print(f"{url}: loading", flush=True)
    try:
        app = make_app(load(args))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    print(f"ready: {args.retriever} at {url}/retrieve", flush=True)
    # h11 limits the headers of a request; httptools, which vLLM brings, does not. A second Ctrl-C
    # would print a traceback without lifespan="off".
    config = uvicorn.Config(app, log_level="warning", lifespan="off", http="h11")
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    with user_errors():
        main()
