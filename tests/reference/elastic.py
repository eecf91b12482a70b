"""Caches that grow with use, and what they have to be like."""

from __future__ import annotations

from typing import Any

from .driver import Context
from .scenario import tokens_of

N_CTX = 2048
LADDER = [512, 768, 1280, 2048]
TOKENS = tokens_of(N_CTX, 0)
DGE: dict[str, Any] = {"budget": 40, "draft_tokens": 3, "scores": "both", "park": "ram"}
F16 = 2  # bytes


def cells_for(n_rows: int, n_max: int = N_CTX) -> int:
    """The ladder, written down once more."""
    return min(next((n for n in LADDER if n >= n_rows), n_max), n_max)


def sizes(context: Context) -> dict[str, int]:
    """What a failure must not change; the buffers of graphs may be made anew."""
    return {name: n for name, n in context.memory_info().items() if name != "compute"}


def bytes_of(n_cells: int, n_layer: int, n_embd: int, n_stream: int = 1) -> int:
    return n_cells * n_stream * n_layer * 2 * n_embd * F16
