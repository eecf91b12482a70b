"""The models: written by llama.cpp's own test-llama-archs, with random weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM_VARIABLE = "LLAMA_DGE_TEST_LLAMA_ARCHS"

SEED = 1
# With the program's own 0.1, attention is all but even and adds next to nothing to the residual stream; with 1.0 each
# head attends to one row alone, and most rows could be lost without a trace.
STDEV = 0.3


def program() -> Path:
    """test-llama-archs as `make sweep-build` makes it, or what LLAMA_DGE_TEST_LLAMA_ARCHS names."""
    given = os.environ.get(PROGRAM_VARIABLE)
    return Path(given) if given else ROOT / "build" / "upstream-tests" / "bin" / "test-llama-archs"


def write_models(folder: Path, archs: list[str] | None = None) -> list[Path]:
    """Write models of all architectures, or of some, into a folder of their own, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [str(program()), "-o", str(folder), "-s", str(SEED), "-d", str(STDEV)]
    if archs:
        command += ["-a", f"^({'|'.join(map(re.escape, archs))})$"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{program().name} failed with {done.returncode}:\n{done.stdout[-2000:]}")
    return sorted(folder.glob("*.gguf"))


def arch_of(model: str) -> str:
    """The architecture in the name of a file: ARCH-dense or ARCH-moe."""
    return model.rsplit("-", 1)[0]


def all_archs() -> list[str]:
    """Names of all architectures of the pinned llama.cpp, from its source."""
    source = ROOT / "build" / "upstream" / "llama.cpp" / "src" / "llama-arch.cpp"
    names = re.findall(r'\{ *LLM_ARCH_(\w+), *"([^"]+)" *\}', source.read_text(encoding="utf-8"))
    return sorted(name for constant, name in names if constant != "UNKNOWN")
