"""Counters of the server, in the text format of Prometheus."""

from __future__ import annotations

import threading

_COUNTERS = {
    "requests": "Requests for a completion, by outcome.",
    "prompt_tokens": "Tokens of prompts.",
    "completion_tokens": "Tokens of answers.",
    "cuts": "Prompts whose cache was cut.",
    "rows_evicted": "Rows per layer and KV head that cuts removed.",
    "restores": "Prompts that got rows of an earlier one back.",
    "rows_restored": "Rows per layer and KV head that these got.",
    "refreshes": "Choices of the rows after a cut.",
    "request_seconds": "Seconds in which requests were answered, without waiting for others.",
    "cut_seconds": "Seconds of cuts, parking included.",
    "restore_seconds": "Seconds of restores.",
    "refresh_seconds": "Seconds of choices after a cut.",
}
_GAUGES = {
    "weights_bytes": "Bytes of the model.",
    "kv_bytes": "Bytes of the cache that can be cut.",
    "kv_max_bytes": "Bytes of the same at its full size.",
    "parked_bytes": "Bytes of rows that wait for a later prompt.",
    "compute_bytes": "Bytes of the graphs' buffers.",
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
        """All of them in the text format, version 0.0.4."""
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
