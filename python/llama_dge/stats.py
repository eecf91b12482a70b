"""What is known about the eviction of the current prompt, and about memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DGEStats:
    """What the cut of the current prompt did, and what the cache holds now.

    Fields about the cut are 0 (`boundary`: -1) until there was one. A row is the K and V of one position in one layer
    and KV head.

    Parameters
    ----------
    state
        "full": nothing was evicted, because the prompt is not longer than the budget or for what `error` says. "armed":
        a cut will follow, if the answer gets so long. "cut": it was done.
    n_prompt
        Tokens of the prompt that the cut applies to.
    n_draft
        Rows after the prompt when it was cut.
    budget
        Rows of the prompt that may stay on average over layers and heads, with a share of the prompt resolved.
    rows_before, rows_after
        Rows per layer and KV head just before and just after the cut. `rows_after` is that of the head with the most,
        where heads differ: so many cells are in use. With `refresh`, those of the latest choice; `n_draft`, too.
    rows
        Cells in use now.
    n_kv
        Cells that attention reads now, padding included.
    n_layer
        Layers that were cut.
    boundary
        Last position of the prompt. What lies above it can be removed again one by one.
    bytes_before, bytes_after
        Bytes of K and V in the cells of this sequence, in the layers that were cut, just before and just after the cut.
    bytes_kept
        Bytes of the rows that are attended; less than `bytes_after` where layers or heads differ in their number.
    seconds_score, seconds_select, seconds_compact
        Time of the cut: scores on the device, choice of the rows on the host, moving them.
    n_cuts
        Cuts since the model was loaded.
    rows_parked, bytes_parked
        Rows of before the cut that wait for a later prompt; bytes of all that are parked, with `refresh` rows of the
        answer, too.
    rows_restored
        Rows that the last prompt got back from there; 0 where it did not build on a cut one.
    seconds_park, seconds_restore
        Time that parking took, which is part of `seconds_compact`, and the last restore.
    n_refresh, n_checks
        Choices after the cut, and with ``refresh="auto"`` how often it was looked whether one pays.
    rows_moved
        Rows of one layer and head that these choices brought back into the cache.
    seconds_refresh
        Time of all of them.
    error
        Why the last attempt to cut failed, or None.
    rows_by_head
        Rows of each layer that was cut and each of its KV heads just after the cut, the draft's included.
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
    n_cuts: int
    rows_parked: int = 0
    rows_restored: int = 0
    bytes_parked: int = 0
    seconds_park: float = 0.0
    seconds_restore: float = 0.0
    n_refresh: int = 0
    n_checks: int = 0
    rows_moved: int = 0
    seconds_refresh: float = 0.0
    error: str | None = None
    rows_by_head: tuple[tuple[int, ...], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds that the whole cut took."""
        return self.seconds_score + self.seconds_select + self.seconds_compact


@dataclass(frozen=True)
class DGEMemory:
    """Bytes that a model and its context use now, over all devices.

    Parameters
    ----------
    weights
        The model's tensors, each once. Where the file is mapped, the CPU backend may keep some of them a second time.
    kv, kv_max
        Buffers of the cache that can be cut, as they are and at their full size.
    other
        Sliding-window caches and recurrent states.
    compute
        Buffers of the graphs.
    dge
        Captured queries, sums and biases.
    parked
        Rows that wait for a later prompt, in host memory or in files.
    n_cells, n_cells_max
        Cells of the cache, as many as it holds rows, likewise.
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
