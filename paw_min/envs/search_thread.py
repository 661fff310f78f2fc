"""Searching in a thread, so that generation goes on while a server looks for passages.

One thread makes one call at a time. All that is asked during a call is the next call, so that the
number of requests on their way never grows with the number of episodes.
"""

from queue import Empty, SimpleQueue
from threading import Thread


class SearchThread:
    """search: {slot: query} -> {slot: hits}, which may take long and may raise."""

    def __init__(self, search):
        self._search = search
        self._asked, self._found = SimpleQueue(), SimpleQueue()
        # A daemon: Ctrl-C does not wait for a server that is silent.
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def ask(self, queries: dict) -> None:
        """Hand over {slot: query}; does not wait."""
        self._asked.put(queries)

    def take(self, timeout: float | None) -> tuple:
        """The next call that has ended: its slots and {slot: hits}, or its slots and its error.

        timeout: seconds to wait for it (None: for ever, 0: not at all); then it is ((), {}).
        """
        try:
            return self._found.get(timeout != 0, timeout)
        except Empty:
            return (), {}

    def close(self) -> None:
        """End the thread; a call that is under way is not waited for."""
        self._asked.put(None)
        self._thread.join(0.1)

    def _work(self) -> None:
        while True:
            waiting = [self._asked.get()]
            waiting += [self._asked.get() for _ in range(self._asked.qsize())]
            if None in waiting:
                return
            queries = {slot: query for part in waiting for slot, query in part.items()}
            try:
                self._found.put((queries.keys(), self._search(queries)))
            except Exception as error:  # noqa: BLE001 - whatever it is, the pool raises it
                self._found.put((queries.keys(), error))
