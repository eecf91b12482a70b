"""Models with layers that are not evicted: recurrent ones beside attention, and sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arch_sweep import models
from reference import driver
from reference.driver import Context, NativeModel
from reference.instances import Instances, evaluated, greedy, instances
from reference.scenario import as_lists, decode_each, evict_after, prefill_and_arm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error::RuntimeWarning")]

HYBRIDS = ["jamba", "nemotron_h", "plamo2", "qwen3next", "lfm2moe", "granitehybrid"]
WINDOWS = ["gemma3", "gpt-oss", "llama4"]
MLA = ["deepseek2"]

BUDGET, DRAFT, N_PROMPT = 40, 3, 150
SETTINGS = {"budget": BUDGET, "draft_tokens": DRAFT}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of each architecture."""
    if not models.program().exists():
        pytest.skip(f"{models.program().name} is not built: make sweep-build")
    paths = models.write_models(tmp_path_factory.mktemp("hybrids") / "archs", [*HYBRIDS, *WINDOWS, *MLA])
    return {models.arch_of(path.stem): path for path in paths}


@pytest.fixture
def new_llm(tiny: dict[str, Path]) -> Iterator[Instances]:
    with instances(tiny["jamba"]) as made:
        yield made


N_VOCAB = 128  # of all these models


def text(n: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng([n, seed]).integers(3, N_VOCAB, n).tolist()
    return tokens


PROMPT = text(N_PROMPT, 0)


def replayed(llm: Any, pieces: list[list[int]]) -> Any:
    """Logits of the last piece, of an instance that is not evicted and evaluates all of them one after another."""
    for piece in pieces:
        llm.eval(piece)
    assert llm.dge_stats.state == "full"
    return llm.scores[llm.n_tokens - len(pieces[-1]) : llm.n_tokens].copy()


def logits_of(llm: Any, start: int, end: int) -> Any:
    return llm.scores[start:end].copy()


SETUPS = [
    *((arch, False, False) for arch in HYBRIDS),
    *((arch, True, False) for arch in HYBRIDS[:2]),
    *((arch, flash_attn, swa_full) for arch in WINDOWS for flash_attn in (False, True) for swa_full in (False, True)),
]


@pytest.mark.parametrize("recall", [0, 4])
@pytest.mark.parametrize("arch, flash_attn, swa_full", SETUPS)
def test_an_appended_turn(
    new_llm: Instances, tiny: dict[str, Path], arch: str, flash_attn: bool, swa_full: bool, recall: int
) -> None:
    """The full cache is restored bit for bit, in layers that are evicted and in those that are not."""
    settings: dict[str, Any] = {"flash_attn": flash_attn, "swa_full": swa_full, "n_ctx": 512, "logits_all": True}
    dge = {**SETTINGS, "recall": recall}
    llm = new_llm(dge, tiny[arch], **settings)
    prompt = PROMPT
    pieces: list[list[int]] = []
    n_whole = 0
    for turn in range(3):
        n_evictions = turn + 1
        sizes = evaluated(llm)
        answer = greedy(llm, prompt, 12)
        del llm._ctx.decode
        stats = llm.dge_stats
        assert stats.state == "evicted" and stats.n_evictions == n_evictions and stats.n_prompt == len(prompt)
        assert stats.n_layer < 3 and (recall == 0 or stats.n_recalls >= 2)
        if turn:
            # everything up to the last eviction but for nothing
            assert stats.rows_restored == len(prompt) - sizes[0] == n_whole
        pieces += [prompt[len(prompt) - sizes[0] :], *([token] for token in answer[: DRAFT - 1])]
        n_whole = len(prompt) + DRAFT - 1
        # prompt and draft are evaluated on a cache that is whole
        got = logits_of(llm, len(prompt) - sizes[0], len(prompt))
        twin = new_llm({**dge, "budget": 500}, tiny[arch], **settings)
        want = replayed(twin, pieces[: -(DRAFT - 1)])
        assert np.isfinite(got).all() and np.array_equal(got, want), turn
        prompt = [*prompt, *answer, *text(20, turn)]


@pytest.mark.parametrize("arch", [*HYBRIDS, *WINDOWS])
@pytest.mark.parametrize("kind", ["edited", "regenerated", "another", "shorter"])
def test_another_turn_answers_as_a_fresh_instance(
    new_llm: Instances, tiny: dict[str, Path], arch: str, kind: str
) -> None:
    """A recurrent state is that of one position: where it does not fit, all is evaluated again."""
    settings: dict[str, Any] = {"n_ctx": 512, "logits_all": True}
    llm = new_llm(SETTINGS, tiny[arch], **settings)
    answer = greedy(llm, PROMPT, 12)
    assert llm.dge_stats.state == "evicted"
    prompt = {
        "edited": [*PROMPT[:130], *text(40, 3)],
        "regenerated": PROMPT,
        "another": [PROMPT[0] % 100 + 4, *PROMPT[1:], *answer],
        "shorter": PROMPT[:90],
    }[kind]
    sizes = evaluated(llm)
    got = greedy(llm, prompt, 12)
    if arch in HYBRIDS or kind == "another":
        assert sizes[0] == len(prompt) and llm.dge_stats.rows_restored == 0
    else:
        assert sizes[0] < len(prompt) and llm.dge_stats.rows_restored > 0
    fresh = new_llm(SETTINGS, tiny[arch], **settings)
    n_kept = len(prompt) - sizes[0]
    if n_kept:
        fresh.eval(prompt[:n_kept])
    want = greedy(fresh, prompt, 12)
    # a shorter batch adds up in another order; these models have few tokens that stand out
    a, b = (logits_of(x, len(prompt) - 1, len(prompt)) for x in (llm, fresh))
    assert np.abs(a - b).max() <= (1e-3 * np.abs(b).max() if n_kept else 0.0)
    assert got == want
    assert llm.dge_stats.state == "evicted" and llm.dge_stats.rows == fresh.dge_stats.rows


@pytest.mark.parametrize("arch", [*HYBRIDS, *WINDOWS])
@pytest.mark.parametrize("recall", [0, 3])
def test_the_same_prompt_short_and_long(new_llm: Instances, tiny: dict[str, Path], arch: str, recall: int) -> None:
    """One token, k, more than k, one again: each time the beginning of the same answer."""
    dge = {**SETTINGS, "recall": recall}
    settings: dict[str, Any] = {"n_ctx": 512, "type_k": 0, "type_v": 0}
    llm = new_llm(dge, tiny[arch], **settings)
    want = greedy(new_llm(dge, tiny[arch], **settings), PROMPT, 24)
    for n in (1, DRAFT, 24, 2, 24, 1):
        assert greedy(llm, PROMPT, n) == want[:n]
    # and on from there
    so_far = [*PROMPT, *want[:14]]
    llm.reset()
    assert greedy(llm, PROMPT, 14) == want[:14]
    assert greedy(llm, so_far, 10) == want[14:] or recall


@pytest.mark.parametrize("arch", [*HYBRIDS, *WINDOWS])
def test_states(new_llm: Instances, tiny: dict[str, Path], arch: str) -> None:
    """A state also holds the layers that are not evicted."""
    llm = new_llm(SETTINGS, tiny[arch], n_ctx=512)
    want = greedy(llm, PROMPT, 30)
    llm.reset()
    start = greedy(llm, PROMPT, 12)
    state = llm.save_state()
    busy = new_llm(SETTINGS, tiny[arch], n_ctx=512)
    greedy(busy, text(90, 5), 9)
    for other in (busy, llm, new_llm(SETTINGS, tiny[arch], n_ctx=512)):
        other.load_state(state)
        assert [*start, *greedy(other, [*PROMPT, *start], 18)] == want
        assert other.dge_stats.state == "evicted" and other.dge_stats.rows == BUDGET + 29
    state.llama_state = state.llama_state[:-1]
    with pytest.raises(RuntimeError, match="damaged"):
        busy.load_state(state)
    fresh = new_llm(SETTINGS, tiny[arch], n_ctx=512)
    assert greedy(busy, text(90, 5), 12) == greedy(fresh, text(90, 5), 12)


@pytest.mark.parametrize("arch", MLA)
def test_latent_attention_is_refused(new_llm: Instances, tiny: dict[str, Path], arch: str) -> None:
    with pytest.raises(ValueError, match="multi-head latent attention"):
        new_llm(SETTINGS, tiny[arch])
    with pytest.warns(RuntimeWarning, match="running without eviction.*multi-head latent attention"):
        llm = new_llm({**SETTINGS, "strict": False}, tiny[arch], n_ctx=256)
    assert not llm.dge_enabled
    # past the end of the context: a clear error, as without eviction
    with pytest.raises(ValueError, match="exceed context window"):
        llm.create_completion(text(300, 1), max_tokens=5)
    assert greedy(llm, PROMPT, 20) == greedy(new_llm(None, tiny[arch], n_ctx=256), PROMPT, 20)


# contexts


@pytest.fixture
def contexts(tiny: dict[str, Path]) -> Iterator[Any]:
    loaded: dict[str, NativeModel] = {}
    made: list[Context] = []

    def make(arch: str, **settings: Any) -> Context:
        if arch not in loaded:
            loaded[arch] = NativeModel(tiny[arch])
        made.append(Context(loaded[arch], n_ctx=settings.pop("n_ctx", 1024), **settings))
        return made[-1]

    yield make
    for context in made:
        context.close()
    for model in loaded.values():
        model.close()


PARAMS: dict[str, Any] = {"budget": BUDGET, "draft_tokens": DRAFT, "park": "ram"}


def others(context: Context, seq: int = 0) -> bytes:
    """The state of the layers that are not evicted."""
    import ctypes

    partial = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    size = context.api.llama_state_seq_get_size_ext(context.handle, seq, partial)
    buffer = (ctypes.c_uint8 * size)()
    assert context.api.llama_state_seq_get_data_ext(context.handle, buffer, size, seq, partial) == size
    return bytes(buffer)


@pytest.mark.parametrize("arch", [*HYBRIDS, *WINDOWS])
def test_an_eviction_leaves_the_other_layers_alone(contexts: Any, arch: str) -> None:
    """Their state is the same bytes before and after an eviction, and after a restore."""
    context = contexts(arch, dge={**PARAMS, "draft_tokens": 1})
    tokens = text(200, 1)
    prefill_and_arm(context, tokens[:N_PROMPT])
    before = others(context)
    assert len(before) > 1000
    assert context.evict() == driver.OK and context.info()["n_rows"] == BUDGET
    assert others(context) == before
    decode_each(context, tokens[N_PROMPT:180])
    assert others(context) != before
    assert context.restore(1000) == N_PROMPT and context.info()["n_rows"] == N_PROMPT
    assert others(context) == before


@pytest.mark.parametrize("arch", [*HYBRIDS, *WINDOWS])
@pytest.mark.parametrize("overlap", [False, True])
def test_recall(contexts: Any, arch: str, overlap: bool) -> None:
    """Rows stay within the budget, and with a budget for all of them logits are those of the full cache."""
    tokens = text(230, 2)
    dge = {**PARAMS, "recall": 4, "recall_async": overlap}
    context = contexts(arch, dge=dge)
    logits = decode_with_recall(context, tokens)
    info = context.info()
    assert info["state"] == driver.STATE_EVICTED and info["n_recalls"] >= 10 and info["n_moved"] > 0
    assert info["n_rows"] <= BUDGET + (8 if overlap else 4)
    whole = contexts(arch, dge={**dge, "budget": 500})
    full = contexts(arch)
    a, b = decode_with_recall(whole, tokens), decode_with_recall(full, tokens)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, logits) and np.isfinite(logits).all()


