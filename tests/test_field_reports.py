"""Public reports of faults in eviction, long contexts, caches and states, tried here: docs/field-reports.md.

Each test is named after the reports it tries. Reports that other tests try are in the table only.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest

from reference import driver
from reference.instances import Instances, evaluated, greedy, instances
from reference.models import write_lora
from reference.scenario import as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

# a saved state has no host copy, of which a warning speaks where entries are recalled
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:llama_dge. recall=.*no host copy")

ROOT = Path(__file__).resolve().parent.parent
BUDGET, DRAFT = 32, 3
SETTINGS = {"budget": BUDGET, "draft_tokens": DRAFT}
PROMPT = tokens_of(150, 0)
# one eviction for good, and recall
MODES = pytest.mark.parametrize("recall", [0, 4])


@pytest.fixture
def new_llm(zoo: Zoo) -> Iterator[Instances]:
    # f32: batches of another size must not tip the scales between two tokens
    def make(dge: Any = None, **settings: Any) -> Any:
        return made(dge, **{"type_k": 0, "type_v": 0, **settings})

    with instances(zoo["g2"].path) as made:
        yield make  # type: ignore[misc]


def dge_of(recall: int, **more: Any) -> dict[str, Any]:
    return {**SETTINGS, "recall": recall, **more}


def params_of(recall: int, **more: Any) -> dict[str, Any]:
    return {**SETTINGS, "recall": recall, "park": "ram", **more}


def nmse(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(((a - b) ** 2).sum() / (b**2).sum())


@MODES
def test_e04_short_prompts(new_llm: Instances, recall: int) -> None:
    """Every length around the window and the budget, down to a budget of one row."""
    full = new_llm()
    for budget, window in ((1, 1), (2, 1), (8, 8), (9, 8), (10, 2)):
        llm = new_llm(dge_of(recall, budget=budget, window=window))
        for n in (*range(1, window + 4), budget + 1, 40):
            prompt = PROMPT[:n]
            llm.reset()
            full.reset()
            answer = greedy(llm, prompt, 12)
            assert answer[:DRAFT] == greedy(full, prompt, 12)[:DRAFT]
            stats = llm.dge_stats
            assert stats.error is None and len(answer) == 12
            if n > budget:
                assert stats.state == "evicted" and stats.rows_after >= budget
            for layer in llm.dge_layers if stats.state == "evicted" else ():
                kept = llm.dge_kept(layer, 0)
                assert (len(kept) >= budget and np.isin(np.arange(n - window, n), kept).all()) or recall
    llm = new_llm(dge_of(recall))
    texts = [one.create_completion("", max_tokens=9, temperature=0.0)["choices"][0]["text"] for one in (llm, full)]
    assert texts[0] == texts[1] and llm.dge_stats.n_evictions == 0


@MODES
@pytest.mark.parametrize("flash_attn", [False, True])
def test_e09_every_length(new_context: ContextFactory, recall: int, flash_attn: bool) -> None:
    """Prompt lengths over the steps of padding, in micro-batches of any size, free cells full of NaN (or, where
    llama.cpp itself multiplies them by zero, of a large value)."""
    tokens = tokens_of(640, 2)
    contexts = {
        n: new_context("one", n_batch=512, n_ubatch=n, flash_attn=flash_attn, dge=params_of(recall))
        for n in (1, 7, 32, 100, 512)
    }
    for n_prompt in [*range(33, 600, 97), 64, 65, 255, 256, 257, 511, 512, 513]:
        found = []
        for context in contexts.values():
            context.clear(False)
            context.poison(driver.NAN_F16 if flash_attn else driver.LARGE_F16)
            prefill_and_arm(context, tokens[:n_prompt])
            logits = decode_each(context, tokens[n_prompt : n_prompt + 12])
            assert np.isfinite(logits).all(), n_prompt
            info = context.info()
            assert info["state"] == driver.STATE_EVICTED and info["n_rows"] <= BUDGET + 12
            found.append((logits, as_lists(context.kept())))
        # rounding may decide between rows of nearly equal scores: then the rows differ, and nothing is compared
        same = [logits for logits, kept in found if kept == found[0][1]]
        assert len(same) >= 3, n_prompt
        assert all(nmse(logits, same[0]) < 1e-5 for logits in same)


@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv", "h2o", "streamingllm"])
def test_e11_one_definition_of_budget(new_llm: Instances, policy: str) -> None:
    """Rows per layer and head, window and sinks included, on average over layers; and that is what is reported."""
    for budget in (16, 40, 90, 0.25):
        llm = new_llm({"budget": budget, "policy": policy, "draft_tokens": 1, "scores": "policy"})
        greedy(llm, PROMPT, 4)
        rows = budget if budget > 1 else 38  # a share rounds up
        stats = llm.dge_stats
        assert stats.state == "evicted" and abs(stats.budget - rows) <= 1
        assert np.mean(stats.rows_by_head) == pytest.approx(stats.budget, abs=0.5)


@MODES
def test_e12_t49_long_prompts_of_unlike_sessions(zoo: Zoo, recall: int) -> None:
    """Each is cut, as the first one was, and nothing piles up."""
    with instances(zoo["one"].path) as made:
        llm, sizes = made(dge_of(recall), n_ctx=2048), []
        for i in range(5):
            prompt = tokens_of(1500 + 31 * i, i)
            answer = greedy(llm, prompt, 12)
            stats, memory = llm.dge_stats, llm.dge_memory
            assert stats.state == "evicted" and stats.n_prompt == len(prompt) and stats.rows <= BUDGET + 12
            sizes.append((memory.kv, memory.n_cells))
            if i in (0, 4):
                assert answer == greedy(made(dge_of(recall), n_ctx=2048), prompt, 12)
        assert len(set(sizes)) == 1


def test_e13_a_failure_in_a_pipe_fails_the_build() -> None:
    """What the recipes of the Makefile run under: a step in front of a pipe must not be lost."""
    for recipe, ok in (("false | cat", False), ("false; true", False), ("true | cat", True)):
        command = ["make", "-s", "-f", str(ROOT / "Makefile"), f"--eval=try-it:\n\t{recipe}", "try-it"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("no make on this machine")
        assert (done.returncode == 0) == ok, (recipe, done.stderr)


def chat(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


def reply(llm: Any, messages: list[dict[str, str]], n: int = 16) -> str:
    out = llm.create_chat_completion(messages, max_tokens=n, temperature=0.0)
    text: str = out["choices"][0]["message"]["content"]
    return text


@MODES
def test_t01_t03_two_chats_take_turns(new_llm: Instances, recall: int) -> None:
    """Unrelated chats on one instance, each with further turns. Where a chat goes on, only what is new is evaluated."""
    dge = dge_of(recall)
    llm = new_llm(dge)
    chats = [chat("Tell me of the sea. " * 5), chat("What is a prime number? " * 4)]
    for turn in range(3):
        for i, messages in enumerate(chats):
            text = reply(llm, messages)
            assert llm.dge_stats.state == "evicted" and len(text) == 16
            if turn == 0:
                assert text == reply(new_llm(dge), messages)
            chats[i] += [*chat("", text)[1:], *chat(f"And {turn}?")]
    sizes = evaluated(llm)
    messages = [*chats[1], {"role": "assistant", "content": reply(llm, chats[1])}, *chat("Why?")]
    sizes.clear()
    reply(llm, messages)
    assert llm.dge_stats.rows_restored > 100 and sizes[0] < 60
    assert sum(sizes) < llm.n_tokens / 2


@MODES
@pytest.mark.parametrize("new_turn", ["restore", "append", "reprefill"])
def test_t11_a_template_that_drops_the_thoughts(new_llm: Instances, recall: int, new_turn: str) -> None:
    """The answer comes back without its beginning: nothing behind the hole is used again."""
    dge = dge_of(recall, new_turn=new_turn)
    llm = new_llm(dge)
    answer = greedy(llm, PROMPT, 30)
    prompt = [*PROMPT, *answer[12:], *tokens_of(10, 4)]
    sizes = evaluated(llm)
    got = greedy(llm, prompt, 20)
    assert sizes[0] >= len(prompt) - 150
    if new_turn == "append" and recall == 0:
        assert llm.dge_stats.n_evictions == 1 and llm.dge_stats.rows == BUDGET + len(prompt) - 150 + 19
    else:
        assert got == greedy(new_llm(dge), prompt, 20)


@MODES
def test_t13_reuse_changes_no_more_than_rounding(new_llm: Instances, recall: int) -> None:
    """Logits of a prompt that was continued, edited or repeated, against those of a fresh instance."""
    dge = dge_of(recall)
    llm = new_llm(dge, logits_all=True, type_k=1, type_v=1)
    answer = greedy(llm, PROMPT, 20)
    for prompt in ([*PROMPT, *answer, *tokens_of(9, 1)], [*PROMPT[:90], *tokens_of(30, 2)], PROMPT):
        greedy(llm, PROMPT, 20)
        greedy(llm, prompt, 1)
        fresh = new_llm(dge, logits_all=True, type_k=1, type_v=1)
        greedy(fresh, prompt, 1)
        assert 0.0 <= nmse(llm.scores[len(prompt) - 1], fresh.scores[len(prompt) - 1]) < 1e-5


@MODES
def test_t17_t23_a_chat_that_outgrows_the_context(new_llm: Instances, recall: int) -> None:
    """A clear error that tells what eviction does not do; the instance goes on with what fits."""
    dge = dge_of(recall)
    llm = new_llm(dge, n_ctx=256)
    prompt = PROMPT
    while len(prompt) < 256:
        answer = greedy(llm, prompt, 10)
        assert llm.dge_stats.state == "evicted" and llm.dge_stats.rows < 60
        prompt = [*prompt, *answer, *tokens_of(20, len(prompt))]
    for too_long in (prompt, tokens_of(256, 1), tokens_of(900, 2)):
        with pytest.raises(ValueError, match=r"exceed context window of 256.*eviction.*n_ctx"):
            llm.create_completion(too_long, max_tokens=4)
    with pytest.raises(ValueError, match=r"exceed context window of 256$"):
        new_llm(n_ctx=256).create_completion(prompt, max_tokens=4)
    shorter = [*prompt[:60], *prompt[-90:]]
    assert greedy(llm, shorter, 20) == greedy(new_llm(dge, n_ctx=256), shorter, 20)


@MODES
def test_t19_an_answer_ends_with_the_context(new_llm: Instances, recall: int) -> None:
    """900 tokens and 512 more do not fit into 1,024: it ends there, whatever eviction made room for."""
    llm = new_llm(dge_of(recall), n_ctx=1024)
    bias = {0: -100.0, 2: -100.0}
    out = llm.create_completion(tokens_of(900, 1), max_tokens=512, temperature=0.0, logit_bias=bias)
    assert out["usage"]["completion_tokens"] == 124 and out["choices"][0]["finish_reason"] == "length"
    assert llm.dge_stats.rows <= BUDGET + (124 if recall == 0 else 4)
    out = llm.create_completion(tokens_of(900, 1), max_tokens=50, temperature=0.0, logit_bias=bias)
    assert out["usage"]["completion_tokens"] == 50


@MODES
@pytest.mark.parametrize("elastic", [False, True])
def test_t25_a_full_cache_is_evicted_and_takes_a_batch(new_context: ContextFactory, recall: int, elastic: bool) -> None:
    """Filled to the last cell; after the eviction a batch of 454 tokens finds room."""
    tokens = tokens_of(1200, 3)
    context = new_context("one", n_ctx=512, elastic=elastic, dge=params_of(recall))
    prefill_and_arm(context, tokens[: 512 - DRAFT + 1])
    decode_each(context, tokens[512 - DRAFT + 1 : 512])
    assert context.info()["n_rows"] == 512
    logits = context.decode(tokens[512 : 512 + 454])
    assert np.isfinite(logits).all()
    assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_rows"] == 454 + (
        BUDGET if recall else BUDGET + DRAFT - 1
    )
    twin = new_context("one", n_ctx=1024, dge=params_of(recall))
    prefill_and_arm(twin, tokens[: 512 - DRAFT + 1])
    decode_each(twin, tokens[512 - DRAFT + 1 : 512])
    assert nmse(logits, twin.decode(tokens[512 : 512 + 454])) < 1e-5


def test_t27_no_limit_after_a_long_prompt(zoo: Zoo) -> None:
    with instances(zoo["one"].path) as made:
        llm = made(dge_of(0), n_ctx=8192)
        for recall in (0, 4):
            llm.set_dge(dge_of(recall))
            out = llm.create_completion(
                tokens_of(8100, 1), max_tokens=-1, temperature=0.0, logit_bias={0: -100.0, 2: -100.0}
            )
            assert out["usage"]["completion_tokens"] == 92
            assert llm.dge_stats.state == "evicted" and llm.dge_stats.n_prompt == 8100
            assert (llm.dge_stats.n_recalls > 20) == bool(recall)


@pytest.mark.parametrize(
    "recall, asynchronous", [(0, False), *((n, asynchronous) for n in (1, 4, -1) for asynchronous in (False, True))]
)
def test_t29_positions_stay_consistent(new_context: ContextFactory, recall: int, asynchronous: bool) -> None:
    """After each step the newest position is there, and the next one is accepted."""
    context = new_context("g2", dge=params_of(recall, recall_async=asynchronous))
    tokens = tokens_of(260, 4)
    prefill_and_arm(context, tokens[:150])
    for i, token in enumerate(tokens[150:]):
        assert np.isfinite(context.decode([token])).all()
        assert context.pos_max() == 150 + i
        info = context.info()
        assert info["pos_min"] <= info["boundary"] + 1 <= 151 + i or info["state"] != driver.STATE_EVICTED
        if info["state"] == driver.STATE_EVICTED:
            assert context.kept()[0][0][-1] <= 150 + i
            assert (context.decode([5], pos=152 + i, check=False).size, context.rc) == (0, -1)
    assert context.info()["state"] == driver.STATE_EVICTED


@MODES
def test_t31_a_probe_finds_the_cache_trimmable(new_context: ContextFactory, recall: int) -> None:
    """Two tokens, the second removed: works as long as nothing is evicted, and again when all is cleared."""
    context = new_context("g2", dge=params_of(recall))
    for _ in range(2):
        context.decode([5, 6])
        assert context.seq_rm(0, 1, -1) and context.pos_max() == 0 and context.can_shift()
        context.clear(False)
        prefill_and_arm(context, tokens_of(170, 1)[:150])
        decode_each(context, tokens_of(170, 1)[150:])
        assert context.info()["state"] == driver.STATE_EVICTED
        assert not context.seq_rm(0, 1, -1) and context.pos_max() == 169
        context.clear(False)


@MODES
@pytest.mark.parametrize("kv_unified", [True, False])
def test_t33_t35_e10_one_of_four_is_evicted(new_context: ContextFactory, recall: int, kv_unified: bool) -> None:
    """Sequences of unlike length; one is evicted, the longest goes, the others do not notice."""
    settings: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 4, "kv_unified": kv_unified}
    context, twin = (new_context("g2", dge=params_of(recall), **settings) for _ in range(2))
    lengths = [150, 60, 200, 90]
    texts = [tokens_of(300, 10 + i) for i in range(4)]
    for each, seq in itertools.product((context, twin), range(4)):
        each.decode(texts[seq][: lengths[seq]], seq=seq, every=False)
    assert context.arm(150) == driver.OK
    for step in range(40):
        if step == 20:
            for each in (context, twin):
                assert each.seq_rm(2, -1, -1)
        for seq, n in enumerate(lengths):
            if seq == 2 and step >= 20:
                continue
            got, want = (each.decode([texts[seq][n + step]], seq=seq) for each in (context, twin))
            if seq != 0 and not kv_unified:
                assert np.array_equal(got, want)
            elif seq != 0:
                # in other cells sums are made in another order
                assert nmse(got, want) < 1e-5
    info = context.info(0)
    assert info["state"] == driver.STATE_EVICTED and (info["n_recalls"] > 5) == bool(recall)
    assert [context.info(seq)["state"] for seq in (1, 3)] == [driver.STATE_FULL] * 2


def test_t37_a_prompt_with_images_is_not_evicted(new_llm: Instances) -> None:
    """The steps of a handler for images: it fills the cache itself and hands over a prompt that matches."""
    other = tokens_of(40, 6)
    want = None
    for dge in (None, SETTINGS):
        llm = new_llm(dge)
        answers = []
        for middle in (other, tokens_of(40, 7), other):
            llm.reset()
            llm._ctx.kv_cache_clear()
            llm.eval(PROMPT[:70])
            # rows that are no tokens
            llm._batch.set_batch(batch=middle, n_past=70, logits_all=False)
            llm._ctx.decode(llm._batch)
            llm.input_ids[70:110] = -7
            llm.n_tokens = 110
            llm.eval(PROMPT[70:])
            prompt = llm.input_ids[: llm.n_tokens].tolist()
            if dge and not answers:
                with pytest.warns(RuntimeWarning, match="images or audio"):
                    answers.append(greedy(llm, prompt, 12))
            else:
                answers.append(greedy(llm, prompt, 12))
            if dge:
                assert llm.dge_stats.state == "full" and "images" in llm.dge_stats.error
        assert answers[0] == answers[2] != answers[1]
        want = want or answers
        assert answers == want
    assert greedy(llm, PROMPT, 20) == greedy(new_llm(SETTINGS), PROMPT, 20) and llm.dge_stats.state == "evicted"


@MODES
@pytest.mark.parametrize("evicted", [True, False])
def test_t45_logits_are_no_part_of_a_state(new_llm: Instances, recall: int, evicted: bool) -> None:
    """The prompt that a state holds, asked right after it was loaded: the last token is evaluated again."""
    dge = dge_of(recall)
    llm = new_llm(dge)
    start = greedy(llm, PROMPT, 12 if evicted else 1)
    state = llm.save_state()
    held = llm.input_ids[: llm.n_tokens].tolist()
    want = start[11] if evicted else start[0]
    other = new_llm(dge)
    greedy(other, tokens_of(80, 3), 9)
    for each in (llm, other):
        each.load_state(state)
        sizes = evaluated(each)
        assert greedy(each, held, 1) == [want]
        assert 1 <= sum(sizes) <= 8 + DRAFT
        del each._ctx.decode


@MODES
def test_t51_proposals_in_vain(new_llm: Instances, recall: int) -> None:
    """A draft model that is always wrong: the prompt is evicted where it would be without, and recall goes on."""

    def wrong(input_ids: Any, /, **_: Any) -> Any:
        return np.full(10, 3 + int(input_ids[-1] + 7) % 20, dtype=np.intc)

    llm = new_llm(dge_of(recall), draft_model=wrong)
    answer = greedy(llm, PROMPT, 60)
    stats = llm.dge_stats
    assert stats.state == "evicted" and stats.error is None
    assert stats.rows_after == BUDGET + (0 if recall else DRAFT - 1)
    assert llm.draft_model is wrong
    if recall:
        assert stats.n_recalls >= 10 and stats.rows <= BUDGET + 4 + 11
    else:
        assert answer == greedy(new_llm(dge_of(recall)), PROMPT, 60)


@pytest.mark.parametrize("recall", [0, 4])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_t53_graphs_that_are_used_again(
    new_context: ContextFactory, monkeypatch: pytest.MonkeyPatch, recall: int, flash_attn: bool
) -> None:
    """300 steps after an eviction, over the steps of padding: the same with and without reuse of graphs."""
    tokens = tokens_of(460, 5)
    found = []
    for off in (False, True):
        if off:
            monkeypatch.setenv("LLAMA_GRAPH_REUSE_DISABLE", "1")
        context = new_context("g2", flash_attn=flash_attn, elastic=True, dge=params_of(recall))
        prefill_and_arm(context, tokens[:150])
        found.append(decode_each(context, tokens[150:]))
        assert context.info()["state"] == driver.STATE_EVICTED
    assert np.isfinite(found[0]).all() and np.array_equal(found[0], found[1])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_t55_threads_share_an_instance(new_llm: Instances, asynchronous: bool) -> None:
    """Requests and chats of several threads at once: each gets the answer of a fresh instance, or a clear error."""
    dge = dge_of(4, recall_async=asynchronous)
    prompts = [tokens_of(100 + 9 * i, 30 + i) for i in range(3)]

    def text(llm: Any, prompt: list[int]) -> str:
        return str(llm.create_completion(prompt, max_tokens=14, temperature=0.0)["choices"][0]["text"])

    want = [text(new_llm(dge), prompt) for prompt in prompts]
    llm = new_llm(dge)
    got: list[tuple[int, str]] = []
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(3):
                got.append((i, text(llm, prompts[i])))
        except BaseException as error:
            errors.append(error)

    def stream() -> None:
        try:
            for _ in range(3):
                for _chunk in llm.create_completion(prompts[0], max_tokens=14, temperature=0.0, stream=True):
                    pass
        except RuntimeError as error:
            if "this stream has ended" not in str(error):
                errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)] + [threading.Thread(target=stream)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(got) == 9 and all(answer == want[i] for i, answer in got)


@pytest.mark.parametrize("recall", [0, 1, 4])
def test_t63_trimmable_down_to_the_boundary_and_no_further(new_context: ContextFactory, recall: int) -> None:
    """What the library says can be removed can be, and nothing else is touched."""
    context = new_context("g2", dge=params_of(recall))
    tokens = tokens_of(300, 7)
    prefill_and_arm(context, tokens[:150])
    decode_each(context, tokens[150:180])
    for _ in range(5):
        info = context.info()
        boundary, last = info["boundary"], context.pos_max()
        assert info["pos_min"] <= boundary + 1 <= last + 1
        kept = as_lists(context.kept())
        for p0 in (1, 2, boundary - 1, boundary):
            assert not context.seq_rm(0, p0, -1)
        assert as_lists(context.kept()) == kept and context.info()["n_rows"] == info["n_rows"]
        assert context.seq_rm(0, boundary + 1, -1) and context.pos_max() == boundary
        logits = decode_each(context, tokens[boundary + 1 : boundary + 8])
        assert np.isfinite(logits).all()


def test_r44_samplers(new_llm: Instances) -> None:
    """One grammar object for many requests, processors, seeds: in force before and after the eviction."""
    llm, full = new_llm(SETTINGS), new_llm()
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= ("ab" [0-9])+', verbose=False)

    def text(one: Any, prompt: list[int], **settings: Any) -> str:
        return str(one.create_completion(prompt, max_tokens=24, **settings)["choices"][0]["text"])

    for i in range(3):
        got = text(llm, PROMPT[i:], grammar=grammar, temperature=0.0)
        assert re.fullmatch("(ab[0-9])*(a|ab)?", got) and llm.dge_stats.state == "evicted"
        assert got == text(new_llm(SETTINGS), PROMPT[i:], grammar=grammar, temperature=0.0)

    def only_digits(_ids: Any, scores: Any) -> Any:
        kept = np.full_like(scores, -np.inf)
        kept[3 + ord("0") : 4 + ord("9")] = scores[3 + ord("0") : 4 + ord("9")]
        return kept

    processors = llama_cpp.LogitsProcessorList([only_digits])
    got = text(llm, PROMPT, logits_processor=processors, temperature=1.5, seed=7)
    assert got.isdigit() and len(got) == 24 and llm.dge_stats.state == "evicted"
    # the draft is chosen by the full cache
    assert got[:DRAFT] == text(full, PROMPT, logits_processor=processors, temperature=1.5, seed=7)[:DRAFT]
    texts = {seed: text(llm, PROMPT, temperature=1.5, seed=seed) for seed in range(4)}
    assert len(set(texts.values())) == 4
    assert texts == {seed: text(llm, PROMPT, temperature=1.5, seed=seed) for seed in range(4)}


@pytest.mark.parametrize(
    "settings",
    [
        {"n_batch": 7},
        {"n_batch": 33, "n_ubatch": 5},
        {"rope_freq_base": 50000.0, "rope_freq_scale": 0.5},
        {"rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN, "yarn_orig_ctx": 64, "rope_freq_scale": 0.25},
        {"lora_scale": 0.5},
        {"lora_scale": -1.0},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_r45_settings_of_the_context(new_llm: Instances, zoo: Zoo, tmp_path: Path, settings: dict[str, Any]) -> None:
    if "lora_scale" in settings:
        lora = write_lora(zoo["g2"].weights, tmp_path / "lora.gguf")
        settings = {**settings, "lora_path": str(lora)}
    llm, full, plain = new_llm(SETTINGS, **settings), new_llm(**settings), new_llm()
    for prompt in (PROMPT, tokens_of(120, 5), PROMPT):
        answer = greedy(llm, prompt, 16)
        assert llm.dge_stats.state == "evicted" and llm.dge_stats.rows_after == BUDGET + DRAFT - 1
        assert answer[:DRAFT] == greedy(full, prompt, 16)[:DRAFT]
        assert answer == greedy(new_llm(SETTINGS, **settings), prompt, 16)
    if "n_batch" not in settings:  # the setting counts
        assert greedy(full, PROMPT, 16) != greedy(plain, PROMPT, 16)


def test_r46_eight_requests_at_once(zoo: Zoo) -> None:
    """On the server, one conversation at a time and three: each gets its own answer."""
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from reference.serving import serving

    def ask(client: Any, i: int) -> Any:
        body = {"prompt": "the quick brown fox " * 10 + str(i), "max_tokens": 12, "temperature": 0}
        return client.post("/v1/completions", json=body).json()

    answers = []
    for parallel in (1, 3):
        settings = {"dge": SETTINGS, "parallel": parallel, "type_k": 0, "type_v": 0}
        with serving(zoo["g2"].path, **settings) as client, ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i, client=client: ask(client, i), range(8)))
        assert {body["usage"]["dge"]["state"] for body in found} == {"evicted"}
        answers.append([body["choices"][0]["text"] for body in found])
    assert answers[0] == answers[1] and len(set(answers[0])) > 4


@MODES
def test_r47_a_long_prefix(new_llm: Instances, recall: int) -> None:
    """Filling in the middle by `suffix`: the window at the end of the prompt holds the suffix, and is kept."""
    llm, full = new_llm(dge_of(recall)), new_llm()
    prefix, suffix = "def add(a, b): # " + "adds " * 60, "    return total"

    def text(one: Any) -> str:
        return str(one.create_completion(prefix, suffix=suffix, max_tokens=14, temperature=0.0)["choices"][0]["text"])

    answer = text(llm)
    assert llm.dge_stats.state == "evicted" and llm.dge_stats.n_prompt > len(prefix) + len(suffix)
    assert answer[:DRAFT] == text(full)[:DRAFT] and answer == text(new_llm(dge_of(recall)))
    assert answer == text(llm)


def test_table_names_every_report() -> None:
    """docs/field-reports.md has a row for each report, and the tests it names exist."""
    page = (ROOT / "docs" / "field-reports.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(("| E", "| T", "| R"))]
    ids = [line.split("|")[1].strip() for line in rows]
    reports = [*(f"E{i}" for i in range(1, 14)), *(f"T{i:02}" for i in range(1, 64, 2))]
    assert ids == [*reports, *(f"R{i:02}" for i in range(1, 48))]
    names = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", page)
    assert len(names) > 30
    for file, name in names:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, (file, name)
