"""Failures in the middle of an eviction, as tests ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .driver import dge_library


@contextmanager
def failing_move(n: int) -> Iterator[None]:
    """Let the n-th step fail that moves rows: a device's graph, or the copy of a layer; 0: none."""
    dge_library().llama_dge_debug_fail_move(n)
    try:
        yield
    finally:
        dge_library().llama_dge_debug_fail_move(0)
