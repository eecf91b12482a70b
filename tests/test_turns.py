"""Later prompts on one instance: what an eviction removed is restored, however people go on with a chat."""

from __future__ import annotations

import ctypes
import threading
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

from reference.instances import Instances, evaluated, greedy
from reference.scenario import tokens_of

if TYPE_CHECKING:
    from conftest import Zoo

BUDGET, DRAFT = 32, 3
SETTINGS = {"budget": BUDGET, "draft_tokens": DRAFT}
PROMPT = tokens_of(150, 0)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def never_evicted(new_llm: Instances, dge: Any, held: list[int], prompt: list[int], n: int, **settings: Any) -> Any:
    """An instance that held `held` when the prompt came, and was not evicted before; and its answer."""
    llm = new_llm(dge, **settings)
    llm.eval(held)
    return llm, greedy(llm, prompt, n)


KINDS = {
    # kind: (prompt of the second turn, given the first answer; tokens of it that the parked rows hold)
    "appended question": (lambda answer: [*PROMPT, *answer, *tokens_of(20, 11)], 150 + DRAFT - 1),
    "answer only": (lambda answer: [*PROMPT, *answer[:-1], answer[-1] % 200 + 4], 150 + DRAFT - 1),
    "edited answer": (lambda answer: [*PROMPT, *answer[:9], *tokens_of(12, 13)], 150 + DRAFT - 1),
    "edited at the first token of the answer": (lambda answer: [*PROMPT, answer[0] % 200 + 4, *tokens_of(5, 3)], 150),
    "regenerated": (lambda answer: PROMPT, 149),
    "edited last message": (lambda answer: [*PROMPT[:130], *tokens_of(40, 12)], 130),
    "changed middle": (lambda answer: [*PROMPT[:60], *tokens_of(90, 14), *PROMPT[120:]], 60),
    "shorter": (lambda answer: PROMPT[:100], 99),
}


