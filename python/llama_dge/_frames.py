"""Where the code of a user is."""

from __future__ import annotations

import os
import sys
from types import FrameType


def _folder(module: str) -> list[str]:
    file = getattr(sys.modules.get(module), "__file__", None)
    return [os.path.dirname(file) + os.sep] if file else []


def caller() -> tuple[FrameType | None, int]:
    """Return the innermost frame outside of llama_dge, llama_cpp and the import system, and its depth.

    The depth is what ``warnings.warn`` in the calling function takes as `stacklevel`.
    """
    inside = ("<frozen importlib", *_folder("llama_dge"), *_folder("llama_cpp"))
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame, depth = frame.f_back, depth + 1
    return frame, depth
