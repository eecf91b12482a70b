"""What is known about the eviction of the current prompt, and about memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

_RENAMED = {"n_cuts": "n_evictions", "n_refresh": "n_recalls", "seconds_refresh": "seconds_recall"}


@dataclass(frozen=True)
class DGEStats:
    """What the eviction of the current prompt did, and what the cache holds now.

    Fields about the eviction are 0 (`boundary`: -1) until there was one. An entry ("row" in names) is the K and V of
    one position in one layer and KV head.

    Parameters
    ----------
    state
        "empty": there is no prompt. "full": nothing was evicted, because the prompt is not longer than the budget or
        for the reason in `error`. "armed": an eviction will follow, if the answer gets so long. "evicted": it was done.
        "lost": a device failed while entries moved, and the cache was emptied.
    n_prompt
        Tokens of the prompt that the eviction applies to.
    n_draft
        Entries after the prompt when it was evicted.
    budget
        Prompt entries that may be kept on average over layers and heads; a share of the prompt is resolved.
    rows_before, rows_after
        Entries per layer and KV head just before and just after the eviction. `rows_after` is that of the head with the
        most, where heads differ: so many cells are in use. With `recall`, those of the latest selection, and `n_draft`
        as well.
    rows
        Cells in use now.
    n_kv
        Cells that attention reads now, padding included.
    n_layer
        Layers that were evicted.
    boundary
        Last position of the prompt. Entries above it can be removed one by one.
    bytes_before, bytes_after
        Bytes of K and V in the cells of this sequence, in the evicted layers, just before and just after the eviction.
    bytes_kept
        Bytes of the entries that are attended; less than `bytes_after` where layers or heads differ in their number.
    seconds_score, seconds_select, seconds_compact
        Time of the eviction: scores on the device, selection on the host, moving the entries.
    n_evictions
        Evictions since the model was loaded.
    rows_parked, bytes_parked
        Prompt entries in the host copy, and its bytes; with `recall` it holds entries of the answer as well.
    rows_restored
        Entries that the last prompt got back from the host copy; 0 where it did not build on an evicted one.
    seconds_park, seconds_restore
        Time of the host copy, which is part of `seconds_compact`, and of the last restore.
    n_recalls, n_checks
        Selections after the eviction, and with ``recall="auto"`` how often the attention mass was estimated.
    rows_moved
        Entries of one layer and head that these selections moved into the cache.
    seconds_recall
        Time of all of them, checks included.
    error
        Why the last attempt to evict failed, or None.
    rows_by_head
        Entries of each evicted layer and each of its KV heads just after the eviction, the draft's included.
    """

    state: str
    n_prompt: int
    n_draft: int
    budget: int
    rows_before: int
    rows_after: int
    rows: int
    n_kv: int
    n_layer: int
    boundary: int
    bytes_before: int
    bytes_after: int
    bytes_kept: int
    seconds_score: float
    seconds_select: float
    seconds_compact: float
    n_evictions: int
    rows_parked: int = 0
    rows_restored: int = 0
    bytes_parked: int = 0
    seconds_park: float = 0.0
    seconds_restore: float = 0.0
    n_recalls: int = 0
    n_checks: int = 0
    rows_moved: int = 0
    seconds_recall: float = 0.0
    error: str | None = None
    rows_by_head: tuple[tuple[int, ...], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds that the whole eviction took."""
        return self.seconds_score + self.seconds_select + self.seconds_compact

    if not TYPE_CHECKING:  # which would take every attribute for one that exists

        def __getattr__(self, name: str) -> None:
            hint = f"; it is called {_RENAMED[name]}" if name in _RENAMED else ""
            raise AttributeError(f"DGEStats has no attribute {name!r}{hint}")


@dataclass(frozen=True)
class DGEMemory:
    """Bytes that a model and its context use now, over all devices.

    Parameters
    ----------
    weights
        The model's tensors, each once. Where the file is mapped, the CPU backend may keep some of them a second time.
    kv, kv_max
        Buffers of the cache that can be evicted, as they are and at their full size.
    other
        Sliding-window caches and recurrent states.
    compute
        Buffers of the graphs.
    dge
        Captured queries, sums and biases.
    parked
        Host copies, in memory or in files.
    n_cells, n_cells_max
        Cells of the cache, likewise.
    """

    weights: int
    kv: int
    kv_max: int
    other: int
    compute: int
    dge: int
    parked: int
    n_cells: int
    n_cells_max: int


@dataclass(frozen=True)
class DGEEstimate:
    """What a prompt will need, in entries, cells and bytes, over all devices.

    Parameters
    ----------
    n_rows, n_rows_after
        Entries per layer and KV head just before the eviction, draft included, and just after, in the layer and head
        with the most.
    at_most
        Whether `n_rows_after`, and what follows from it, is an upper bound: heads share entries by scores.
    n_cells, n_cells_after
        Cells of the cache just before and just after the eviction.
    kv, kv_after, kv_max
        Bytes of the cache, likewise, and at its full size.
    compute
        Bytes that the graphs need beside the model's own, while the prompt is evaluated.
    dge
        Captured queries, sums and biases.
    parked
        Host copy.
    reason
        Why nothing will be evicted, or None.
    """

    n_rows: int
    n_rows_after: int
    at_most: bool
    n_cells: int
    n_cells_after: int
    kv: int
    kv_after: int
    kv_max: int
    compute: int
    dge: int
    parked: int
    reason: str | None
