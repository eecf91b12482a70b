"""The package with ggml-cuda: linked, loaded, and right where no card is. `make test-cuda-link` builds it first."""

from __future__ import annotations

import ctypes

import pytest

from llama_dge._library import lib_dir
from reference.instances import Instances, greedy

pytestmark = pytest.mark.cuda_link

LIB = lib_dir()

PROMPT = list(range(40, 240))


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


def test_an_eviction_with_this_build(new_llm: Instances) -> None:
    """A budget for all entries is the full cache; a small one is kept."""
    full = greedy(new_llm(n_ctx=512), PROMPT, 12)
    assert len(full) == 12
    assert greedy(new_llm({"budget": 512}, n_ctx=512), PROMPT, 12) == full
    llm = new_llm({"budget": 48, "draft_tokens": 2}, n_ctx=512)
    greedy(llm, PROMPT, 12)
    stats = llm.dge_stats
    assert (stats.error, stats.rows_before, stats.rows_after) == (None, len(PROMPT) + 1, 49)
