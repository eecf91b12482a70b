"""Recall: entries are selected again from the host copy, and evicted ones return."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver, messages
from reference.bounds import nmse_bounds
from reference.forward import Reference, nmse
from reference.models import ZOO
from reference.policies import Settings, disagreement, past_scores
from reference.recall import BUDGET, WINDOW, recall
from reference.scenario import as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo


def cells_in_use(context: driver.Context, every: int) -> None:
    """No more rows than the budget and those since the last selection."""
    info = context.info()
    assert info["n_rows"] == info["n_rows_after"] + (context.pos_max() + 1 - info["n_rows_before"])
    assert context.pos_max() + 1 - info["n_rows_before"] <= max(every, 1)


RUNS = [
    ("g1", True, "f16", "snapkv", "uniform", 4, False),
    ("g2", False, "f16", "snapkv", "uniform", 1, True),
    ("g2", True, "q8_0", "snapkv", "uniform", 3, False),
    ("g2", True, "q4_0", "snapkv", "adaptive", 5, True),
    ("g3", False, "f16", "pyramidkv", "uniform", 2, False),
    ("g3", True, "f16", "streamingllm", "uniform", 4, True),
    ("g8", True, "f16", "snapkv", "adaptive", 8, False),
    ("g8", False, "f32", "snapkv", "uniform", 7, False),
    ("one", False, "f16", "snapkv", "uniform", 16, True),
    ("deep", False, "f32", "pyramidkv", "adaptive", 6, True),
    ("deep", False, "bf16", "streamingllm", "uniform", 1, False),
]


@pytest.mark.parametrize("model, flash_attn, kind, policy, head_budgets, every, elastic", RUNS, ids=str)
def test_every_step_equals_the_masked_cache(
    zoo: Zoo,
    new_context: ContextFactory,
    model: str,
    flash_attn: bool,
    kind: str,
    policy: str,
    head_budgets: str,
    every: int,
    elastic: bool,
) -> None:
    """Between selections and across them; rows of the answer are evicted and recalled as those of the prompt."""
    dge = recall(every, policy=policy, head_budgets=head_budgets)
    kv = {"flash_attn": flash_attn, "type_k": kind, "type_v": kind, "elastic": elastic}
    context = new_context(model, **kv, dge=dge)
    reference = Reference(zoo[model].weights, kind, kind, flash_attn)
    tokens = tokens_of(220, 0)
    prefill_and_arm(context, tokens[:150])
    reference.run(tokens[:150])
    largest, median = nmse_bounds(kind, kind, flash_attn, ZOO[model].n_layer)
    errors, n_before, n_back, evicted = [], -1, 0, None
    for token in tokens[150:]:
        got = context.decode([token])[0]
        info = context.info()
        if info["state"] == driver.STATE_EVICTED and info["n_rows_before"] != n_before:
            n_before = info["n_rows_before"]
            assert n_before == reference.n_tokens
            kept = context.kept()
            reference.mask_all_but(kept)
            if policy != "pyramidkv" and head_budgets == "uniform":
                assert info["n_rows_after"] == BUDGET
            if evicted is not None:
                n_back += len(set(kept[0][0].tolist()) & evicted)
            evicted = set(range(n_before)) - set(kept[0][0].tolist())
        if info["state"] == driver.STATE_EVICTED:
            cells_in_use(context, every)
        errors.append(nmse(got, reference.step([token])[0]))
    info = context.info()
    # the first selection is the eviction
    assert info["n_recalls"] == (219 - 151) // every and info["n_moved"] > 0
    assert info["n_parked"] == 151 and info["bytes_parked"] > 0
    assert max(errors) < largest and np.median(errors) < median
    if policy != "streamingllm":
        assert n_back > 0  # otherwise nothing was recalled above


@pytest.mark.usefixtures("scored_by")
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("model", ["g1", "g2", "g8"])
def test_the_last_queries_select(zoo: Zoo, new_context: ContextFactory, model: str, flash_attn: bool) -> None:
    """Each selection is the one that SnapKV makes of a prompt that ends here."""
    context = new_context(model, flash_attn=flash_attn, dge=recall(5))
    tokens = tokens_of(200, 1)
    prefill_and_arm(context, tokens[:150])
    reference = Reference(zoo[model].weights, "f16", "f16", flash_attn)
    reference.run(tokens[:150])
    s = Settings(scores="policy", budget=BUDGET, window=WINDOW)
    gaps, n_before = [], -1
    for token in tokens[150:]:
        context.decode([token])
        info = context.info()
        if info["n_rows_before"] != n_before and info["state"] == driver.STATE_EVICTED:
            n_before = info["n_rows_before"]
            kept = context.kept()
            for q, k, heads in zip(reference.q, reference.k, kept):
                for row, positions in zip(past_scores(q, k, n_before, s), heads):
                    gaps.append(disagreement(row, positions, BUDGET - WINDOW))
                    assert positions[-WINDOW:].tolist() == list(range(n_before - WINDOW, n_before))
            reference.mask_all_but(kept)
        reference.step([token])
    # scores that differ by rounding alone may change places
    assert max(gaps) < 2e-2 and np.mean(np.asarray(gaps) == 0.0) > 0.8
    assert len(gaps) >= 9 * len(kept)


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("elastic", [False, True])
def test_a_budget_for_all_rows_is_the_full_cache(new_context: ContextFactory, flash_attn: bool, elastic: bool) -> None:
    context = new_context("g2", flash_attn=flash_attn, elastic=elastic, dge=recall(1, budget=400))
    full = new_context("g2", flash_attn=flash_attn)
    tokens = tokens_of(250, 2)
    prefill_and_arm(context, tokens[:150])
    full.decode(tokens[:150])
    assert np.array_equal(decode_each(context, tokens[150:]), decode_each(full, tokens[150:]))


def test_a_short_prompt_with_a_long_answer(new_context: ContextFactory) -> None:
    """Rows stay within the budget however long the answer is; the first eviction comes when they exceed it."""
    context = new_context("g2", n_ctx=1024, flash_attn=True, dge=recall(4))
    tokens = tokens_of(800, 3)
    prefill_and_arm(context, tokens[:20])
    for i, token in enumerate(tokens[20:]):
        context.decode([token])
        info = context.info()
        assert (info["state"] == driver.STATE_EVICTED) == (i + 20 >= BUDGET + 4)
        assert info["n_rows"] <= BUDGET + 4 + 1
    assert context.info()["n_recalls"] == (799 - 44) // 4 and context.pos_max() == 799


@pytest.mark.parametrize("pattern", [driver.NAN_F16, driver.LARGE_F16])
def test_free_cells_are_never_read(new_context: ContextFactory, pattern: int) -> None:
    results = []
    for poison in (False, True):
        context = new_context("g2", flash_attn=True, n_ubatch=50, dge=recall(3, head_budgets="adaptive"))
        tokens = tokens_of(200, 4)
        prefill_and_arm(context, tokens[:150])
        logits = []
        for token in tokens[150:]:
            if poison:
                context.poison(pattern)
            logits.append(context.decode([token])[0])
        results.append((np.asarray(logits), as_lists(context.kept())))
    assert np.isfinite(results[1][0]).all()
    assert np.array_equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


@pytest.mark.parametrize("park_rows", [0, 2000])
def test_restore_puts_back_what_was_before_the_eviction(new_context: ContextFactory, park_rows: int) -> None:
    """Rows made with an evicted cache are not restored; the host copy grows where it has no room."""
    context = new_context("g2", n_ctx=4096, elastic=True, dge=recall(8))
    full = new_context("g2", n_ctx=4096)
    tokens = tokens_of(300 + park_rows, 5)
    prefill_and_arm(context, tokens[:150])
    decode_each(context, tokens[150 : 200 + park_rows])
    assert context.info()["n_parked"] == 151
    assert context.restore(10**6) == 151
    full.decode(tokens[:150])
    decode_each(full, tokens[150:151])
    assert np.array_equal(context.decode(tokens[151:180]), full.decode(tokens[151:180]))


def test_entries_after_a_selection_can_be_removed(zoo: Zoo, new_context: ContextFactory) -> None:
    """As speculative decoding does: tokens above the last selection are removed and replaced."""
    context = new_context("g2", dge=recall(4))
    reference = Reference(zoo["g2"].weights, "f16", "f16")
    tokens = tokens_of(300, 6)
    prefill_and_arm(context, tokens[:150])
    reference.run(tokens[:150])
    n, n_before = 150, -1
    rng = np.random.default_rng(7)
    for _ in range(40):
        size = int(rng.integers(1, 6))
        got = context.decode(tokens[n : n + size])
        info = context.info()
        if info["n_rows_before"] != n_before and info["state"] == driver.STATE_EVICTED:
            n_before = info["n_rows_before"]
            reference.mask_all_but(context.kept())
        for a, b in zip(got, reference.step(tokens[n : n + size])):
            assert nmse(a, b) < 1e-5
        keep = n + int(rng.integers(1, size + 1))
        if n_before >= 0:
            assert not context.seq_rm(0, n_before - 1, -1)
        assert context.seq_rm(0, keep, -1)
        reference.truncate(keep)
        n = keep
    assert context.info()["n_recalls"] > 10


def test_two_sequences(new_context: ContextFactory) -> None:
    """Selections of one sequence leave the other alone, in one cache and in two."""
    for unified in (True, False):
        kv = {"n_seq_max": 2, "kv_unified": unified, "n_ctx": 1024}
        alone = new_context("g2", **kv, dge=recall(3))
        both = new_context("g2", **kv, dge=recall(3))
        a, b = tokens_of(220, 8), tokens_of(220, 9)
        prefill_and_arm(alone, a[:128], 0)
        prefill_and_arm(both, a[:128], 0)
        both.decode(b[:128], seq=1)
        want = decode_each(alone, a[128:180], 0)
        got = []
        other = [both.decode([b[128]], seq=1)[0]]
        for i in range(128, 180):
            got.append(both.decode([a[i]], seq=0)[0])
            other.append(both.decode([b[i + 1]], seq=1)[0])
        assert nmse(np.asarray(got), want) < 1e-6
        untouched = new_context("g2", **kv)
        untouched.decode(a[:128], seq=0)
        untouched.decode(b[:128], seq=1)
        full = decode_each(untouched, b[128:181], 1)
        assert nmse(np.asarray(other), full) < 1e-6
        assert both.info(0)["n_recalls"] >= alone.info(0)["n_recalls"] > 10
        assert both.info(1)["state"] == driver.STATE_FULL


def test_a_copied_sequence_is_not_selected_again(new_context: ContextFactory) -> None:
    """Cells of two sequences cannot be moved: the last kept set stays until the copy is gone."""
    context = new_context("g2", n_seq_max=2, dge=recall(3))
    tokens = tokens_of(300, 10)
    prefill_and_arm(context, tokens[:150])
    decode_each(context, tokens[150:160])
    context.seq_cp(0, 1)
    n_recalls = context.info()["n_recalls"]
    with driver.captured_log() as lines:
        logits = decode_each(context, tokens[160:180])
    assert np.isfinite(logits).all() and context.info()["n_recalls"] == n_recalls
    # once for each of the two
    assert sum(messages.KEEPS_SELECTION in line for line in lines) == 2
    assert context.seq_rm(1, -1, -1)
    decode_each(context, tokens[180:200])
    assert context.info()["n_recalls"] > n_recalls and context.info()["n_rows_after"] == BUDGET


def test_a_state_holds_no_host_copy(new_context: ContextFactory) -> None:
    """It continues with the last kept set; n_parked is 0."""
    context = new_context("g2", dge=recall(5))
    tokens = tokens_of(300, 11)
    prefill_and_arm(context, tokens[:150])
    decode_each(context, tokens[150:168])
    assert context.info()["n_rows_before"] == 166 and context.info()["n_recalls"] == 3
    state = context.state()
    want = decode_each(context, tokens[168:170])
    other = new_context("g2", dge=recall(5))
    assert other.state_load(state) == len(state)
    assert as_lists(other.kept()) == as_lists(context.kept())
    assert other.info()["n_parked"] == 0
    assert np.array_equal(decode_each(other, tokens[168:170]), want)
    decode_each(other, tokens[170:190])
    assert other.info()["n_recalls"] == 0 and other.info()["n_rows"] == BUDGET + 190 - 166


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_selection_without_memory_changes_nothing(new_context: ContextFactory, n: int) -> None:
    context = new_context("g2", dge=recall(4))
    tokens = tokens_of(300, 12)
    prefill_and_arm(context, tokens[:150])
    decode_each(context, tokens[150:156])
    before, info = as_lists(context.kept()), context.info()
    n_fill = info["n_rows_before"] + 4 - (context.pos_max() + 1)
    decode_each(context, tokens[156 : 156 + n_fill])
    with driver.failing_alloc(n), driver.captured_log() as lines:
        context.decode([tokens[156 + n_fill]])
    after = context.info()
    if after["n_recalls"] == info["n_recalls"]:
        assert after["error"] == driver.ERR_MEMORY and as_lists(context.kept()) == before
        assert any(messages.KEEPS_SELECTION in line for line in lines)
    else:
        assert n > 3  # a selection of this model allocates once per layer
    decode_each(context, tokens[157 + n_fill : 170])
    assert context.info()["n_recalls"] > info["n_recalls"]


def test_abort_in_a_selection(new_context: ContextFactory) -> None:
    """The callback stops a selection at any step: the old kept set stays, and the next decode selects."""
    tokens = tokens_of(300, 13)

    def run(abort_at: int) -> tuple[driver.Context, int, int]:
        context = new_context("g2", dge=recall(4))
        prefill_and_arm(context, tokens[:150])
        decode_each(context, tokens[150:155])
        calls = 0

        def abort() -> bool:
            nonlocal calls
            calls += 1
            return calls == abort_at

        before = as_lists(context.kept())
        context.set_abort(abort)
        context.decode([tokens[155]], check=False)
        if context.rc != 0:  # stopped in the graph of the decode, after the selection
            context.set_abort(None)
            return context, calls, context.rc
        context.set_abort(None)
        if context.info()["n_recalls"] == 0:
            assert context.info()["error"] == driver.ERR_ABORTED and as_lists(context.kept()) == before
        return context, calls, 0

    _, n_calls, _ = run(-1)
    n_stopped = 0
    for abort_at in range(1, n_calls + 1):
        context, _, rc = run(abort_at)
        n_stopped += context.info()["n_recalls"] == 0
        if rc == 0:
            context.decode([tokens[156]])
        assert context.info()["n_recalls"] == 1 and context.info()["n_rows_after"] == BUDGET
        assert context.info()["n_rows_before"] in (155, 156)
    assert n_stopped >= ZOO["g2"].n_layer


def test_no_recall_is_dge_as_published(new_context: ContextFactory) -> None:
    """recall=0 with a host copy changes nothing in what is attended."""
    s = Settings(budget=BUDGET, window=WINDOW)
    tokens = tokens_of(220, 16)
    results = []
    for extra in ({}, {"park": "ram"}):
        context = new_context("g2", dge={**replace(s).as_params(), **extra})
        prefill_and_arm(context, tokens[:150])
        results.append((decode_each(context, tokens[150:]), as_lists(context.kept())))
    assert np.array_equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [1, 3, -1])
def test_entries_that_are_removed_after_they_were_copied_to_the_host(
    zoo: Zoo, new_context: ContextFactory, every: int, overlap: bool
) -> None:
    """Rows copied to the host by a check or a thread, then removed and replaced: the new ones count."""
    context = new_context("g2", dge=recall(every, recall_async=overlap, recall_mass=0.5))
    reference = Reference(zoo["g2"].weights, "f16", "f16")
    tokens = tokens_of(600, 22)
    prefill_and_arm(context, tokens[:150])
    reference.run(tokens[:150])
    n, seen, rng = 150, (-1, -1), np.random.default_rng(1)
    for turn in range(60):
        size = int(rng.integers(1, 5))
        part = tokens[n + turn : n + turn + size]
        got = context.decode(part)
        info = context.info()
        now = (info["n_rows_before"], info["n_recalls"])
        if info["state"] == driver.STATE_EVICTED and now != seen:
            seen = now
            reference.mask_all_but(context.kept())
        for a, b in zip(got, reference.step(part)):
            assert nmse(a, b) < 1e-5
        keep = max(n + int(rng.integers(0, size + 1)), info["boundary"] + 1, 150)
        assert context.seq_rm(0, keep, -1)
        reference.truncate(keep)
        n = keep
    assert context.info()["n_recalls"] >= (1 if every < 0 else 10)


def test_settings_that_change_between_two_selections(new_context: ContextFactory) -> None:
    """The captured queries are dropped: the next selection comes when there are enough again, without a warning."""
    context = new_context("g2", dge=recall(3))
    tokens = tokens_of(300, 23)
    prefill_and_arm(context, tokens[:150])
    decode_each(context, tokens[150:160])
    n_recalls = context.info()["n_recalls"]
    with driver.captured_log() as lines:
        context.enable(**recall(2))
        decode_each(context, tokens[160 : 160 + WINDOW - 1])
        assert context.info()["n_recalls"] == n_recalls
        decode_each(context, tokens[160 + WINDOW - 1 : 190])
    assert context.info()["n_recalls"] > n_recalls + 5
    assert not [line for line in lines if messages.KEEPS_SELECTION in line]


def test_a_restore_does_not_select_first(new_context: ContextFactory) -> None:
    """A selection due at the restore would copy and score rows that are about to be dropped."""
    context = new_context("g2", dge=recall(1))
    tokens = tokens_of(300, 24)
    prefill_and_arm(context, tokens[:150])
    decode_each(context, tokens[150:160])
    # the first allocation of a selection would fail and be logged
    with driver.failing_alloc(1), driver.captured_log() as lines:
        assert context.restore(1000) == 151
    assert not [line for line in lines if messages.KEEPS_SELECTION in line]
