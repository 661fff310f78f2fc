"""Threads that do not keep a process alive."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


def in_daemon(function: Callable, *arguments) -> Future:
    """Call a function in a thread; Ctrl-C does not wait for it, as it does for an executor's."""
    future = Future()

    def work():
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # future.result raises it
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future
