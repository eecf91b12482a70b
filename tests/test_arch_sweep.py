"""The sweep over all architectures: its rows and its table, and in short form the sweep itself."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arch_sweep import checks, models
from arch_sweep.checks import Case, CheckError
from arch_sweep.runner import (
    FAILED,
    INSENSITIVE,
    PASSED,
    REFUSED,
    Row,
    check_model,
    describe_end,
    row_of,
    without_paths,
)
from arch_sweep.table import markdown, summary
from reference.driver import Context, NativeModel
from reference.scenario import decode_each, prefill_and_arm, tokens_of

SUPPORT = {"done": "support", "result": "ok", "n_evicted": 1, "n_layer": 2}
END = {"end": True}


def test_row_of_a_pass_takes_the_worst_numbers() -> None:
    events = [
        {"start": "support"},
        SUPPORT,
        {"flash_attn": True, "detail": ""},
        {"done": "mask", "result": "ok", "nmse": 1e-9, "one_row": 0.1, "effect": 2.0},
        {"done": "mask, flash attention", "result": "ok", "nmse": 1e-12, "one_row": 0.2, "effect": 0.5},
        END,
    ]
    assert row_of("m", events) == Row("m", PASSED, "", 1, 2, True, 1e-9, 0.1, 0.5)


def test_row_of_a_pass_tells_why_there_is_no_flash_attention() -> None:
    row = row_of("m", [SUPPORT, {"flash_attn": False, "detail": "no kernel"}, END])
    assert (row.result, row.note, row.flash_attn) == (PASSED, "no kernel", False)


def test_row_of_a_refusal() -> None:
    row = row_of("m", [{"start": "support"}, {"done": "support", "result": "refused", "detail": "it uses ALiBi"}])
    assert row == Row("m", REFUSED, "it uses ALiBi")


def test_row_of_failures_names_each_and_outweighs_the_rest() -> None:
    events = [
        SUPPORT,
        {"done": "mask", "result": "insensitive", "detail": "too little"},
        {"done": "scores", "result": "failed", "detail": "two runs differ"},
        {"done": "sequences", "result": "failed", "detail": "other rows"},
        END,
    ]
    row = row_of("m", events)
    assert (row.result, row.note) == (FAILED, "scores: two runs differ; sequences: other rows")
    assert row_of("m", [*events[:2], END]).result == INSENSITIVE


def test_row_of_a_process_that_died_names_the_step() -> None:
    events = [
        SUPPORT,
        {"start": "mask"},
        {"done": "mask", "result": "ok", "nmse": 0.0, "effect": 1.0},
        {"start": "scores"},
    ]
    row = row_of("m", events, died="SIGSEGV")
    assert (row.result, row.note, row.nmse) == (FAILED, "scores: SIGSEGV", 0.0)
    assert row_of("m", [], died="SIGSEGV").note == "start: SIGSEGV"
    # a crash when the process ends, after a refusal, is no refusal
    refused = [{"start": "support"}, {"done": "support", "result": "refused", "detail": "why"}]
    assert row_of("m", refused, died="SIGABRT").result == FAILED


def test_row_of_checks_that_stopped_without_a_word_is_a_failure() -> None:
    assert row_of("m", [SUPPORT]).result == FAILED
    assert row_of("m", []).result == FAILED


def test_describe_end() -> None:
    said = "loading\n/home/me/src/ggml.c:12: GGML_ASSERT(n > 0) failed\nbacktrace\n"
    assert describe_end(-6, said) == "SIGABRT: ggml.c:12: GGML_ASSERT(n > 0) failed"
    assert describe_end(3, "") == "exit status 3"
    assert without_paths("open /a/b/c.gguf, 1/2 of it") == "open c.gguf, 1/2 of it"


def test_check_model_reports_a_hang_and_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "x-dense.gguf"
    path.write_bytes(b"no model")
    assert check_model(path, timeout=0.01) == Row("x-dense", FAILED, "start: no end after 0 s")
    assert check_model(path) == Row("x-dense", FAILED, "load: llama.cpp does not load the file")


def test_table() -> None:
    rows = [
        Row("llama-moe", PASSED, "", 2, 2, True, 0.0, 0.03, 2.1974),
        Row("b-dense", FAILED, "mask: a | b\nnext", 1, 2, False, 2e-3, 0.5, 1.0),
        Row("bloom-dense", REFUSED, "ALiBi"),
        Row("llama-dense", INSENSITIVE, "mask: little", 2, 2, True),
    ]
    date = datetime.date(2026, 1, 2)
    page = markdown(rows, date=date, command="make it", upstream="some 1.2", archs=["llama", "t5", "b", "bert"])
    assert "Written by `make it` on 2026-01-02, with the llama.cpp of some 1.2." in page
    assert "4 models of 3 architectures: 1 passed, 1 refused, 1 insensitive, 1 failed." in page
    assert "| ALiBi | 1 |" in page
    assert page.endswith("\nNo model is written of: bert, t5.\n")
    head = page.index("| model | result |")
    lines = page[head:].splitlines()[2:6]
    assert lines == [
        "| b-dense | failed | 1 of 2 | no | 2e-03 | 5e-01 | 1e+00 | mask: a \\| b next |",
        "| bloom-dense | refused |  |  |  |  |  | ALiBi |",
        "| llama-dense | insensitive | 2 of 2 | yes |  |  |  | mask: little |",
        "| llama-moe | passed | 2 of 2 | yes | 0e+00 | 3e-02 | 2e+00 |  |",
    ]
    assert summary(rows[:1]) == "1 models of 1 architectures: 1 passed, 0 refused, 0 insensitive, 0 failed"
    assert "{" not in page and max(map(len, page.splitlines())) <= 121


def test_arch_of() -> None:
    assert [models.arch_of(name) for name in ("llama-moe", "ernie4_5-moe-moe", "gpt-oss-moe")] == [
        "llama",
        "ernie4_5-moe",
        "gpt-oss",
    ]


# plain; soft cap and sliding windows; attention sinks; experts; recurrent layers beside attention; ALiBi
WANT = {
    "llama": PASSED,
    "gemma2": PASSED,
    "gpt-oss": PASSED,
    "qwen3moe": PASSED,
    "granitehybrid": PASSED,
    "bloom": REFUSED,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of each architecture in WANT."""
    if not models.program().exists():
        pytest.skip(f"{models.program().name} is not built: make sweep-build")
    paths = models.write_models(tmp_path_factory.mktemp("sweep") / "archs", list(WANT))
    return {models.arch_of(path.stem): path for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("arch", WANT)
def test_sweep(tiny: dict[str, Path], arch: str) -> None:
    row = check_model(tiny[arch])
    assert row.result == WANT[arch], row
    if row.result == REFUSED:
        assert "ALiBi" in row.note
    else:
        assert row.n_evicted and row.nmse is not None and row.nmse <= checks.NMSE_BOUND
        assert row.one_row is not None and row.one_row > checks.NMSE_FLOOR


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch, result in WANT.items() if result == PASSED])
@pytest.mark.parametrize("shift", [1, -1])
def test_a_wrong_row_is_seen(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, arch: str, shift: int) -> None:
    """One row of the reference is another than that of the eviction."""
    remove = checks.debug_seq_rm
    monkeypatch.setattr(
        checks, "debug_seq_rm", lambda context, seq, p0, p1: remove(context, seq, p0 + shift, p1 + shift)
    )
    model = NativeModel(tiny[arch])
    try:
        for flash_attn in (False, True):
            with pytest.raises(CheckError, match="to the reference"):
                checks.check_mask(Case(model, flash_attn))
    finally:
        model.close()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma2", "gpt-oss"])  # soft cap; attention sinks
