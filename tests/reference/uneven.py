"""Sequences whose heads keep unlike numbers of rows, each with its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import driver
from .bounds import nmse_bounds
from .driver import Context
from .forward import Reference, nmse
from .models import ZOO
from .policies import Settings
from .scenario import tokens_of

if TYPE_CHECKING:
    from conftest import Zoo

MODEL = "g2"  # 3 layers, 2 KV heads
SETTINGS = {
    "adaptive": Settings(budget=40, draft_tokens=2, head_budgets="adaptive"),
    "pyramid": Settings(policy="pyramidkv", budget=40, draft_tokens=2),
    "table": Settings(budget=40, draft_tokens=2, head_budgets="table", table=((8, 60), (30, 9), (45, 45))),
    # one head keeps its whole past
    "a head keeps all": Settings(draft_tokens=2, head_budgets="table", table=((10, 900), (10, 20), (30, 9))),
}


def settings_of(cache: tuple[bool, str, str], **others: Any) -> dict[str, Any]:
    return {"flash_attn": cache[0], "type_k": cache[1], "type_v": cache[2], "n_ctx": 1024, **others}


class Sequence:
    """A sequence of a context and the same one in the reference."""

    def __init__(self, zoo: Zoo, context: Context, cache: tuple[bool, str, str], seq: int) -> None:
        self.context, self.seq = context, seq
        self.reference = Reference(zoo[MODEL].weights, cache[1], cache[2], cache[0])
        self.bound = nmse_bounds(cache[1], cache[2], cache[0], ZOO[MODEL].n_layer)[0]

    def decode(self, tokens: list[int]) -> None:
        """At once, and compare."""
        assert nmse(self.context.decode(tokens, seq=self.seq), self.reference.step(tokens)) <= self.bound

    def each(self, tokens: list[int]) -> None:
        for token in tokens:
            self.decode([token])

    def evict(self, s: Settings, n_prompt: int, seed: int) -> None:
        """Prompt, draft and the eviction; one token after it. The sequence must be empty."""
        tokens = tokens_of(n_prompt + s.draft_tokens, seed)
        self.decode(tokens[:n_prompt])
        status = self.context.arm(n_prompt, self.seq)
        assert status == driver.OK, self.context.status(status)
        self.each(tokens[n_prompt:-1])
        n = self.reference.n_tokens
        got = self.context.decode(tokens[-1:], seq=self.seq)
        info = self.context.info(self.seq)
        assert info["state"] == driver.STATE_EVICTED, self.context.status(info["error"])
        kept = self.context.kept(self.seq)
        assert info["n_rows_before"] == n and is_uneven(kept)
        self.reference.mask_all_but(kept)
        assert nmse(got, self.reference.step(tokens[-1:])) <= self.bound

    def copy_to(self, seq: int, context: Context | None = None) -> Sequence:
        """What another sequence must be like after it got the rows of this one."""
        twin = object.__new__(Sequence)
        twin.context, twin.seq = context or self.context, seq
        twin.reference, twin.bound = self.reference.fork(), self.bound
        return twin


def is_uneven(kept: Any) -> bool:
    return len({len(positions) for heads in kept for positions in heads}) > 1


def together(*parts: tuple[Sequence, list[int]]) -> None:
    """Tokens of several sequences in one llama_decode(), and compare."""
    context = parts[0][0].context
    rows = [(token, s.reference.n_tokens + i, s.seq, True) for s, tokens in parts for i, token in enumerate(tokens)]
    got = context.decode_batch(rows)
    for s, tokens in parts:
        assert nmse(got[: len(tokens)], s.reference.step(tokens)) <= s.bound, s.seq
        got = got[len(tokens) :]
