"""``llama_cpp.Llama`` with Draft-Guided Eviction of the KV cache."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_cache import BaseLlamaCache

from . import _native, _states, _troubles
from ._closed import FreedModel, refuse_after_close
from ._eviction import SEQ, Eviction
from ._signatures import as_stock, bound
from ._turns import Turns
from .config import RENAMED, DGEConfig
from .stats import DGEMemory, DGEStats


@refuse_after_close("close", "dge_config")
class Llama(llama_cpp.Llama):
    """A drop-in ``llama_cpp.Llama`` that can evict its KV cache after the first answer tokens.

    Every parameter, method and attribute of llama_cpp.Llama works as documented there; with ``dge=None`` nothing
    differs. With eviction on, `n_tokens`, positions and `n_ctx` stay logical: they count evicted tokens as well.

    Parameters
    ----------
    model_path
        Path of a GGUF file.
    dge
        True (the defaults), the name of a preset ("paper", "recall"), a dict of settings or a `DGEConfig` turns
        eviction on; None or False leaves it off.
    **kwargs
        Every other parameter of llama_cpp.Llama. With ``verbose=True`` the settings in force are logged (level INFO).

    Raises
    ------
    TypeError
        An unknown parameter whose name starts with "dge", a setting outside of `dge`, or an unknown one in it.
    ValueError
        A setting that is out of range, ``embedding=True``, a file that cannot be loaded, or a model that is not
        supported while `dge.strict` is True.
    DGEError
        The library could not turn eviction on, for want of memory for example.

    Notes
    -----
    - `generate` and everything built on it evict. Code that drives `eval` and `sample` calls `evict`.
    - A prompt with images or audio is not evicted; a warning says so once.
    - `set_cache`: states of an evicted sequence are not stored, for they answer one question only.
    - Threads: calls wait for each other. A stream that was begun before another call raises RuntimeError when it is
      asked for its next token, because its cache is gone.
    - A forked child may use the instance, unless another thread used it at that moment; then calls raise RuntimeError.
      With ``n_threads`` or ``n_threads_batch`` above 1 the child of a process that has decoded may hang, as with
      llama_cpp.Llama, because it has no threads of the maths library. Spawned children and pickling work.
    - A decode that fails, or is interrupted, empties the cache; the next call starts over.
    - After `close` every method and property raises RuntimeError.
    - With `draft_model`, logits of all tokens are kept (n_ctx x n_vocab floats), which llama_cpp.Llama needs as well
      but does not allocate, so that it fails where the prompt is longer than n_batch. It proposes nothing before the
      eviction. With `recall`, entries are selected again after other tokens than without it, so answers may differ;
      more than 16 rejected proposals may put off a selection.

    Examples
    --------
    >>> llm = Llama("model.gguf", n_ctx=8192, dge={"budget": 512})  # doctest: +SKIP
    >>> llm(prompt)["choices"][0]["text"], llm.dge_stats.rows_after  # doctest: +SKIP
    """

    _closed = False

    @as_stock
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        dge: bool | str | Mapping[str, Any] | DGEConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self._stack = contextlib.ExitStack()  # __del__ closes it, also when this constructor raises
        self._turns = Turns()
        self._eviction = Eviction(None)

        settings = {*RENAMED, *(field.name for field in dataclasses.fields(DGEConfig))}
        unknown = sorted(name for name in kwargs if name.lower().startswith("dge") or name in settings)
        if unknown:
            raise TypeError(
                f'unknown parameter {", ".join(unknown)}; settings go into dge, as in dge={{"budget": 512}}'
            )
        config = self._eviction.config = DGEConfig.from_any(dge)
        if config is not None and kwargs.get("embedding"):
            raise ValueError("dge and embedding=True exclude each other: embeddings leave no cache to evict")
        if kwargs.get("draft_model") is not None:
            kwargs["logits_all"] = True

        path = os.path.expanduser(os.fspath(model_path))
        for name in ("lora_path", "lora_base"):
            if isinstance(kwargs.get(name), os.PathLike):
                kwargs[name] = os.fspath(kwargs[name])
        with _native.elastic(config is not None and config.elastic):
            try:
                super().__init__(path, **kwargs)
            except ValueError as error:
                why = _troubles.of_loading(path, kwargs)
                if why is None:
                    raise
                raise ValueError(f"{error}: {why}") from error
        if config is not None:
            try:
                self._enable(config)
                self._eviction.warn_budget(self)
            except BaseException:
                self.close()
                raise

    def _enable(self, config: DGEConfig) -> None:
        self._eviction.enable(self, config)
        self._turns.has_thread = self._eviction.on and config.recall_async

    def set_dge(self, dge: bool | str | Mapping[str, Any] | DGEConfig | None) -> None:
        """Change the settings for the prompts to come.

        A prompt that was evicted already stays so until the next call. If that goes on with the answer, the prompt is
        evicted anew, but not with ``new_turn="append"`` nor after `load_state`. The constructor decides on `elastic`.

        Parameters
        ----------
        dge
            As the constructor's. None or False turns eviction off, which empties a cache that was evicted.

        Raises
        ------
        TypeError, ValueError, DGEError
            As the constructor; the old settings stay in force then.
        """
        config = DGEConfig.from_any(dge)
        if config is not None and self.context_params.embeddings:
            raise ValueError("dge and embedding=True exclude each other: embeddings leave no cache to evict")
        with self._turns.call():
            if config is not None:
                self._enable(config)
            else:
                self._eviction.disable(self)
            if self._eviction.on and self.cache is not None and not isinstance(self.cache, _states.FullStates):
                self.set_cache(self.cache)
        self._eviction.warn_budget(self)

    # what users read

    @property
    def dge_config(self) -> DGEConfig | None:
        """The settings as given, or None where eviction was not asked for."""
        return self._eviction.config

    @property
    def dge_enabled(self) -> bool:
        """Whether prompts are evicted: False where eviction is off or the model does not support it."""
        return self._eviction.on

    @property
    def dge_stats(self) -> DGEStats | None:
        """What the last eviction did and what the cache holds now; None before any prompt and where eviction is off."""
        if not self._eviction.on or self.n_tokens == 0:
            return None
        with self._turns.glance():
            return self._eviction.stats(self)

    @property
    def dge_memory(self) -> DGEMemory:
        """Bytes that the model and its context use now."""
        return _native.memory(self.ctx)

    @property
    def dge_layers(self) -> list[int]:
        """Layers of the model that eviction applies to, ascending."""
        return _native.layers(self.ctx)

    def dge_kept(self, layer: int, head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a layer and KV head kept at the last eviction.

        Parameters
        ----------
        layer
            Layer of the model, one of `dge_layers`.
        head
            KV head, from 0.

        Returns
        -------
        ndarray of int32, shape [rows_after]
            Positions in the original prompt, ascending, followed by the draft's.

        Raises
        ------
        ValueError
            Eviction does not apply to such a layer or head.
        DGEError
            Nothing was evicted.
        """
        layers = self.dge_layers
        if layer not in layers:
            raise ValueError(f"layer={layer!r}: eviction applies to the layers {', '.join(map(str, layers))}")
        n_head = _native.n_head_kv(self.ctx, layer)
        if head not in range(n_head):
            raise ValueError(f"head={head!r}: layer {layer} has the KV heads 0 .. {n_head - 1}")
        with self._turns.glance():
            if self._eviction.on and (state := self._eviction.state(self)) != "evicted":
                raise _native.DGEError(f'dge_kept: nothing was evicted (dge_stats.state: "{state}")', _native.ERR_SEQ)
            return _native.kept(self.ctx, SEQ, layer, head)

    def evict(self) -> bool:
        """Evict now. For code that calls `eval` and `sample` itself; `generate` evicts without it.

        Everything evaluated so far is the prompt, unless `generate` was called for it.

        Returns
        -------
        bool
            False where the prompt is not longer than the budget, so that nothing had to be evicted.

        Raises
        ------
        RuntimeError
            Eviction is off, or the prompt has images.
        DGEError
            The eviction failed; the cache is as it was, or with `status` -13 (a device failed) empty.
        """
        if not self._eviction.on:
            raise RuntimeError("evict: eviction is off; pass dge=True to the constructor")
        with self._turns.look():
            return self._eviction.evict(self)

    # the stock methods that must know about an eviction

    def close(self) -> None:
        """Free the model. Every other method and property raises RuntimeError afterwards."""
        if "_stack" in self.__dict__:  # else the constructor was called with the wrong parameters
            super().close()
        self._closed = True
        model = getattr(self, "_model", None)
        if model is not None:
            model.__class__ = FreedModel  # tokenizers refer to it

    @as_stock
    def reset(self) -> None:
        """Reset the model state, eviction included."""
        with self._turns.call():
            super().reset()  # type: ignore[no-untyped-call]
            self._eviction.text_end = 0
            if self._eviction.on:
                self._eviction.clear(self)

    @as_stock
    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate a list of tokens.

        Raises
        ------
        RuntimeError
            llama_decode failed. With eviction on, the cache is empty then. A DGEError where a device failed while
            entries moved.
        """
        if not self._eviction.on:
            start = self.n_tokens
            try:
                super().eval(tokens)
            finally:
                self._eviction.note_eval(self, start)  # set_dge may turn eviction on later
            return
        with self._turns.call():
            self._eviction.eval(self, tokens, super().eval)

    @as_stock
    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Create a generator of tokens from a prompt; parameters as in llama_cpp.Llama.generate.

        With eviction on, the cache is evicted when `draft_tokens` tokens have been yielded and another is asked for.
        """
        if not self._eviction.on:
            yield from super().generate(tokens, *args, **kwargs)
            return
        tokens = list(tokens)
        reset = bound(super().generate, tokens, *args, **kwargs)["reset"]
        with self._turns.call() as turn:
            self._eviction.prepare(self, tokens, reset)

        inner = super().generate(tokens, *args, **kwargs)
        sent: Sequence[int] | None = None
        evicted_at: int | None = None  # tokens at which the eviction will have been made
        armed = False
        while True:
            with self._turns.step(turn):
                try:
                    with self._without_proposals(evicted_at is not None and self.n_tokens < evicted_at - 1):
                        token = inner.send(sent)
                except StopIteration:
                    return
                if not armed:
                    # Only now is the prompt complete: it may have come in several evals, some of them before this call.
                    armed = True
                    with self._turns.glance():
                        evicted_at = self._eviction.arm(self)
                elif evicted_at is not None and self.n_tokens >= evicted_at:
                    evicted_at = None
                    self._eviction.report(self)
                self._eviction.last_token = token
            sent = yield token

    @contextlib.contextmanager
    def _without_proposals(self, on: bool) -> Iterator[None]:
        """Leave the draft model out: its tokens would displace queries that the eviction needs."""
        draft_model = self.draft_model
        if on:
            self.draft_model = None
        try:
            yield
        finally:
            self.draft_model = draft_model

    # requests: one at a time, other threads wait

    @as_stock
    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Generate text from a prompt; parameters as in llama_cpp.Llama.create_completion."""
        with self._turns.request(self._eviction.on):
            try:
                return super().create_completion(*args, **kwargs)
            except ValueError as error:
                if self._eviction.on and "exceed context window" in str(error):
                    raise ValueError(f"{error}; eviction makes the cache smaller, but n_ctx still applies") from None
                raise

    @as_stock
    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Generate a reply to messages; parameters as in llama_cpp.Llama.create_chat_completion."""
        with self._turns.request(self._eviction.on):
            return super().create_chat_completion(*args, **kwargs)

    # states

    @as_stock
    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Set the cache for states of earlier prompts. States of an evicted sequence are not stored in it."""
        super().set_cache(_states.FullStates(cache) if self._eviction.on and cache is not None else cache)

    @as_stock
    def save_state(self) -> llama_cpp.LlamaState:
        """Save the state. After an eviction it holds the kept entries but not the host copy."""
        with self._turns.look():
            state = super().save_state()
        if self._eviction.on:
            _states.note(state, **self._eviction.to_note(self))
        return state

    @as_stock
    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Load a state of `save_state`.

        With eviction on, n_ctx and n_batch may be others than those of the instance that saved it.

        Raises
        ------
        RuntimeError
            The state is damaged, is of another model, cache layout or version, or holds more tokens than n_ctx. The
            cache is empty then.
        """
        noted: dict[str, Any] = {}
        with self._turns.call():
            try:
                noted = _states.noted(state)
                if self._eviction.on:
                    if "model" in noted and noted["model"] != _native.fingerprint(self.ctx):
                        raise RuntimeError("load_state: the state is of another model or another type of cache")
                    state = _states.fitted(state, self._n_ctx, self._n_vocab, len(self.scores))
                super().load_state(state)
                if self._eviction.on and self._held() < state.n_tokens:
                    raise RuntimeError(f"load_state: the state does not hold the {state.n_tokens} tokens that it names")
            except BaseException:
                self._eviction.clear(self)
                raise
        self._eviction.take_over(self, noted)

    def _held(self) -> int:
        """Return how many tokens the library's cache holds."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, SEQ)) + 1

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "dge": self.dge_config}  # type: ignore[no-untyped-call]
