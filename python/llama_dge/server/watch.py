"""What came of a sequence's eviction: counted for `/metrics`, and told in `usage.dge`."""

from __future__ import annotations

from typing import Any

from .. import _native
from ..stats import DGEStats
from .metrics import Metrics


class SequenceWatch:
    """Counts what happens to one sequence.

    Parameters
    ----------
    metrics
        Where it is counted.
    seq
        The sequence.
    """

    def __init__(self, metrics: Metrics, seq: int = 0) -> None:
        self._metrics = metrics
        self._seq = seq
        self._last: DGEStats | None = None

    def forget(self, ctx: Any, on: bool) -> None:
        """Count from here on, after settings have changed."""
        self._last = _native.seq_stats(ctx, self._seq) if on else None

    def observe(self, ctx: Any, on: bool, n_evictions: int | None = None) -> None:
        """Count what has happened since the last call.

        Parameters
        ----------
        ctx
            The context.
        on
            Whether eviction is on.
        n_evictions
            Of this sequence; None: the context's number is, as it has no other sequence.
        """
        before, self._last = self._last, None
        if not on:
            return
        now = self._last = _native.seq_stats(ctx, self._seq)
        metrics = self._metrics
        restore = (now.rows_restored, now.seconds_restore)
        if now.rows_restored and (before is None or restore != (before.rows_restored, before.seconds_restore)):
            metrics.add(restores=1, rows_restored=now.rows_restored, restore_seconds=now.seconds_restore)
        count = n_evictions if n_evictions is not None else now.n_evictions - (before.n_evictions if before else 0)
        if count > 0:
            metrics.add(
                evictions=count,
                rows_evicted=max(0, now.rows_before - now.rows_after) * count,
                eviction_seconds=now.seconds,
            )
            before = None
        metrics.add(
            recalls=max(0, now.n_recalls - (before.n_recalls if before else 0)),
            recall_seconds=max(0.0, now.seconds_recall - (before.seconds_recall if before else 0.0)),
        )


def observe_memory(metrics: Metrics, ctx: Any) -> None:
    """Note how many bytes a context uses."""
    memory = _native.memory(ctx)
    metrics.set(
        weights_bytes=memory.weights,
        kv_bytes=memory.kv,
        kv_max_bytes=memory.kv_max,
        parked_bytes=memory.parked,
        compute_bytes=memory.compute,
    )


def usage(stats: DGEStats | None, n_tokens: int) -> dict[str, Any]:
    """Return what `usage.dge` tells of a cache, None where eviction is off."""
    if stats is None:
        return {"state": "off", "rows_before": n_tokens, "rows_kept": n_tokens, "rows_restored": 0, "n_recalls": 0}
    evicted = stats.state == "evicted"
    return {
        "state": stats.state,
        "rows_before": stats.rows_before if evicted else stats.rows,
        "rows_kept": stats.rows_after if evicted else stats.rows,
        "rows_restored": stats.rows_restored,
        "rows_parked": stats.rows_parked,
        "n_recalls": stats.n_recalls,
        "budget": stats.budget,
        "bytes_before": stats.bytes_before,
        "bytes_after": stats.bytes_after,
        "bytes_parked": stats.bytes_parked,
        "seconds": stats.seconds,
        "error": stats.error,
    }
