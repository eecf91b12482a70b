"""`llama_dge.patch_llama_cpp`: each case in a process of its own, for it is about what was imported before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


def test_patch_and_undo() -> None:
    done = python("""
import llama_dge
undo = llama_dge.patch_llama_cpp()
import llama_cpp, llama_cpp.llama
from llama_cpp import Llama
assert llama_dge.Llama.__mro__[1].__module__ == "llama_cpp.llama"
assert Llama is llama_cpp.llama.Llama is llama_dge.Llama
again = llama_dge.patch_llama_cpp()
assert llama_cpp.Llama is llama_dge.Llama
undo()
assert llama_cpp.Llama is llama_cpp.llama.Llama is llama_dge.Llama.__mro__[1]
assert llama_cpp.Llama is not llama_dge.Llama
again(); undo()
assert llama_cpp.Llama is llama_dge.Llama.__mro__[1]
""")
    assert done.returncode == 0, done.stderr


def test_what_follows_builds_our_class(zoo: object) -> None:
    path = zoo["g2"].path  # type: ignore[index]
    done = python(
        """
import sys
import llama_dge
llama_dge.patch_llama_cpp()
import llama_cpp, pickle
llm = llama_cpp.Llama(sys.argv[1], n_ctx=1024, n_threads=1, verbose=False, dge={"budget": 32, "draft_tokens": 2})
llm("abcdefgh" * 30, max_tokens=8, temperature=0)
print(type(llm).__module__, llm.dge_stats.state, llm.dge_stats.rows_after)
print(pickle.loads(pickle.dumps(llm)).dge_config.budget)
""",
        str(path),
    )
    assert done.stdout.split() == ["llama_dge.llama", "evicted", "33", "32"], done.stderr


def test_refuses_where_a_module_has_the_stock_class(tmp_path: Path) -> None:
    (tmp_path / "user_of_llama.py").write_text("from llama_cpp import Llama\n", encoding="utf-8")
    done = python(
        """
import sys
sys.path.insert(0, sys.argv[1])
import llama_dge, user_of_llama, llama_cpp
try:
    llama_dge.patch_llama_cpp()
except RuntimeError as error:
    print(error)
assert llama_cpp.Llama is not llama_dge.Llama
""",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("patch_llama_cpp: user_of_llama has taken the stock Llama already. Call "), (
        done.stdout
    )


@pytest.mark.parametrize("first", ["llama_cpp"])
def test_refuses_where_the_stock_library_was_loaded_first(tmp_path: Path, first: str) -> None:
    # a stock library needs a stock build; a module in its place, whose library has no dge in it, is told the same
    package = tmp_path / first
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.3.36"\n', encoding="utf-8")
    (package / "llama_cpp.py").write_text("import ctypes\n_lib = ctypes.CDLL(None)\n", encoding="utf-8")
    done = python(
        f"import sys; sys.path.insert(0, sys.argv[1]); import {first}; import llama_dge; llama_dge.patch_llama_cpp()",
        str(tmp_path),
    )
    assert done.returncode != 0
    assert "llama_cpp was imported before llama_dge and uses" in done.stderr
    assert "Import llama_dge first" in done.stderr
