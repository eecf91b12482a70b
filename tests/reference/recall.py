"""Settings of sequences whose rows are chosen again."""

from __future__ import annotations

from typing import Any

BUDGET, WINDOW = 40, 8


def recall(refresh: int, **settings: Any) -> dict[str, Any]:
    """Parameters of the library."""
    return {"budget": BUDGET, "window": WINDOW, "draft_tokens": 2, "park": "ram", "refresh": refresh, **settings}
