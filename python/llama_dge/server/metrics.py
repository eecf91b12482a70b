"""Counters of the server, in the text format of Prometheus."""

from __future__ import annotations

import threading

_COUNTERS = {
    "requests": "Requests for a completion, by outcome.",
    "prompt_tokens": "Tokens of prompts.",
    "completion_tokens": "Tokens of answers.",
    "evictions": "Prompts whose cache was evicted.",
    "rows_evicted": "Entries per layer and KV head that evictions removed.",
    "restores": "Prompts for which the host copy of an earlier one was put back.",
    "rows_restored": "Entries per layer and KV head that restores put back.",
    "recalls": "Selections after an eviction.",
    "request_seconds": "Seconds in which requests were answered, without waiting for others.",
    "eviction_seconds": "Seconds of evictions, the host copy included.",
    "restore_seconds": "Seconds of restores.",
    "recall_seconds": "Seconds of selections after an eviction.",
}
_GAUGES = {
    "weights_bytes": "Bytes of the model.",
    "kv_bytes": "Bytes of the cache that can be evicted.",
    "kv_max_bytes": "Bytes of the same at its full size.",
    "parked_bytes": "Bytes of host copies.",
    "compute_bytes": "Bytes of the graphs' buffers.",
    "requests_running": "Requests that are being answered.",
    "requests_waiting": "Requests in the queue.",
}
OUTCOMES = ("ok", "error", "cancelled")


class Metrics:
    """Counts, for threads that add while another one reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys((*_COUNTERS, *_GAUGES), 0)
        self._outcomes = dict.fromkeys(OUTCOMES, 0)

    def add(self, **values: float) -> None:
        """Add to counters."""
        with self._lock:
            for name, value in values.items():
                self._values[name] += value

    def set(self, **values: float) -> None:
        """Set gauges."""
        with self._lock:
            self._values.update(values)

    def count(self, outcome: str) -> None:
        """Count a request, which ended as one of `OUTCOMES`."""
        with self._lock:
            self._outcomes[outcome] += 1

    def text(self) -> str:
        """Return all of them in the text format, version 0.0.4."""
        lines = []
        with self._lock:
            for name, text in _COUNTERS.items():
                full = f"llama_dge_{name}_total"
                lines += [f"# HELP {full} {text}", f"# TYPE {full} counter"]
                if name == "requests":
                    lines += [f'{full}{{outcome="{key}"}} {value}' for key, value in self._outcomes.items()]
                else:
                    lines.append(f"{full} {self._values[name]}")
            for name, text in _GAUGES.items():
                full = f"llama_dge_{name}"
                lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge", f"{full} {self._values[name]}"]
        return "\n".join(lines) + "\n"
