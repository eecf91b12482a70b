"""The requests that wait: bounded, and fair between clients."""

from __future__ import annotations

import collections
import threading
from typing import Generic, TypeVar

from .errors import APIError

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First come, first served per client, and the clients take turns.

    A client with a hundred requests does not keep one with a single request waiting for all of them.

    Parameters
    ----------
    limit
        Items that may wait, of all clients together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._condition = threading.Condition()
        self._waiting: collections.OrderedDict[str, collections.deque[Item]] = collections.OrderedDict()
        self._n = 0
        self._closed = False

    def __len__(self) -> int:
        return self._n

    def put(self, client: str, item: Item) -> None:
        """Append an item of a client; raises APIError (503) where too many wait, or nothing is taken any more."""
        with self._condition:
            if self._closed:
                raise APIError(503, "the server stops")
            if self._n >= self._limit:
                raise APIError(503, f"{self._n} requests are waiting (queue_limit); try again later")
            self._waiting.setdefault(client, collections.deque()).append(item)
            self._n += 1
            self._condition.notify()

    def head(self, wait: bool) -> Item | None:
        """Return the item whose turn it is, without taking it; None where there is none, or the queue is closed."""
        with self._condition:
            while wait and not self._n and not self._closed:
                self._condition.wait()
            return next(iter(self._waiting.values()))[0] if self._n else None

    def take(self) -> Item:
        """Take the item that `head` returned; the next turn is another client's."""
        with self._condition:
            client, items = next(iter(self._waiting.items()))
            item = items.popleft()
            self._n -= 1
            del self._waiting[client]
            if items:
                self._waiting[client] = items  # behind the others
            return item

    def close(self) -> list[Item]:
        """Take no more items. Returns those that wait."""
        with self._condition:
            self._closed = True
            left = [item for items in self._waiting.values() for item in items]
            self._waiting.clear()
            self._n = 0
            self._condition.notify_all()
            return left
