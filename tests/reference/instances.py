"""Instances of llama_dge.Llama as tests make and compare them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp

from llama_dge import Llama


class Instances:
    """Makes instances and closes them: make(dge=..., path, **settings of llama_cpp.Llama)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made: list[Any] = []

    def __call__(self, dge: Any = None, path: Path | None = None, **settings: Any) -> Any:
        settings = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 3, **settings}
        self.made.append(Llama(str(path or self.path), dge=dge, **settings))
        return self.made[-1]

    def close(self) -> None:
        for llm in self.made:
            llm.close()
        self.made.clear()


@contextmanager
def instances(path: Path) -> Iterator[Instances]:
    made = Instances(path)
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
