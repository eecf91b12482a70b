"""Answers on the wire: events of a stream, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import Gone, as_api_error
from .job import Job

PING_SECONDS = 15
T = TypeVar("T")


class EventStream(StreamingResponse):
    """Chunks as server-sent events, with a comment now and then while nothing comes.

    Parameters
    ----------
    job
        The request; it is cancelled when the client goes away.
    chunks
        Objects to send. An error ends them with an object that says why: the status was sent long ago.
    pings
        Whether to send the comments.
    """

    def __init__(self, job: Job, chunks: AsyncIterator[dict[str, Any]], pings: bool) -> None:
        self._job = job
        self._chunks = chunks
        self._pings = pings
        super().__init__(
            self._events(),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()  # no harm if it is done

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for event in with_pings(self._lines(), PING_SECONDS if self._pings else None):
                yield event
        finally:
            self._job.cancel()

    async def _lines(self) -> AsyncIterator[str]:
        try:
            async for chunk in self._chunks:
                yield f"data: {json.dumps(chunk)}\n\n"
        except Gone:
            return
        except Exception as error:
            yield f"data: {json.dumps(as_api_error(error).body())}\n\n"
            return
        yield "data: [DONE]\n\n"


async def with_pings(lines: AsyncIterator[str], seconds: float | None) -> AsyncIterator[str]:
    """Yield lines, and a comment whenever none has come for a while; None: no comments."""
    pending: asyncio.Future[str] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(lines.__anext__())
            done, _ = await asyncio.wait({pending}, timeout=seconds)
            if not done:
                yield ": ping\n\n"
                continue
            finished, pending = pending, None
            try:
                line = finished.result()
            except StopAsyncIteration:
                return
            yield line
    finally:
        if pending is not None:
            pending.cancel()


async def until_gone(request: Request, job: Job, answer: Awaitable[T]) -> T:
    """Return an answer; cancels its job if the client goes away first, and raises `Gone`."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await answer
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
