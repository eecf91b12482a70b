"""Drives the arms so that what is compared is measured side by side.

The noise of a machine lasts for seconds. So the arms take turns every few hundred tokens of prefill and every few
tokens of decoding, and the order turns round each time (A B, B A, A B, ...): whatever slows one arm down slows its
partner down as well, and only ratios of neighbours are used.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

Times = list[list[float]]  # [n][wall, CPU] seconds

#: In the order of a first turn. "stock" is left out where there is no stock interpreter.
STOCK, OFF, DGE = "stock", "off", "dge"


class BenchError(RuntimeError):
    """The benchmark cannot go on; the message is for the user."""


class Worker:
    """A process that runs worker.py.

    Parameters
    ----------
    name
        Of the arm, for messages.
    python
        Interpreter.
    kind
        "stock" or "ours".
    """

    def __init__(self, name: str, python: str, kind: str) -> None:
        self.name = name
        env = dict(os.environ)
        if kind == "stock":
            # what points at our library or our packages must not reach it
            for variable in ("PYTHONPATH", "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "LLAMA_DGE_LIB_PATH"):
                env.pop(variable, None)
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name("worker.py")), kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=env,
            )
        except OSError as error:
            self._stderr.close()
            raise BenchError(f"arm {name}: cannot run {python}: {error}") from error

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Have the worker do something and return its result; raises BenchError."""
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError(f"arm {self.name}: no pipes")
        with contextlib.suppress(BrokenPipeError):  # it died; the empty answer below says why
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._stderr.seek(0)
            tail = "".join(self._stderr.readlines()[-5:]).strip()
            raise BenchError(f"arm {self.name}: the process ended with status {status}: {tail}")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"arm {self.name}: {do}: {answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # of a process that is gone, with a request unread
                self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()
        self._stderr.close()


class Lock:
    """An flock on a file that others take, too, such as the builds of a machine that is shared.

    Parameters
    ----------
    path
        The file, or None: nothing is locked then.
    at_most
        Seconds after which `breathe` lets the others in.
    """

    def __init__(self, path: Path | None = None, at_most: float = 300.0) -> None:
        self._path, self._at_most = path, at_most
        self._file: IO[str] | None = None
        self._since = 0.0

    def take(self) -> None:
        """Wait for the lock."""
        if self._path is None:
            return
        import fcntl  # not on Windows

        self._file = open(self._path, "a")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._since = time.monotonic()

    def give(self) -> None:
        """Give the lock back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def breathe(self) -> None:
        """Between two turns: give the lock back and take it again, if it was held for long."""
        if self._file is not None and time.monotonic() - self._since > self._at_most:
            self.give()
            time.sleep(1.0)  # who waits comes first
            self.take()


class Arms:
    """The workers by name, started and ended together.

    Parameters
    ----------
    pythons
        Interpreter of each arm.
    lock
        Held while a round runs.
    """

    def __init__(self, pythons: dict[str, str], lock: Lock) -> None:
        self.workers: dict[str, Worker] = {}
        self.lock = lock
        try:
            for name, python in pythons.items():
                self.workers[name] = Worker(name, python, "stock" if name == STOCK else "ours")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Arms:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Worker:
        return self.workers[name]

    @property
    def names(self) -> list[str]:
        """Arms that take part."""
        return list(self.workers)

    def turns(self, names: Sequence[str], n: int, first: int) -> Iterator[list[str]]:
        """Yield n orders of the names, and let others have the machine between two turns where they wait for it."""
        for order in turns(names, n, first):
            self.lock.breathe()
            yield order

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.close()


def turns(names: Sequence[str], n: int, first: int = 0) -> Iterator[list[str]]:
    """Yield n orders of the names, turned round each time: A B, B A, A B, ..."""
    for i in range(first, first + n):
        yield list(names) if i % 2 == 0 else list(reversed(names))


@dataclass(frozen=True)
class Plan:
    """What one round measures.

    Parameters
    ----------
    context
        Tokens of the prompt.
    budget
        Rows that are left of it, and tokens of the fresh prompt that decoding is compared with.
    draft_tokens
        k: the cut comes after that many tokens of the answer.
    chunk
        Tokens of prefill per turn.
    blocks, block
        Turns of decoding, and tokens per turn.
    """

    context: int
    budget: int
    draft_tokens: int
    chunk: int
    blocks: int
    block: int

    @property
    def n_decode(self) -> int:
        """Most tokens that an arm decodes in a round."""
        return self.draft_tokens + 2 * self.blocks * self.block


def prompt_tokens(n: int, n_vocab: int) -> list[int]:
    """Return n token ids, always the same ones. Speed does not depend on what a text says."""
    draw = random.Random(n)
    return [draw.randrange(n_vocab) for _ in range(n)]


def prefill(arms: Arms, names: Sequence[str], prompt: list[int], chunk: int, first: int) -> dict[str, Times]:
    """Evaluate a prompt in all arms, chunk by chunk. Returns the times of the chunks."""
    for name in names:
        arms[name]("reset", prompt=prompt)
    times: dict[str, Times] = {name: [] for name in names}
    starts = range(0, len(prompt), chunk)
    for start, order in zip(starts, arms.turns(names, len(starts), first)):
        for name in order:
            times[name].append(arms[name]("evaluate", start=start, stop=start + chunk))
    return times


def decode(arms: Arms, names: Sequence[str], blocks: int, block: int, first: int) -> dict[str, Times]:
    """Decode in all arms, block by block. Returns the time of each block."""
    times: dict[str, Times] = {name: [] for name in names}
    for order in arms.turns(names, blocks, first):
        for name in order:
            steps = arms[name]("step", n=block)
            times[name].append([sum(step[i] for step in steps) for i in range(2)])
    return times


def run_round(arms: Arms, plan: Plan, n_vocab: int, index: int) -> dict[str, Any]:
    """Measure everything once.

    Returns
    -------
    dict
        ``prefill``, ``draft`` (the k steps that end with the cut), ``decode`` and ``fresh`` hold times by arm; the
        rest is what report.py explains.

    Raises
    ------
    BenchError
        An arm failed, or nothing was cut.
    """
    load_before = _load()
    names = arms.names
    times = prefill(arms, names, prompt_tokens(plan.context, n_vocab), plan.chunk, index)
    first = {name: arms[name]("first") for name in names}
    # k - 1 tokens on the full cache, then the one whose decoding starts with the cut
    draft = {name: arms[name]("step", n=plan.draft_tokens) for name in names}
    cut = arms[DGE]("stats")["dge"]
    if cut is None or cut["state"] != "cut" or cut["rows_after"] != plan.budget + plan.draft_tokens - 1:
        raise BenchError(f"the prompt was not cut as asked: {cut}")
    decoded = decode(arms, names, plan.blocks, plan.block, index)
    long_stats = {name: arms[name]("stats") for name in names}

    # a short prompt in the arm without eviction, against the long one that was cut: both goes on from here
    fresh = [OFF]
    prefill(arms, fresh, prompt_tokens(plan.budget, n_vocab), plan.chunk, index)
    arms[OFF]("first")
    arms[OFF]("step", n=plan.draft_tokens)
    freshly = decode(arms, [OFF, DGE], plan.blocks, plan.block, index)

    return {
        "context": plan.context,
        "round": index,
        "load_average": [load_before, _load()],
        "prefill": times,
        "first": first,
        "draft": draft,
        "decode": decoded,
        "fresh": freshly,
        "cut": cut,
        "rows_end": arms[DGE]("stats")["dge"]["rows"],
        "peak_rss": {name: long_stats[name]["peak_rss"] for name in names},
    }


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # Windows
        return None
