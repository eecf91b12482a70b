"""Arms that share a prefill answer as runs of their own do."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from llama_dge import Llama
from llama_dge.demo_text import chronicle
from llama_dge.eval import engine as engine_module
from llama_dge.eval.arms import Arm, parse_arm, parse_arms
from llama_dge.eval.cache import Cache, EvalError
from llama_dge.eval.engine import TAIL, Engine
from llama_dge.eval.metrics import kl_divergence, log_softmax

if TYPE_CHECKING:
    from conftest import Zoo

N_NEW = 16
ARMS = [
    "full",
    "snapkv:budget=32",
    "paper:budget=32",
    "default:k=5,budget=64",
    "default:k=3,scores=both,budget=32",
    "recall:k=2,recall=1,budget=32",
    "recall:k=1,budget=32",
    "default:k=2,recall=auto,budget=32",
    "streamingllm:budget=32",
    "h2o:budget=32",
    "h2o:k=4,scores=both,budget=48",
    "h2o:k=2,scores=draft,budget=32",
    "h2o:k=2,recall=4,budget=32",
    "pyramidkv:k=2,scores=draft,budget=48",
    "paper:head_budgets=adaptive,budget=32",
    "paper:window=20,budget=40",
]


def load(zoo: Zoo, model: str = "g2", **settings: Any) -> Llama:
    return Llama(
        str(zoo[model].path), n_ctx=1024, n_batch=128, n_threads=1, n_threads_batch=1, verbose=False, **settings
    )


def prompt_of(llm: Llama, question: str = "") -> list[int]:
    return llm.tokenize(f"{chronicle(1)[:300]}\n\n{question}".encode())


def alone(zoo: Zoo, arm: Arm, parts: list[list[int]], forced: list[int], n: int) -> tuple[list[int], Any]:
    """Answer with an instance of one's own, over generate(); the first tokens of the answer are given."""
    llm = load(zoo, dge=arm.config)
    for part in parts:
        llm.eval(part)
    seen: list[npt.NDArray[np.float32]] = []

    def force(_: Any, scores: Any) -> Any:
        seen.append(np.array(scores, dtype=np.float32))
        if len(seen) <= len(forced):
            scores = np.full_like(scores, -1e9)
            scores[forced[len(seen) - 1]] = 1e9
        return scores

    tokens = [token for part in parts for token in part]
    answer = list(islice(llm.generate(tokens, temp=0.0, logits_processor=llama_cpp.LogitsProcessorList([force])), n))
    llm.close()
    return answer, seen


@pytest.mark.parametrize("shared", [0, 250], ids=["", "shared document"])
def test_as_separate_runs(zoo: Zoo, shared: int) -> None:
    llm = load(zoo)
    arms = parse_arms(ARMS if not shared else [*ARMS[:7:2], *(arm for arm in ARMS if arm.startswith("h2o:"))])
    engine = Engine(llm, keep_logits=True)
    if shared:  # what another prompt left must not matter
        list(engine.run([*prompt_of(llm), 5, 6, 7], arms, max_tokens=4, shared=shared))
    prompt = prompt_of(llm, "Who?")
    results = list(engine.run(prompt, arms, max_tokens=N_NEW, shared=shared))
    assert [result.arm for result in results] == arms
    full = results[0].tokens

    eog = [token for token in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(engine._vocab, token)]
    differ = 0
    for result in results:
        tail = max([TAIL, *(arm.config.window for arm in arms if arm.config is not None)])
        parts = [prompt[:shared], prompt[shared:-tail], prompt[-tail:]] if shared else [prompt[:-tail], prompt[-tail:]]
        answer, _ = alone(zoo, result.arm, parts, [], N_NEW)
        end = next((i + 1 for i, token in enumerate(answer) if token in eog), N_NEW)
        assert result.tokens == answer[:end], result.arm.name
        differ += result.tokens != full

        _, logits = alone(zoo, result.arm, parts, full, len(full))
        for t, (mine, its) in enumerate(zip(result.logits, logits)):
            np.testing.assert_array_equal(mine, its, err_msg=f"{result.arm.name}, {t}")
            if result.arm.config is not None:
                want = kl_divergence(log_softmax(results[0].logits[t]), log_softmax(its))
                assert result.kl[t] == pytest.approx(want, abs=1e-6)
                assert result.same[t] == (int(np.argmax(its)) == full[t])
        assert len(result.logits) == len(full)
        if result.arm.config is not None:
            assert result.evicted and result.n_before_eviction == result.arm.config.draft_tokens
            assert max(result.kl[: result.n_before_eviction]) < 1e-9  # the same cache until then
    assert differ > 1  # the comparison would show something


