"""A thousand random requests, errors and interrupts on a few instances: answers stay those of a fresh instance."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaDraftModel

from reference.instances import Instances, set_abort
from reference.models import token_of

pytestmark = pytest.mark.filterwarnings(
    "error::RuntimeWarning", "ignore:.*a saved state has no host copy:RuntimeWarning"
)

BUDGET, DRAFT = 32, 3
N_CTX, LONGEST = 512, 200


class Guess(LlamaDraftModel):
    """Proposes tokens of which some are right: what followed the same pair of tokens before, or anything."""

    def __init__(self) -> None:
        self.n_proposed = 0

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        ids = np.asarray(input_ids)
        n = int(ids[-1]) % 6  # the same for the same text, so that a fresh instance gets the same proposals
        found = np.flatnonzero(ids[:-1] == ids[-1])
        guess = ids[found[-1] + 1 : found[-1] + 1 + n] if len(found) else (ids[-1] + np.arange(n)) % 200 + 4
        self.n_proposed += len(guess)
        return guess.astype(np.intc)


class Requests:
    """Makes random requests of one instance. What a request asks is fixed before it is made, so it can be repeated."""

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        self.make = make
        self.rng = random.Random(seed)
        self.llm = make()
        self.said: list[int] = []
        self.counts: dict[str, int] = {}
        self.n_evicted = self.n_compared = self.n_recalls = self.n_stopped = 0

    def text(self, n: int) -> list[int]:
        return [token_of(chr(self.rng.randrange(0x21, 0x7F))) for _ in range(n)]

    def prompt(self) -> list[int]:
        kind = self.rng.randrange(4)
        if kind == 0 or not self.said or len(self.said) > LONGEST:
            return self.text(self.rng.randrange(1, LONGEST))
        if kind == 1:
            return [*self.said, *self.text(self.rng.randrange(0, 20))]
        if kind == 2:
            return [*self.said[: self.rng.randrange(1, len(self.said) + 1)], *self.text(self.rng.randrange(1, 20))]
        return self.said[: self.rng.randrange(1, len(self.said) + 1)]

    def settings(self) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"max_tokens": rng.choice([1, 2, DRAFT, DRAFT + 1, 8, 15, 30]), "temperature": 0.0}
        if rng.random() < 0.03:
            found["max_tokens"] = -1
        if rng.random() < 0.3:
            found.update(
                temperature=rng.choice([0.3, 1.0, 1.8]),
                top_k=rng.choice([0, 5, 40]),
                top_p=rng.choice([0.5, 1.0]),
                min_p=rng.choice([0.0, 0.1]),
                repeat_penalty=rng.choice([1.0, 1.3]),
                seed=rng.randrange(1000),
            )
        if rng.random() < 0.15:
            found["grammar"] = llama_cpp.LlamaGrammar.from_string('root ::= "<" [a-f]+', verbose=False)
        if rng.random() < 0.3:
            found["stop"] = [chr(rng.randrange(0x21, 0x7F)), "ab"]
        if rng.random() < 0.2:
            found["logit_bias"] = {token_of("q"): 3.0, token_of("x"): -50.0}
        return found

    def step(self, compare: bool) -> None:
        kinds = ["answer"] * 8 + ["stream", "stream", "overflow", "embed", "reset", "interrupt", "interrupt", "abort"]
        kinds += ["stopped", "state"]
        kind = "answer" if compare else self.rng.choice(kinds)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        prompt, settings = self.prompt(), self.settings()
        if kind == "answer":
            self.answer(prompt, settings, compare)
        else:
            getattr(self, f"do_{kind}")(prompt, settings)

    def answer(self, prompt: list[int], settings: dict[str, Any], compare: bool) -> None:
        if compare:
            # batches of another size differ in their last bits, which may decide between two tokens
            self.llm.reset()
            self.n_compared += 1
        out = self.llm.create_completion(prompt, **settings)
        n_tokens = out["usage"]["completion_tokens"]
        # a character of several bytes is completed
        assert n_tokens <= (settings["max_tokens"] + 3 if settings["max_tokens"] > 0 else N_CTX)
        self.look(prompt, n_tokens, settings)
        if compare:
            fresh = self.make()
            want = fresh.create_completion(prompt, **settings)
            assert out["choices"] == want["choices"], (self.counts, settings)
            assert self.llm.dge_stats.rows == fresh.dge_stats.rows
            fresh.close()

    def look(self, prompt: list[int], n_tokens: int, settings: dict[str, Any]) -> None:
        stats = self.llm.dge_stats
        assert stats is not None and stats.error is None
        assert self.llm.n_tokens <= N_CTX
        self.said = self.llm.input_ids[: self.llm.n_tokens].tolist()
        self.n_recalls += stats.n_recalls
        if stats.state == "evicted":
            self.n_evicted += 1
            assert stats.rows_before > stats.rows_after
        elif len(prompt) > BUDGET:
            # it ended in the draft
            assert n_tokens <= DRAFT + (1 if settings.get("stop") or "grammar" in settings else 0)

    def do_stream(self, prompt: list[int], settings: dict[str, Any]) -> None:
        stream = self.llm.create_completion(prompt, stream=True, **settings)
        list(islice(stream, self.rng.randrange(1, 12)))
        if self.rng.random() < 0.5:
            stream.close()

    def do_overflow(self, prompt: list[int], settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="exceed context window"):
            self.llm.create_completion(self.text(N_CTX + self.rng.randrange(9)), **settings)

    def do_embed(self, prompt: list[int], settings: dict[str, Any]) -> None:
        with pytest.raises(RuntimeError, match="embedding"):
            self.llm.embed("some words")

    def do_reset(self, prompt: list[int], settings: dict[str, Any]) -> None:
        self.llm.reset()
        assert self.llm.n_tokens == 0 and self.llm.dge_memory.parked == 0

    def do_interrupt(self, prompt: list[int], settings: dict[str, Any]) -> None:
        """KeyboardInterrupt in front of a decode, or right behind it."""
        at, behind = self.rng.choice([0, 1, 2, 3, 4, 5, 8, 14]), self.rng.random() < 0.5
        decode, n = self.llm._ctx.decode, 0

        def failing(batch: Any) -> None:
            nonlocal n
            n += 1
            if n > at and not behind:
                raise KeyboardInterrupt
            decode(batch)
            if n > at:
                raise KeyboardInterrupt

        self.llm._ctx.decode = failing
        try:
            self.llm.create_completion(prompt, **settings)
        except KeyboardInterrupt:
            self.n_stopped += 1
            assert self.llm.n_tokens == 0 and self.llm.dge_stats is None
        finally:
            self.llm._ctx.decode = decode

    def do_abort(self, prompt: list[int], settings: dict[str, Any]) -> None:
        """The library's own callback, after a random number of calls: in a decode, an eviction or a selection."""
        at, n = self.rng.choice([1, 5, 20, 60, 100, 200]), 0

        def stop() -> bool:
            nonlocal n
            n += 1
            return n == at

        set_abort(self.llm, stop)
        try:
            self.llm.create_completion(prompt, **settings)
        except RuntimeError:
            self.n_stopped += 1
            assert self.llm.n_tokens == 0
        finally:
            set_abort(self.llm, None)

    def do_stopped(self, prompt: list[int], settings: dict[str, Any]) -> None:
        """The user's own code raises between two tokens."""
        at, n = self.rng.randrange(1, 9), 0

        def stop(_tokens: Any, _logits: Any) -> bool:
            nonlocal n
            n += 1
            if n == at:
                raise ZeroDivisionError
            return False

        try:
            self.llm.create_completion(
                prompt, stopping_criteria=llama_cpp.StoppingCriteriaList([stop]), **{**settings, "max_tokens": 12}
            )
        except ZeroDivisionError:
            self.n_stopped += 1

    def do_state(self, prompt: list[int], settings: dict[str, Any]) -> None:
        state = self.llm.save_state()
        self.llm.create_completion(prompt, **settings)
        self.llm.load_state(state)
        assert self.llm.n_tokens == state.n_tokens


