"""The model of the server: who is served, with which settings, and what came of it."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import llama_cpp
from llama_cpp.llama_cache import BaseLlamaCache
from llama_cpp.server import model as stock

from .. import _native
from .._states import UncutStates
from ..config import DGEConfig
from ..llama import Llama
from .metrics import Metrics
from .settings import BadOverride, ModelSettings, request_config


class Gone(Exception):
    """Nobody waits for this answer any more: the client went away, or the server stops."""


@contextlib.contextmanager
def replaced(module: Any, **names: Any) -> Iterator[None]:
    """Let names of a module stand for something else."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class Service:
    """What the parts of one server share."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.stopping = threading.Event()
        self.proxy: Proxy | None = None

    def close(self) -> None:
        """Free the model, after the token that is being decoded."""
        self.stopping.set()
        if self.proxy is not None:
            self.proxy.free()  # type: ignore[no-untyped-call]
            self.proxy = None


class Request:
    """One request for a completion."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.gone = threading.Event()
        self.override: object = None
        self.include_usage = False
        self.n_prompt = 0
        self.n_completion = 0
        self._begun: float | None = None
        self._outcome: str | None = None

    def check(self) -> None:
        """Raise `Gone` if nobody waits for the answer."""
        if self.gone.is_set() or self.service.stopping.is_set():
            raise Gone("the client has gone away" if self.gone.is_set() else "the server stops")

    def begin(self) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()

    def finish(self, outcome: str) -> None:
        """Count the request, once."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        metrics = self.service.metrics
        metrics.count(outcome)
        metrics.add(prompt_tokens=self.n_prompt, completion_tokens=self.n_completion)
        if self._begun is not None:
            metrics.add(request_seconds=time.perf_counter() - self._begun)


#: The request that an asyncio task is about; None for those that ask for no completion.
current: contextvars.ContextVar[Request | None] = contextvars.ContextVar("llama_dge_request", default=None)


class ServerLlama(Llama):
    """A `Llama` that stops for who has gone away, and counts."""

    service: Service | None = None
    request: Request | None = None  # the one that is served
    _seen = (0, 0, 0.0)  # n_cuts, n_refresh, seconds_refresh that were counted

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._busy = threading.RLock()  # a step of decoding, or the end of the model
        super().__init__(*args, **kwargs)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate a list of tokens; between batches, stop if nobody waits."""
        if self.request is None or len(tokens) <= self.n_batch:
            super().eval(tokens)
            return
        for i in range(0, len(tokens), self.n_batch):
            self.request.check()
            super().eval(tokens[i : i + self.n_batch])

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Create a generator of tokens; it raises `Gone` if nobody waits."""
        request = self.request
        if request is None:
            yield from super().generate(tokens, *args, **kwargs)
            return
        self.observe()
        request.n_prompt += len(tokens)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        inner = super().generate(tokens, *args, **kwargs)
        sent: Sequence[int] | None = None
        try:
            while True:
                with self._busy:
                    request.check()
                    try:
                        token = inner.send(sent)
                    except StopIteration:
                        return
                    request.n_completion += not llama_cpp.llama_vocab_is_eog(vocab, token)
                sent = yield token
        finally:
            inner.close()

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Set the cache for states of earlier prompts, which gets none that is cut, whatever requests ask for."""
        super().set_cache(None if cache is None else UncutStates(cache))

    def begin(self, request: Request) -> None:
        """Serve a request: with its settings, until the next one begins."""
        self.observe()  # what one that was abandoned left
        self.request = request
        request.begin()
        request.check()
        wanted = request_config(self.server_config, request.override)
        if wanted != self.dge_config:
            try:
                self.set_dge(wanted)
            except ValueError as error:
                raise BadOverride(str(error)) from error
            finally:
                self._seen = self._now()

    @property
    def server_config(self) -> DGEConfig | None:
        """Settings of requests that ask for none of their own."""
        return None

    def _dge_restore(self, n_match: int) -> int:
        n = super()._dge_restore(n_match)
        if n > 0 and self.service is not None:
            stats = _native.seq_stats(self.ctx, 0)
            self.service.metrics.add(
                restores=1, rows_restored=stats.rows_restored, restore_seconds=stats.seconds_restore
            )
        return n

    def _now(self) -> tuple[int, int, float]:
        if not self._dge_on:
            return 0, 0, 0.0
        stats = _native.seq_stats(self.ctx, 0)
        return stats.n_cuts, stats.n_refresh, stats.seconds_refresh

    def observe(self) -> None:
        """Count what has happened to the cache since the last call."""
        if self.service is None:
            return
        metrics = self.service.metrics
        if self._dge_on:
            n_cuts, n_refresh, seconds_refresh = self._seen
            self._seen = self._now()
            if self._seen[0] > n_cuts:
                stats = _native.seq_stats(self.ctx, 0)
                metrics.add(
                    cuts=self._seen[0] - n_cuts,
                    rows_evicted=max(0, stats.rows_before - stats.rows_after),
                    cut_seconds=stats.seconds,
                )
                n_refresh, seconds_refresh = 0, 0.0
            metrics.add(
                refreshes=max(0, self._seen[1] - n_refresh),
                refresh_seconds=max(0.0, self._seen[2] - seconds_refresh),
            )
        memory = self.dge_memory
        metrics.set(
            weights_bytes=memory.weights,
            kv_bytes=memory.kv,
            kv_max_bytes=memory.kv_max,
            parked_bytes=memory.parked,
            compute_bytes=memory.compute,
        )

    def dge_usage(self) -> dict[str, Any]:
        """What `usage` tells of the cache."""
        stats = self.dge_stats
        if stats is None:
            n = self.n_tokens
            return {"state": "off", "rows_before": n, "rows_kept": n, "rows_restored": 0, "n_refresh": 0}
        cut = stats.state == "cut"
        return {
            "state": stats.state,
            "rows_before": stats.rows_before if cut else stats.rows,
            "rows_kept": stats.rows_after if cut else stats.rows,
            "rows_restored": stats.rows_restored,
            "rows_parked": stats.rows_parked,
            "n_refresh": stats.n_refresh,
            "budget": stats.budget,
            "bytes_before": stats.bytes_before,
            "bytes_after": stats.bytes_after,
            "bytes_parked": stats.bytes_parked,
            "seconds": stats.seconds,
            "error": stats.error,
        }

    def close(self) -> None:
        """Free the model, after the token that is being decoded."""
        with self._busy:
            super().close()


