"""Rows of results as JSON lines, one per prompt and arm, and going on where an earlier run ended."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import llama_cpp
import numpy as np

from .. import __version__
from .engine import ArmResult
from .prompts import Prompt

_VERSION = 2
Row = dict[str, Any]
Key = tuple[str, str, str, str, str]

# what a row was made with beside its settings: rows that differ in these do not compare
_MADE_WITH = ("cache", "limits", "style", "max_prompt")
_START = f'{{"version":{_VERSION},'.encode()


class ResultsError(RuntimeError):
    """A file of results cannot be read or does not fit."""


def key_of(row: Row) -> Key:
    """Return what no two rows of a file have in common."""
    try:
        return row["task"], row["prompt_id"], row["prompt_sha256"], row["arm"], row["model_sha256"]
    except KeyError as error:
        raise ResultsError(f"a row has no {error}") from None


def read_rows(path: Path) -> Iterator[Row]:
    """Read a file of results. A last line that was not finished is left out.

    Raises
    ------
    ResultsError
        The file cannot be read, or a line that another follows is not JSON.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error}") from error
    for i, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ResultsError(f"{path}, line {i}: {error}") from None
        if isinstance(row, dict) and row.get("version") == 1:
            raise ResultsError(f"{path}, line {i}: of version 1, whose arms have other names: run its command again")
        if not isinstance(row, dict) or row.get("version") != _VERSION:
            raise ResultsError(f"{path}, line {i}: not a result of version {_VERSION}")
        yield row


def unique(rows: Iterable[Row]) -> list[Row]:
    """Return rows without those that a later one repeats."""
    return list({key_of(row): row for row in rows}.values())


def told_apart(rows: Iterable[Row]) -> list[Row]:
    """Return rows in which models of the same name have some of their hash behind it."""
    rows = list(rows)
    hashes: dict[str, set[str]] = {}
    for row in rows:
        hashes.setdefault(row["model"], set()).add(row["model_sha256"])
    return [
        row if len(hashes[row["model"]]) == 1 else {**row, "model": f"{row['model']} {row['model_sha256'][:8]}"}
        for row in rows
    ]


def _made_with(row: Row) -> Row:
    return {name: row[name] for name in _MADE_WITH if name in row}


def _kind(name: str, task: str, part: str, n_expected: int, model: str) -> tuple[Any, ...]:
    """Which rows have to agree in something that they were made with: those that a table may pool."""
    if name == "cache" or task == "kld":  # whose sets are documents
        return name, task, model
    return name, task, part, n_expected, model


def _lock(file: IO[str], path: Path) -> None:
    """Keep other runs away from a file until it is closed; raises ResultsError where one has it."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ResultsError(f"another run writes to {path}: wait, or take another file for --out") from None
    except OSError:
        pass  # a file system without locks


class Results:
    """A file that rows are added to.

    Parameters
    ----------
    path
        Of the file. Rows that are in it are not made again.

    Raises
    ------
    ResultsError
        It is no file of results, or another run writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: set[Key] = set()
        self._made: dict[tuple[Any, ...], list[Any]] = {}
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # __exit__ closes it
        try:
            _lock(self._file, path)
            for row in read_rows(path):
                self._note(row)
            data = path.read_bytes()
            complete = data.rfind(b"\n") + 1
            if complete < len(data):
                # the rest of a row that was not finished, and nothing else
                if not data[complete:].startswith(_START[: len(data) - complete]):
                    raise ResultsError(f"{path} is not a file of results")
                os.truncate(path, complete)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def has(self, prompt: Prompt, arm: str, about: Row) -> bool:
        """Tell whether the row is there.

        Raises
        ------
        ResultsError
            Rows of such prompts were made with another cache, another length of answers or in another style, and tables
            would pool them.
        """
        model = about["model_sha256"]
        for name, value in _made_with({**prompt.info, **about}).items():
            made = self._made.get(_kind(name, prompt.task, prompt.set, len(prompt.expected), model), [])
            other = next((other for other in made if other != value), None)
            if other is not None:
                mismatch = f"rows of {prompt.task}, {prompt.set} with {name} {other}, not {value}"
                raise ResultsError(f"{self._path} has {mismatch}: take another file for --out")
        return (prompt.task, prompt.id, prompt.sha256, arm, model) in self.done

    def _note(self, row: Row) -> None:
        self.done.add(key_of(row))
        for name, value in _made_with(row).items():
            try:
                kind = _kind(name, row["task"], row["set"], len(row["expected"]), row["model_sha256"])
            except (KeyError, TypeError) as error:
                raise ResultsError(f"a row is incomplete: {error}") from None
            made = self._made.setdefault(kind, [])
            if value not in made:
                made.append(value)

    def add(self, row: Row) -> None:
        """Add a row, in one piece."""
        self._note(row)
        self._file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._file.flush()


