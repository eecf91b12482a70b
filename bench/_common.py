"""What the benchmarks of this folder share."""

# ruff: noqa: T201
from __future__ import annotations

import sys
from pathlib import Path

from llama_dge import models

ROOT = Path(__file__).resolve().parent.parent


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def model_file(name: str) -> str:
    """Return the path of a model, downloaded where it is named; ends the program where it cannot be had."""
    try:
        found = models.find(name, models.read_manifest())
        return str(found if isinstance(found, Path) else models.fetch(found, report=say))
    except models.ModelError as error:
        raise SystemExit(f"bench: error: {error}") from error
