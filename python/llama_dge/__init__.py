"""Draft-Guided Eviction of the KV cache for llama.cpp.

`Llama` is a drop-in subclass of ``llama_cpp.Llama``; pass ``dge=True`` or a `DGEConfig`. Import this package before
llama_cpp, because it brings its own llama.cpp libraries.
"""

from __future__ import annotations

from . import _library  # noqa: F401  # isort: skip  # first: decides which libllama is loaded

import importlib.metadata

from ._native import DGEError
from ._patch import patch_llama_cpp
from .config import DGEConfig, Policy
from .llama import Llama
from .stats import DGEMemory, DGEStats

try:
    __version__ = importlib.metadata.version("llama-dge")
except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+unknown"

__all__ = ["DGEConfig", "DGEError", "DGEMemory", "DGEStats", "Llama", "Policy", "__version__", "patch_llama_cpp"]
