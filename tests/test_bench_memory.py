"""``python -m bench.memory``: it runs, and its ratios are what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import memory

if TYPE_CHECKING:
    from conftest import Zoo


def test_verdict() -> None:
    figures = {
        "before": {"rss": 900, "kv": 400, "kv_max": 500},
        "after": {"rss": 630, "kv": 100, "kv_max": 500},
        "seconds_prefill": 50.0,
        "second": {"seconds_restore": 2.0},
    }
    assert memory.verdict(figures) == {
        "kv after / full": 0.2,
        "rss fall / kv fall": 0.9,
        "restore / prefill, seconds": 0.04,
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs VmRSS")
def test_run(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    args = [str(zoo["g2"].path), "--context", "1500", "--budget", "64", "--json", str(out)]
    assert memory.main(args) == 0
    printed = capsys.readouterr().out
    assert "| K and V after it |" in printed and "wanted with park off: 0.15 or less" in printed
    arms = json.loads(out.read_text(encoding="utf-8"))["arms"]
    assert [arm["park"] for arm in arms] == ["off", "ram", "disk"]
    for arm in arms:
        assert arm["ratios"]["kv after / full"] < 0.15
        assert (arm["after"]["parked"] > 0) == (arm["park"] != "off")
        assert arm["eviction"]["rows_after"] == 65
        if arm["park"] != "off":
            assert arm["second"]["rows_restored"] >= 1500
