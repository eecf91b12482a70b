"""The benchmark: its arithmetic on made-up times, and one small run of the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import measure, report  # noqa: E402

if TYPE_CHECKING:
    from conftest import Zoo

PLAN = {"block": 4, "blocks": 2}


def both(*seconds: float) -> list[list[float]]:
    """Times that are the same by both clocks."""
    return [[s, s] for s in seconds]


def made_up_round(**changes: Any) -> dict[str, Any]:
    """Arm "off" runs at speed 1, stock at 2 (prefill) and 0.5 (decode); the cut took 3 seconds."""
    round_ = {
        "context": 8192,
        "prefill": {"stock": both(0.5, 1), "off": both(1, 2), "dge": both(1, 4)},
        "decode": {"stock": both(8, 8), "off": both(4, 4), "dge": both(2, 2)},
        "fresh": {"off": both(2, 2), "dge": both(2, 2.5)},
        # a step on the full cache is 4/4 = 1 s and one after the cut 2/4 = 0.5 s
        "draft": {"dge": both(1, 3.5)},
        "cut": {"seconds": 2.5, "rows_before": 8193, "rows_after": 513, "bytes_before": 8193, "bytes_after": 513},
        "peak_rss": {"stock": None, "off": 2**20, "dge": 2**21},
    }
    return {**round_, **changes}


def made_up_result(*rounds: dict[str, Any]) -> dict[str, Any]:
    arms = {name: {"system": "AVX2 = 1"} for name in ("stock", "off", "dge")}
    return {"rounds": list(rounds), "plan": PLAN, "settings": {"n_threads": 1}, "arms": arms}


def test_ratios() -> None:
    found = report.ratios([made_up_round()], PLAN)
    assert found == {
        "prefill_off_stock": 0.5,
        "decode_off_stock": 2.0,
        "prefill_armed_off": pytest.approx(0.75),  # pairs 1 and 0.5
        "decode_cut_fresh": pytest.approx(0.9),  # pairs 1 and 0.8
        "cut_prefill": pytest.approx(3 / 5),
        "cut_prefill_stats": pytest.approx(2.5 / 5),
        "decode_cut_full": 2.0,
    }
    assert list(found) == [line.key for line in report.LINES]


def test_one_bad_round_does_not_move_the_median() -> None:
    disturbed = made_up_round(decode={"stock": both(8, 8), "off": both(400, 4), "dge": both(2, 2)})
    found = report.ratios([made_up_round(), disturbed, made_up_round()], PLAN)
    assert found["decode_off_stock"] == 2.0


def test_without_stock_nothing_is_called_passed() -> None:
    times = made_up_round()
    for phase in ("prefill", "decode"):
        del times[phase]["stock"]
    result = made_up_result(times)
    del result["arms"]["stock"]
    assert report.ratios([times], PLAN)["decode_off_stock"] is None
    text = report.table(result)
    assert text.count("not measured") == 3
    assert "LLAMA_DGE_STOCK_PYTHON" in text


def test_table_tells_what_is_missed() -> None:
    text = report.table(made_up_result(made_up_round()))
    lines = {line.title: next(row for row in text.splitlines() if row.startswith(line.title)) for line in report.LINES}
    assert lines["prefill speed, dge off / stock"].endswith("MISSED")
    assert lines["decode speed, dge off / stock"].endswith("ok")
    assert lines["seconds, cut (from outside) / its prefill"].endswith("0.600 MISSED")
    assert "8,193 -> 513 rows" in text


def test_short_prompts_have_no_target_for_the_cut() -> None:
    text = report.table(made_up_result(made_up_round(context=1024)))
    row = next(row for row in text.splitlines() if row.startswith("seconds, cut (from outside)"))
    assert row.endswith("0.600")


def test_a_busy_machine_is_told() -> None:
    busy = {arm: [[1.0, 0.5]] for arm in ("stock", "off", "dge")}
    result = made_up_result(made_up_round(prefill=busy, decode=busy, fresh=busy))
    assert "NOT a quiet machine" in report.table(result)
    assert "NOT a quiet machine" not in report.table(made_up_result(made_up_round()))


def test_other_builds_are_told() -> None:
    result = made_up_result(made_up_round())
    assert "other options" not in report.table(result)
    result["arms"]["stock"]["system"] = "AVX2 = 0"
    assert "other options" in report.table(result)


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="1 turns cannot be paired with 2"):
        report.paired_speed(both(1), both(1, 2), report.WALL)


def test_turns_go_both_ways() -> None:
    assert list(measure.turns(["a", "b"], 3)) == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert list(measure.turns(["a", "b"], 1, first=1)) == [["b", "a"]]


def test_the_lock_lets_others_in(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")

    def is_free() -> bool:
        with open(tmp_path / "lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    lock = measure.Lock(tmp_path / "lock", at_most=0.0)
    lock.take()
    assert not is_free()
    with ThreadPoolExecutor(1) as pool:
        breath = pool.submit(lock.breathe)
        while not is_free():
            assert not breath.done()
        breath.result()
    assert not is_free()
    lock.give()
    assert is_free()


def run_bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # the library under test reaches the workers through the environment, where it is set
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def test_whole_run_on_a_tiny_model(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = run_bench(
        "--quick", "--model", str(zoo["g2"].path), "--contexts", "300", "--budget", "64", "--json", str(out)
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    (found,) = result["summary"]
    assert found["rows"] == [301, 65]
    assert found["bytes"][0] / found["bytes"][1] == pytest.approx(301 / 65)
    assert found["ratios"]["decode_cut_fresh"] > 0
    assert found["ratios"]["cut_prefill_stats"] > 0
    assert "301 -> 65 rows" in done.stdout
    (round_,) = result["rounds"]
    assert len(round_["prefill"]["off"]) == len(round_["prefill"]["dge"]) == 3  # chunks of 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "no such file"),
        (["--contexts", "64", "--budget", "64"], "must be more than the budget"),
    ],
)
def test_errors(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_bench(*arguments, "--json", str(tmp_path / "bench.json"))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_stock_interpreter_is_an_error(zoo: Zoo, tmp_path: Path) -> None:
    # not there at all, and one that cannot import llama_cpp
    for python in (str(tmp_path / "python"), "/bin/false"):
        done = run_bench(
            "--quick",
            "--model",
            str(zoo["one"].path),
            "--json",
            str(tmp_path / "b.json"),
            LLAMA_DGE_STOCK_PYTHON=python,
        )
        assert done.returncode == 1
        assert "arm stock" in done.stderr
        assert "Traceback" not in done.stderr
