"""Captured queries and sums, saved and loaded with a state: the eviction is the same as without."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.forward import nmse
from reference.scenario import as_lists, decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

N_PROMPT = 150
TOKENS = tokens_of(N_PROMPT + 20, 3)
# what captures: the longest draft and window of those that are evicted
WIDE: dict[str, Any] = {"budget": 40, "draft_tokens": 9, "window": 12, "scores": "both"}
SUMS: dict[str, Any] = {**WIDE, "policy": "h2o"}
OTHERS: list[dict[str, Any]] = [
    {"budget": 32, "draft_tokens": 9, "scores": "draft"},
    {"budget": 32, "draft_tokens": 3, "window": 12},
    {"budget": 48, "draft_tokens": 1, "scores": "policy"},
    {"budget": 32, "draft_tokens": 4, "recall": 3, "park": "ram"},
    {"budget": 32, "draft_tokens": 2, "policy": "streamingllm"},
    {"budget": 32, "draft_tokens": 1, "policy": "h2o", "scores": "policy"},
    {"budget": 48, "draft_tokens": 4, "policy": "h2o", "scores": "policy", "head_budgets": "adaptive"},
    {"budget": 32, "draft_tokens": 3, "policy": "h2o", "scores": "both"},
]


@pytest.mark.parametrize("settings", OTHERS, ids=str)
@pytest.mark.parametrize("model", ["g2", "g3", "g8"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_other_settings_go_on(
    new_context: ContextFactory, model: str, settings: dict[str, Any], flash_attn: bool
) -> None:
    """One context reads and drafts, another one evicts with settings of its own."""
    n_draft = settings["draft_tokens"] - 1
    alone = new_context(model, flash_attn=flash_attn, dge=settings)
    prefill_and_arm(alone, TOKENS[:N_PROMPT])
    want = decode_each(alone, TOKENS[N_PROMPT:])[n_draft:]

    # sums are also given to settings that do not need them
    reader = new_context(model, flash_attn=flash_attn, dge=SUMS)
    reader.decode(TOKENS[:N_PROMPT], every=False)
    for token in TOKENS[N_PROMPT : N_PROMPT + n_draft]:
        reader.decode([token])
    state, queries = reader.seq_state(), reader.queries()
    decode_each(reader, TOKENS[N_PROMPT + n_draft :])

    other = new_context(model, flash_attn=flash_attn, dge=settings, n_seq_max=2)
    for seq in (1, 0):
        assert other.seq_state_load(state, seq) == len(state)
        needed = settings.get("policy") != "streamingllm"
        assert other.arm(N_PROMPT, seq) == (driver.ERR_QUERIES if needed else driver.OK)
        assert other.set_queries(queries, seq) == driver.OK
        assert other.arm(N_PROMPT, seq) == driver.OK
        got = decode_each(other, TOKENS[N_PROMPT + n_draft :], seq)
        np.testing.assert_array_equal(got, want)
        assert as_lists(other.kept(seq)) == as_lists(alone.kept())
        other.seq_rm(seq, -1, -1)


def test_of_rows_that_are_there(new_context: ContextFactory) -> None:
    """Queries of removed rows are dropped; those that remain are the last ones."""
    reader = new_context("g2", dge=WIDE)
    reader.decode(TOKENS[: N_PROMPT + 8], every=False)
    state, queries = reader.seq_state(), reader.queries()
    other = new_context("g2", dge={**WIDE, "draft_tokens": 2})
    assert other.seq_state_load(state) == len(state)
    assert other.seq_rm(0, N_PROMPT + 1, -1)
    assert other.set_queries(queries) == driver.OK
    assert other.arm(N_PROMPT) == driver.OK
    got = decode_each(other, TOKENS[N_PROMPT + 1 :])

    alone = new_context("g2", dge={**WIDE, "draft_tokens": 2})
    assert nmse(got, evict_after(alone, TOKENS, N_PROMPT, 1)) < 1e-8
    assert as_lists(other.kept()) == as_lists(alone.kept())


def test_too_few(new_context: ContextFactory) -> None:
    """A wider window than was captured is not guessed."""
    reader = new_context("g2", dge={"budget": 40, "draft_tokens": 2, "window": 8})
    reader.decode(TOKENS[:N_PROMPT], every=False)
    other = new_context("g2", dge={"budget": 40, "draft_tokens": 1, "window": 16, "scores": "policy"})
    assert other.seq_state_load(reader.seq_state())
    assert other.set_queries(reader.queries()) == driver.OK
    assert other.arm(N_PROMPT) == driver.ERR_QUERIES


def test_sums_in_other_cells(new_context: ContextFactory) -> None:
    """They follow their rows, and those of another sequence stay."""
    reader = new_context("g3", dge=SUMS)
    reader.decode(TOKENS[:N_PROMPT], every=False)
    queries = reader.queries()
    other = new_context("g3", dge=SUMS, n_seq_max=2)
    other.decode(tokens_of(60, 4))
    beside = other.queries()
    assert other.seq_state_load(reader.seq_state(), 1)
    assert other.set_queries(queries, 1) == driver.OK
    assert other.queries(1) == queries != beside == other.queries()
    # the next rows add to them as they do where they came from
    decode_each(reader, TOKENS[N_PROMPT : N_PROMPT + 3])
    decode_each(other, TOKENS[N_PROMPT : N_PROMPT + 3], 1)
    sums = [np.frombuffer(data, "<f4")[-(N_PROMPT + 3) * 4 :] for data in (reader.queries(), other.queries(1))]
    assert sums[0].sum() == pytest.approx(6 * 2 * (N_PROMPT + 3), rel=1e-4)  # heads, layers: 1 from each row
    np.testing.assert_allclose(sums[1], sums[0], rtol=1e-4, atol=1e-5)


def test_sums_that_are_not_those_of_the_rows(new_context: ContextFactory) -> None:
    """None, too few, too many: no eviction by sums, and never one by wrong ones."""
    settings = {**SUMS, "draft_tokens": 1}
    for captures, n_captured, n_removed in [(WIDE, N_PROMPT, 0), (SUMS, N_PROMPT - 1, 0), (SUMS, N_PROMPT, 1)]:
        reader = new_context("g2", dge=captures)
        reader.decode(TOKENS[:n_captured], every=False)
        queries = reader.queries()
        reader.decode(TOKENS[n_captured:N_PROMPT], every=False) if n_captured < N_PROMPT else None
        other = new_context("g2", dge=settings)
        assert other.seq_state_load(reader.seq_state())
        assert not n_removed or other.seq_rm(0, N_PROMPT - n_removed, -1)
        assert other.set_queries(queries) == driver.OK
        assert other.arm(N_PROMPT - n_removed) == driver.ERR_QUERIES


def test_sums_are_parked_as_they_are(new_context: ContextFactory) -> None:
    """Bit for bit, also with 3 heads in a group: x / 3 * 3 is not always x."""
    settings = {"policy": "h2o", "scores": "policy", "budget": 32, "draft_tokens": 1, "park": "ram"}
    context = new_context("g3", dge=settings)
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    before = context.queries()
    decode_each(context, TOKENS[N_PROMPT : N_PROMPT + 3])
    assert context.info()["state"] == driver.STATE_EVICTED and context.queries() != before
    assert context.restore(N_PROMPT) == N_PROMPT
    assert context.queries() == before


def test_what_is_refused(new_context: ContextFactory) -> None:
    """With an error, and nothing has changed."""
    context = new_context("g2", dge=SUMS)
    assert context.queries() and context.set_queries(b"") == driver.ERR_SEQ  # no rows
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    good = context.queries()
    header = struct.Struct("<IIQQQQ")
    head = header.size
    fields = header.unpack_from(good)  # magic, layers, length of a query, positions, KV heads, rows in the sums
    assert fields[1] == 3 and fields[3] == 20 and fields[4:] == (6, N_PROMPT)

    def changed(i: int, value: int) -> bytes:
        return header.pack(*fields[:i], value, *fields[i + 1 :]) + good[head:]

    bad = [
        b"", good[:-1], good[: head - 1], good + b"\0", b"\0" + good[1:],
        *(changed(i, fields[i] + 1) for i in range(6)), *(changed(i, 2**61) for i in (2, 3, 4, 5)),
        good[:head] + good[head + 4 : head + 8] + good[head : head + 4] + good[head + 8 :],  # not ascending
        good[:head] + struct.pack("<i", -1) + good[head + 4 :],
    ]  # fmt: skip
    for data in bad:
        assert context.set_queries(data) == driver.ERR_PARAMS
    assert context.queries() == good
    assert context.set_queries(good, 7) == driver.ERR_SEQ
    decode_each(context, TOKENS[N_PROMPT : N_PROMPT + 12])
    assert context.info()["state"] == driver.STATE_EVICTED
    assert context.set_queries(good) == driver.ERR_EVICTED
    other = new_context("g1", dge=WIDE)
    other.decode(TOKENS[:N_PROMPT], every=False)
    assert other.set_queries(good) == driver.ERR_PARAMS  # another model
    off = new_context("g2")
    assert off.queries() == b"" and off.set_queries(good) == driver.ERR_DISABLED


def test_none_are_needed(new_context: ContextFactory) -> None:
    context = new_context("g2", dge={"policy": "streamingllm", "budget": 32, "scores": "policy"})
    context.decode(TOKENS[:N_PROMPT], every=False)
    assert context.queries() == b""
    assert context.set_queries(b"") == driver.OK
