"""A cache for states that leaves those of a cut sequence out."""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp
from llama_cpp.llama_cache import BaseLlamaCache


class UncutStates(BaseLlamaCache):
    """Passes states on to a cache, except those of a cut sequence: they would push out states that can be reused."""

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
        if not getattr(value, "dge", {}).get("cut", False):
            self.cache[key] = value