def test_answers_longer_than_what_is_compared(zoo: Zoo) -> None:
    llm = load(zoo)
    arms = parse_arms(["full", "paper", "recall:k=2", "paper:k=8", "h2o:k=8"], [32])
    prompt = prompt_of(llm)
    long = list(Engine(llm).run(prompt, arms, max_tokens=N_NEW))
    short = list(Engine(llm).run(prompt, arms, max_tokens=N_NEW, kl_tokens=5))
    for a, b in zip(long, short):
        assert b.tokens == a.tokens and b.kl == a.kl[:5]
        # the draft may be longer than what is compared
        assert a.arm.config is None or (
            a.evicted and a.n_before_eviction == b.n_before_eviction == a.arm.config.draft_tokens
        )


@pytest.mark.parametrize("shared", [0, 250], ids=["", "shared document"])
def test_what_is_read(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    """A prompt once for all arms, and once more for those of h2o that sum attention; what prompts share likewise."""
    llm = load(zoo)
    engine = Engine(llm)
    read: list[int] = []
    decode = Cache.decode
    monkeypatch.setattr(Cache, "decode", lambda self, tokens: (read.append(len(tokens)), decode(self, tokens))[1])
    arms = parse_arms(["full", "paper", "h2o", "h2o:k=3,scores=both"], [32, 48, 64])
    prompts = [prompt_of(llm, question) for question in ("Who?", "When?")]
    for prompt, n_shared in zip(prompts, (0, shared)):
        read.clear()
        results = list(engine.run(prompt, arms, max_tokens=4, shared=shared))
        assert len(results) == 10 and all(result.evicted for result in results[1:])
        assert sum(n for n in read if n > 1) == 2 * (len(prompt) - n_shared)


def test_nothing_to_evict(zoo: Zoo) -> None:
    llm = load(zoo)
    prompt = prompt_of(llm)
    arms = parse_arms(["full", "paper:budget=900", "recall:budget=900", f"default:k={N_NEW},budget=32"])
    full, *others = Engine(llm).run(prompt, arms, max_tokens=N_NEW)
    for result in others:
        assert not result.evicted and result.tokens == full.tokens and max(result.kl) < 1e-9
        assert result.n_before_eviction >= len(full.tokens)


def test_an_eviction_that_waits_for_the_answer(zoo: Zoo) -> None:
    """With recall, entries of the answer count: they are evicted when prompt and answer have outgrown the budget."""
    llm = load(zoo)
    prompt = prompt_of(llm)[:36]
    full, result = Engine(llm).run(prompt, parse_arms(["full", "recall:k=2,recall=2,budget=40"]), max_tokens=N_NEW)
    assert result.evicted and 4 < result.n_before_eviction <= 8
    assert max(result.kl[: result.n_before_eviction]) < 1e-9 < max(result.kl[result.n_before_eviction :])
    assert result.rows_end <= 42 < full.rows_end


def test_short_prompts(zoo: Zoo) -> None:
    llm = load(zoo)
    for n in (1, TAIL, TAIL + 1):
        results = list(Engine(llm).run(prompt_of(llm)[:n], parse_arms(["full", "paper:budget=32"]), max_tokens=3))
        assert results[0].tokens == results[1].tokens


def test_stop(zoo: Zoo) -> None:
    llm = load(zoo)
    engine = Engine(llm)
    arms = parse_arms(["full", "paper:budget=32"])
    for result in engine.run(prompt_of(llm), arms, max_tokens=N_NEW, stop=lambda raw: len(raw) >= 3):
        assert result.ended and len(engine._raw(result.tokens)) >= 3 > len(engine._raw(result.tokens[:-1]))


def test_entries_that_are_not_the_budget(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(zoo)
    n_kept = engine_module._native.n_kept
    monkeypatch.setattr(engine_module._native, "n_kept", lambda *args: n_kept(*args) + 2)
    with pytest.raises(EvalError, match=r"35 \.\. 35 entries are kept, which is not the budget 32"):
        list(Engine(llm).run(prompt_of(llm), [parse_arm("paper:budget=32")], max_tokens=N_NEW))


def test_the_model_is_left_as_it_was(zoo: Zoo) -> None:
    llm = load(zoo)
    prompt = prompt_of(llm)
    before = list(islice(llm.generate(prompt, temp=0.0), 8))
    engine = Engine(llm)
    list(engine.run(prompt, parse_arms(["paper:budget=32"]), max_tokens=4))
    engine.close()
    assert not llm.dge_enabled
    assert list(islice(llm.generate(prompt, temp=0.0), 8)) == before
