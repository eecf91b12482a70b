"""llama_dge.Llama when a device fails during an eviction: the error names the remedy, the next request is right."""

from __future__ import annotations

from typing import Any

import pytest

from llama_dge import DGEError
from reference.faults import failing_move
from reference.instances import Instances, greedy
from reference.scenario import tokens_of

PROMPT = tokens_of(150, 0)
DGE: dict[str, Any] = {"budget": 32, "draft_tokens": 3}
ANSWER = 12
ERR_LOST = -13
MESSAGE = r"sequence was cleared: evaluate its prompt again \(status -13\)"

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.fixture(params=["cpu", "host"], autouse=True)
def moved_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are moved by graphs, as on a device, or by the host."""
    monkeypatch.setenv("LLAMA_DGE_GATHER", request.param)


def assert_cleared(llm: Any) -> None:
    assert llm.n_tokens == 0 and llm.dge_stats is None
    assert llm.dge_memory.parked == 0


def assert_as_new(llm: Any, new_llm: Instances, prompt: list[int], dge: dict[str, Any]) -> None:
    fresh = new_llm(dge)
    assert greedy(llm, prompt, ANSWER) == greedy(fresh, prompt, ANSWER)
    assert llm.dge_stats.state == "evicted" and llm.dge_stats.error is None
    assert [llm.dge_kept(0, head).tolist() for head in range(2)] == [
        fresh.dge_kept(0, head).tolist() for head in range(2)
    ]


@pytest.mark.parametrize("park", ["ram", "off"])
@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("nth", [2, 3])  # the first step of graphs is a trial
def test_generate(new_llm: Instances, park: str, elastic: bool, nth: int) -> None:
    dge = {**DGE, "park": park, "elastic": elastic}
    llm = new_llm(dge)
    answer: list[int] = []
    with failing_move(nth), pytest.raises(DGEError, match=MESSAGE) as caught:
        answer.extend(llm.generate(PROMPT, temp=0.0))
    assert caught.value.status == ERR_LOST
    assert isinstance(caught.value.__cause__, RuntimeError)  # "llama_decode returned -2"
    assert_cleared(llm)
    for prompt in (PROMPT, [*PROMPT, *tokens_of(5, 2)], tokens_of(120, 4)):
        assert_as_new(llm, new_llm, prompt, dge)


@pytest.mark.parametrize("nth", [1, 3])
def test_a_selection(new_llm: Instances, nth: int) -> None:
    """A selection in the middle of an answer."""
    dge = {**DGE, "recall": 2}
    llm = new_llm(dge)
    answer = llm.generate(PROMPT, temp=0.0)
    for _ in range(DGE["draft_tokens"] + 1):
        next(answer)
    assert llm.dge_stats.state == "evicted"
    with failing_move(nth), pytest.raises(DGEError, match=MESSAGE):
        list(answer)
    assert_cleared(llm)
    assert_as_new(llm, new_llm, PROMPT, dge)
    assert llm.dge_stats.n_recalls > 0


def test_a_stream_of_text(new_llm: Instances) -> None:
    llm = new_llm(DGE)
    prompt = llm.detokenize(PROMPT).decode("utf-8", "replace")
    with failing_move(2), pytest.raises(DGEError, match=MESSAGE):
        list(llm.create_completion(prompt, max_tokens=ANSWER, temperature=0.0, stream=True))
    assert_cleared(llm)
    assert_as_new(llm, new_llm, PROMPT, DGE)


def test_evict(new_llm: Instances) -> None:
    llm = new_llm(DGE)
    llm.eval(PROMPT)
    with failing_move(2), pytest.raises(DGEError, match=MESSAGE):
        llm.evict()
    assert_cleared(llm)
    llm.eval(PROMPT)
    assert llm.evict() and llm.dge_stats.rows == DGE["budget"]


@pytest.mark.parametrize("nth, reason", [(2, "out of memory"), (5, MESSAGE)])  # the cache grows before it is filled
def test_restore(new_llm: Instances, nth: int, reason: str) -> None:
    """The prompt is evaluated from its start, with a warning."""
    llm = new_llm(DGE)
    greedy(llm, PROMPT, ANSWER)
    assert llm.dge_stats.rows_parked > 0
    second = [*PROMPT, *tokens_of(6, 3)]
    with failing_move(nth), pytest.warns(RuntimeWarning, match="evaluated from its start.*" + reason):
        got = greedy(llm, second, 1)
    assert got == greedy(new_llm(DGE), second, 1)
    assert llm.dge_stats.rows_restored == 0 and llm.n_tokens == len(second)
    assert_as_new(llm, new_llm, second, DGE)


def test_an_interrupt_stays_an_interrupt(new_llm: Instances) -> None:
    """An interrupt stays one, also when the sequence was lost in the same call."""
    llm = new_llm(DGE)
    decode = llm._ctx.decode

    def interrupted(batch: Any) -> None:
        try:
            decode(batch)
        except RuntimeError:
            raise KeyboardInterrupt from None

    llm._ctx.decode = interrupted
    with failing_move(2), pytest.raises(KeyboardInterrupt):
        greedy(llm, PROMPT, ANSWER)
    llm._ctx.decode = decode
    assert_cleared(llm)
    assert_as_new(llm, new_llm, PROMPT, DGE)
