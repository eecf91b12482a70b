"""The thread that has the model: it takes requests from the queue, loads models, and lets them answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import anyio.to_thread

from ..config import DGEConfig
from .batch import BatchRunner
from .errors import APIError, Gone
from .fair_queue import FairQueue
from .job import Job, Task
from .loader import load
from .metrics import Metrics
from .prompts import ChatFormat
from .serial import SerialRunner, ServerLlama
from .settings import ModelSettings, ServerSettings

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Answers requests with one model."""

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        ...

    def fits(self, job: Job) -> bool:
        """Whether another request can be begun now."""
        ...

    def configure(self, job: Job) -> None:
        """Apply the settings of a request that fits; raises APIError."""
        ...

    def start(self, job: Job) -> None:
        """Begin a request, whose work is prepared."""
        ...

    def step(self) -> None:
        """Go on with what was begun."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


_LEAST_CTX = 64


def _check_parallel(settings: ModelSettings) -> None:
    """Raise ValueError where a setting needs one conversation at a time."""
    for name in ("embedding", "cache", "logits_all", "draft_model", "vocab_only"):
        if getattr(settings, name):
            raise ValueError(f"parallel={settings.parallel}: not with {name}={getattr(settings, name)!r}")


class Loaded:
    """A model that is loaded.

    Attributes
    ----------
    llm
        A `Llama`: vocabulary, metadata, chat format. The runner decodes.
    n_ctx
        Tokens of a conversation.
    chat
        Its chat format.
    lock
        Held by whoever uses `llm` beside the thread that decodes, so that it is not freed meanwhile.
    """

    def __init__(self, settings: ModelSettings, metrics: Metrics, waiting: Callable[[], bool]) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        many = settings.parallel > 1
        if many:
            _check_parallel(settings)
            # the runner has a context of its own, so the one of this instance is as small as can be
            llm = load(settings, ServerLlama, dge=None, n_ctx=_LEAST_CTX, n_batch=_LEAST_CTX)
        else:
            llm = load(settings, ServerLlama, dge=settings.dge_config)
        try:
            self.llm = llm
            self.n_ctx = int((settings.n_ctx or llm._model.n_ctx_train()) if many else llm.n_ctx())
            self.chat = ChatFormat(llm, settings)
            if many and (self.chat.eyes or self.chat.driving):
                raise ValueError(f"parallel: not with chat_format={settings.chat_format!r}, which decodes by itself")
            self.runner: Runner = (
                BatchRunner(llm, settings, self.n_ctx, metrics) if many else SerialRunner(llm, metrics, waiting)
            )
        except BaseException:
            llm.close()
            raise

    def close(self) -> None:
        """Free it."""
        with self.lock:
            self.runner.close()


class Engine:
    """Answers requests with one of several models, of which one is loaded at a time.

    Parameters
    ----------
    settings
        Of the server.
    models
        Of each model; the first is loaded at once.

    Raises
    ------
    ValueError
        The first model cannot be loaded.
    """

    def __init__(self, settings: ServerSettings, models: Sequence[ModelSettings]) -> None:
        self.metrics = Metrics()
        self.models = {model.alias: model for model in models}
        self.settings = settings
        self.default = models[0].alias
        self.stopping = threading.Event()
        self._queue: FairQueue[Job | Task] = FairQueue(settings.queue_limit)
        self._loaded: Loaded | None = self._load(self.default)
        self._running: set[Job] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="llama-dge-engine", daemon=True)
        self._thread.start()

    def alias(self, name: str | None) -> str:
        """Return the alias of the model that answers a request; a name that is not known means the first."""
        return name if name in self.models else self.default

    @property
    def status(self) -> dict[str, Any]:
        """What the engine is doing."""
        loaded = self._loaded
        return {
            "status": "stopping" if self.stopping.is_set() else "ok",
            "model": loaded.settings.alias if loaded is not None else None,
            "running": sum(job.running for job in set(self._running)),
            "waiting": len(self._queue),
        }

    async def submit(self, client: str, job: Job) -> None:
        """Have a request answered; raises APIError where that is refused, at once if its model is loaded."""
        loaded = self._loaded
        here = loaded is not None and loaded.settings.alias == job.alias and not loaded.chat.eyes
        # what the server has not: only the thread can tell whether it fits
        if loaded is not None and here and job.config in (None, loaded.settings.dge_config):
            await anyio.to_thread.run_sync(self._prepare, loaded, job)
        self._queue.put(client, job)

    async def call(self, client: str, name: str | None, function: Callable[[Loaded], Any], now: bool = False) -> Any:
        """Return what a function makes of a model, in the thread that has it, or `now` beside it."""
        alias = self.alias(name)
        loaded = self._loaded
        if now and loaded is not None and loaded.settings.alias == alias:
            return await anyio.to_thread.run_sync(self._beside, loaded, function)
        task = Task(alias, function)
        self._queue.put(client, task)
        return await task.result

    def stop(self) -> None:
        """End what is being answered with the next token, and take nothing more."""
        self.stopping.set()
        for item in [*self._queue.close(), *self._running]:
            if isinstance(item, Job):
                item.cancel()
            if item not in self._running:
                item.fail(Gone())

    def close(self) -> None:
        """Free the model, after the token that is being decoded."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # beside the thread

    def _beside(self, loaded: Loaded, function: Callable[[Loaded], Any]) -> Any:
        with loaded.lock:
            if self._loaded is not loaded:
                raise APIError(503, "the model is being exchanged; try again")
            return function(loaded)

    def _prepare(self, loaded: Loaded, job: Job) -> None:
        with loaded.lock:
            if self._loaded is loaded:  # else the thread does it, when the model is back
                job.prepare(loaded)

    # the thread

    def _work(self) -> None:
        try:
            while not self.stopping.is_set():
                runner = self._loaded.runner if self._loaded is not None else None
                busy = runner is not None and runner.busy
                item = self._queue.head(wait=not busy)
                if item is not None:
                    self._take(item, busy)
                if self._loaded is not None and self._loaded.runner.busy:
                    self._step(self._loaded)
                    self._running = {job for job in self._running if job.running}
        finally:
            for job in self._running:
                job.fail(Gone())
            if self._loaded is not None:
                self._loaded.close()
                self._loaded = None

    def _step(self, loaded: Loaded) -> None:
        """Go on; after an error that no request answers for, the model is loaded again."""
        try:
            loaded.runner.step()
        except Exception as error:
            for job in self._running:
                job.fail(error)
            self._loaded = None
            loaded.close()

    def _take(self, item: Job | Task, busy: bool) -> None:
        """Begin what is next in the queue, if it can be begun now."""
        loaded = self._loaded
        here = loaded is not None and loaded.settings.alias == item.alias
        if busy and not (here and (isinstance(item, Task) or (loaded is not None and loaded.runner.fits(item)))):
            return
        self._queue.take()
        try:
            if isinstance(item, Job):
                item.check()
            if not here or loaded is None:
                loaded = self._exchange(item.alias)
            if isinstance(item, Task):
                item.run(loaded)
                return
            loaded.runner.configure(item)
            with loaded.lock:
                item.prepare(loaded)
            self._running.add(item)
            loaded.runner.start(item)
        except BaseException as error:
            item.fail(error)
            self._running.discard(item)
            if not isinstance(error, Exception):
                raise

    def _exchange(self, alias: str) -> Loaded:
        """Free the model that is loaded, and load another."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        try:
            self._loaded = self._load(alias)
        except ValueError as error:  # not the client's fault
            raise APIError(500, f"the model {alias} cannot be loaded: {error}") from error
        return self._loaded

    def _load(self, alias: str) -> Loaded:
        loaded = Loaded(self.models[alias], self.metrics, lambda: len(self._queue) > 0)
        logger.info("loaded %s", alias)
        return loaded

    def config(self, name: str | None) -> DGEConfig | None:
        """Settings of eviction of the model that a request names."""
        return self.models[self.alias(name)].dge_config
