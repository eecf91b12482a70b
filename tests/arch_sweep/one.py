"""Checks one model in a process of its own: ``python -m arch_sweep.one MODEL.gguf``.

Writes one JSON object a line, before and after each step, so that whoever reads them knows what a crash interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_dge  # noqa: F401  # first: it decides which libllama llama_cpp loads
from reference import driver
from reference.driver import NativeModel, captured_log

from .checks import CHECKS, Case, CheckError, Insensitive


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def facts(case: Case) -> tuple[str, dict[str, Any]]:
    """Return the reason of a refusal; else an empty one and the model's columns of the table."""
    with case.context() as context:
        status, reason = context.supported()
        if status != driver.OK:
            return reason or f"status {status} without a reason", {}
        layers = context.layers()
        if context.enable(check=False) != driver.OK:
            raise CheckError("llama_dge_supported() says yes, llama_dge_enable() no")
        return "", {"n_evicted": len(layers), "n_layer": int(driver.llama().llama_model_n_layer(case.model.handle))}


def flash_attention(model: NativeModel) -> str:
    """Why the model does not run with flash attention; empty where it does."""
    with captured_log() as lines:
        try:
            with Case(model, flash_attn=True).context():
                pass
        except RuntimeError as error:
            return str(error)
    # llama.cpp turns it off by itself where an architecture or a head size does not allow it
    refused = [line for line in lines if "flash" in line.lower() and ("forcing off" in line or "disabled" in line)]
    return refused[0].strip() if refused else ""


def run_check(name: str, case: Case) -> None:
    label = f"{name}, flash attention" if case.flash_attn else name
    tell(start=label)
    try:
        tell(done=label, result="ok", **CHECKS[name](case))
    except Insensitive as error:
        tell(done=label, result="insensitive", detail=str(error))
    except (CheckError, RuntimeError) as error:
        tell(done=label, result="failed", detail=str(error))


def main(path: Path) -> None:
    tell(start="load")
    try:
        model = NativeModel(path)
    except RuntimeError:
        tell(done="load", result="failed", detail="llama.cpp does not load the file")
        return
    case = Case(model)
    try:
        tell(start="support")
        refused, found = facts(case)
        if refused:
            tell(done="support", result="refused", detail=refused)
            return
        tell(done="support", result="ok", **found)
        no_flash = flash_attention(model)
        tell(flash_attn=not no_flash, detail=no_flash)
    except (CheckError, RuntimeError) as error:
        tell(done="support", result="failed", detail=str(error))
        return
    for name in CHECKS:
        run_check(name, case)
        if not no_flash:
            run_check(name, Case(model, flash_attn=True))
    model.close()
    tell(end=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
