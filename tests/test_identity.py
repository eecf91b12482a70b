"""With eviction off, or with nothing to evict, the library is stock llama-cpp-python bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from conftest import Zoo

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).resolve().parent / "reference" / "identity_run.py"

pytestmark = pytest.mark.stock


def build_stock(folder: Path) -> Path:
    """A virtual environment with a stock llama-cpp-python of the pinned version, built from its sdist; its python."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        local = os.environ.get("LLAMA_DGE_UPSTREAM")
        source = [local] if local else ["--require-hashes", "-r", str(ROOT / "patches" / "UPSTREAM")]
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        # pip's cache may hold a wheel of it without libraries: the one that our own set-up builds
        build = ["--no-cache-dir", "--no-deps", "--no-binary", "llama-cpp-python"]
        environment = dict(os.environ)
        if sys.platform == "linux":
            # GCC's error with AMX would also end the process here, before there is anything to compare
            flags = f"-DCMAKE_CXX_FLAGS=-include{ROOT / 'native' / 'ggml' / 'cpu' / 'amx-compat.h'}"
            environment["CMAKE_ARGS"] = f"{environment.get('CMAKE_ARGS', '')} {flags}".strip()
        subprocess.run([*pip, *build, *source], check=True, env=environment)
        subprocess.run([*pip, "numpy", "typing-extensions", "diskcache", "jinja2"], check=True)
        done.touch()
    return python


@pytest.fixture(scope="session")
def stock_python() -> Path:
    """Interpreter with stock llama-cpp-python: LLAMA_DGE_STOCK_PYTHON, or build/stock-venv, built once."""
    given = os.environ.get("LLAMA_DGE_STOCK_PYTHON")
    return Path(given) if given else build_stock(ROOT / "build" / "stock-venv")


def run(python: Path, arguments: list[str], out: Path) -> dict[str, Any]:
    environment = dict(os.environ)
    if arguments[0] == "stock":
        # nothing of ours may reach the other interpreter
        for name in ("PYTHONPATH", "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "LLAMA_DGE_LIB_PATH", "LD_LIBRARY_PATH"):
            environment.pop(name, None)
    subprocess.run([str(python), str(SCRIPT), *arguments, str(out)], check=True, env=environment)
    with np.load(out) as found:
        return {name: found[name] for name in found.files}


@pytest.mark.parametrize("model", ["g2", "g8"])
@pytest.mark.parametrize(
    "cache",
    [("0", "f16", "f16"), ("1", "f16", "f16"), ("0", "q8_0", "f16"), ("1", "q8_0", "q8_0")],
    ids=lambda cache: f"fa{cache[0]}-{cache[1]}-{cache[2]}",
)
def test_identity(zoo: Zoo, tmp_path: Path, stock_python: Path, model: str, cache: tuple[str, str, str]) -> None:
    arguments = [str(zoo[model].path), *cache]
    want = run(stock_python, ["stock", *arguments], tmp_path / "stock.npz")
    assert len(want["first_tokens"]) == 339 and len(want["sampled"]) == 40
    assert len(want["first_state"]) > 10000 and np.ptp(want["first_logits"]) > 1
    for mode in ("off", "idle"):
        got = run(Path(sys.executable), [mode, *arguments], tmp_path / f"{mode}.npz")
        assert set(got) == set(want) - ({"embedding"} if mode == "idle" else set())
        for name, values in got.items():
            assert np.array_equal(values, want[name], equal_nan=values.dtype.kind == "f"), (mode, name)
