"""Policies of one's own: a callback in C, an object with a method `select` in Python."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from llama_dge import DGEConfig, DGEError
from reference import driver
from reference.budgets import caps_of
from reference.driver import Context
from reference.forward import Reference, nmse
from reference.instances import Instances, greedy
from reference.policies import Settings, past_scores, top_positions
from reference.scenario import as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

N_PROMPT = 120
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
SNAPKV = Settings(budget=40, draft_tokens=3)
N_PAST, N_CAP, N_DRAFT = N_PROMPT - 8, 40 - 8, 2
TOKENS = tokens_of(N_PROMPT + 30, 0)
Calls = list[tuple[int, int, npt.NDArray[np.float32]]]


# the callback of llama-dge.h


def write(chosen: Sequence[Sequence[int]], rows: npt.NDArray[np.int32], n_rows: npt.NDArray[np.int32]) -> int:
    for ih, of_head in enumerate(chosen):
        n_rows[ih] = len(of_head)
        rows[ih, : len(of_head)] = of_head
    return 0


def run(context: Context, tokens: list[int] = TOKENS) -> driver.Logits:
    prefill_and_arm(context, tokens[:N_PROMPT])
    return decode_each(context, tokens[N_PROMPT:])


def reference_of(zoo: Zoo, n_tokens: int) -> Reference:
    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:n_tokens])
    return reference


@pytest.mark.parametrize("scores", ["draft", "policy", "both"])
@pytest.mark.parametrize("pooling", ["none", "avg"])
def test_callback_gets_the_scores(zoo: Zoo, new_context: ContextFactory, scores: str, pooling: str) -> None:
    """One call per layer, with the scores as the settings make them, and how many rows the budget allows."""
    s = Settings(budget=40, draft_tokens=3, scores=scores, pooling=pooling)
    calls: Calls = []

    def select(il: int, n: int, of_layer: Any, rows: Any, n_rows: Any) -> int:
        calls.append((il, n, of_layer.copy()))
        return write([top_positions(row, n).tolist() for row in of_layer], rows, n_rows)

    context = new_context("g2", **F32, dge={**s.as_params(), "policy": None, "select": select})
    run(context)
    assert context.info()["state"] == driver.STATE_EVICTED
    reference = reference_of(zoo, N_PROMPT + N_DRAFT)
    assert [(il, n) for il, n, _ in calls] == [(il, N_CAP) for il in range(3)]
    for (_, _, got), q, k in zip(calls, reference.q, reference.k):
        want = past_scores(q, k, N_PROMPT, s)
        assert got.shape == (2, N_PAST)
        assert np.abs(got / got.sum(1, keepdims=True) - want / want.sum(1, keepdims=True)).max() <= 1e-6
    # higher = keep: the best rows by these scores are SnapKV's
    snapkv = new_context("g2", **F32, dge=s.as_params())
    run(snapkv)
    assert as_lists(context.kept()) == as_lists(snapkv.kept())


def test_callback_may_choose_any_rows(zoo: Zoo, new_context: ContextFactory) -> None:
    """Numbers that differ everywhere, none and all among them; decoding equals decoding with the rest masked."""
    chosen = [[[], list(range(N_PAST))], [[5], [0, 7, N_PAST - 1]], [list(range(0, N_PAST, 3)), [N_PAST - 1]]]

    def select(il: int, _n: int, _scores: Any, rows: Any, n_rows: Any) -> int:
        return write(chosen[il], rows, n_rows)

    context = new_context("g2", **F32, dge={**SNAPKV.as_params(), "policy": None, "select": select})
    got = run(context)[N_DRAFT:]
    kept = context.kept()
    rest = list(range(N_PAST, N_PROMPT + N_DRAFT))
    assert as_lists(kept) == [[[*rows, *rest] for rows in heads] for heads in chosen]
    reference = reference_of(zoo, N_PROMPT + N_DRAFT)
    reference.mask_all_but(kept)
    want = np.concatenate([reference.step([token]) for token in TOKENS[N_PROMPT + N_DRAFT :]])
    assert nmse(got, want) <= 1e-10
    info = context.info()
    assert info["bytes_kept"] == sum(len(p) for heads in kept for p in heads) * 2 * 64 * 4
    assert info["n_rows_after"] == info["n_rows_before"]


def bad(what: str) -> driver.Select:
    def select(il: int, n: int, _scores: Any, rows: Any, n_rows: Any) -> int:
        good = [list(range(n)), list(range(n))]
        write(good, rows, n_rows)
        if il < 2:
            return 0  # all or nothing: the last layer spoils it
        if what == "status":
            return 1
        if what == "too many":
            n_rows[1] = N_PAST + 1
        elif what == "negative count":
            n_rows[0] = -1
        else:
            write([good[0], {"descending": [3, 1], "twice": [4, 4], "negative": [-1], "past": [N_PAST]}[what]],
                  rows, n_rows)  # fmt: skip
        return 0

    return select


BAD = ["status", "too many", "negative count", "descending", "twice", "negative", "past"]


@pytest.mark.parametrize("what", BAD)
def test_callback_that_fails(new_context: ContextFactory, what: str) -> None:
    """The sequence is as it was before, and goes on as without eviction; the next prompt may be evicted."""
    context = new_context("g2", dge={**SNAPKV.as_params(), "policy": None, "select": bad(what)})
    plain = new_context("g2")
    with driver.captured_log() as lines:
        got = run(context)
    info = context.info()
    assert info["state"] == driver.STATE_FULL and info["error"] == driver.ERR_CALLBACK and info["n_evictions"] == 0
    assert info["n_rows"] == len(TOKENS)
    assert any("full cache" in line for line in lines)
    plain.decode(TOKENS[:N_PROMPT])
    assert np.array_equal(got, decode_each(plain, TOKENS[N_PROMPT:]))

    context.clear()
    assert context.enable(**SNAPKV.as_params()) == driver.OK
    run(context)
    assert context.info()["state"] == driver.STATE_EVICTED and context.info()["error"] == driver.OK


def test_eviction_on_demand_that_fails(new_context: ContextFactory) -> None:
    context = new_context("g2", dge={**SNAPKV.as_params(), "policy": None, "select": bad("status")})
    context.decode(TOKENS[:N_PROMPT])
    before = context.seq_state()
    assert context.evict() == driver.ERR_CALLBACK
    assert context.seq_state() == before and context.info()["state"] == driver.STATE_FULL


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": None},
        {"policy": "snapkv", "select": bad("status")},
        {"select": bad("status"), "head_budgets": "adaptive"},
        {"select": bad("status"), "head_budgets": "table", "table": [[40, 40]] * 3},
        {"policy": "streamingllm", "head_budgets": "adaptive"},
        {"head_budgets": "table"},
        {"table": [[40, 40]] * 3},
        {"head_budgets": "table", "table": [[40, 40]] * 2},
        {"head_budgets": "table", "table": [[40, 40]] * 4},
        {"head_budgets": "table", "table": [[40, 40], [40, 7], [40, 40]]},
        {"head_budgets": "table", "table": [[40, 40], [40, 2**24 + 1], [40, 40]]},
        {"policy": "streamingllm", "head_budgets": "table", "table": [[40, 40], [40, 11], [40, 40]]},
        {"head_budgets": 3},
        {"head_budgets": -1},
        {"layer_budgets": 2},
        {"layer_budgets": -1},
        {"policy": "custom"},
    ],
    ids=lambda s: "-".join(f"{k}={'f' if callable(v) else v}" for k, v in s.items()),
)
def test_parameters_that_do_not_fit(new_context: ContextFactory, settings: dict[str, Any]) -> None:
    context = new_context("g2")
    assert context.enable(check=False, **settings) == driver.ERR_PARAMS
    assert context.arm(1) == driver.ERR_DISABLED


# the object of DGEConfig


class Policy:
    """Remembers its calls and chooses what it is told to."""

    def __init__(self, choice: Any = None) -> None:
        self.choice = choice
        self.calls: Calls = []

    def select(self, scores: npt.NDArray[np.float32], n_rows: int, layer: int) -> Any:
        self.calls.append((layer, n_rows, scores))
        if self.choice is None:
            return [top_positions(row, n_rows) for row in scores]
        return self.choice(scores, n_rows, layer)


class Broken:
    """Picklable, unlike a lambda."""

    def select(self, scores: Any, n_rows: int, layer: int) -> Any:
        raise RuntimeError("a mistake of the user's")


def answer_of(llm: Any, n: int = 20, prompt: list[int] = TOKENS[:N_PROMPT]) -> list[int]:
    return greedy(llm, prompt, n)


def config(policy: Any, **others: Any) -> DGEConfig:
    return DGEConfig(policy=policy, budget=40, draft_tokens=3, **others)


def kept_of(llm: Any) -> list[list[list[int]]]:
    return [[llm.dge_kept(layer, head).tolist() for head in range(2)] for layer in llm.dge_layers]


@pytest.mark.parametrize("scores", ["draft", "policy", "both"])
def test_object_with_snapkv_rule_is_snapkv(new_llm: Instances, scores: str) -> None:
    policy = Policy()
    llm, snapkv = new_llm(config(policy, scores=scores)), new_llm(config("snapkv", scores=scores))
    assert answer_of(llm) == answer_of(snapkv)
    assert kept_of(llm) == kept_of(snapkv)
    assert [(layer, n) for layer, n, _ in policy.calls] == [(layer, N_CAP) for layer in range(3)]
    for _, _, given in policy.calls:
        assert given.dtype == np.float32 and given.shape == (2, N_PAST) and given.flags.owndata
        assert np.isfinite(given).all() and (given >= 0).all()
    # a copy: what the policy does to it, also later, changes nothing
    policy.calls[0][2][:] = np.nan
    assert answer_of(llm) == answer_of(snapkv)
    assert llm.dge_stats.n_evictions == 2


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, lambda rows: np.asarray(rows, dtype=np.uint8)])
def test_rows_of_any_kind_and_order(new_llm: Instances, kind: Any) -> None:
    """Heads may keep unlike numbers of rows, given in any order and as any kind of ints."""
    chosen = [[[90, 3, 50], []], [list(range(60)), [111]], [[0], [1, 0]]]
    llm = new_llm(config(Policy(lambda scores, n, layer: [kind(rows) for rows in chosen[layer]])))
    answer_of(llm)
    rest = list(range(N_PAST, N_PROMPT + N_DRAFT))
    assert kept_of(llm) == [[[*sorted(rows), *rest] for rows in heads] for heads in chosen]
    stats = llm.dge_stats
    assert stats.state == "evicted" and stats.error is None
    assert caps_of([[list(range(n)) for n in heads] for heads in stats.rows_by_head], 8 + N_DRAFT) == [
        [len(rows) for rows in heads] for heads in chosen
    ]
    assert stats.rows_after == 60 + 8 + N_DRAFT and stats.bytes_kept < stats.bytes_after


def refuse(_scores: Any, _n: int, _layer: int) -> Any:
    raise KeyError("not today")


WRONG: dict[str, Any] = {
    "exception": refuse,
    "nothing": lambda scores, n, layer: None,
    "a number": lambda scores, n, layer: 3,
    "one array": lambda scores, n, layer: np.arange(n),
    "too few heads": lambda scores, n, layer: [np.arange(n)],
    "too many heads": lambda scores, n, layer: [np.arange(n)] * 3,
    "two dimensions": lambda scores, n, layer: [np.arange(n).reshape(2, -1)] * 2,
    "floats": lambda scores, n, layer: [np.arange(n, dtype=float)] * 2,
    "a mask": lambda scores, n, layer: scores > 0,
    "strings": lambda scores, n, layer: [["1", "2"]] * 2,
    "None among rows": lambda scores, n, layer: [[1, None]] * 2,
    "negative": lambda scores, n, layer: [[-1, 3]] * 2,
    "out of range": lambda scores, n, layer: [[N_PAST]] * 2,
    "twice": lambda scores, n, layer: [[5, 7, 5]] * 2,
    "too many rows": lambda scores, n, layer: [np.arange(N_PAST + 1)] * 2,
    "beyond 32 bits": lambda scores, n, layer: [[2**32 + 3]] * 2,
    "below -32 bits": lambda scores, n, layer: [[3 - 2**32]] * 2,
    "beyond 63 bits": lambda scores, n, layer: [np.array([2**63 + 3], dtype=np.uint64)] * 2,
    "only in the last layer": lambda scores, n, layer: [[N_PAST if layer == 2 else 0]] * 2,
}


@pytest.mark.parametrize("name", WRONG)
def test_object_that_fails(new_llm: Instances, name: str) -> None:
    """The full cache, with one warning and the reason in dge_stats; the answer is that of the full cache."""
    llm = new_llm(config(Policy(WRONG[name])))
    with pytest.warns(RuntimeWarning, match="full cache.*policy") as seen:
        answer = answer_of(llm)
    assert len(seen) == 1
    stats = llm.dge_stats
    assert stats.state == "full" and stats.n_evictions == 0 and stats.rows == llm.n_tokens
    assert "policy" in stats.error
    assert answer == answer_of(new_llm(None))
    # every prompt anew, but no second warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer_of(llm, 20, TOKENS[5:115]) == answer_of(new_llm(None), 20, TOKENS[5:115])
    assert llm.dge_stats.state == "full" and llm.dge_stats.error is not None


def test_object_that_fails_once(new_llm: Instances) -> None:
    """The next prompt is evicted as if nothing had happened."""
    policy = Policy(refuse)
    llm = new_llm(config(policy))
    with pytest.warns(RuntimeWarning):
        answer_of(llm)
    policy.choice = None
    fresh = new_llm(config(Policy()))
    assert answer_of(llm, 20, TOKENS[5:125]) == answer_of(fresh, 20, TOKENS[5:125])
    assert llm.dge_stats.state == "evicted" and llm.dge_stats.error is None
    assert kept_of(llm) == kept_of(fresh)


def test_evict_raises(new_llm: Instances) -> None:
    """Who asks for an eviction gets the error, and the cache as it was."""
    llm = new_llm(config(Policy(refuse)))
    llm.eval(TOKENS[:N_PROMPT])
    with pytest.raises(DGEError, match="policy"):
        llm.evict()
    assert llm.dge_stats.state == "full" and llm.n_tokens == N_PROMPT
    llm.eval(TOKENS[N_PROMPT:])


def test_keeping_everything_is_fine(new_llm: Instances) -> None:
    llm = new_llm(config(Policy(lambda scores, n, layer: [np.arange(N_PAST)] * 2)))
    assert answer_of(llm) == answer_of(new_llm(None))
    stats = llm.dge_stats
    assert stats.rows_after == stats.rows_before == N_PROMPT + N_DRAFT and stats.bytes_kept == stats.bytes_before
    state = llm.save_state()
    more = answer_of(llm, 5, TOKENS[30:])
    llm.load_state(state)
    assert llm.dge_stats.state == stats.state and more == answer_of(llm, 5, TOKENS[30:])


def test_config_with_an_object() -> None:
    policy = Broken()
    settings = config(policy)
    assert settings.policy is policy
    assert DGEConfig.from_any({"policy": policy, "budget": 40, "draft_tokens": 3}) == settings
    twin = pickle.loads(pickle.dumps(settings))
    assert isinstance(twin.policy, Broken) and twin.budget == 40
    assert isinstance(copy.deepcopy(settings).policy, Broken)
    assert hash(settings) == hash(config(policy)) and settings != config(Broken())


@pytest.mark.parametrize("policy", [object(), Policy, Broken, lambda scores, n, layer: None, 3, None, b"snapkv"])
def test_objects_that_are_no_policies(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"^policy=.*select"):
        DGEConfig(policy=policy)


@pytest.mark.parametrize("head_budgets", ["adaptive", [[40, 40]] * 3])
def test_an_object_decides_the_rows_of_heads_itself(head_budgets: Any) -> None:
    with pytest.raises(ValueError, match=r"^head_budgets"):
        config(Policy(), head_budgets=head_budgets)


def test_pickled_llm_keeps_its_policy(new_llm: Instances) -> None:
    llm = new_llm(config(Broken()))
    twin = pickle.loads(pickle.dumps(llm))
    try:
        assert isinstance(twin.dge_config.policy, Broken)
        with pytest.warns(RuntimeWarning, match="policy"):
            answer_of(twin)
    finally:
        twin.close()


# head_budgets as an array: the model decides whether the shape fits


@pytest.mark.parametrize(
    "rows",
    [
        [[30, 40]],
        [[30]] * 3,
        np.full((2, 3), 40),  # as many as there are heads, in another shape
        [[40] * 6],
        [[40, 40]] * 4,
        [[40], [40, 40], [40, 40, 40]],  # as many, ragged
    ],
    ids=["1x2", "3x1", "2x3", "1x6", "4x2", "ragged"],
)
def test_table_of_another_shape(new_llm: Instances, rows: Any) -> None:
    with pytest.raises(ValueError, match=r"head_budgets") as caught:
        new_llm({"head_budgets": rows})
    # the shape that the model has
    assert "3" in str(caught.value) and "2" in str(caught.value)


def test_table_of_another_shape_that_is_not_strict(new_llm: Instances) -> None:
    """`strict` is about models that are not supported; this is a wrong setting."""
    with pytest.raises(ValueError, match="head_budgets"):
        new_llm({"head_budgets": [[40, 40]], "strict": False})


@pytest.mark.parametrize("kind", [list, np.asarray, lambda rows: np.asarray(rows, dtype=np.uint16)])
def test_table_of_the_right_shape(new_llm: Instances, kind: Any) -> None:
    table = [[20, 30], [8, 300], [45, 44]]
    llm = new_llm({"head_budgets": kind(table), "draft_tokens": 3})
    answer_of(llm)
    assert llm.dge_stats.rows_by_head == tuple(tuple(min(n, N_PROMPT) + 2 for n in heads) for heads in table)
    assert pickle.loads(pickle.dumps(llm.dge_config)) == llm.dge_config
