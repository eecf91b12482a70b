"""Instances of llama_dge.Llama as tests make and compare them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp

from llama_dge import Llama

if TYPE_CHECKING:
    from conftest import Zoo

DGE = {"budget": 32, "draft_tokens": 3}


class Instances:
    """Makes instances and closes them: new_llm(dge=..., model=..., **settings of llama_cpp.Llama).

    Parameters
    ----------
    model
        File of the model that is used unless a call names another one.
    zoo
        What finds a model that a call gives by its name.
    """

    def __init__(self, model: Path, zoo: Zoo | None = None) -> None:
        self.model, self.zoo = model, zoo
        self.made: list[Any] = []

    def __call__(self, dge: Any = None, model: str | Path | None = None, cls: Any = Llama, **settings: Any) -> Any:
        if isinstance(model, str):
            assert self.zoo is not None
            model = self.zoo[model].path
        if cls is Llama:
            settings["dge"] = dge
        settings = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 3, **settings}
        self.made.append(cls(str(model or self.model), **settings))
        return self.made[-1]

    def close(self) -> None:
        for llm in self.made:
            llm.close()
        self.made.clear()


@contextmanager
def instances(model: Path, zoo: Zoo | None = None) -> Iterator[Instances]:
    made = Instances(model, zoo)
    try:
        yield made
    finally:
        made.close()


def greedy(llm: Any, prompt: list[int], n: int, **settings: Any) -> list[int]:
    """The first n tokens of an answer."""
    return list(islice(llm.generate(prompt, temp=0.0, **settings), n))


def evaluated(llm: Any) -> list[int]:
    """Sizes of the batches that the instance decodes from now on."""
    sizes: list[int] = []
    decode = llm._ctx.decode

    def counting(batch: Any) -> None:
        sizes.append(batch.batch.n_tokens)
        decode(batch)

    llm._ctx.decode = counting
    return sizes


def set_abort(llm: Any, stop: Any) -> None:
    """Install an abort callback (a callable without arguments), or remove it with None."""
    make = llama_cpp.llama_cpp.ggml_abort_callback
    llm.abort_callback = make(0) if stop is None else make(lambda _: bool(stop()))
    llama_cpp.llama_set_abort_callback(llm.ctx, llm.abort_callback, None)


def assert_evicted(llm: Any, n_prompt: int, n_tokens: int, dge: dict[str, Any] = DGE, n_evictions: int = 1) -> None:
    """The cache was evicted and holds what it should after n_tokens tokens of the answer were drawn."""
    stats = llm.dge_stats
    assert stats is not None
    n_draft = dge["draft_tokens"] - 1
    assert stats.state == "evicted" and stats.error is None and stats.n_evictions == n_evictions
    assert (stats.n_prompt, stats.n_draft, stats.boundary) == (n_prompt, n_draft, n_prompt - 1)
    assert (stats.rows_before, stats.rows_after) == (n_prompt + n_draft, dge["budget"] + n_draft)
    assert stats.rows_before > stats.rows_after
    # the last token that was drawn is not evaluated yet
    assert llm.n_tokens == n_prompt + n_tokens - 1
    assert stats.rows == dge["budget"] + n_tokens - 1
    assert stats.bytes_after < stats.bytes_before and stats.seconds >= 0
    for layer in llm.dge_layers:
        for head in range(2):
            assert len(llm.dge_kept(layer, head)) == stats.rows_after
