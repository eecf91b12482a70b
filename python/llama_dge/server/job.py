"""A request for answers, between the task that serves it and the thread that has the model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from ..config import DGEConfig
from .answer import Piece
from .errors import Gone, as_api_error
from .metrics import Metrics
from .prompts import Prompt
from .sampling import Sampling

if TYPE_CHECKING:
    from .engine import Loaded


@dataclass(frozen=True)
class Work:
    """What is to be written: known when the prompt is.

    Parameters
    ----------
    prompts
        One for each answer.
    sampling
        Of all of them.
    max_tokens
        Of each; None: to the end of the context.
    stops
        Strings that end an answer.
    n_top
        Likeliest tokens to report in each place; None: no probabilities.
    special
        Whether the text of control tokens belongs to an answer.
    echo_logprobs
        Whether probabilities of the prompt's tokens are wanted.
    driven
        Arguments for a chat format that decodes by itself, in place of prompts.
    """

    prompts: list[Prompt]
    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...] = ()
    n_top: int | None = None
    special: bool = False
    echo_logprobs: bool = False
    driven: Mapping[str, Any] | None = None


@dataclass
class Usage:
    """What a request took."""

    n_prompt: int = 0
    n_cached: int = 0
    n_completion: int = 0
    dge: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return it as OpenAI's API has it, with `dge` beside."""
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_completion,
            "total_tokens": self.n_prompt + self.n_completion,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
            "dge": self.dge,
        }


_Event = Union[Piece, Usage, BaseException, None]


class Job:
    """A request for answers.

    Parameters
    ----------
    alias
        Of the model.
    config
        Settings of eviction, None: off.
    prepare
        Makes the work for a model that is loaded; raises APIError.
    metrics
        Where it is counted.
    interruptible
        Whether another request may end it, see `ServerSettings.interrupt_requests`.
    """

    def __init__(
        self,
        alias: str,
        config: DGEConfig | None,
        prepare: Callable[[Loaded], Work],
        metrics: Metrics,
        interruptible: bool = False,
    ) -> None:
        self.alias = alias
        self.config = config
        self.interruptible = interruptible
        self.usage = Usage()
        self.work: Work | None = None
        self._prepare = prepare
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._gone = threading.Event()
        self._begun: float | None = None
        self._outcome: str | None = None

    @property
    def running(self) -> bool:
        """Whether it was not counted yet."""
        return self._outcome is None

    # the task that serves the request

    async def ready(self) -> None:
        """Wait until the work is prepared, so that nothing is wrong with the request; raises what was."""
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield what the answers grow by; `usage` is complete afterwards. Raises what went wrong."""
        while True:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Usage):
                return
            if event is not None:
                yield event

    def cancel(self) -> None:
        """Say that nobody waits for it."""
        self._gone.set()

    def finish(self, outcome: str) -> None:
        """Count the request, once."""
        if self._outcome is None:
            self._outcome = outcome
            self._metrics.count(outcome)
            self._metrics.add(prompt_tokens=self.usage.n_prompt, completion_tokens=self.usage.n_completion)
            if self._begun is not None:
                self._metrics.add(request_seconds=time.perf_counter() - self._begun)

    # the thread that has the model

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it."""
        return self._gone.is_set()

    def check(self) -> None:
        """Raise `Gone` if nobody waits for it."""
        if self.gone:
            raise Gone

    def prepare(self, loaded: Loaded) -> Work:
        """Make the work, once; the task goes on with `pieces` then."""
        if self.work is None:
            work = self._prepare(loaded)
            self.work = work
            self._put(None)
        return self.work

    def begin(self) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()

    def emit(self, piece: Piece) -> None:
        """Pass a piece of an answer on."""
        self._put(piece)

    def done(self) -> None:
        """Say that all answers are complete."""
        self.finish("ok")
        self._put(self.usage)

    def fail(self, error: BaseException) -> None:
        """Say that nothing more comes."""
        self.finish("cancelled" if isinstance(error, Gone) else "error")
        self._put(as_api_error(error))

    def _put(self, event: _Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Task:
    """Something else to be done with a model, such as an embedding."""

    def __init__(self, alias: str, run: Callable[[Loaded], Any]) -> None:
        self.alias = alias
        self._run = run
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()

    def run(self, loaded: Loaded) -> None:
        """Do it, in the thread that has the model."""
        try:
            value, error = self._run(loaded), None
        except Exception as raised:
            value, error = None, raised
        self._settle(value, error)

    def fail(self, error: BaseException) -> None:
        """Say that it is not done."""
        self._settle(None, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if not self.result.done():
                if error is None:
                    self.result.set_result(value)
                else:
                    self.result.set_exception(as_api_error(error))

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle)