@pytest.mark.parametrize("flash_attn", [False, True])
def test_both_ways_to_score_agree(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, arch: str, flash_attn: bool
) -> None:
    """The fused operation and the graph in its place give the same scores."""
    found: list[list[Any]] = []

    def select(_il: int, n: int, scores: Any, rows: Any, n_rows: Any) -> int:
        found[-1].append(scores.copy())
        n_rows[:] = n
        rows[:, :n] = np.arange(n)
        return 0

    dge = {"budget": 60, "window": 16, "draft_tokens": 2, "scores": "policy", "select": select}
    model = NativeModel(tiny[arch])
    try:
        tokens = [token % model.n_vocab for token in tokens_of(210, 5)]
        for fused in ("1", "0"):
            monkeypatch.setenv("LLAMA_DGE_FUSED", fused)
            names: list[str] = []
            found.append([])
            context = Context(
                model, n_ctx=512, flash_attn=flash_attn, type_k="f32", type_v="f32", dge=dge, operations=names
            )
            prefill_and_arm(context, tokens[:200])
            decode_each(context, tokens[200:])
            assert ("ATTN_SCORE" in names) == (fused == "1")
            context.close()
    finally:
        model.close()
    assert len(found[0]) == len(found[1]) > 0
    worst = max(float((np.abs(a - b) / b).max()) for a, b in zip(*found))
    assert worst < 1e-6
