"""One arm of the benchmark: a process that holds one `Llama` and does what it is told, a line of JSON at a time.

Run by file name in any interpreter, so that the arm "stock" needs nothing of this project::

    python worker.py stock    # llama_cpp as installed there
    python worker.py ours     # llama_dge

A request is ``{"do": NAME, ...}`` and the answer ``{"ok": RESULT}`` or ``{"error": TEXT}``. All times are pairs of
seconds, wall clock and CPU time of the process: where the two differ, the machine was not quiet.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO


def rss() -> int | None:
    """Return the bytes of this process that are in memory, or None where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            sizes = [line.split()[1] for line in file if line.startswith("VmRSS:")]
    except OSError:  # not Linux
        return None
    return int(sizes[0]) * 1024 if sizes else None


def peak_rss() -> int | None:
    """Return the peak resident set of this process in bytes, or None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Arm:
    """The model under test and the prompt that it works on."""

    def __init__(self, kind: str) -> None:
        if kind == "ours":
            import llama_dge  # first: it decides which libllama is loaded

            self._class: Any = llama_dge.Llama
        import llama_cpp

        self._cpp: Any = llama_cpp
        library = llama_cpp.llama_cpp._lib
        if kind == "stock":
            self._class = llama_cpp.Llama
            if hasattr(library, "llama_dge_abi_version"):
                raise RuntimeError(f"{sys.executable} runs llama-dge's library, not a stock one: {library._name}")
        self._llm: Any = None
        self._prompt: list[int] = []
        self._tokens: Iterator[int] | None = None

    def load(self, model: str, dge: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
        """Load the model. Returns what identifies the library and the model."""
        if dge is not None:
            settings["dge"] = dge
        self._llm = self._class(model, verbose=False, **settings)
        return {
            "llama_cpp_python": self._cpp.__version__,
            "system": self._cpp.llama_print_system_info().decode("utf-8", "replace").strip(),
            "python": sys.version.split()[0],
            "n_vocab": self._llm.n_vocab(),
        }

    def warm_up(self, n: int) -> None:
        """Evaluate some tokens and forget them, so that the first turn does not pay for pages and graphs."""
        self._llm.eval(list(range(n)))
        self._llm.eval([0])
        self.reset([])

    def reset(self, prompt: list[int]) -> None:
        """Forget everything and take a new prompt."""
        self._tokens = None
        self._llm.reset()
        self._prompt = prompt

    def evaluate(self, start: int, stop: int) -> list[float]:
        """Evaluate a part of the prompt."""
        before = self._now()
        self._llm.eval(self._prompt[start:stop])
        return self._since(before)

    def read(self, start: int, stop: int) -> list[float]:
        """Evaluate a part of the prompt as an answer is decoded: one by one, a token sampled each time."""
        before = self._now()
        for token in self._prompt[start:stop]:
            self._llm.eval([token])
            self._llm.sample(temp=0.0)
        return self._since(before)

    def first(self) -> list[float]:
        """Sample the first token of the answer. The prompt was evaluated, so nothing is decoded."""
        if self._llm.n_tokens != len(self._prompt):
            raise RuntimeError(f"{self._llm.n_tokens} of {len(self._prompt)} tokens were evaluated")
        self._tokens = self._llm.generate(self._prompt, temp=0.0)
        return self.step(1)[0]

    def step(self, n: int) -> list[list[float]]:
        """Decode n tokens. Returns the time of each."""
        if self._tokens is None:
            raise RuntimeError("step before first")
        times = []
        for _ in range(n):
            before = self._now()
            next(self._tokens)
            times.append(self._since(before))
        return times

    def stats(self) -> dict[str, Any] | None:
        """Return what is known of the eviction, or None where eviction is off."""
        stats = getattr(self._llm, "dge_stats", None)
        return None if stats is None else {**vars(stats), "seconds": stats.seconds}

    def kept(self) -> list[list[list[int]]]:
        """Return the positions that each evicted layer and KV head kept, ascending."""
        heads = self._llm.dge_stats.rows_by_head
        return [
            [self._llm.dge_kept(layer, head).tolist() for head in range(len(rows))]
            for layer, rows in zip(self._llm.dge_layers, heads)
        ]

    def logits(self) -> list[float]:
        """Return the logits that follow the newest token that was decoded."""
        pointer = self._cpp.llama_get_logits_ith(self._llm.ctx, -1)
        return [float(pointer[i]) for i in range(self._llm.n_vocab())]

    def memory(self) -> dict[str, int | None]:
        """Return the bytes in use now, those of stock's cache left out: it does not tell."""
        memory = getattr(self._llm, "dge_memory", None)
        return {"rss": rss(), "peak_rss": peak_rss(), **({} if memory is None else vars(memory))}

    def _now(self) -> tuple[float, float]:
        self._cpp.llama_synchronize(self._llm.ctx)  # devices work ahead of the host
        return time.perf_counter(), time.process_time()

    def _since(self, before: Sequence[float]) -> list[float]:
        after = self._now()
        return [after[0] - before[0], after[1] - before[1]]


def serve(arm: Arm, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    names = ("load", "warm_up", "reset", "evaluate", "read", "first", "step", "stats", "memory", "kept", "logits")
    actions = {name: getattr(arm, name) for name in names}
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"ok": actions[request.pop("do")](**request)}
        except Exception as error:  # the parent reports it, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # answers keep the pipe to themselves: what a library prints goes to stderr
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Arm(sys.argv[1]), sys.stdin, channel)
