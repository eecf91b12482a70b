"""Draft entries that were removed are not restored from a host copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reference.forward import nmse
from reference.scenario import F32, decode_each, evict_after, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory


DGE: dict[str, Any] = {"budget": 32, "draft_tokens": 4, "window": 8}
TOKENS = tokens_of(400, 0)
N_PROMPT, N_DRAFT = 120, 3


@pytest.mark.parametrize(("park", "recall"), [("ram", False), ("ram", True), ("disk", False)])
@pytest.mark.parametrize("n_left", [0, 2])
def test_draft_entries_that_were_removed_are_not_restored(
    new_context: ContextFactory, tmp_path: Path, park: str, recall: bool, n_left: int
) -> None:
    context = new_context("g2", **F32, dge={**DGE, "park": park, "park_dir": tmp_path})
    evict_after(context, TOKENS[:126], N_PROMPT, N_DRAFT)
    if recall:
        context.enable(**DGE, park=park, recall=4)
    n = N_PROMPT + n_left
    assert context.seq_rm(0, n, -1) and context.info()["n_parked"] == n
    others = tokens_of(30, 5)
    decode_each(context, others)
    assert (context.info()["n_recalls"] > 0) == recall
    assert context.restore(1000) == n
    fresh = new_context("g2", **F32)
    fresh.decode(TOKENS[:n], every=False)
    assert nmse(context.decode(others), fresh.decode(others)) < 1e-9


def test_a_copy_keeps_the_draft_entries_that_its_source_lost(new_context: ContextFactory, tmp_path: Path) -> None:
    for park in ("ram", "disk"):
        context = new_context(
            "g2", **F32, n_seq_max=2, kv_unified=False, dge={**DGE, "park": park, "park_dir": tmp_path}
        )
        evict_after(context, TOKENS[:126], N_PROMPT, N_DRAFT)
        context.seq_cp(0, 1)
        assert context.seq_rm(0, N_PROMPT, -1)
        context.decode(TOKENS[300:310], seq=0)
        assert [context.info(s)["n_parked"] for s in (0, 1)] == [N_PROMPT, N_PROMPT + N_DRAFT]
        assert context.restore(1000, 1) == N_PROMPT + N_DRAFT
        fresh = new_context("g2", **F32)
        fresh.decode(TOKENS[: N_PROMPT + N_DRAFT], every=False)
        assert nmse(context.decode([5], seq=1), fresh.decode([5])) < 1e-9
