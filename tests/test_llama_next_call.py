"""llama_dge.Llama: what a call finds after another one: a later turn, a reset, an interrupt, an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

from reference.forward import Reference
from reference.instances import DGE, Instances, assert_evicted, evaluated, greedy
from reference.scenario import tokens_of

if TYPE_CHECKING:
    from conftest import Zoo

SETTINGS = DGE
PROMPT = tokens_of(150, 0)

# "switched off because ..." must not pass unseen
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


# later turns


def second_turn(answer: list[int]) -> list[int]:
    return [*PROMPT, *answer, *tokens_of(20, 11)]


def test_new_turn_reprefill_equals_a_fresh_instance(new_llm: Instances) -> None:
    dge = {**SETTINGS, "new_turn": "reprefill"}
    llm = new_llm(dge)
    prompt = second_turn(greedy(llm, PROMPT, 25))
    assert greedy(llm, prompt, 30) == greedy(new_llm(dge), prompt, 30)
    assert_evicted(llm, len(prompt), 30, dge, n_evictions=2)


def test_new_turn_append_goes_on_with_the_kept_entries(zoo: Zoo, new_llm: Instances) -> None:
    dge = {**SETTINGS, "new_turn": "append"}
    llm = new_llm(dge)
    first = greedy(llm, PROMPT, 25)
    prompt = second_turn(first)
    sizes = evaluated(llm)
    second = greedy(llm, prompt, 30)
    assert sizes[0] == 21 and sum(sizes) == 21 + 29  # the last token of the answer, the new text, the new answer
    stats = llm.dge_stats
    assert stats.state == "evicted" and stats.n_evictions == 1 and stats.n_prompt == 150
    assert stats.rows == 32 + 25 + 20 + 29

    reference = Reference(zoo["g2"].weights, "f16", "f16")
    reference.run([*PROMPT, *first[:2]])
    reference.mask_all_but([[llm.dge_kept(layer, head) for head in range(2)] for layer in llm.dge_layers])
    for token in first[2:24]:
        reference.step([token])
    row = reference.run(prompt[174:])[-1]
    for token in second:
        assert row[token] >= row.max() - 1e-2
        row = reference.step([token])[0]


@pytest.mark.parametrize("new_turn", ["append", "reprefill"])
@pytest.mark.parametrize("n_same", [0, 1, 100, 149])
def test_prompt_that_parts_below_the_boundary(new_llm: Instances, new_turn: str, n_same: int) -> None:
    """Nothing of an evicted cache may be reused: everything is evaluated again."""
    dge = {**SETTINGS, "new_turn": new_turn}
    llm = new_llm(dge)
    greedy(llm, PROMPT, 25)
    other = [*PROMPT[:n_same], *(t % 250 + 4 for t in tokens_of(60, 12))]
    sizes = evaluated(llm)
    assert greedy(llm, other, 30) == greedy(new_llm(dge), other, 30)
    assert sizes[0] == len(other)
    assert_evicted(llm, len(other), 30, dge, n_evictions=2)


@pytest.mark.parametrize("new_turn", ["append", "reprefill"])
def test_prompt_that_parts_in_the_answer(new_llm: Instances, new_turn: str) -> None:
    """Editing the answer: append removes rows above the boundary, reprefill starts over."""
    dge = {**SETTINGS, "new_turn": new_turn}
    llm = new_llm(dge)
    answer = greedy(llm, PROMPT, 25)
    other = [*PROMPT, *answer[:10], 3 + (answer[10] + 1) % 200, *tokens_of(10, 13)]
    sizes = evaluated(llm)
    got = greedy(llm, other, 30)
    if new_turn == "reprefill":
        assert got == greedy(new_llm(dge), other, 30) and sizes[0] == len(other)
        assert_evicted(llm, len(other), 30, dge, n_evictions=2)
    else:
        assert sizes[0] == 11 and llm.dge_stats.n_evictions == 1
        assert llm.dge_stats.rows == 32 + 10 + 11 + 29


def test_shorter_prompt_after_an_eviction(new_llm: Instances) -> None:
    for new_turn in ("append", "reprefill"):
        dge = {**SETTINGS, "new_turn": new_turn}
        llm = new_llm(dge)
        for n in (150, 149, 60, 20, 1, 150):
            assert greedy(llm, PROMPT[:n], 12) == greedy(new_llm(dge), PROMPT[:n], 12), (new_turn, n)
            assert llm.dge_stats.state == ("evicted" if n > 32 else "full")


# interruptions


def test_reset(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    want = greedy(llm, PROMPT, 20)
    llm.reset()
    assert llm.n_tokens == 0 and llm.dge_stats is None
    assert greedy(llm, PROMPT[:20], 40) == greedy(new_llm(), PROMPT[:20], 40)
    llm.reset()
    assert greedy(llm, PROMPT, 20) == want
    # without reset=True the prompt goes behind what is there
    llm.reset()
    llm.eval(PROMPT[:70])
    assert greedy(llm, PROMPT[70:], 20, reset=False) == want


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 10])
def test_interrupted_between_tokens(new_llm: Instances, error: type[BaseException], after: int) -> None:
    llm = new_llm(SETTINGS)
    want = {n: greedy(new_llm(SETTINGS), tokens_of(n, 9), 20) for n in (120, 150)}
    drawn = [0]

    def stop(_tokens: Any, _logits: Any) -> bool:
        drawn[0] += 1
        if drawn[0] == after:
            raise error("enough")
        return False

    with pytest.raises(error):
        greedy(llm, PROMPT, 30, stopping_criteria=llama_cpp.StoppingCriteriaList([stop]))
    for n in (120, 150):
        assert greedy(llm, tokens_of(n, 9), 20) == want[n]
    assert greedy(llm, PROMPT, 20) == greedy(new_llm(SETTINGS), PROMPT, 20)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 10])
def test_failed_decode(new_llm: Instances, at: int) -> None:
    """An error or an interrupt in any decode: of the prompt's two batches, of the draft, in the eviction, after it."""
    llm = new_llm(SETTINGS, n_batch=100)
    want = greedy(new_llm(SETTINGS, n_batch=100), PROMPT, 20)
    decode, n_decodes = llm._ctx.decode, [0]

    def failing(batch: Any) -> None:
        n_decodes[0] += 1
        if n_decodes[0] == at + 1:
            raise KeyboardInterrupt
        decode(batch)

    llm._ctx.decode = failing
    with pytest.raises(KeyboardInterrupt):
        greedy(llm, PROMPT, 20)
    llm._ctx.decode = decode
    assert llm.dge_stats is None
    assert greedy(llm, PROMPT, 20) == want
    assert_evicted(llm, 150, 20, n_evictions=2 if at > 4 else 1)  # the first eviction happens in decode 4


