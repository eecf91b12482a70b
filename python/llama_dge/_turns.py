"""Who may use the one context of an instance."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator


class Turns:
    """Lets the calls of several threads follow each other, and ends streams that another call has overtaken.

    A stream holds nothing between two of its tokens: whoever abandons one must not lock everybody else out.

    A forked child has the forking thread only. Where another one was inside a call, its locks are never released there
    and the cache may be half changed, so every call in the child raises RuntimeError.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of a call, and of a whole request
        self._moment = threading.RLock()  # of one change of the cache, such as an eval; taken after the other one
        self._turn = 0
        self._inside = 0  # calls within a step of a stream, or within another call, are part of it
        self._orphaned = False
        self.has_thread = False  # the library selects on a thread of its own, which no child has
        _living.add(self)

    def _check_fork(self) -> None:
        if self._orphaned:
            raise RuntimeError(
                "this instance was in use by another thread when the process was forked; create it in the child "
                'instead, or start the child by "spawn": multiprocessing.get_context("spawn")'
            )

    def after_fork(self) -> None:
        """Find out, in a child, whether another thread held the context."""
        for lock in (self._lock, self._moment):
            if lock.acquire(blocking=False):
                lock.release()
            else:
                self._orphaned = True
        self._orphaned = self._orphaned or self.has_thread

    @contextlib.contextmanager
    def call(self) -> Iterator[int]:
        """Change the cache. Yields the number of the turn, a new one for a call from outside."""
        self._check_fork()
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
        self._check_fork()
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
        self._check_fork()
        with self._lock, self._moment:
            yield

    @contextlib.contextmanager
    def glance(self) -> Iterator[None]:
        """Read from the context, between two changes of the cache by another thread's request."""
        self._check_fork()
        with self._moment:
            yield

    @contextlib.contextmanager
    def request(self, on: bool) -> Iterator[None]:
        """Keep other threads out until a whole request is done; a stream only begins in it."""
        if not on:
            yield
            return
        self._check_fork()
        with self._lock:
            yield


_living: weakref.WeakSet[Turns] = weakref.WeakSet()


def _after_fork() -> None:
    for turns in list(_living):
        turns.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
