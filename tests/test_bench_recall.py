"""``python -m bench.recall``: it runs, and its ratios are what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import recall

if TYPE_CHECKING:
    from conftest import Zoo


def test_summary() -> None:
    rounds = [
        {"full": {"token": 0.4, "rows": 9.0}, "recall 4": {"token": 0.1, "rows": 3.0, "recall": 0.2, "moved": 6.0}},
        {"full": {"token": 0.6, "rows": 9.0}, "recall 4": {"token": 0.2, "rows": 3.0, "recall": 0.6, "moved": 8.0}},
        {"full": {"token": 0.5, "rows": 9.0}, "recall 4": {"token": 0.25, "rows": 3.0, "recall": 0.5, "moved": 7.0}},
    ]
    table = recall.summary(rounds)
    assert table["full"]["speed"] == 1.0
    assert table["recall 4"]["speed"] == pytest.approx(3.0)  # of 4, 3 and 2
    assert table["recall 4"]["recall / full step"] == pytest.approx(1.0)  # of 0.5, 1 and 1
    assert table["recall 4"]["moved"] == 7.0


def test_run(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recall.json"
    args = [str(zoo["g2"].path), "--context", "600", "--budget", "64", "--rounds", "1", "--tokens", "16"]
    assert recall.main([*args, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| recall 4 |" in printed and "wanted: see above" in printed
    medians = json.loads(out.read_text())["medians"]
    assert medians["recall 4"]["recalls"] == 4 and medians["recall 1"]["recalls"] == 16
    assert medians["full"]["rows"] > 600 and all(medians[f"recall {n}"]["rows"] <= 64 + n for n in (1, 4, 8, 16))
