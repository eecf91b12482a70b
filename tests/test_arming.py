"""Arming a sequence, evicting it and reusing its prefix: what each call returns, and that a refusal changes nothing."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.evicted import N_BEFORE, N_PROMPT, SETTINGS, TOKENS
from reference.forward import nmse
from reference.policies import Settings
from reference.scenario import F32, SAME, as_lists, decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo


def test_decodes_before_the_eviction_are_those_of_a_full_cache(new_context: ContextFactory) -> None:
    s = Settings(budget=32, draft_tokens=10)
    context, plain = new_context("g2", dge=s.as_params()), new_context("g2")
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    plain.decode(TOKENS[:N_PROMPT])
    rest = TOKENS[N_PROMPT : N_PROMPT + 9]
    assert np.array_equal(decode_each(context, rest), decode_each(plain, rest))
    assert context.info()["state"] == driver.STATE_ARMED
    assert context.disarm() == driver.OK
    rest = TOKENS[N_PROMPT + 9 : N_PROMPT + 20]
    assert np.array_equal(decode_each(context, rest), decode_each(plain, rest))
    assert context.info()["state"] == driver.STATE_FULL and context.info()["n_evictions"] == 0


def test_return_codes(new_context: ContextFactory) -> None:
    off = new_context("g2")
    off.decode(TOKENS[:N_PROMPT])
    assert off.supported() == (driver.OK, "")
    assert off.arm(N_PROMPT) == off.evict() == off.disarm() == off.reuse(10, 5) == driver.ERR_DISABLED
    assert off.disable() == driver.OK

    # enabled too late: the queries of the prompt are gone
    off.enable(**SETTINGS.as_params())
    assert off.arm(N_PROMPT) == off.evict() == driver.ERR_QUERIES

    context = new_context("g2", dge=SETTINGS.as_params())
    assert context.arm(1) == context.evict() == driver.ERR_SEQ
    context.decode(TOKENS[:N_PROMPT])
    assert context.arm(N_PROMPT + 1) == context.arm(0) == context.arm(-5) == driver.ERR_SEQ
    assert context.arm(N_PROMPT, seq=1) == context.arm(N_PROMPT, seq=-1) == driver.ERR_SEQ
    assert context.arm(32) == driver.NOTHING_TO_EVICT
    with pytest.raises(RuntimeError, match=str(driver.ERR_SEQ)):
        context.kept_of(0, 0)
    assert context.evict() == driver.OK
    assert context.info()["n_rows"] == 32
    assert context.arm(N_PROMPT) == context.evict() == context.disable() == driver.ERR_EVICTED
    for layer, head in ((3, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(RuntimeError, match=str(driver.ERR_PARAMS)):
            context.kept_of(layer, head)

    # new settings drop the captured queries, sequences that were evicted stay so
    context.enable(**Settings(budget=40, window=16).as_params())
    assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_rows"] == 32
    context.clear()
    context.decode(TOKENS[:N_PROMPT])
    context.enable(**SETTINGS.as_params())
    assert context.arm(N_PROMPT) == driver.ERR_QUERIES


@pytest.mark.parametrize("scores", ["draft", "policy", "both"])
def test_reuse_of_a_prefix(zoo: Zoo, new_context: ContextFactory, scores: str) -> None:
    """A prompt that shares a prefix with an older one: the eviction is the same with as much reused as allowed."""
    s = Settings(budget=32, draft_tokens=3, scores=scores)
    second = [*TOKENS[:100], *tokens_of(30, 15)]
    fresh = new_context("g2", **F32, dge=s.as_params())
    want = evict_after(fresh, [*second, *TOKENS[:12]], len(second), 2)
    for n_match, n_prompt in ((100, 130), (100, 103), (100, 100), (20, 130)):
        context = new_context("g2", **F32, dge=s.as_params())
        context.decode(TOKENS[:110])
        n_keep = context.reuse(n_prompt, n_match)
        assert n_match - s.window <= n_keep <= n_match
        assert context.seq_rm(0, n_keep, -1)
        prompt = [*TOKENS[:n_match], *second[n_match:]][:n_prompt]
        if n_keep < n_prompt:
            context.decode(prompt[n_keep:])
        assert context.arm(n_prompt) == driver.OK
        if prompt == second:
            got = decode_each(context, TOKENS[:12])[2:]
            assert nmse(got, want) <= SAME
            assert as_lists(context.kept()) == as_lists(fresh.kept())
    assert context.reuse(130, 131) == context.reuse(0, 0) == context.reuse(10, -1) == driver.ERR_PARAMS


def test_positions_far_apart_take_no_memory(new_context: ContextFactory) -> None:
    context = new_context("g2", dge=SETTINGS.as_params())
    context.decode([5, 6, 7], pos=1_000_000_000)
    assert context.arm(3) == context.evict() == driver.ERR_SEQ


def test_numbers_that_would_overflow(new_context: ContextFactory) -> None:
    context = new_context("g2", dge=SETTINGS.as_params())
    context.decode(TOKENS[:50], every=False)
    top = 2**31 - 1
    assert context.reuse(top, 50) == context.reuse(top, top) == driver.ERR_PARAMS
    assert context.reuse(1 << 30, 50) == 50


# aborts


def test_abort_in_the_eviction(new_context: ContextFactory) -> None:
    """Stopped at any of its steps, the eviction leaves the sequence as it was, and a later decode makes it."""
    settings = {**F32, "dge": SETTINGS.as_params()}
    once = new_context("g2", **settings)
    want = evict_after(once, TOKENS, N_PROMPT, 2)
    n_aborted = 0
    for n_calls in [*range(40), *range(40, 400, 20)]:
        context = new_context("g2", **settings)
        prefill_and_arm(context, TOKENS[:N_PROMPT])
        decode_each(context, TOKENS[N_PROMPT:N_BEFORE])
        calls = count()
        context.set_abort(lambda calls=calls, n_calls=n_calls: next(calls) >= n_calls)
        context.decode([TOKENS[N_BEFORE]], check=False)
        context.set_abort(None)
        assert context.rc in (0, 2)
        info = context.info()
        if info["state"] == driver.STATE_ARMED:
            n_aborted += 1
            assert info["error"] == driver.ERR_ABORTED and info["n_evictions"] == 0
            assert context.rc == 2 and info["n_rows"] == N_BEFORE
        else:
            assert info["state"] == driver.STATE_EVICTED and info["n_evictions"] == 1
        # after an abort the row of the batch may be there or not; the sequence goes on from what is there
        at = context.pos_max() + 1
        assert at in (N_BEFORE, N_BEFORE + 1)
        got = decode_each(context, TOKENS[at:])
        assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_evictions"] == 1
        assert as_lists(context.kept()) == as_lists(once.kept())
        assert nmse(got, want[at - N_BEFORE :]) <= SAME
        context.close()
        if next(calls) <= n_calls:
            break  # nothing was stopped: no more steps to stop
    assert n_aborted > 3


def test_abort_of_a_forced_eviction(new_context: ContextFactory) -> None:
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    context.decode(TOKENS[:N_PROMPT])
    before = context.state()
    context.set_abort(lambda: True)
    assert context.evict() == driver.ERR_ABORTED
    context.set_abort(None)
    assert context.info()["state"] == driver.STATE_FULL and context.state() == before
    assert context.evict() == driver.OK and context.info()["n_rows"] == 32
