"""H2O's sums count each token of a prompt once: an eviction that would need others is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.forward import evaluated
from reference.h2o import S, check, evict, finish
from reference.policies import Settings
from reference.scenario import F32, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo


@pytest.mark.parametrize("draft_tokens", [1, 2, 4])
@pytest.mark.parametrize("n_more", [2, 5])
def test_speculative_rows_beyond_the_draft_do_not_count(
    zoo: Zoo, new_context: ContextFactory, draft_tokens: int, n_more: int
) -> None:
    """A batch runs past the draft; its rejected rows are removed. Sums are those of prompt and draft."""
    n_prompt, n_draft, s = 100, draft_tokens - 1, replace(S, draft_tokens=draft_tokens)
    tokens = tokens_of(n_prompt + n_draft + 1, 50)
    context = new_context("g3", **F32, dge=s.as_params())
    prefill_and_arm(context, tokens[:n_prompt])
    context.decode([*tokens[n_prompt : n_prompt + n_draft], *tokens_of(n_more, 51)])
    assert context.info()["state"] == (driver.STATE_ARMED if n_draft else driver.STATE_EVICTED)
    if n_draft:
        assert context.seq_rm(0, n_prompt + n_draft, -1)
    kept = finish(context, tokens[-1:])
    check(evaluated(zoo["g3"].weights, tokens[:-1], n_prompt), kept, n_prompt, s)
    # without removal all rows stay, and still do not count
    context.clear()
    prefill_and_arm(context, tokens[:n_prompt])
    if n_draft:
        context.decode([*tokens[n_prompt : n_prompt + n_draft], *tokens_of(n_more, 51)])
        kept = finish(context, tokens[-1:])
        assert context.info()["n_draft"] == n_draft + n_more
        reference = evaluated(zoo["g3"].weights, [*tokens[:-1], *tokens_of(n_more, 51)], n_prompt)
        check(reference, kept, n_prompt, s)


def test_rejected_draft_rows_are_an_error(new_context: ContextFactory) -> None:
    """A counted draft row cannot be uncounted: the eviction is refused and the full cache goes on."""
    s = replace(S, draft_tokens=4)
    tokens = tokens_of(120, 52)
    context = new_context("g3", **F32, dge=s.as_params())
    plain = new_context("g3", **F32)
    prefill_and_arm(context, tokens[:100])
    context.decode(tokens_of(2, 53))
    assert context.seq_rm(0, 100, -1)
    got = decode_each(context, tokens[100:])
    assert context.info()["state"] == driver.STATE_FULL and context.info()["error"] == driver.ERR_QUERIES
    plain.decode(tokens[:100])
    assert np.array_equal(got, decode_each(plain, tokens[100:]))


@pytest.mark.parametrize("keep", [1, 60, 99])
def test_a_tail_that_is_evaluated_again(zoo: Zoo, new_context: ContextFactory, keep: int) -> None:
    """Rows that were removed are in the sums already: start over, or there is no eviction."""
    s = S
    tokens = tokens_of(101, 54)
    context = new_context("g3", **F32, dge=s.as_params())
    context.decode([*tokens[:keep], *tokens_of(100 - keep, 55)])
    assert context.reuse(100, keep) == 0
    assert context.seq_rm(0, keep, -1)
    assert context.reuse(100, keep) == 0
    context.decode(tokens[keep:100])
    assert context.arm(100) == driver.ERR_QUERIES
    assert context.info()["state"] == driver.STATE_FULL
    # from the start it works
    assert context.seq_rm(0, 0, -1)
    kept = evict(context, tokens, 100)
    check(evaluated(zoo["g3"].weights, tokens[:100], 100), kept, 100, s)


def test_a_prompt_that_only_grows_is_reused(zoo: Zoo, new_context: ContextFactory) -> None:
    tokens = tokens_of(121, 56)
    context = new_context("g3", **F32, dge=S.as_params())
    context.decode(tokens[:70])
    assert context.reuse(120, 70) == 70
    context.decode(tokens[70:120])
    assert context.reuse(120, 120) == 120
    assert context.arm(120) == driver.OK
    check(evaluated(zoo["g3"].weights, tokens[:120], 120), finish(context, tokens[120:]), 120, S)


def test_a_loaded_state_has_no_sums(zoo: Zoo, new_context: ContextFactory) -> None:
    tokens = tokens_of(121, 57)
    context = new_context("g3", **F32, n_seq_max=2, dge=S.as_params())
    context.decode(tokens[:100])
    for load in (lambda: context.seq_state_load(context.seq_state(0), 1), lambda: context.state_load(context.state())):
        context.seq_rm(1, -1, -1)
        assert load() > 0
        seq = 1 if context.pos_max(1) >= 0 else 0
        assert context.reuse(120, 100, seq) == 0
        assert context.arm(100, seq) == driver.ERR_QUERIES
        context.decode(tokens[100:120], seq=seq)
        assert context.arm(120, seq) == driver.ERR_QUERIES
    context.clear()
    check(evaluated(zoo["g3"].weights, tokens[:120], 120), evict(context, tokens, 120), 120, S)


def test_copies_have_no_sums(new_context: ContextFactory) -> None:
    tokens = tokens_of(121, 58)
    for kv_unified in (True, False):
        context = new_context("g3", **F32, n_seq_max=2, kv_unified=kv_unified, dge=S.as_params())
        context.decode(tokens[:100])
        context.seq_cp(0, 1)
        context.decode(tokens[100:120], seq=1)
        assert context.arm(120, 1) < 0
        assert context.reuse(120, 100, 1) == 0


def test_settings_that_change_later(zoo: Zoo, new_context: ContextFactory) -> None:
    """Rows that were there before H2O was switched on are missing in the sums."""
    tokens = tokens_of(121, 59)
    context = new_context("g3", **F32, dge=Settings().as_params())
    context.decode(tokens[:50])
    context.enable(**S.as_params())
    context.decode(tokens[50:120])
    assert context.arm(120) == driver.ERR_QUERIES
    context.clear()
    check(evaluated(zoo["g3"].weights, tokens[:120], 120), evict(context, tokens, 120), 120, S)
