"""``llama-dge estimate``: what it says before a model is loaded is what is in use then."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llama_dge import Llama
from llama_dge.cli import main
from llama_dge.models import fetch, read_manifest

if TYPE_CHECKING:
    from conftest import Zoo

F16, Q8_0 = {"type": "f16", "flash_attn": False}, {"type": "q8_0", "flash_attn": True}
F16_FLASH = {"type": "f16", "flash_attn": True}
TYPES = {"f16": 1, "q8_0": 8}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: str) -> tuple[int, str, str]:
        status = main(["estimate", *args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def options(cache: dict[str, Any], dge: dict[str, Any]) -> list[str]:
    flags = ["--type-k", cache["type"], "--type-v", cache["type"]]
    flags.append("--flash-attn" if cache["flash_attn"] else "--no-flash-attn")
    for name, value in dge.items():
        option = name.replace("_", "-")
        flags += [f"--no-{option}" if value is False else f"--{option}"] if isinstance(value, bool) else []
        flags += [f"--{option}", str(value)] if not isinstance(value, bool) else []
    return flags


def measured(path: str, n_ctx: int, n_prompt: int, cache: dict[str, Any], dge: Any) -> dict[str, Any]:
    """What a model uses just before and just after the eviction of a prompt."""
    kind = TYPES[cache["type"]]
    llm = Llama(
        path,
        n_ctx=n_ctx,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
        dge=dge,
        type_k=kind,
        type_v=kind,
        flash_attn=cache["flash_attn"],
    )
    k = llm.dge_config.draft_tokens if llm.dge_config is not None else 2
    generator = llm.generate([4 + i * 7 % 250 for i in range(n_prompt)], temp=0.0)
    list(islice(generator, k))
    before = llm.dge_memory
    list(islice(generator, 3))  # graphs get their buffers anew in the decode after the eviction
    after = llm.dge_memory
    stats = llm.dge_stats
    llm.close()
    return {"before": before, "after": after, "rows_after": stats.rows_after if stats is not None else 0}


def assert_close(estimate: int, real: int, name: str, slack: int = 0) -> None:
    assert abs(estimate - real) <= 0.05 * real + slack, (name, estimate, real)


def check(said: dict[str, Any], real: dict[str, Any], h2o_flash: bool = False) -> None:
    before, after = real["before"], real["after"]
    assert said["weights"] == pytest.approx(after.weights, rel=0.05)
    assert_close(said["kv_full"], after.kv_max, "kv_full")
    assert_close(said["kv_peak"], before.kv, "kv_peak")
    assert_close(said["other"], after.other, "other")
    if h2o_flash:
        assert before.compute <= 1.05 * said["compute_peak"] <= 1.05 * (before.compute + 24 * 2**20)
    else:
        assert_close(said["compute_peak"], before.compute, "compute_peak")
        total = before.weights + before.kv + before.other + before.compute + said["dge"]
        assert_close(said["total_peak"], total, "total_peak")
    in_memory = after.parked if said["parked_in"] == "ram" else 0
    total = after.weights + after.kv + after.other + after.compute + after.dge + in_memory
    if said["at_most"]:
        assert said["rows_after"] >= real["rows_after"]
        assert said["kv_after"] >= after.kv and said["total_after"] >= total and said["dge"] >= after.dge
        return
    assert real["rows_after"] in (0, said["rows_after"])
    assert_close(said["kv_after"], after.kv, "kv_after")
    # uneven layers have masks of their own, a quarter of a MiB here; in a model of some size that is nothing
    assert_close(said["compute_after"], after.compute, "compute_after", slack=2**18)
    assert_close(said["dge"], after.dge, "dge")
    assert_close(said["parked"], after.parked, "parked")
    assert_close(said["total_after"], total, "total_after", slack=2**18)


@pytest.mark.parametrize("cache", [F16, F16_FLASH, Q8_0], ids=str)
@pytest.mark.parametrize(
    "dge",
    [
        {"budget": 64},
        {"budget": 0.25, "park": "off", "draft_tokens": 4},
        {"budget": 200, "elastic": False, "park": "disk"},
        {"budget": 64, "policy": "h2o", "scores": "both"},
        {"budget": 100, "policy": "pyramidkv"},
        {"budget": 64, "head_budgets": "adaptive"},
        {"budget": 64, "policy": "streamingllm"},
        {"budget": 64, "recall": 8},
        {"budget": 2000},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["g2", "g8"])
def test_estimate_is_what_is_measured(
    run: Callable[..., tuple[int, str, str]], zoo: Zoo, model: str, cache: dict[str, Any], dge: dict[str, Any]
) -> None:
    path = str(zoo[model].path)
    status, out, err = run(path, "--n-ctx", "2048", "--n-prompt", "700", "--json", *options(cache, dge))
    assert (status, err) == (0, "")
    said = json.loads(out)
    assert (said["reason"] is None) == (dge["budget"] != 2000)
    # the sums are made in a block of attention that other buffers may or may not leave room for
    check(said, measured(path, 2048, 700, cache, dge), dge.get("policy") == "h2o" and cache["flash_attn"])


@pytest.mark.parametrize("n_prompt", [510, 511, 512, 513, 767, 768])
def test_steps_of_the_cache(run: Callable[..., tuple[int, str, str]], zoo: Zoo, n_prompt: int) -> None:
    """A prompt that just fits into a size, or does not."""
    path = str(zoo["g2"].path)
    for dge in ({"budget": 128}, {"budget": 126}):
        args = ["--n-ctx", "1100", "--n-prompt", str(n_prompt), "--json", *options(F16, dge)]
        check(json.loads(run(path, *args)[1]), measured(path, 1100, n_prompt, F16, dge))


def test_nothing_else_is_printed(zoo: Zoo) -> None:
    command = [sys.executable, "-m", "llama_dge", "estimate", str(zoo["g2"].path), "--n-ctx", "4096", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "" and json.loads(done.stdout)["n_ctx"] == 4096


def test_full_cache(run: Callable[..., tuple[int, str, str]], zoo: Zoo) -> None:
    path = str(zoo["g2"].path)
    status, out, _ = run(path, "--n-ctx", "1024", "--n-prompt", "300", "--full", "--json")
    said = json.loads(out)
    assert status == 0 and said["reason"] == "eviction is off" and said["kv_after"] == said["kv_full"]
    check(said, measured(path, 1024, 300, F16, None))


def test_table(run: Callable[..., tuple[int, str, str]], zoo: Zoo) -> None:
    status, out, _ = run(str(zoo["g2"].path), "--n-ctx", "2048", "--n-prompt", "1500", "--budget", "64")
    assert status == 0
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert lines["entries"].strip() == "1,507 -> 71 per layer and KV head"
    assert list(lines)[2:6] == [
        "weights",
        "KV cache for 2,048 cells",
        "KV cache before the eviction",
        "KV cache after the eviction",
    ]
    out = run(str(zoo["g2"].path), "--n-ctx", "2048", "--head-budgets", "adaptive", "--budget", "64")[1]
    assert "-> at most " in out and "1,792 tokens" in out


def test_what_cannot_be_evicted(
    run: Callable[..., tuple[int, str, str]], zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_dge._native.supported", lambda ctx: "it is a test")
    status, out, _ = run(str(zoo["g2"].path), "--n-ctx", "1024")
    assert status == 0 and "nothing is evicted: it is a test" in out


@pytest.mark.parametrize(
    "args, message",
    [
        (["--n-prompt", "2000"], "--n-prompt 2000 does not fit into --n-ctx 1024"),
        (["--budget", "5"], "budget=5: must be at least 8"),
        (["--full", "--budget", "64"], "--full excludes --budget"),
        (["--type-v", "q8_0", "--no-flash-attn"], "a context with these settings cannot be made"),
    ],
    ids=str,
)
def test_refusals(run: Callable[..., tuple[int, str, str]], zoo: Zoo, args: list[str], message: str) -> None:
    status, out, err = run(str(zoo["g2"].path), "--n-ctx", "1024", *args)
    assert (status, out) == (1, "")
    assert err.startswith("llama-dge estimate: error: ") and message in err


def test_no_model(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no model")
    status, _, err = run(str(tmp_path / "text"), "--n-ctx", "1024")
    assert status == 1 and "Failed to load model from file" in err


@pytest.mark.model
@pytest.mark.parametrize("cache", [F16, F16_FLASH, Q8_0], ids=str)
@pytest.mark.parametrize("n_ctx, n_prompt, budget", [(2048, 700, 128), (1024, 600, 0.5)])
def test_a_real_model(
    run: Callable[..., tuple[int, str, str]], cache: dict[str, Any], n_ctx: int, n_prompt: int, budget: float
) -> None:
    path = str(fetch(read_manifest()["smollm2-135m"]))
    args = ["--n-ctx", str(n_ctx), "--n-prompt", str(n_prompt), "--json", *options(cache, {"budget": budget})]
    check(json.loads(run(path, *args)[1]), measured(path, n_ctx, n_prompt, cache, {"budget": budget}))
