"""``llama_cpp.Llama`` with Draft-Guided Eviction of the KV cache."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import zlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_cache import BaseLlamaCache

from . import _native
from ._eviction import SEQ, EvictingLlama
from ._states import UncutStates
from ._turns import Turns
from .config import DGEConfig
from .stats import DGEMemory, DGEStats

_GENERATE = inspect.signature(llama_cpp.Llama.generate)


def _checksum_of_tokens(state: llama_cpp.LlamaState) -> int:
    return zlib.crc32(np.asarray(state.input_ids[: state.n_tokens], dtype=np.intc).tobytes())


class Llama(EvictingLlama):
    """A drop-in ``llama_cpp.Llama`` that can cut its KV cache after the first tokens of an answer.

    Every parameter, method and attribute of llama_cpp.Llama works as documented there; with ``dge=None`` nothing
    differs. With eviction on, `n_tokens`, positions and `n_ctx` stay logical: they count evicted tokens, too.

    Parameters
    ----------
    model_path
        Path of a GGUF file.
    dge
        True (the defaults), a dict of settings or a `DGEConfig` turns eviction on; None or False leaves it off.
    **kwargs
        Every other parameter of llama_cpp.Llama.

    Raises
    ------
    TypeError
        An unknown parameter whose name starts with "dge", a setting outside of `dge`, or an unknown one in it.
    ValueError
        A setting that is out of range, ``embedding=True``, or a model that cannot be cut while `dge.strict` is True.
    DGEError
        The library could not turn eviction on, for want of memory for example.

    Notes
    -----
    - The cut is made by `generate` and everything built on it. Code that drives `eval` and `sample` calls `evict`.
    - A prompt with images or audio is not cut; a warning says so once.
    - `set_cache`: states of a cut sequence are not stored, for they answer one question only.
    - Threads: calls wait for each other. A stream that was begun before another call raises RuntimeError when it is
      asked for its next token, because its cache is gone.
    - A decode that fails, or is interrupted, empties the cache; the next call starts over.
    - With `draft_model`, logits of all tokens are kept (n_ctx x n_vocab floats), which llama_cpp.Llama needs as well
      but does not allocate, so that it fails where the prompt is longer than n_batch. It proposes nothing before the
      cut. With `refresh`, rows are chosen again after other tokens than without it, so answers may differ; more than 16
      proposals in vain may put off a choice.

    Examples
    --------
    >>> llm = Llama("model.gguf", n_ctx=8192, dge={"budget": 512})  # doctest: +SKIP
    >>> llm(prompt)["choices"][0]["text"], llm.dge_stats.rows_after  # doctest: +SKIP
    """

    #: The settings as given, or None where eviction was not asked for.
    dge_config: DGEConfig | None

    def __init__(
        self, model_path: str, *, dge: bool | Mapping[str, Any] | DGEConfig | None = None, **kwargs: Any
    ) -> None:
        self._stack = contextlib.ExitStack()  # __del__ closes it, also when this constructor raises
        self._dge_on = False
        self._dge_callback: Any = None  # the library calls it as long as the context lives
        self._dge_warned: set[str] = set()
        self._dge_arm_error: str | None = None
        self._dge_last_token: int | None = None  # last token that generate() yielded
        self._dge_text_end = 0  # positions below were filled by eval(), that is by tokens and not by images
        self._dge_turns = Turns()
        self._dge_cut_by: DGEConfig | None = None  # what the cut was made with; None where a state brought it

        settings = {field.name for field in dataclasses.fields(DGEConfig)}
        unknown = sorted(name for name in kwargs if name.lower().startswith("dge") or name in settings)
        if unknown:
            raise TypeError(
                f'unknown parameter {", ".join(unknown)}; settings go into dge, as in dge={{"budget": 512}}'
            )
        self.dge_config = DGEConfig.from_any(dge)
        if self.dge_config is not None and kwargs.get("embedding"):
            raise ValueError("dge and embedding=True exclude each other: embeddings leave no cache to cut")
        if kwargs.get("draft_model") is not None:
            kwargs["logits_all"] = True

        with _native.elastic(self.dge_config is not None and self.dge_config.elastic):
            super().__init__(model_path, **kwargs)
        if self.dge_config is not None:
            try:
                self._dge_enable(self.dge_config)
                self._dge_warn_budget(self.dge_config)
            except BaseException:
                self.close()
                raise

    def set_dge(self, dge: bool | Mapping[str, Any] | DGEConfig | None) -> None:
        """Change the settings for the prompts to come.

        A cut that was made already stays until the next call. If that goes on with the answer, the prompt is cut anew,
        but not with ``new_turn="append"`` nor after `load_state`. `elastic` is decided by the constructor.

        Parameters
        ----------
        dge
            As the constructor's. None or False turns eviction off, which empties a cache that was cut.

        Raises
        ------
        TypeError, ValueError, DGEError
            As the constructor; the old settings stay in force then.
        """
        config = DGEConfig.from_any(dge)
        if config is not None and self.context_params.embeddings:
            raise ValueError("dge and embedding=True exclude each other: embeddings leave no cache to cut")
        with self._dge_turns.call():
            if config is not None:
                self._dge_enable(config)
            else:
                self._dge_switch_off()
            self.dge_config = config
            if self._dge_on and self.cache is not None and not isinstance(self.cache, UncutStates):
                self.set_cache(self.cache)
        if config is not None:
            self._dge_warn_budget(config)

    # what users read

    @property
    def dge_enabled(self) -> bool:
        """Whether prompts are cut: False where eviction is off or the model does not support it."""
        return self._dge_on

    @property
    def dge_stats(self) -> DGEStats | None:
        """What the last cut did and what the cache holds now; None before any prompt and where eviction is off."""
        if not self._dge_on or self.ctx is None or self.n_tokens == 0:
            return None
        with self._dge_turns.glance():
            stats = _native.seq_stats(self.ctx, SEQ)
            if stats.error is None and self._dge_arm_error is not None:
                stats = dataclasses.replace(stats, error=self._dge_arm_error)
            if stats.state == "evicted":
                rows = tuple(
                    tuple(_native.n_kept(self.ctx, SEQ, i, head) for head in range(_native.n_head_kv(self.ctx, i)))
                    for i in self.dge_layers
                )
                stats = dataclasses.replace(stats, rows_by_head=rows)
            return stats

    @property
    def dge_memory(self) -> DGEMemory:
        """Bytes that the model and its context use now."""
        return _native.memory(self.ctx)

    @property
    def dge_layers(self) -> list[int]:
        """Layers of the model that a cut applies to, ascending."""
        return _native.layers(self.ctx)

    def dge_kept(self, layer: int, head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a layer and KV head kept at the last cut.

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
            No such layer or head is cut.
        DGEError
            Nothing was cut.
        """
        layers = self.dge_layers
        if layer not in layers:
            raise ValueError(f"layer={layer!r}: the layers that are cut are {', '.join(map(str, layers))}")
        n_head = _native.n_head_kv(self.ctx, layer)
        if head not in range(n_head):
            raise ValueError(f"head={head!r}: layer {layer} has the KV heads 0 .. {n_head - 1}")
        with self._dge_turns.glance():
            if self._dge_on and (state := _native.seq_stats(self.ctx, SEQ).state) != "evicted":
                raise _native.DGEError(f'dge_kept: nothing was cut (dge_stats.state: "{state}")', _native.ERR_SEQ)
            return _native.kept(self.ctx, SEQ, layer, head)

    def evict(self) -> bool:
        """Cut the cache now. For code that calls `eval` and `sample` itself; `generate` cuts without it.

        Everything evaluated so far is the prompt, unless `generate` was called for it.

        Returns
        -------
        bool
            False where the prompt is not longer than the budget, so that nothing had to be cut.

        Raises
        ------
        RuntimeError
            Eviction is off, or the prompt has images.
        DGEError
            The cut failed; the cache is as it was, or with `status` -13 (a device failed) empty.
        """
        if not self._dge_on:
            raise RuntimeError("evict: eviction is off; pass dge=True to the constructor")
        if self._dge_text_end < self.n_tokens:
            raise RuntimeError("evict: a prompt with images or audio cannot be cut")
        with self._dge_turns.look():
            try:
                cut = _native.seq_evict(self.ctx, SEQ)
            except _native.DGEError as error:
                if error.status == _native.ERR_LOST:
                    self._dge_clear()
                _native.raise_interrupt(self._dge_callback)
                raise
            self._dge_cut_by = self.dge_config
            return cut

    # the stock methods that must know about a cut

    def close(self) -> None:
        """Free the model. Calls for answers, states, its cache or its eviction raise an error afterwards."""
        self._dge_on = False
        super().close()

    def _dge_check_open(self) -> None:
        if self.ctx is None:  # the library would follow it
            raise RuntimeError("the model is closed")

    def reset(self) -> None:
        """Reset the model state, eviction included."""
        with self._dge_turns.call():
            super().reset()  # type: ignore[no-untyped-call]
            self._dge_text_end = 0
            if self._dge_on:
                self._dge_clear()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate a list of tokens.

        Raises
        ------
        RuntimeError
            llama_decode failed. With eviction on, the cache is empty then. A DGEError where a device failed in a cut.
        """
        self._dge_check_open()
        if not self._dge_on:
            start = self.n_tokens
            try:
                super().eval(tokens)
            finally:
                if start <= self._dge_text_end:  # set_dge may turn eviction on later
                    self._dge_text_end = self.n_tokens
            return
        with self._dge_turns.call():
            self._dge_eval(tokens)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Create a generator of tokens from a prompt; parameters as in llama_cpp.Llama.generate.

        With eviction on, the cache is cut when `draft_tokens` tokens have been yielded and another is asked for.
        """
        self._dge_check_open()
        if not self._dge_on:
            yield from super().generate(tokens, *args, **kwargs)
            return
        tokens = list(tokens)
        reset = _GENERATE.bind(self, tokens, *args, **kwargs).arguments.get("reset", True)
        with self._dge_turns.call() as turn:
            self._dge_prepare(tokens, reset)

        inner = super().generate(tokens, *args, **kwargs)
        sent: Sequence[int] | None = None
        cut_seen_at: int | None = None
        armed = False
        while True:
            with self._dge_turns.step(turn):
                try:
                    with self._dge_without_proposals(cut_seen_at is not None and self.n_tokens < cut_seen_at - 1):
                        token = inner.send(sent)
                except StopIteration:
                    return
                if not armed:
                    # Only now is the prompt complete: it may have come in several evals, some of them before this call.
                    armed = True
                    with self._dge_turns.glance():
                        cut_seen_at = self._dge_arm()
                elif cut_seen_at is not None and self.n_tokens >= cut_seen_at:
                    cut_seen_at = None
                    self._dge_report()
                self._dge_last_token = token
            sent = yield token

    # requests: one at a time, other threads wait

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Generate text from a prompt; parameters as in llama_cpp.Llama.create_completion."""
        self._dge_check_open()
        with self._dge_turns.request(self._dge_on):
            try:
                return super().create_completion(*args, **kwargs)
            except ValueError as error:
                if self._dge_on and "exceed context window" in str(error):
                    raise ValueError(f"{error}; eviction makes the cache smaller, but n_ctx limits as ever") from None
                raise

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Generate a reply to messages; parameters as in llama_cpp.Llama.create_chat_completion."""
        self._dge_check_open()
        with self._dge_turns.request(self._dge_on):
            return super().create_chat_completion(*args, **kwargs)

    # states

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Set the cache for states of earlier prompts. States of a cut sequence are not stored in it."""
        super().set_cache(UncutStates(cache) if self._dge_on and cache is not None else cache)

    def save_state(self) -> llama_cpp.LlamaState:
        """Save the state. After a cut it holds the rows that are left but not those that are parked."""
        self._dge_check_open()
        with self._dge_turns.look():
            state = super().save_state()
        if self._dge_on:
            state.dge = {  # type: ignore[attr-defined]
                "evicted": self.n_tokens > 0 and _native.seq_stats(self.ctx, SEQ).state == "cut",
                "text_end": self._dge_text_end,
                "last_token": self._dge_last_token,
                "model": _native.fingerprint(self.ctx),
                "checksum": zlib.crc32(state.llama_state),
                "tokens": _checksum_of_tokens(state),
            }
        return state

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Load a state of `save_state`.

        With eviction on, n_ctx and n_batch may be others than those of the instance that saved it.

        Raises
        ------
        RuntimeError
            The state is damaged, is of another model, cache layout or version, or holds more tokens than n_ctx. The
            cache is empty then.
        """
        self._dge_check_open()
        saved: dict[str, Any] = getattr(state, "dge", {})
        with self._dge_turns.call():
            try:
                if "checksum" in saved and saved["checksum"] != zlib.crc32(state.llama_state):
                    raise RuntimeError("load_state: the state is damaged: its checksum differs")
                if "tokens" in saved and saved["tokens"] != _checksum_of_tokens(state):
                    raise RuntimeError("load_state: the state is damaged: the checksum of its tokens differs")
                if self._dge_on and "model" in saved and saved["model"] != _native.fingerprint(self.ctx):
                    raise RuntimeError("load_state: the state is of another model or another type of cache")
                if self._dge_on:
                    state = self._dge_fitted(state)
                super().load_state(state)
                if self._dge_on and llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, SEQ) + 1 < state.n_tokens:
                    raise RuntimeError(f"load_state: the state does not hold the {state.n_tokens} tokens that it names")
            except BaseException:
                self._dge_clear()
                raise
        self._dge_text_end = saved.get("text_end", self.n_tokens)
        self._dge_last_token = saved.get("last_token")
        self._dge_cut_by = None

    def _dge_fitted(self, state: llama_cpp.LlamaState) -> llama_cpp.LlamaState:
        """A copy of a state whose arrays have the sizes of this instance, which the stock class takes for granted."""
        n = state.n_tokens
        # the library takes no bytes at all for a good state and loads nothing
        if not 0 < state.llama_state_size == len(state.llama_state) or not 0 <= n <= len(state.input_ids):
            raise RuntimeError("load_state: the state is damaged: its sizes do not fit together")
        if n > self._n_ctx:
            raise RuntimeError(f"load_state: the state holds {n} tokens, which is more than n_ctx={self._n_ctx}")
        if state.scores.ndim != 2 or state.scores.shape[1] != self._n_vocab:
            raise RuntimeError("load_state: the state is of another model: its vocabulary has another size")
        state = copy.copy(state)
        input_ids = np.zeros(self._n_ctx, dtype=np.intc)
        input_ids[:n] = state.input_ids[:n]
        state.input_ids = input_ids
        rows = min(n, len(self.scores))
        if len(state.scores) != rows:
            scores = np.zeros((rows, self._n_vocab), dtype=np.single)
            scores[: len(state.scores)] = state.scores[:rows]
            state.scores = scores
        return state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "dge": self.dge_config}  # type: ignore[no-untyped-call]