def decode_with_recall(context: Context, tokens: list[int]) -> Any:
    context.decode(tokens[:N_PROMPT], every=False)
    context.arm(N_PROMPT)
    return decode_each(context, tokens[N_PROMPT:])


@pytest.mark.parametrize("arch", [*HYBRIDS[:4], *WINDOWS])
@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("swa_full", [False, True])
def test_two_sequences(contexts: Any, arch: str, kv_unified: bool, swa_full: bool) -> None:
    """One is evicted, restored and evicted again; the other is what it is without it."""
    if swa_full and arch in HYBRIDS:
        pytest.skip("no sliding windows")
    settings = {"n_seq_max": 2, "kv_unified": kv_unified, "swa_full": swa_full, "n_ctx": 2048}
    one, two = text(220, 3), text(220, 4)
    context, twin = contexts(arch, dge=PARAMS, **settings), contexts(arch, dge=PARAMS, **settings)
    for each in (context, twin):
        each.decode(two[:N_PROMPT], seq=1, every=False)
        each.decode(one[:N_PROMPT], seq=0, every=False)
    assert context.arm(N_PROMPT) == driver.OK
    for i in range(N_PROMPT, 180):
        for each in (context, twin):
            each.decode([one[i]], seq=0)
        got, want = (each.decode([two[i]], seq=1) for each in (context, twin))
        close(got, want)
    assert context.info(0)["n_rows"] == BUDGET + 30 and context.info(1)["state"] == driver.STATE_FULL
    assert others(context, 1) == others(twin, 1) or kv_unified
    kept = as_lists(context.kept())
    assert context.restore(1000) == N_PROMPT + DRAFT - 1
    assert context.arm(N_PROMPT) == driver.OK
    got = decode_each(context, one[N_PROMPT + DRAFT - 1 : 190])
    assert as_lists(context.kept()) == kept and np.isfinite(got).all()
    close(context.decode([two[180]], seq=1), twin.decode([two[180]], seq=1))
    assert context.seq_rm(0, -1, -1)
    close(decode_each(context, two[181:190], seq=1), decode_each(twin, two[181:190], seq=1))