class Served:
    """A model as one request sees it: everything is the model's, but answers are counted and carry `usage.dge`."""

    def __init__(self, llm: ServerLlama, request: Request) -> None:
        self._llm = llm
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        return self.create_completion(*args, **kwargs)

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        return self._answer(self._llm.create_completion, *args, **kwargs)

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        return self._answer(self._llm.create_chat_completion, *args, **kwargs)

    def _answer(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("stream"):
            return self._stream(call, *args, **kwargs)
        with self._served():
            answer = call(*args, **kwargs)
            answer["usage"]["dge"] = self._llm.dge_usage()
            return answer

    def _stream(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        chunk: dict[str, Any] = {}
        try:
            with self._served():
                for chunk in call(*args, **kwargs):
                    yield chunk
                if self._request.include_usage:
                    yield {**chunk, "choices": [], "usage": self._usage()}
        except Gone:
            return
        except Exception as error:
            # the status was sent long ago; this is how the clients of OpenAI's API learn of it
            bad = isinstance(error, ValueError)
            yield {
                "error": {
                    "message": str(error),
                    "type": "invalid_request_error" if bad else "internal_server_error",
                    "param": "dge" if isinstance(error, BadOverride) else None,
                    "code": None,
                }
            }

    @contextlib.contextmanager
    def _served(self) -> Iterator[None]:
        """Begin, and count in the end. A stream that is dropped is counted by the next request, which has the lock."""
        try:
            self._llm.begin(self._request)
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            if not self._request.service.stopping.is_set():
                self._llm.observe()
            self._request.finish("cancelled" if isinstance(error, Gone) else "error")
            raise
        self._llm.observe()
        self._request.finish("ok")

    def _usage(self) -> dict[str, Any]:
        n_prompt, n = self._request.n_prompt, self._request.n_completion
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n,
            "total_tokens": n_prompt + n,
            "dge": self._llm.dge_usage(),
        }


class _LlamaCpp:
    """The module llama_cpp, but with another class `Llama`."""

    def __init__(self, llama: type[Llama]) -> None:
        self.Llama = llama

    def __getattr__(self, name: str) -> Any:
        return getattr(llama_cpp, name)


class Proxy(stock.LlamaProxy):
    """Loads the models, one at a time, as `ServerLlama`."""

    def __init__(self, service: Service, models: list[ModelSettings]) -> None:
        self._service = service
        self._configs = {model.model_alias or model.model: model.dge_config for model in models}
        service.proxy = self
        super().__init__(models=list(models))

    def config(self, model: str | None) -> DGEConfig | None:
        """Settings of eviction of the model that a request names."""
        name = model if model in self._configs else self._default_model_alias
        return self._configs[name or ""]

    def __call__(self, model: str | None = None) -> Any:
        """Return a model, as the request of this task sees it."""
        try:
            llm = super().__call__(model)
        except ValueError as error:  # a model that cannot be loaded is not the client's fault
            raise RuntimeError(str(error)) from error
        assert isinstance(llm, ServerLlama)
        if llm.service is None:
            llm.service = self._service
            llm.observe()
        request = current.get()
        return llm if request is None else Served(llm, request)

    @staticmethod
    def load_llama_from_model_settings(settings: Any) -> llama_cpp.Llama:
        """Load a model; the stock method passes no setting on that it does not know."""
        config: DGEConfig | None = settings.dge_config

        class Configured(ServerLlama):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, dge=config, **kwargs)

            @property
            def server_config(self) -> DGEConfig | None:
                return config

        with replaced(stock, llama_cpp=_LlamaCpp(Configured)):
            llm: llama_cpp.Llama = stock.LlamaProxy.load_llama_from_model_settings(settings)
            return llm