@pytest.mark.parametrize("at", [0, 3, 4, 8])
def test_aborted_decode(new_llm: Instances, at: int) -> None:
    """The library's own abort callback stops a decode, the eviction before it included."""
    llm = new_llm(SETTINGS)
    want = greedy(new_llm(SETTINGS), PROMPT, 20)
    answer = llm.generate(PROMPT, temp=0.0)
    for _ in range(at):
        next(answer)
    stop = llama_cpp.llama_cpp.ggml_abort_callback(lambda _: True)
    llama_cpp.llama_set_abort_callback(llm.ctx, stop, None)
    with pytest.raises(RuntimeError):
        next(answer)
    go_on = llama_cpp.llama_cpp.ggml_abort_callback(0)
    llama_cpp.llama_set_abort_callback(llm.ctx, go_on, None)
    assert greedy(llm, PROMPT, 20) == want
    assert llm.dge_stats.state == "evicted"


def test_generator_left_unfinished(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    want = greedy(new_llm(SETTINGS), PROMPT, 20)
    for n in (1, 2, 3, 4, 5):
        left = llm.generate(tokens_of(130, n), temp=0.0)
        for _ in range(n):
            next(left)
        left.close()
        assert greedy(llm, PROMPT, 20) == want
    stream = llm.create_completion(tokens_of(130, 6), max_tokens=30, temperature=0.0, stream=True)
    next(stream)
    next(stream)
    del stream
    assert greedy(llm, PROMPT, 20) == want