def close(a: Any, b: Any) -> None:
    """Equal but for the order of sums, which depends on the cells in use."""
    assert np.abs(a - b).max() <= 2e-3 * np.abs(b).max()


@pytest.mark.parametrize("arch", [*HYBRIDS, *WINDOWS])
def test_abort_in_the_eviction(contexts: Any, arch: str) -> None:
    """Stopped at any step: the layers that are not evicted go on with those that are."""
    tokens = text(220, 5)
    want = evict_after(contexts(arch, dge=PARAMS), tokens, N_PROMPT, DRAFT - 1)
    for at in count(1):
        context = contexts(arch, dge=PARAMS)
        prefill_and_arm(context, tokens[:N_PROMPT])
        decode_each(context, tokens[N_PROMPT : N_PROMPT + DRAFT - 1])
        calls = count(1)
        before = others(context)
        context.set_abort(lambda calls=calls, at=at: next(calls) == at)
        status = context.evict()
        context.set_abort(None)
        if next(calls) <= at:
            assert status == driver.OK
            break  # nothing was stopped: no more steps to stop
        assert status == driver.ERR_ABORTED
        assert others(context) == before and context.info()["n_rows"] == N_PROMPT + DRAFT - 1
        assert np.array_equal(decode_each(context, tokens[N_PROMPT + DRAFT - 1 :]), want)
    assert at > len(context.layers())