def settings_of(result: ArmResult) -> dict[str, Any] | None:
    """Return the settings of an arm, all of them, as JSON can hold them."""
    if result.arm.config is None:
        return None
    return {name: value for name, value in dataclasses.asdict(result.arm.config).items() if value is not None}


def row_of(prompt: Prompt, result: ArmResult, *, score: float | None, score_draft: float | None, about: Row) -> Row:
    """Make a row.

    Parameters
    ----------
    prompt, result
        What was asked and what came.
    score
        Of the answer.
    score_draft
        Of the tokens that were decoded before the eviction, which say nothing about it.
    about
        Model, versions and what else is the same in all rows.
    """
    stats = result.stats
    after = range(result.n_before_eviction, len(result.kl))
    config = result.arm.config
    row: Row = {
        "version": _VERSION,
        "task": prompt.task,
        "set": prompt.set,
        "prompt_id": prompt.id,
        "prompt_sha256": prompt.sha256,
        "n_prompt": len(prompt.tokens),
        **prompt.info,
        "arm": result.arm.name,
        "budget": None if config is None else config.budget,
        "settings": settings_of(result),
        "answer": result.text,
        "ended": result.ended,
        "n_answer": len(result.tokens),
        "expected": list(prompt.expected),
        "score": score,
        "score_draft": score_draft,
        "evicted": result.evicted,
        "n_before_eviction": result.n_before_eviction,
        "kl": [float(f"{value:.6g}") for value in result.kl],
        "same_top": [int(value) for value in result.same],
        "kl_mean": float(np.mean([result.kl[t] for t in after])) if after else None,
        "rows_end": result.rows_end,
        "n_kv_end": result.n_kv_end,
        "seconds": {
            "prefill": round(result.prefill_seconds, 4),
            "decode": round(result.decode_seconds, 4),
            "cpu": round(result.cpu_seconds, 4),
        },
        "n_decoded": result.n_decoded,
    }
    if stats is not None:
        row["dge"] = {
            name: getattr(stats, name)
            for name in (
                "n_draft", "rows_before", "rows_after", "bytes_before", "bytes_after", "bytes_kept", "bytes_parked",
                "n_recalls", "n_checks", "rows_moved",
            )
        }  # fmt: skip
        row["seconds"]["eviction"] = round(stats.seconds, 5)
        row["seconds"]["recall"] = round(stats.seconds_recall, 5)
    return {**row, **about}


def versions() -> dict[str, str]:
    """Return the versions of what makes the figures."""
    return {
        "llama_dge": __version__,
        "llama_cpp_python": llama_cpp.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def file_sha256(path: Path, cache: Path | None = None) -> str:
    """Return the SHA-256 of a file, which is kept for the next time: a model takes seconds.

    Parameters
    ----------
    path
        The file.
    cache
        Where hashes are kept; by default a file in the user's folder for caches.
    """
    status = path.stat()
    mark = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    if cache is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache = Path(base) / "llama-dge" / "sha256.json"
    try:
        known = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    if mark not in known:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        known[mark] = digest.hexdigest()
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            scratch = cache.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(known), encoding="utf-8")
            os.replace(scratch, cache)
        except OSError:
            pass  # it is only slower the next time
    return str(known[mark])
