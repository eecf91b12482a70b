"""Captured queries that are taken out of a context and put back with a state: the cut is the same as without that."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.scenario import as_lists, cut_after, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

N_PROMPT = 150
TOKENS = tokens_of(N_PROMPT + 20, 3)
# what captures: the longest draft and window of those that are cut
WIDE: dict[str, Any] = {"budget": 40, "draft_tokens": 9, "window": 12, "scores": "both"}
OTHERS: list[dict[str, Any]] = [
    {"budget": 32, "draft_tokens": 9, "scores": "draft"},
    {"budget": 32, "draft_tokens": 3, "window": 12},
    {"budget": 48, "draft_tokens": 1, "scores": "policy"},
    {"budget": 32, "draft_tokens": 4, "scores": "both", "refresh": 3, "park": "ram"},
    {"budget": 32, "draft_tokens": 2, "policy": "streamingllm"},
]


@pytest.mark.parametrize("settings", OTHERS, ids=str)
@pytest.mark.parametrize("model", ["g2", "g8"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_other_settings_go_on(
    new_context: ContextFactory, model: str, settings: dict[str, Any], flash_attn: bool
) -> None:
    """One context reads and drafts, another one cuts with settings of its own."""
    n_draft = settings["draft_tokens"] - 1
    alone = new_context(model, flash_attn=flash_attn, dge=settings)
    prefill_and_arm(alone, TOKENS[:N_PROMPT])
    want = decode_each(alone, TOKENS[N_PROMPT:])[n_draft:]

    reader = new_context(model, flash_attn=flash_attn, dge=WIDE)
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
    """Queries of rows that were removed are left out; those that remain are the last ones."""
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
    np.testing.assert_allclose(got, cut_after(alone, TOKENS, N_PROMPT, 1), atol=1e-4)
    assert as_lists(other.kept()) == as_lists(alone.kept())


def test_too_few(new_context: ContextFactory) -> None:
    """A wider window than was captured is not guessed."""
    reader = new_context("g2", dge={"budget": 40, "draft_tokens": 2, "window": 8})
    reader.decode(TOKENS[:N_PROMPT], every=False)
    other = new_context("g2", dge={"budget": 40, "draft_tokens": 1, "window": 16, "scores": "policy"})
    assert other.seq_state_load(reader.seq_state())
    assert other.set_queries(reader.queries()) == driver.OK
    assert other.arm(N_PROMPT) == driver.ERR_QUERIES


def test_what_is_refused(new_context: ContextFactory) -> None:
    """With an error, and nothing has changed."""
    context = new_context("g2", dge=WIDE)
    assert context.queries() and context.set_queries(b"") == driver.ERR_SEQ  # no rows
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    good = context.queries()
    magic, n_layer, n_embd, n_pos = struct.unpack_from("<IIQQ", good)
    head = 24
    bad = [
        b"", good[:-1], good[: head - 1], good + b"\0", b"\0" + good[1:],
        struct.pack("<IIQQ", magic, n_layer + 1, n_embd, n_pos) + good[head:],
        struct.pack("<IIQQ", magic, n_layer, n_embd + 1, n_pos) + good[head:],
        struct.pack("<IIQQ", magic, n_layer, n_embd, 2**61) + good[head:],
        struct.pack("<IIQQ", magic, n_layer, n_embd, n_pos + 1) + good[head:],
        good[:head] + good[head + 4 : head + 8] + good[head : head + 4] + good[head + 8 :],  # not ascending
        good[:head] + struct.pack("<i", -1) + good[head + 4 :],
    ]  # fmt: skip
    for data in bad:
        assert context.set_queries(data) == driver.ERR_PARAMS
    assert context.queries() == good
    assert context.set_queries(good, 7) == driver.ERR_SEQ
    decode_each(context, TOKENS[N_PROMPT : N_PROMPT + 12])
    assert context.info()["state"] == driver.STATE_CUT
    assert context.set_queries(good) == driver.ERR_CUT
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
