"""Settings of sequences with recall."""

from __future__ import annotations

from typing import Any

BUDGET, WINDOW = 40, 8


def recall(every: int, **settings: Any) -> dict[str, Any]:
    """Parameters of the library."""
    return {
        "budget": BUDGET,
        "window": WINDOW,
        "draft_tokens": 2,
        "pooling": "max",
        "park": "ram",
        "recall": every,
        **settings,
    }
