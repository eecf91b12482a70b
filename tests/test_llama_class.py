"""llama_dge.Llama: a drop-in llama_cpp.Llama that evicts its cache, on tiny models."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from itertools import islice
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llama_dge import DGEConfig, Llama
from reference.driver import dge_library
from reference.forward import Reference
from reference.instances import DGE, Instances, assert_evicted, greedy
from reference.models import N_SPECIAL, token_of
from reference.scenario import tokens_of

if TYPE_CHECKING:
    from conftest import Zoo

SETTINGS = DGE
PROMPT = tokens_of(150, 0)

# "switched off because ..." must not pass unseen
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def text_of(llm: Any, prompt: Any, n: int, **settings: Any) -> str:
    text: str = llm.create_completion(prompt, max_tokens=n, temperature=0.0, **settings)["choices"][0]["text"]
    return text


def assert_follows_reference(zoo: Zoo, llm: Any, prompt: list[int], answer: list[int], model: str = "g2") -> None:
    """Each token of a greedy answer has the highest logit of the reference, masked as the library says."""
    stats = llm.dge_stats
    assert stats is not None
    reference = Reference(zoo[model].weights, "f16", "f16")
    row = reference.run(prompt)[-1]
    for i, token in enumerate(answer):
        assert row[token] >= row.max() - 1e-2, i
        if reference.n_tokens == stats.rows_before:
            reference.mask_all_but([[llm.dge_kept(layer, head) for head in range(2)] for layer in llm.dge_layers])
        row = reference.step([token])[0]


# answers


@pytest.mark.parametrize("dge", [SETTINGS, {"budget": 40, "draft_tokens": 1, "policy": "streamingllm"}], ids=str)
@pytest.mark.parametrize("n_batch", [512, 64])
def test_greedy_answer(zoo: Zoo, new_llm: Instances, dge: dict[str, Any], n_batch: int) -> None:
    llm = new_llm(dge, n_batch=n_batch)
    answer = greedy(llm, PROMPT, 40)
    assert_evicted(llm, 150, 40, dge)
    assert_follows_reference(zoo, llm, PROMPT, answer)
    kept = llm.dge_kept(0, 0)
    assert kept.dtype == np.int32 and (np.diff(kept) > 0).all() and kept[-1] == 150 + dge["draft_tokens"] - 2
    # eviction does change the answer: otherwise nothing here would be worth a test
    assert answer != greedy(new_llm(), PROMPT, 40)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_first_tokens_are_those_of_the_full_cache(new_llm: Instances, k: int) -> None:
    full, n_equal = new_llm(), []
    for seed in range(4):
        prompt = tokens_of(140 + seed, seed)
        llm = new_llm({"budget": 24, "draft_tokens": k})
        sampling = {"temp": 0.9, "top_k": 60, "repeat_penalty": 1.1}
        for llama in (llm, full):
            llama.set_seed(11 + seed)
        a, b = (list(islice(llama.generate(prompt, **sampling), 40)) for llama in (llm, full))
        assert a[:k] == b[:k]
        n_equal.append(next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), 40))
        full.reset()
    assert min(n_equal) < 40


def test_streaming_equals_not_streaming(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    whole = text_of(llm, PROMPT, 40)
    assert_evicted(llm, 150, 40)
    assert len(whole) == 40
    stream = llm.create_completion(PROMPT, max_tokens=40, temperature=0.0, stream=True)
    chunks = [chunk["choices"][0]["text"] for chunk in stream]
    assert "".join(chunks) == whole and len(chunks) >= 40
    assert_evicted(llm, 150, 40, n_evictions=2)
    assert text_of(llm, PROMPT, 40) == whole


def test_chat(new_llm: Instances) -> None:
    messages = [
        {"role": "system", "content": "You know a thing or two. " * 4},
        {"role": "user", "content": "And what would that be?"},
    ]
    llm = new_llm(SETTINGS)
    whole = llm.create_chat_completion(messages, max_tokens=30, temperature=0.0)
    assert llm.dge_stats.state == "evicted"
    parts = llm.create_chat_completion(messages, max_tokens=30, temperature=0.0, stream=True)
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert text == whole["choices"][0]["message"]["content"] and len(text) == 30
    assert llm.dge_stats.state == "evicted" and llm.dge_stats.n_evictions == 2


@pytest.mark.parametrize("n_prompt", [20, 31, 32])
def test_prompt_within_the_budget(new_llm: Instances, n_prompt: int) -> None:
    llm, full = new_llm(SETTINGS), new_llm()
    assert greedy(llm, PROMPT[:n_prompt], 60) == greedy(full, PROMPT[:n_prompt], 60)
    assert llm.dge_stats.state == "full" and llm.dge_stats.n_evictions == 0 and llm.dge_stats.error is None
    assert llm.dge_stats.rows == llm.n_tokens == n_prompt + 59


@pytest.mark.parametrize("max_tokens, evicted", [(1, False), (2, False), (3, False), (4, True)])
def test_answer_that_ends_inside_the_draft(new_llm: Instances, max_tokens: int, evicted: bool) -> None:
    llm, full = new_llm(SETTINGS), new_llm()
    text = text_of(llm, PROMPT, max_tokens)
    assert text[:3] == text_of(full, PROMPT, max_tokens)[:3] and len(text) == max_tokens
    assert llm.dge_stats.n_evictions == int(evicted)
    assert llm.dge_stats.rows == (150 if not evicted else 32) + max_tokens - 1
    # what comes next is not affected
    for prompt in (PROMPT, tokens_of(120, 9)):
        assert greedy(llm, prompt, 30) == greedy(new_llm(SETTINGS), prompt, 30)
        assert llm.dge_stats.state == "evicted"


def test_stop_string_inside_the_draft(new_llm: Instances) -> None:
    """The answer ends by a stop string in its first token: no eviction."""
    llm = new_llm(SETTINGS)
    first = text_of(llm, PROMPT, 1)
    llm.reset()
    assert text_of(llm, PROMPT, 20, stop=[first]) == ""
    assert llm.dge_stats.n_evictions == 0


@pytest.mark.parametrize("n", [1, 3, 4, 20])
def test_the_same_prompt_again(new_llm: Instances, n: int) -> None:
    llm = new_llm(SETTINGS)
    want = greedy(new_llm(SETTINGS), PROMPT, 30)
    for _ in range(3):
        assert greedy(llm, PROMPT, n) == want[:n]
    assert greedy(llm, PROMPT, 30) == want
    assert_evicted(llm, 150, 30, n_evictions=(3 if n > 3 else 0) + 1)


def test_fifty_requests_are_all_evicted(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS, n_ctx=512, n_batch=100)
    rng = np.random.default_rng(1)
    for i in range(50):
        prompt = tokens_of(int(rng.integers(33, 300)), i)
        answer = greedy(llm, prompt, 6)
        assert_evicted(llm, len(prompt), 6, n_evictions=i + 1)
        if i % 7 == 0:
            assert answer == greedy(new_llm(SETTINGS, n_ctx=512, n_batch=100), prompt, 6)


def test_prompt_that_extends_one_with_its_full_cache(new_llm: Instances) -> None:
    """Prefixes are reused, and the queries that the eviction needs are there."""
    for dge in (SETTINGS, {**SETTINGS, "scores": "both"}, {**SETTINGS, "scores": "policy"}):
        llm = new_llm(dge)
        assert llm.dge_enabled
        for n_prompt in (25, 28, 90, 149, 150):
            llm.n_tokens or greedy(llm, PROMPT[:20], 1)
            assert greedy(llm, PROMPT[:n_prompt], 1) == greedy(new_llm(), PROMPT[:n_prompt], 1)
            assert llm.dge_stats.error is None
        assert greedy(llm, PROMPT, 30) == greedy(new_llm(dge), PROMPT, 30)
        assert_evicted(llm, 150, 30, dge)


def test_prompt_evaluated_in_pieces_before(new_llm: Instances) -> None:
    """As multimodal handlers do: several evals, then generate() with the whole prompt."""
    llm = new_llm(SETTINGS)
    want = greedy(new_llm(SETTINGS), PROMPT, 30)
    llm.reset()
    for start in range(0, 150, 47):
        llm.eval(PROMPT[start : min(start + 47, 150)])
    assert greedy(llm, PROMPT, 30) == want
    assert_evicted(llm, 150, 30)


def test_evict_for_those_who_eval_and_sample(zoo: Zoo, new_llm: Instances) -> None:
    llm = new_llm({**SETTINGS, "draft_tokens": 1})
    llm.eval(PROMPT)
    answer = [llm.sample(temp=0.0)]
    assert llm.evict() is True
    while len(answer) < 20:
        llm.eval(answer[-1:])
        answer.append(llm.sample(temp=0.0))
    assert_evicted(llm, 150, 20, {**SETTINGS, "draft_tokens": 1})
    assert_follows_reference(zoo, llm, PROMPT, answer)
    llm.reset()
    llm.eval(PROMPT[:20])
    assert llm.evict() is False
    with pytest.raises(RuntimeError, match="dge=True"):
        new_llm().evict()


def test_off_is_stock(new_llm: Instances) -> None:
    for dge in (None, False):
        llm, stock = new_llm(dge), new_llm(cls=llama_cpp.Llama)
        assert greedy(llm, PROMPT, 40) == greedy(stock, PROMPT, 40)
        assert llm.dge_stats is None and not llm.dge_enabled


def test_nothing_is_printed(zoo: Zoo, capfd: pytest.CaptureFixture[str]) -> None:
    llm = Llama(str(zoo["g2"].path), dge=SETTINGS, n_ctx=512, n_threads=1, verbose=False)
    for prompt in (PROMPT, tokens_of(120, 9)):
        greedy(llm, prompt, 10)
        assert llm.dge_stats.state == "evicted"
    llm.reset()
    llm.close()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


# what else llama_cpp.Llama can do


def test_two_instances_side_by_side(new_llm: Instances) -> None:
    dges = [SETTINGS, {"budget": 60, "draft_tokens": 2, "scores": "policy"}, None]
    prompts = [PROMPT, tokens_of(200, 2), tokens_of(90, 3)]
    want = [greedy(new_llm(dge), prompt, 30) for dge, prompt in zip(dges, prompts)]
    llms = [new_llm(dge) for dge in dges]
    answers = zip(*(llm.generate(prompt, temp=0.0) for llm, prompt in zip(llms, prompts)))
    assert [list(answer) for answer in zip(*islice(answers, 30))] == want
    for llm, dge, prompt in zip(llms[:2], dges, prompts):
        assert_evicted(llm, len(prompt), 30, dge)


def test_instances_do_not_leak_into_each_other_when_closed(new_llm: Instances) -> None:
    want = greedy(new_llm(SETTINGS), PROMPT, 30)
    for _ in range(3):
        gone = new_llm(SETTINGS)
        greedy(gone, tokens_of(100, 4), 10)
        gone.close()
    assert greedy(new_llm(SETTINGS), PROMPT, 30) == want


def test_state_after_an_eviction(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    want = greedy(llm, PROMPT, 40)
    llm.reset()
    start = greedy(llm, PROMPT, 15)
    state = llm.save_state()
    so_far = [*PROMPT, *start]

    def goes_on(other: Any) -> None:
        other.load_state(state)
        assert other.n_tokens == 164
        assert [*start, *greedy(other, so_far, 25)] == want
        assert other.dge_stats.state == "evicted" and other.dge_stats.n_prompt == 150
        assert other.dge_stats.rows == 32 + 39
        assert other.dge_kept(1, 1).tolist() == llm.dge_kept(1, 1).tolist()

    goes_on(llm)
    goes_on(new_llm(SETTINGS))
    busy = new_llm(SETTINGS)
    greedy(busy, tokens_of(222, 5), 9)
    goes_on(busy)
    goes_on(busy)
    # and a new prompt is a new prompt
    assert greedy(busy, tokens_of(120, 9), 30) == greedy(new_llm(SETTINGS), tokens_of(120, 9), 30)


def test_state_after_an_eviction_needs_eviction(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    greedy(llm, PROMPT, 15)
    state = llm.save_state()
    for other in (new_llm(), new_llm(cls=llama_cpp.Llama), new_llm(SETTINGS, model="g3")):
        with pytest.raises(RuntimeError):
            other.load_state(state)
        other.reset()
        fresh = new_llm(SETTINGS if getattr(other, "dge_enabled", False) else None, model=_name_of(other))
        assert greedy(other, tokens_of(80, 6), 20) == greedy(fresh, tokens_of(80, 6), 20)


def _name_of(llm: Any) -> str:
    return llm.model_path.rsplit("/", 1)[-1].removesuffix(".gguf")


def test_damaged_state(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    want = greedy(llm, PROMPT, 15)
    state = llm.save_state()
    damaged = copy.copy(state)
    damaged.llama_state = state.llama_state[: len(state.llama_state) // 2]
    damaged.llama_state_size = len(damaged.llama_state)
    with pytest.raises(RuntimeError):
        llm.load_state(damaged)
    assert greedy(llm, PROMPT, 15) == want


def test_state_of_a_full_cache(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    want = greedy(new_llm(SETTINGS), PROMPT, 30)
    greedy(llm, PROMPT, 2)
    state = llm.save_state()
    for other in (llm, new_llm(SETTINGS)):
        other.load_state(state)
        assert greedy(other, PROMPT, 30) == want
        assert_evicted(other, 150, 30)


def test_pickle_keeps_the_settings(new_llm: Instances) -> None:
    llm = new_llm({**SETTINGS, "scores": "both", "window": 5}, flash_attn=True)
    again = pickle.loads(pickle.dumps(llm))
    try:
        assert type(again) is Llama and again.dge_config == llm.dge_config == DGEConfig.from_any(again.dge_config)
        assert again.dge_config.window == 5
        assert greedy(again, PROMPT, 30) == greedy(llm, PROMPT, 30)
        assert_evicted(again, 150, 30)
    finally:
        again.close()


class CountingLookup(LlamaPromptLookupDecoding):
    """Prompt lookup that counts what it proposed."""

    def __init__(self) -> None:
        super().__init__(num_pred_tokens=6, max_ngram_size=2)
        self.n_proposed = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = super().__call__(*args, **kwargs)
        self.n_proposed += len(found)
        return found


@pytest.mark.parametrize("dge", [{"budget": 32, "draft_tokens": 1}, {"budget": 32, "draft_tokens": 2}, None], ids=str)
@pytest.mark.parametrize("n_batch", [512, 64])
def test_prompt_lookup_after_an_eviction(new_llm: Instances, dge: dict[str, Any] | None, n_batch: int) -> None:
    """Rejected proposals are removed again, above the boundary; the answer is that of plain greedy decoding."""
    # no pair of tokens occurs twice, so nothing is proposed before the eviction, which happens where it would otherwise
    prompt = np.random.default_rng(8).permutation(np.arange(3, 103)).tolist()
    lookup = CountingLookup()
    # f32: batches of another size must not tip the scales between two tokens
    settings = {"n_batch": n_batch, "type_k": 0, "type_v": 0}
    llm = new_llm(dge, **settings, draft_model=lookup)
    plain = new_llm(dge, **settings)
    n_decodes = [0]
    decode = llm._ctx.decode

    def counting(batch: Any) -> None:
        n_decodes[0] += 1
        decode(batch)

    llm._ctx.decode = counting
    answer = greedy(llm, prompt, 200)
    assert answer == greedy(plain, prompt, 200)
    assert lookup.n_proposed > 0 and n_decodes[0] < 200 - 10
    if dge:
        assert llm.dge_stats.state == "evicted" and llm.dge_stats.rows_after == 32 + dge["draft_tokens"] - 1
        assert greedy(llm, PROMPT, 20) == greedy(new_llm(dge, **settings), PROMPT, 20)


def test_grammar(new_llm: Instances) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "<" [a-f]{60} ">"', verbose=False)
    llm, full = new_llm(SETTINGS), new_llm()
    text = text_of(llm, PROMPT, 40, grammar=grammar)
    assert_evicted(llm, 150, 40)
    assert text[0] == "<" and set(text[1:]) <= set("abcdef")
    assert text[:3] == text_of(full, PROMPT, 40, grammar=grammar)[:3]


def test_logprobs(new_llm: Instances) -> None:
    llm, full = new_llm(SETTINGS, logits_all=True), new_llm(logits_all=True)
    plain = new_llm(SETTINGS)
    a, b = (x.create_completion(PROMPT, max_tokens=30, temperature=0.0, logprobs=4) for x in (llm, full))
    assert_evicted(llm, 150, 30)
    assert a["choices"][0]["text"] == text_of(plain, PROMPT, 30)
    probs = [x["choices"][0]["logprobs"]["token_logprobs"] for x in (a, b)]
    assert len(probs[0]) == 30 and np.isfinite(probs[0]).all() and max(probs[0]) <= 0
    # prompt and draft are those of the full cache
    assert probs[0][:3] == probs[1][:3]
    assert np.array_equal(llm.scores[: 150 + 2], full.scores[: 150 + 2])
    assert not np.array_equal(llm.scores[152:179], full.scores[152:179])


def test_echo_and_suffix_of_prompt_text(new_llm: Instances) -> None:
    prompt = "It was the best of times, it was the worst of times. " * 3
    llm = new_llm(SETTINGS)
    text = text_of(llm, prompt, 20, echo=True)
    assert text.startswith(prompt) and len(text) == len(prompt) + 20
    assert llm.dge_stats.state == "evicted" and llm.dge_stats.n_prompt == 1 + len(prompt)
    tokens = llm.tokenize(prompt.encode())
    assert tokens[1] == token_of("I") == N_SPECIAL + ord("I")


def test_ram_cache(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    llm.set_cache(llama_cpp.LlamaRAMCache())
    prompts = [PROMPT, tokens_of(120, 9), PROMPT[:25], [*PROMPT[:25], *tokens_of(90, 10)], PROMPT]
    for prompt in prompts:
        assert text_of(llm, prompt, 20) == text_of(new_llm(SETTINGS), prompt, 20)
        assert llm.dge_stats.state == ("evicted" if len(prompt) > 32 else "full")


def test_from_pretrained_gives_our_class(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    path = zoo["g2"].path
    hub = types.ModuleType("huggingface_hub")
    utils = types.ModuleType("huggingface_hub.utils")
    hub.HfFileSystem = lambda: types.SimpleNamespace(  # type: ignore[attr-defined]
        ls=lambda repo, recursive=True: [{"name": f"{repo}/{path.name}"}]
    )
    hub.hf_hub_download = lambda **_: str(path)  # type: ignore[attr-defined]
    utils.validate_repo_id = lambda _: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    llm = Llama.from_pretrained(
        "somebody/tiny", path.name, local_dir=str(path.parent), dge=SETTINGS, n_ctx=512, verbose=False
    )
    try:
        assert type(llm) is Llama and llm.dge_config.budget == 32
        greedy(llm, PROMPT, 10)
        assert_evicted(llm, 150, 10)
    finally:
        llm.close()


def test_stock_class_on_an_evicted_cache(new_llm: Instances) -> None:
    """Even llama_cpp.Llama is right after an eviction: the removal that it asks for is refused, so it starts over."""
    stock, fresh = new_llm(cls=llama_cpp.Llama), new_llm(cls=llama_cpp.Llama)
    lib = dge_library()
    params = lib.llama_dge_default_params()
    params.budget = 32
    assert lib.llama_dge_enable(stock.ctx, params) == 0
    greedy(stock, PROMPT, 3)
    assert lib.llama_dge_seq_evict(stock.ctx, 0) == 0
    for prompt in (PROMPT, [*PROMPT[:100], *tokens_of(40, 7)]):
        assert greedy(stock, prompt, 20) == greedy(fresh, prompt, 20)


# refusals


def test_what_cannot_be_supported_is_said(zoo: Zoo, new_llm: Instances) -> None:
    path = str(zoo["g2"].path)
    with pytest.raises(TypeError, match="dge_budget"):
        Llama(path, dge_budget=3, verbose=False)
    with pytest.raises(TypeError, match="budgets"):
        Llama(path, dge={"budgets": 3}, verbose=False)
    with pytest.raises(ValueError, match="embedding"):
        Llama(path, dge=True, embedding=True, verbose=False)
    llm = new_llm(SETTINGS)
    greedy(llm, PROMPT, 10)
    with pytest.raises(ValueError, match="head"):
        llm.dge_kept(0, 2)
    with pytest.raises(ValueError, match="layer"):
        llm.dge_kept(3, 0)


def test_embedding_still_works_without_eviction(new_llm: Instances) -> None:
    a = new_llm(embedding=True).embed("a few words")
    b = new_llm(cls=llama_cpp.Llama, embedding=True).embed("a few words")
    assert np.array_equal(a, b)
