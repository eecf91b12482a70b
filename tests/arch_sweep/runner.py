"""Runs the checks of each model in a process of its own: a crash or a hang costs one row of the table."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0

PASSED, REFUSED, INSENSITIVE, FAILED = "passed", "refused", "insensitive", "failed"


@dataclass(frozen=True)
class Row:
    """What became of one model. Numbers are the worst of all settings; None where nothing was measured."""

    model: str
    result: str
    note: str = ""
    n_evicted: int | None = None
    n_layer: int | None = None
    flash_attn: bool | None = None
    nmse: float | None = None
    one_row: float | None = None
    effect: float | None = None


def without_paths(text: str) -> str:
    """Text without folders: the table is committed."""
    return re.sub(r"(?:[A-Za-z]:)?(?:[\\/][\w.+-]+)+[\\/]([\w.+-]+)", r"\1", text)


def describe_end(returncode: int, stderr: str) -> str:
    """How a process ended that did not come to its end."""
    try:
        how = signal.Signals(-returncode).name if returncode < 0 else f"exit status {returncode}"
    except ValueError:
        how = f"signal {-returncode}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [line for line in lines if "GGML_ASSERT" in line or "Error" in line] or lines
    return how + (f": {without_paths(said[-1])[:200]}" if said else "")


def row_of(model: str, events: Sequence[dict[str, Any]], died: str = "") -> Row:
    """Make a row of what `arch_sweep.one` wrote; `died` is why it stopped."""
    done = [event for event in events if "done" in event]
    refused = [event["detail"] for event in done if event["result"] == REFUSED]
    if refused and not died:
        return Row(model, REFUSED, refused[0])
    found: dict[str, Any] = {}
    for event in events:
        found.update((name, event[name]) for name in ("n_evicted", "n_layer", "flash_attn") if name in event)
    for name, worst in (("nmse", max), ("one_row", min), ("effect", min)):
        values = [event[name] for event in done if name in event]
        found[name] = worst(values) if values else None
    problems = [f"{event['done']}: {event['detail']}" for event in done if event["result"] == FAILED]
    if died:
        # the step that was begun last is the one that the process died in
        begun = [event["start"] for event in events if "start" in event]
        problems.append(f"{begun[-1] if begun else 'start'}: {died}")
    elif not problems and not any("end" in event for event in events):
        problems.append("the checks did not come to their end")
    if problems:
        return Row(model, FAILED, "; ".join(problems), **found)
    weak = [f"{event['done']}: {event['detail']}" for event in done if event["result"] == INSENSITIVE]
    if weak:
        return Row(model, INSENSITIVE, "; ".join(weak), **found)
    no_flash = [event["detail"] for event in events if event.get("flash_attn") is False]
    return Row(model, PASSED, without_paths(no_flash[0]) if no_flash else "", **found)


def check_model(path: Path, timeout: float = TIMEOUT_S) -> Row:
    """Check one GGUF file."""
    command = [sys.executable, "-m", f"{__package__}.one", str(path)]
    # the folder of this package and of `reference` goes in front of what the caller has set
    folders = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False, env=environment)
        output, died = done.stdout, ""
        if done.returncode != 0:
            died = describe_end(done.returncode, done.stderr.decode("utf-8", "replace"))
    except subprocess.TimeoutExpired as error:
        output, died = error.stdout or b"", f"no end after {timeout:.0f} s"
    events = []
    for line in output.decode("utf-8", "replace").splitlines():
        # the last line of a process that was killed may be half a line, and libraries print as well
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return row_of(path.stem, events, died)
