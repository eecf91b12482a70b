"""The processes that are compared, and the order in which they take turns."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

#: Names of the arms that others are compared with: stock llama-cpp-python, and this package with eviction off.
STOCK, FULL = "stock", "full"


class BenchError(RuntimeError):
    """The benchmark cannot go on; the message is for the user."""


class Worker:
    """A process that runs worker.py, or another script that answers the same requests.

    Parameters
    ----------
    name
        Of the arm, for messages.
    python
        Interpreter.
    script
        Instead of worker.py, in an interpreter that has nothing of this project.
    """

    def __init__(self, name: str, python: str, script: Path | None = None) -> None:
        self.name = name
        ours = script is None and name != STOCK
        command = [str(script)] if script else [str(Path(__file__).with_name("worker.py")), "ours" if ours else "stock"]
        env = dict(os.environ)
        if not ours:
            # what points at our library or our packages must not reach it
            for variable in ("PYTHONPATH", "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "LLAMA_DGE_LIB_PATH"):
                env.pop(variable, None)
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, *command],
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

        try:
            self._file = open(self._path, "a")  # noqa: SIM115
        except OSError as error:
            raise BenchError(f"--lock {self._path}: {error.strerror}") from error
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


class Workers:
    """A worker for each arm, started and ended together.

    Parameters
    ----------
    pythons
        Interpreter of each arm.
    lock
        Held while a round runs.
    """

    def __init__(self, pythons: Mapping[str, str], lock: Lock) -> None:
        self.workers: dict[str, Worker] = {}
        self.lock = lock
        try:
            for name, python in pythons.items():
                self.workers[name] = Worker(name, python)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Worker:
        return self.workers[name]

    @property
    def names(self) -> list[str]:
        """Arms that take part, in the order of a first turn."""
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