@pytest.mark.parametrize("park", ["ram", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_continues_as_if_nothing_had_been_evicted(
    new_llm: Instances, tmp_path: Path, kind: str, park: str
) -> None:
    dge = {**SETTINGS, "park": park, "park_dir": tmp_path}
    llm = new_llm(dge)
    answer = greedy(llm, PROMPT, 25)
    assert llm.dge_stats.rows_parked == 150 + DRAFT - 1 and llm.dge_stats.bytes_parked > 0
    assert len(list(tmp_path.iterdir())) == (park == "disk")

    make, n_held = KINDS[kind]
    prompt = make(answer)
    sizes = evaluated(llm)
    got = greedy(llm, prompt, 30)

    stats = llm.dge_stats
    assert stats.rows_restored > 0 and stats.seconds_restore > 0
    # queries of the window that were not kept have to be made again, nothing else
    assert len(prompt) - n_held <= sizes[0] <= len(prompt) - n_held + stats.n_prompt - (stats.n_prompt - 8)
    n_kept = len(prompt) - sizes[0]
    other, want = never_evicted(new_llm, dge, [*PROMPT, *answer][:n_kept], prompt, 30)
    assert got == want
    assert stats.state == "evicted" and stats.n_evictions == 2 and stats.n_prompt == len(prompt)
    assert stats.rows == BUDGET + 29 and other.dge_stats.n_evictions == 1
    for layer in llm.dge_layers:
        for head in range(2):
            assert llm.dge_kept(layer, head).tolist() == other.dge_kept(layer, head).tolist()
    llm.close()
    other.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv", "h2o", "streamingllm"])
def test_many_turns(new_llm: Instances, policy: str) -> None:
    dge = {**SETTINGS, "policy": policy, "scores": "policy" if policy == "h2o" else "draft"}
    llm = new_llm(dge, flash_attn=True)
    prompt = PROMPT
    sizes = evaluated(llm)
    for turn in range(1, 6):
        answer = greedy(llm, prompt, 20)
        stats = llm.dge_stats
        assert stats.state == "evicted" and stats.n_evictions == turn and stats.error is None
        assert stats.rows == stats.rows_after + 20 - DRAFT
        assert policy == "pyramidkv" or stats.rows_after == BUDGET + DRAFT - 1
        assert stats.rows_restored == (0 if turn == 1 else stats.n_prompt - sizes[0])
        # everything in front of the last answer was there already
        assert turn == 1 or sizes[0] == 20 - (DRAFT - 1) + 15
        _, want = never_evicted(new_llm, dge, prompt[: len(prompt) - sizes[0]], prompt, 20, flash_attn=True)
        assert answer == want
        prompt = [*prompt, *answer, *tokens_of(15, turn)]
        sizes.clear()


@pytest.mark.parametrize("park", ["off", "ram"])
def test_where_nothing_can_be_restored_the_prompt_is_evaluated_again(new_llm: Instances, park: str) -> None:
    """Nothing parked, or no token in common."""
    dge = {**SETTINGS, "park": park}
    llm = new_llm(dge)
    answer = greedy(llm, PROMPT, 25)
    prompt = [*PROMPT, *answer, *tokens_of(20, 11)] if park == "off" else [PROMPT[0] % 200 + 5, *PROMPT[1:]]
    sizes = evaluated(llm)
    assert greedy(llm, prompt, 30) == greedy(new_llm(dge), prompt, 30)
    assert sizes[0] == len(prompt) and llm.dge_stats.rows_restored == 0


def test_a_host_copy_beyond_the_limit_leaves_the_full_cache(new_llm: Instances) -> None:
    dge = {**SETTINGS, "park_limit": 1000}
    llm = new_llm(dge)
    what = r"goes on with the full cache: its host copy needs \d{3},\d{3} bytes, which exceeds park_limit=1000; raise"
    with pytest.warns(RuntimeWarning, match=what):
        answer = greedy(llm, PROMPT, 25)
    assert answer == greedy(new_llm(), PROMPT, 25)
    assert llm.dge_stats.state == "full" and "host copy" in llm.dge_stats.error


def test_damaged_file(new_llm: Instances, tmp_path: Path) -> None:
    dge = {**SETTINGS, "park": "disk", "park_dir": str(tmp_path)}
    llm = new_llm(dge)
    prompt = [*PROMPT, *greedy(llm, PROMPT, 25), *tokens_of(20, 11)]
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    sizes = evaluated(llm)
    with pytest.warns(RuntimeWarning, match="evaluated from its start.*damaged"):
        answer = greedy(llm, prompt, 30)
    assert sizes[0] == len(prompt)
    assert answer == greedy(new_llm(dge), prompt, 30)


def test_memory_follows_the_cache(new_llm: Instances) -> None:
    llm = new_llm({**SETTINGS, "park": "off"}, n_ctx=2048, n_batch=64)
    fixed = new_llm({**SETTINGS, "park": "off", "elastic": False}, n_ctx=2048, n_batch=64)
    full = fixed.dge_memory.kv
    assert llm.dge_memory.kv < 0.3 * full and llm.dge_memory.kv_max == full
    prompt = tokens_of(1500, 5)
    for other in (llm, fixed):
        other.eval(prompt)
    assert 0.73 * full < llm.dge_memory.kv <= full
    assert greedy(llm, prompt, 10) == greedy(fixed, prompt, 10)
    assert llm.dge_memory.kv < 0.15 * full and fixed.dge_memory.kv == full
    assert llm.dge_memory.n_cells == 256 and llm.dge_memory.n_cells_max == 2048


def test_a_stream_that_was_abandoned(new_llm: Instances) -> None:
    """A client goes away in the middle of an answer; the chat goes on."""
    llm = new_llm(SETTINGS)
    for n in (1, DRAFT - 1, DRAFT, DRAFT + 1, 12):
        stream = llm.generate(PROMPT, temp=0.0)
        begun = list(islice(stream, n))
        prompt = [*PROMPT, *begun, *tokens_of(20, 11)]
        sizes = evaluated(llm)
        got = greedy(llm, prompt, 20)
        _, want = never_evicted(new_llm, SETTINGS, prompt[: len(prompt) - sizes[0]], prompt, 20)
        assert got == want, n
        with pytest.raises(RuntimeError, match="this stream has ended: another call"):
            next(stream)
        assert greedy(llm, prompt, 20) == got  # and that changed nothing


@pytest.mark.parametrize("call", ["eval", "reset", "load_state", "generate"])
def test_any_call_ends_an_older_stream(new_llm: Instances, call: str) -> None:
    llm = new_llm(SETTINGS)
    state = llm.save_state()
    stream = llm.generate(PROMPT, temp=0.0)
    next(stream)
    {
        "eval": lambda: llm.eval([5]),
        "reset": llm.reset,
        "load_state": lambda: llm.load_state(state),
        "generate": lambda: greedy(llm, PROMPT[:5], 1),
    }[call]()
    with pytest.raises(RuntimeError, match="this stream has ended"):
        next(stream)


def test_saving_a_state_does_not_end_a_stream(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    want = greedy(llm, PROMPT, 10)
    llm.reset()
    got = []
    for token in islice(llm.generate(PROMPT, temp=0.0), 10):
        got.append(token)
        llm.save_state()
        assert llm.dge_stats is not None
    assert got == want


def test_two_threads(new_llm: Instances) -> None:
    """Requests of several threads follow each other, each with its own answer."""
    prompts = [tokens_of(120 + 7 * i, 20 + i) for i in range(4)]

    def text(llm: Any, prompt: list[int]) -> str:
        return str(llm.create_completion(prompt, max_tokens=12, temperature=0.0)["choices"][0]["text"])

    want = [text(new_llm(SETTINGS), prompt) for prompt in prompts]
    llm = new_llm(SETTINGS)
    got: dict[tuple[int, int], str] = {}
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for round_ in range(3):
                got[i, round_] = text(llm, prompts[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert got == {(i, round_): want[i] for i in range(4) for round_ in range(3)}
    assert llm.dge_stats.n_evictions >= 4


def test_interrupted_restore_loses_nothing(new_llm: Instances) -> None:
    """A decode that fails right after a restore: the next call answers as a fresh instance."""
    llm = new_llm(SETTINGS)
    prompt = [*PROMPT, *greedy(llm, PROMPT, 25), *tokens_of(20, 11)]
    decode = llm._ctx.decode

    def interrupted(batch: Any) -> None:
        raise KeyboardInterrupt

    llm._ctx.decode = interrupted
    with pytest.raises(KeyboardInterrupt):
        greedy(llm, prompt, 30)
    llm._ctx.decode = decode
    assert greedy(llm, prompt, 30) == greedy(new_llm(SETTINGS), prompt, 30)


def test_generate_after_moving_back(new_llm: Instances) -> None:
    """Code that sets n_tokens itself and evaluates on gets its rows back, too."""
    llm = new_llm(SETTINGS)
    greedy(llm, PROMPT, 25)
    llm.n_tokens = 100
    sizes = evaluated(llm)
    llm.eval(tokens_of(30, 9))
    assert sizes == [30] and llm.n_tokens == 130 and llm.dge_stats.rows_restored == 100
    other = new_llm(SETTINGS)
    other.eval(PROMPT[:100])
    other.eval(tokens_of(30, 9))
    prompt = [*PROMPT[:100], *tokens_of(30, 9)]
    assert greedy(llm, prompt, 20) == greedy(other, prompt, 20)


def test_logits_of_a_restored_cache_are_not_taken_for_those_of_the_prompt(new_llm: Instances) -> None:
    """The same prompt again, with one token, with k, with more: each time as the first time."""
    llm = new_llm(SETTINGS)
    want = greedy(llm, PROMPT, 30)
    for n in (1, DRAFT, 30, 2, 30):
        assert greedy(llm, PROMPT, n) == want[:n]
        assert llm.n_tokens == 150 + n - 1


def test_max_tokens_of_minus_one_ends_at_the_context(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS, n_ctx=256)
    out = llm.create_completion(PROMPT, max_tokens=-1, temperature=0.0, logit_bias={0: -100.0, 2: -100.0})
    assert out["usage"]["completion_tokens"] > 50
    with pytest.raises(ValueError, match=r"exceed context window"):
        llm.create_completion(tokens_of(300, 1), max_tokens=5)
    assert greedy(llm, PROMPT, 20) == greedy(new_llm(SETTINGS), PROMPT, 20)


def test_lora_switched_between_turns(new_llm: Instances, zoo: Zoo, tmp_path: Path) -> None:
    """Rows that were made without an adapter are not used with one."""
    from reference.models import write_lora

    path = write_lora(zoo["g2"].weights, tmp_path / "lora.gguf")
    llm = new_llm(SETTINGS)
    prompt = [*PROMPT, *greedy(llm, PROMPT, 25), *tokens_of(20, 11)]

    adapter = llama_cpp.llama_adapter_lora_init(llm.model, str(path).encode())
    assert adapter
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    assert llama_cpp.llama_set_adapters_lora(llm.ctx, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0
    sizes = evaluated(llm)
    got = greedy(llm, prompt, 20)
    assert sizes[0] == len(prompt) and llm.dge_stats.rows_restored == 0
    assert got == greedy(new_llm(SETTINGS, lora_path=str(path)), prompt, 20)
    assert got != greedy(new_llm(SETTINGS), prompt, 20)


def test_settings_can_be_changed(new_llm: Instances) -> None:
    """Every prompt is evicted by the settings of its time; what is in the cache is reused as far as it goes."""
    llm = new_llm(SETTINGS)
    other = {"budget": 48, "policy": "streamingllm", "draft_tokens": 1}
    want, want_other, want_full = (greedy(new_llm(dge), PROMPT, 20) for dge in (SETTINGS, other, None))
    assert want != want_other != want_full
    for _ in range(2):
        assert greedy(llm, PROMPT, 20) == want and llm.dge_stats.budget == BUDGET
        llm.set_dge(other)
        assert greedy(llm, PROMPT, 20) == want_other and llm.dge_stats.budget == 48
        llm.set_dge(None)
        assert llm.dge_stats is None and not llm.dge_enabled
        assert greedy(llm, PROMPT, 20) == want_full
        llm.set_dge(SETTINGS)
    with pytest.raises(ValueError, match="budget"):
        llm.set_dge({"budget": 0})
    assert llm.dge_config.budget == BUDGET and greedy(llm, PROMPT, 20) == want


def test_settings_change_in_the_middle_of_a_chat(new_llm: Instances) -> None:
    llm = new_llm(SETTINGS)
    prompt = [*PROMPT, *greedy(llm, PROMPT, 25), *tokens_of(20, 11)]
    llm.set_dge({**SETTINGS, "recall": 4})
    sizes = evaluated(llm)
    got = greedy(llm, prompt, 30)
    assert sizes[0] < 60 and llm.dge_stats.rows_restored == 150 + DRAFT - 1 and llm.dge_stats.n_recalls > 4
    _, want = never_evicted(new_llm, {**SETTINGS, "recall": 4}, prompt[: len(prompt) - sizes[0]], prompt, 30)
    assert got == want


def test_recall_through_generate(new_llm: Instances) -> None:
    """Rows stay within the budget; stop strings, streaming and later turns work as always."""
    dge = {"budget": BUDGET, "draft_tokens": 2, "window": 8, "recall": 4}
    llm = new_llm(dge)
    answer = greedy(llm, PROMPT, 100)
    stats = llm.dge_stats
    assert stats.n_recalls == (249 - 1 - 151) // 4 and stats.rows <= BUDGET + 4 and stats.rows_moved > 0
    assert stats.rows_parked == 151 and stats.seconds_recall > 0 and stats.error is None
    assert llm.dge_kept(0, 0)[-1] == stats.boundary > 240
    prompt = [*PROMPT, *answer, *tokens_of(20, 11)]
    sizes = evaluated(llm)
    got = greedy(llm, prompt, 30)
    _, want = never_evicted(new_llm, dge, prompt[: len(prompt) - sizes[0]], prompt, 30)
    assert got == want
    pieces = [
        c["choices"][0]["text"] for c in llm.create_completion(PROMPT, max_tokens=60, temperature=0.0, stream=True)
    ]
    assert (
        "".join(pieces) == new_llm(dge).create_completion(PROMPT, max_tokens=60, temperature=0.0)["choices"][0]["text"]
    )


def test_recall_with_everything_kept_is_the_full_cache(new_llm: Instances) -> None:
    assert greedy(new_llm({"budget": 500, "recall": 1}), PROMPT, 80) == greedy(new_llm(), PROMPT, 80)
