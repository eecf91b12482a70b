"""What the native part relies on inside llama.cpp: one probe per private assumption.

``upstream_probe.py`` checks them against a tree and writes the table in patches/README.md from them.
"""

from __future__ import annotations

from .build import PROBES as _BUILD
from .cache import PROBES as _CACHE
from .context import PROBES as _CONTEXT
from .ggml import PROBES as _GGML
from .graph import PROBES as _GRAPH
from .memory import PROBES as _MEMORY
from .probe import Count, Order, Probe

__all__ = ["PROBES", "Count", "Order", "Probe"]

PROBES: tuple[Probe, ...] = (*_CACHE, *_CONTEXT, *_MEMORY, *_GRAPH, *_GGML, *_BUILD)
