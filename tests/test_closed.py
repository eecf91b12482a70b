"""After `close` everything public raises RuntimeError; nothing follows a pointer that was freed."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest

from llama_dge import Llama
from reference.instances import DGE, Instances, greedy
from reference.scenario import tokens_of

PROMPT = tokens_of(150, 0)
HARMLESS = {"close", "dge_config", "from_pretrained", "logits_to_logprobs", "longest_token_prefix"}
NAMES = sorted({*(name for name in dir(Llama) if not name.startswith("_")), "__call__"} - HARMLESS)


def use(llm: Any, name: str) -> None:
    """Read a property, or call a method with None for what it requires."""
    member = inspect.getattr_static(type(llm), name)
    if isinstance(member, property):
        getattr(llm, name)
        return
    method = getattr(llm, name)
    required = [
        p
        for p in inspect.signature(method).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    method(*[None] * len(required))


@pytest.fixture
def closed(new_llm: Instances) -> Any:
    llm = new_llm(DGE)
    greedy(llm, PROMPT, 20)
    llm.close()
    return llm


@pytest.mark.parametrize("name", NAMES)
def test_everything_public_raises(closed: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"^the model is closed$"):
        use(closed, name)


def test_the_walk_is_complete() -> None:
    assert {"tokenize", "n_ctx", "embed", "token_eos", "dge_stats", "evict", "ctx", "set_dge", "__call__"} <= set(NAMES)
    assert len(NAMES) >= 35


def test_tokenizers_that_were_handed_out(new_llm: Instances) -> None:
    llm = new_llm(DGE)
    tokenizers, model = [llm.tokenizer(), llm.tokenizer_], llm._model
    llm.close()
    for tokenizer in tokenizers:
        for call in (
            lambda t: t.encode("text"),
            lambda t: t.decode([5]),
            lambda t: t.tokenize(b"text"),
            lambda t: t.detokenize([5]),
        ):
            with pytest.raises(RuntimeError, match=r"^the model is closed$"):
                call(tokenizer)
    for name in ("n_vocab", "metadata", "token_bos", "desc"):
        with pytest.raises(RuntimeError, match=r"^the model is closed$"):
            getattr(model, name)()


def test_a_stream_that_was_begun_before(new_llm: Instances) -> None:
    for dge in (DGE, None):
        llm = new_llm(dge)
        stream = llm.generate(PROMPT, temp=0.0)
        next(stream)
        llm.close()
        with pytest.raises(RuntimeError, match=r"^the model is closed$"):
            next(stream)


def test_closing_twice_and_what_is_harmless(closed: Any) -> None:
    closed.close()
    assert closed.dge_config.budget == DGE["budget"]
    with pytest.raises(RuntimeError, match=r"^the model is closed$"):
        closed.tokenize(b"text")


def test_a_closed_instance_can_be_loaded_again(closed: Any) -> None:
    again = pickle.loads(pickle.dumps(closed))
    assert len(greedy(again, PROMPT, 5)) == 5 and again.dge_config == closed.dge_config
    again.close()


def test_the_last_reference_frees_the_model(new_llm: Instances) -> None:
    """Without waiting for the garbage collection: a model is gigabytes."""
    llm = new_llm(copy.copy(DGE))
    greedy(llm, PROMPT, 5)
    gone = weakref.ref(llm)
    new_llm.made.clear()
    gc.disable()
    try:
        del llm
        assert gone() is None
    finally:
        gc.enable()
