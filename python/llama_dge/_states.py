"""Saved states of an instance: what is noted beside the library's own, and which of them are refused."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_cache import BaseLlamaCache


def note(state: llama_cpp.LlamaState, **values: Any) -> None:
    """Note in a state what eviction needs, with checksums of its parts."""
    state.dge = {  # type: ignore[attr-defined]
        **values,
        "checksum": zlib.crc32(state.llama_state),
        "tokens": _checksum_of_tokens(state),
    }


def noted(state: llama_cpp.LlamaState) -> dict[str, Any]:
    """Return what was noted; empty for a state of the stock class. Raises RuntimeError where the state is damaged."""
    saved: dict[str, Any] = getattr(state, "dge", {})
    if "checksum" in saved and saved["checksum"] != zlib.crc32(state.llama_state):
        raise RuntimeError("load_state: the state is damaged: its checksum differs")
    if "tokens" in saved and saved["tokens"] != _checksum_of_tokens(state):
        raise RuntimeError("load_state: the state is damaged: the checksum of its tokens differs")
    return saved


def _checksum_of_tokens(state: llama_cpp.LlamaState) -> int:
    return zlib.crc32(np.asarray(state.input_ids[: state.n_tokens], dtype=np.intc).tobytes())


def fitted(state: llama_cpp.LlamaState, n_ctx: int, n_vocab: int, n_scores: int) -> llama_cpp.LlamaState:
    """Return a copy of a state whose arrays have the sizes of an instance, which the stock class takes for granted.

    Raises
    ------
    RuntimeError
        The state is damaged, of another model, or holds more tokens than `n_ctx`.
    """
    n = state.n_tokens
    # the library takes no bytes at all for a good state and loads nothing
    if not 0 < state.llama_state_size == len(state.llama_state) or not 0 <= n <= len(state.input_ids):
        raise RuntimeError("load_state: the state is damaged: its sizes do not fit together")
    if n > n_ctx:
        raise RuntimeError(f"load_state: the state holds {n} tokens, which is more than n_ctx={n_ctx}")
    if state.scores.ndim != 2 or state.scores.shape[1] != n_vocab:
        raise RuntimeError("load_state: the state is of another model: its vocabulary has another size")
    state = copy.copy(state)
    input_ids = np.zeros(n_ctx, dtype=np.intc)
    input_ids[:n] = state.input_ids[:n]
    state.input_ids = input_ids
    rows = min(n, n_scores)
    if len(state.scores) != rows:
        scores = np.zeros((rows, n_vocab), dtype=np.single)
        scores[: len(state.scores)] = state.scores[:rows]
        state.scores = scores
    return state


class FullStates(BaseLlamaCache):
    """Passes states on to a cache, except those of an evicted sequence: they would push out states to be reused."""

    def __init__(self, cache: BaseLlamaCache) -> None:
        super().__init__(cache.capacity_bytes)
        self.cache = cache

    @property
    def cache_size(self) -> int:
        return self.cache.cache_size

    def __getitem__(self, key: Sequence[int]) -> llama_cpp.LlamaState:
        return self.cache[key]

    def __contains__(self, key: Sequence[int]) -> bool:
        return key in self.cache

    def __setitem__(self, key: Sequence[int], value: llama_cpp.LlamaState) -> None:
        if not getattr(value, "dge", {}).get("evicted", False):
            self.cache[key] = value
