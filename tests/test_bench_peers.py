"""``python -m bench.peers``: how agreement and ratios are computed; kvpress itself only runs in `make bench-peers`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import f32, peers, peers_report

from llama_dge import DGEConfig, Llama

if TYPE_CHECKING:
    from conftest import Zoo

# one layer of two heads and one of one, 4 entries each, of a prompt of 10 with a window of 2
OURS = [[[0, 3, 8, 9], [1, 2, 8, 9]], [[4, 5, 8, 9]]]
THEIRS = [[[0, 4, 8, 9], [1, 2, 8, 9]], [[6, 7, 8, 9]]]


def test_overlaps() -> None:
    assert peers_report.overlaps(OURS, THEIRS) == [[0.75, 1.0], [0.5]]
    assert peers_report.overlaps(OURS, THEIRS, 8) == [[0.5, 1.0], [0.0]]
    assert peers_report.overlaps(OURS, OURS, 8) == [[1.0, 1.0], [1.0]]
    # the order in which a library gives its entries means nothing
    assert peers_report.overlaps([[[9, 0]]], [[[0, 9]]]) == [[1.0]]


@pytest.mark.parametrize(
    ("ours", "theirs", "n_past", "message"),
    [
        (OURS, THEIRS[:1], None, r"layers of \[2, 1\] and \[2\] heads"),
        (OURS, [[[0], [1, 2, 8, 9]], [[4, 5, 8, 9]]], None, "layer 0, head 0: 4 and 1 entries cannot be compared"),
        ([[[0, 9]]], [[[0, 1]]], 8, "layer 0, head 0: 1 and 2 entries"),  # a window that one of them does not keep
        ([[[0, 0]]], [[[0, 1]]], None, "cannot be compared"),
        ([[[8, 9]]], [[[8, 9]]], 8, "layer 0, head 0: 0 and 0 entries"),
    ],
)
def test_what_cannot_be_compared(ours: Any, theirs: Any, n_past: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peers_report.overlaps(ours, theirs, n_past)


def row(**changes: Any) -> dict[str, Any]:
    texts = {
        "a": {"all": [[0.75, 1.0], [0.5]], "past": [[0.5, 1.0], [0.0]], "logits": 1e-4},
        "b": {"all": [[1.0, 1.0], [1.0]], "past": [[1.0, 1.0], [1.0]], "logits": 1e-3},
    }
    return {"window": 2, "kernel": 5, "budget": 4, "variant": "f32", "texts": texts, **changes}


def test_agreement() -> None:
    assert peers_report.agreement(row()) == {
        "mean": pytest.approx(5.25 / 6),
        "min": 0.5,
        "past_mean": pytest.approx(4.5 / 6),
        "past_min": 0.0,
        "equal": pytest.approx(4 / 6),
        "logits": 1e-3,
    }


def made_up_rounds() -> list[dict[str, Any]]:
    def arm(prefill: float, step: float, decode: list[float], kv: int, share: float = 0.5) -> dict[str, Any]:
        found: dict[str, Any] = {"prefill": [prefill, prefill * share], "step": [step, step * share]}
        found["decode"] = [[s, s * share] for s in decode]
        return {**found, "memory": {"kv": kv * 2**20, "rss": 10 * 2**20, "peak_rss": 11 * 2**20}}

    one = {
        "llama-dge full": arm(2, 0.5, [4, 4], 8),
        # a step takes 2/8 s, so the eviction took 0.5
        "llama-dge snapkv": arm(2, 0.75, [3, 1], 2, share=1.0),
        "kvpress full": arm(5, 1, [8, 8], 8),
        "kvpress snapkv": arm(10, 0.75, [8, 4], 2),
    }
    return [{"arms": one}]


def test_figures() -> None:
    rounds = made_up_rounds()
    ours = peers_report.figures(rounds, "llama-dge snapkv", "llama-dge full", 100)
    assert ours["prefill"] == 50.0 and ours["decode"] == pytest.approx(16 / 3)  # 8 tokens in 3 and in 1 seconds
    assert ours["prefill / full"] == pytest.approx(2 / 2.5)  # the eviction counts
    assert ours["decode / full"] == pytest.approx(8 / 3)  # of 4/3 and 4
    assert ours["prefill / full, CPU time"] == pytest.approx(1 / 2.5)
    assert ours["decode / full, CPU time"] == pytest.approx(4 / 3)
    assert ours["kv / full"] == 0.25
    theirs = peers_report.figures(rounds, "kvpress snapkv", "kvpress full", 100)
    assert theirs["prefill / full"] == 0.5 and theirs["decode / full"] == 1.5
    assert "prefill / full" not in peers_report.figures(rounds, "kvpress full", None, 100)


def test_table() -> None:
    result = {"settings": {"context": 100}, "kept": [row(), row(variant="q")], "rounds": made_up_rounds()}
    text = peers_report.table(result)
    assert "| 2, 5, 4 | f32 | 0.8750 | 0.5000 | 0.7500 | 0.0000 | 0.6667 | 1.0e-03 |" in text
    assert "wanted in f32: 0.99 or more: MISSED" in text
    assert "| llama-dge, SnapKV | 50.0 | 5.3 | 0.800 (0.400) | 2.667 (1.333) | 2.0 | 10.0 |" in text
    assert "| transformers, full cache | 20.0 | 1.0 |  |  | 8.0 | 10.0 |" in text
    exact = row(texts={"b": row()["texts"]["b"]})
    # what is not f32 on both sides has no target
    text = peers_report.table({**result, "kept": [exact, row(variant="q")], "rounds": []})
    assert "wanted in f32: 0.99 or more: met" in text and "tokens/s" not in text


@pytest.mark.parametrize(("window", "kernel", "budget"), peers.SETTINGS)
def test_settings_are_snapkvs(window: int, kernel: int, budget: int) -> None:
    config = DGEConfig.from_any(peers.dge(window, kernel, budget))
    assert config is not None
    assert (config.policy, config.scores, config.draft_tokens, config.pooling) == ("snapkv", "policy", 1, "avg")
    assert (config.window, config.kernel_size, config.budget) == (window, kernel, budget)


def test_f32_has_the_same_weights(zoo: Zoo, tmp_path: Path) -> None:
    # a model of which one tensor is quantised
    source = tmp_path / "q.gguf"
    reader: Any = gguf.GGUFReader(str(zoo["g2"].path))
    writer: Any = gguf.GGUFWriter(str(source), "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    wanted = {}
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name == "blk.0.attn_q.weight":
            packed = gguf.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            wanted[tensor.name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
            assert not np.array_equal(wanted[tensor.name], data)
        else:
            writer.add_tensor(tensor.name, data)
            wanted[tensor.name] = data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    target = f32.write_f32(source, tmp_path / "f32.gguf")
    found: Any = gguf.GGUFReader(str(target))
    assert {tensor.name for tensor in found.tensors} == set(wanted)
    for tensor in found.tensors:
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert np.array_equal(tensor.data, wanted[tensor.name])
    for name, field in reader.fields.items():
        if name not in ("general.file_type",) and not name.startswith("GGUF."):
            assert found.get_field(name).contents() == field.contents(), name
    Llama(str(target), n_ctx=256, verbose=False).close()  # and it loads
    before = target.stat().st_mtime_ns
    assert f32.write_f32(source, target).stat().st_mtime_ns == before
    assert not (tmp_path / "f32.part").exists()


def test_bad_values(capsys: pytest.CaptureFixture[str], zoo: Zoo) -> None:
    for arguments, message in (
        (["--tokens", "256"], "--tokens must be more than 256"),
        (["--context", "512"], "--context more than --budget"),
        (["--python", "/no/such/python"], "make bench-peers makes it"),
    ):
        with pytest.raises(SystemExit):
            peers.main([str(zoo["g2"].path), *arguments])
        assert message in capsys.readouterr().err