@pytest.mark.parametrize("arch", WINDOWS)
@pytest.mark.parametrize("swa_full", [False, True])
@pytest.mark.parametrize("budget", [BUDGET, 900])
def test_windows_that_forget(new_llm: Instances, tiny: dict[str, Path], arch: str, swa_full: bool, budget: int) -> None:
    """A cache of sliding windows forgets rows that a shorter prompt would see: it is evaluated again then."""
    settings: dict[str, Any] = {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 64, "swa_full": swa_full, "logits_all": True}
    dge = {**SETTINGS, "budget": budget}
    llm = new_llm(dge, tiny[arch], **settings)
    prompt = text(600, 6)
    kept = {}
    for n_same in (599, 595, 570, 400, 100):
        greedy(llm, prompt, 8)
        assert llm.dge_stats.state == ("evicted" if budget < 600 else "full")
        other = [*prompt[:n_same], *text(30, n_same)]
        sizes = evaluated(llm)
        greedy(llm, other, 1)
        del llm._ctx.decode
        kept[n_same] = len(other) - sum(sizes)
        assert 0 <= kept[n_same] <= n_same
        fresh = new_llm(dge, tiny[arch], **settings)
        fresh.eval(other)
        close(llm.scores[len(other) - 1], fresh.scores[len(other) - 1])
        llm.reset()
    assert kept[599] > 500
    # the window of this llama4 is longer than the context
    assert (kept[100] == 0) == (not swa_full and arch != "llama4")
