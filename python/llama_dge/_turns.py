"""Who may use the one context of an instance."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Lets the calls of several threads follow each other, and ends streams that another call has overtaken.

    A stream holds nothing between two of its tokens: whoever abandons one must not lock everybody else out.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of a call, and of a whole request
        self._moment = threading.RLock()  # of one change of the cache, such as an eval; taken after the other one
        self._turn = 0
        self._inside = 0  # calls within a step of a stream, or within another call, are part of it

    @contextlib.contextmanager
    def call(self) -> Iterator[int]:
        """Change the cache. Yields the number of the turn, a new one for a call from outside."""
        with self._lock, self._moment:
            if not self._inside:
                self._turn += 1
            self._inside += 1
            try:
                yield self._turn
            finally:
                self._inside -= 1

    @contextlib.contextmanager
    def step(self, turn: int) -> Iterator[None]:
        """Go on with a turn.

        Raises
        ------
        RuntimeError
            Another call began a turn since.
        """
        with self._lock:
            if turn != self._turn:
                raise RuntimeError(
                    "this stream has ended: another call used the same instance since its last token; "
                    "finish a stream first, or use an instance for each"
                )
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """Use the context without starting a turn."""
        with self._lock, self._moment:
            yield

    @contextlib.contextmanager
    def glance(self) -> Iterator[None]:
        """Read from the context, between two changes of the cache by another thread's request."""
        with self._moment:
            yield

    @contextlib.contextmanager
    def request(self, on: bool) -> Iterator[None]:
        """Keep other threads out until a whole request is done; a stream only begins in it."""
        if not on:
            yield
            return
        with self._lock:
            yield
