"""The package with ggml-cuda: linked, loaded, and right where no card is. `make test-cuda-link` builds it first."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llama_dge import Llama
from llama_dge._library import lib_dir

if TYPE_CHECKING:
    from conftest import Zoo

pytestmark = pytest.mark.cuda_link

LIB = lib_dir()

PROMPT = list(range(40, 240))


def answer(path: Path, **options: Any) -> tuple[list[int], Any]:
    """Tokens of a greedy answer, and the instance."""
    llm = Llama(str(path), n_ctx=512, n_threads=1, seed=1, verbose=False, **options)
    tokens: list[int] = []
    for token in llm.generate(PROMPT, temp=0.0):
        tokens.append(token)
        if len(tokens) == 12:
            break
    return tokens, llm


def test_the_backend_is_registered() -> None:
    by_name = ctypes.CDLL(str(LIB / "libggml.so")).ggml_backend_reg_by_name
    by_name.argtypes, by_name.restype = [ctypes.c_char_p], ctypes.c_void_p
    n_devices = ctypes.CDLL(str(LIB / "libggml-base.so")).ggml_backend_reg_dev_count
    n_devices.argtypes, n_devices.restype = [ctypes.c_void_p], ctypes.c_size_t

    assert by_name(b"no such backend") is None
    cuda = by_name(b"CUDA")
    assert cuda is not None
    n_devices(cuda)  # without a driver none, and no crash


@pytest.mark.parametrize(
    "kernel", [b"attn_score_rows", b"attn_score_combine", b"attn_score_columns", b"attn_score_split"]
)
def test_our_kernels_are_in_the_library(kernel: bytes) -> None:
    assert kernel in (LIB / "libggml-cuda.so").read_bytes()


def test_a_cut_with_this_build(zoo: Zoo) -> None:
    """A budget for all rows is the full cache; a small one is kept."""
    path = zoo["g2"].path
    full, _ = answer(path)
    assert len(full) == 12
    assert answer(path, dge={"budget": 512})[0] == full
    _, llm = answer(path, dge={"budget": 48, "draft_tokens": 2})
    stats = llm.dge_stats
    assert (stats.error, stats.rows_before, stats.rows_after) == (None, len(PROMPT) + 1, 49)