WAYS: list[tuple[int | str, bool, bool, bool]] = [
    # recall, recall_async, logits_all, draft model
    (0, False, False, False),
    (0, False, True, True),
    (3, False, False, False),
    (3, False, True, True),
    (3, True, False, False),
    (3, True, True, True),
    ("auto", False, True, False),
    ("auto", True, False, False),
]


@pytest.mark.parametrize("recall, overlap, logits_all, guess", WAYS)
def test_random_requests(new_llm: Instances, recall: int | str, overlap: bool, logits_all: bool, guess: bool) -> None:
    dge = {"budget": BUDGET, "draft_tokens": DRAFT, "recall": recall, "recall_async": overlap}
    guesses: list[Guess] = []

    def make() -> Any:
        if guess:
            guesses.append(Guess())
        # f32: batches of another size must not tip the scales between two tokens
        return new_llm(
            dge,
            "one",
            n_ctx=N_CTX,
            n_batch=96,
            logits_all=logits_all,
            draft_model=guesses[-1] if guess else None,
            type_k=0,
            type_v=0,
        )

    run = Requests(make, seed=len(str(recall)) + 10 * overlap + guess)
    for i in range(125):
        run.step(compare=i % 10 == 7)
    assert run.n_compared == 12 and run.n_evicted > 15 and run.n_stopped >= 5, (
        run.counts,
        run.n_evicted,
        run.n_stopped,
    )
    assert len(run.counts) == 9
    assert (run.n_recalls > 20) == bool(recall)
    assert not guess or guesses[0].n_proposed > 100
