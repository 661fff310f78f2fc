"""An OpenEnv application at a real port of this process, with OpenEnv's own client."""

import asyncio
import threading
from contextlib import contextmanager

import uvicorn
from openenv.core import GenericEnvClient

from paw_min.retrieval.server import listen
from tests.pools import until


@contextmanager
def serving(app):
    """The URL of an application, which runs in a thread until the end."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def client(url: str):
    """A connected client of OpenEnv; a context manager."""
    return GenericEnvClient(base_url=url).sync()
