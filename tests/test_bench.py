"""``llama-dge bench``: its arithmetic on made-up times, and small runs of the whole."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llama_dge import DGEConfig
from llama_dge.benchmark import measure, report, workers
from llama_dge.cli import main
from llama_dge.cli.bench import stock_python

if TYPE_CHECKING:
    from conftest import Zoo

PLAN = {"chunk": 100, "blocks": 2, "block": 4}
ARM = "paper:budget=512"
NAMES = ("stock", "full", ARM)


def both(*seconds: float) -> list[list[float]]:
    """Times that are the same by both clocks."""
    return [[s, s] for s in seconds]


def made_up_round(**changes: Any) -> dict[str, Any]:
    """The full cache is half as fast as stock in the prefill and twice as fast in decoding; evicting took 3 seconds."""
    memory = {"rss": 40 * 2**20, "peak_rss": 50 * 2**20}
    ours = {**memory, "kv": 8 * 2**20, "parked": 0}
    evicted = {**ours, "kv": 2 * 2**20, "rss": 33 * 2**20}
    round_ = {
        "context": 8192,
        "prefill": {"stock": both(0.5, 1), "full": both(1, 2), ARM: both(1, 4)},
        "before": {"stock": both(8, 8), "full": both(4, 4), ARM: both(4, 5)},
        "draft": {"stock": [], "full": [], ARM: both(1.25)},
        # a step after the eviction is 2/4 = 0.5 s
        "eviction_steps": {"stock": both(2, 2, 2), "full": both(1, 1, 1), ARM: both(3, 1, 0.5)},
        "eviction": {
            ARM: {
                "budget": 512,
                "seconds": 2.5,
                "seconds_score": 1.5,
                "seconds_select": 0.25,
                "seconds_compact": 0.75,
                "rows_before": 8193,
                "rows_after": 513,
                "bytes_before": 8193 * 1024,
                "bytes_after": 513 * 1024,
            }
        },
        "decode": {"stock": both(8, 8), "full": both(4, 4), ARM: both(2, 2)},
        "end": {ARM: {"rows": 523, "n_recalls": 0}},
        "fresh": {"512": {"full": both(2, 2), ARM: both(2, 2.5)}},
        "memory": {
            "stock": dict.fromkeys(("loaded", "before", "after"), memory),
            "full": dict.fromkeys(("loaded", "before", "after"), ours),
            ARM: {"loaded": ours, "before": ours, "after": evicted},
        },
    }
    return copy.deepcopy({**round_, **changes})


def made_up_result(*rounds: dict[str, Any], **dge: Any) -> dict[str, Any]:
    arms: dict[str, Any] = {name: {"system": "AVX2 = 1", "dge": None} for name in NAMES}
    arms[ARM]["dge"] = asdict(DGEConfig(budget=512, **dge))
    return {"rounds": list(rounds), "plan": PLAN, "settings": {"n_threads": 1}, "arms": arms}


def without_stock() -> dict[str, Any]:
    round_ = made_up_round()
    for phase in ("prefill", "before", "draft", "eviction_steps", "decode", "memory"):
        del round_[phase]["stock"]
    result = made_up_result(round_)
    del result["arms"]["stock"]
    return result


def test_ratios() -> None:
    found = report.ratios([made_up_round()], ARM, 4)
    assert found == {
        "prefill": pytest.approx(0.75),  # pairs 1 and 0.5
        "before": pytest.approx(0.9),  # pairs 1 and 0.8
        "after": 2.0,
        "fresh": pytest.approx(0.9),  # pairs 1 and 0.8
        "eviction": pytest.approx(2.5 / 5),
        "eviction_outside": pytest.approx((4.5 - 3 * 0.5) / 5),
    }
    assert set(found) == {ratio.key for ratio in report.RATIOS}
    assert "eviction" not in report.ratios([made_up_round()], ARM, 4, report.CPU)  # dge_stats does not know it
    assert report.stock_ratios([made_up_round()]) == {"prefill": 0.5, "decode": 2.0}


def test_figures() -> None:
    slow = made_up_round(prefill={"stock": both(1), "full": both(1), ARM: both(19)})
    fast = made_up_round(prefill={"stock": both(1), "full": both(1), ARM: both(1)})
    found = report.figures([made_up_round(), slow, fast], ARM, PLAN)
    # 8,192 tokens, of which 8 are read one by one, in 5 s: the median of 19, 5 and 1
    assert found["tokens_per_second"] == {"prefill": (8192 - 8) / 5, "before": pytest.approx(4 / 4.5), "after": 2.0}
    assert found["seconds"] == {"draft": 1.25, "score": 1.5, "select": 0.25, "compact": 0.75, "eviction_outside": 3.0}
    assert found["rows"] == [8193, 513, 523] and found["bytes"] == [8193 * 1024, 513 * 1024]
    assert found["memory"]["after"]["rss"] == 33 * 2**20 and found["peak_rss"] == 50 * 2**20
    full = report.figures([made_up_round()], "full", PLAN)
    assert full["tokens_per_second"]["after"] == 1.0 and "seconds" not in full


def test_one_bad_turn_does_not_move_the_median() -> None:
    decode = {"stock": both(8, 8), "full": both(400, 4), ARM: both(2, 2)}
    rounds = [made_up_round(), made_up_round(decode=decode), made_up_round()]
    assert report.ratios(rounds, ARM, 4)["after"] == 2.0


def test_both_clocks_are_told_apart() -> None:
    decode = {"stock": both(8, 8), "full": [[4, 1], [4, 1]], ARM: both(2, 2)}
    (one,) = report.summary(made_up_result(made_up_round(decode=decode)))
    assert one["arms"][ARM]["ratios"]["after"] == 2.0
    assert one["arms"][ARM]["ratios_cpu_time"]["after"] == 0.5


def row_of(text: str, head: str, name: str) -> list[str]:
    """Cells of an arm in the table that begins with `head`."""
    lines = text[text.index(f"\n{head}") + 1 :].split("\n\n")[0].splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return re.split(r"  +", line)[1:]


def test_tables() -> None:
    text = report.table(made_up_result(made_up_round()))
    assert "8,192 tokens, the last 8 of them read one by one" in text
    speeds = row_of(text, "tokens/s", ARM)
    assert speeds == ["1,636.8", "0.9", "2.0", "1.2500", "1.5000", "0.2500", "0.7500", "8,193 -> 513"]
    assert row_of(text, "tokens/s", "full")[:4] == ["2,728.0", "1.0", "1.0", "-"]
    ratios = row_of(text, "ratio", ARM)
    assert ratios == ["0.750 MISSED", "0.900", "2.000", "0.900 MISSED", "0.500 MISSED", "0.600 MISSED"]
    assert "full / stock: prefill 0.500 MISSED (wanted >= 0.98), decode 2.000 ok (wanted >= 0.98)" in text
    assert row_of(text, "MiB", ARM) == ["8.0 -> 0.5", "8.0 -> 2.0", "0.0", "40.0 -> 33.0", "50.0"]
    assert row_of(text, "MiB", "stock") == ["-", "-", "-", "40.0 -> 40.0", "50.0"]


def test_targets_that_are_not_an_arms_own() -> None:
    # recalls have a price, H2O's sums have one in the prefill; short prompts make the eviction look expensive
    recall = report.table(made_up_result(made_up_round(), recall=4))
    assert row_of(recall, "ratio", ARM)[3] == "0.900"
    h2o = report.table(made_up_result(made_up_round(), policy="h2o"))
    assert row_of(h2o, "ratio", ARM)[0] == "0.750"
    short = report.table(made_up_result(made_up_round(context=1024)))
    assert row_of(short, "ratio", ARM)[4:] == ["0.500", "0.600"]


def test_without_stock_nothing_is_called_passed() -> None:
    text = report.table(without_stock())
    assert "full / stock: not measured" in text and " ok" not in text
    (one,) = report.summary(without_stock())
    assert one["full_over_stock"] is None


def test_a_busy_machine_is_told() -> None:
    busy = {arm: [[1.0, 0.5]] for arm in NAMES}
    result = made_up_result(made_up_round(prefill=busy, before=busy, decode={**busy, ARM: [[1.0, 0.25]]}))
    text = report.table(result)
    assert "NOT a quiet machine" in text and text.count("full / stock: prefill") == 2
    assert row_of(text, "ratio, same turn", ARM)[2] == "1.000"
    assert row_of(text, "the same by CPU time", ARM)[2] == "2.000"
    text = report.table(made_up_result(made_up_round()))
    assert "NOT a quiet machine" not in text and "CPU time" not in text


def test_other_builds_are_told() -> None:
    result = made_up_result(made_up_round())
    assert "other options" not in report.table(result)
    result["arms"]["stock"]["system"] = "AVX2 = 0"
    assert "other options" in report.table(result)


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="1 turns cannot be paired with 2"):
        report.paired_speed(both(1), both(1, 2), report.WALL)


def test_turns_go_both_ways() -> None:
    assert list(workers.turns(["a", "b"], 3)) == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert list(workers.turns(["a", "b"], 1, first=1)) == [["b", "a"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": "full"}, 'was evicted: its state is "full"'),
        ({"error": "no memory"}, "was evicted: no memory"),
        ({"rows_after": 600}, "1001 -> 600 entries instead of 1001 -> 512 .. 513"),
        ({"rows_after": 511}, "1001 -> 511 entries"),
        ({"rows_before": 1000}, "1000 -> 513 entries instead of 1001"),
    ],
)
def test_an_eviction_that_was_none_is_an_error(changes: dict[str, Any], message: str) -> None:
    good = {"state": "evicted", "error": None, "budget": 512, "rows_before": 1001, "rows_after": 513}
    measure.check_eviction("a", DGEConfig(budget=512, draft_tokens=2), good, 1000)
    with pytest.raises(workers.BenchError, match=re.escape(message)):
        measure.check_eviction("a", DGEConfig(budget=512, draft_tokens=2), {**good, **changes}, 1000)


def test_the_lock_lets_others_in(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")

    def is_free() -> bool:
        with open(tmp_path / "lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    lock = workers.Lock(tmp_path / "lock", at_most=0.0)
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


Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(zoo: Zoo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command on a tiny model, without stock."""
    monkeypatch.delenv("LLAMA_DGE_STOCK_PYTHON", raising=False)

    def run(*args: str, model: str | None = None) -> tuple[int, str, str]:
        status = main(["bench", model or str(zoo["g2"].path), "--quick", *args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_run(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "new folder" / "bench.json"
    arms = ["paper", "snapkv:budget=0.25", "recall:k=3", "pyramidkv"]
    status, printed, told = bench("--contexts", "900", "600", "--arms", *arms, "--budgets", "64", "--json", str(out))
    assert status == 0
    assert "600 tokens, round 1" in told and "900 tokens, round 1" in told

    result = json.loads(out.read_text(encoding="utf-8"))
    assert [one["context"] for one in result["summary"]] == [600, 900]
    names = ["full", *(name for name in result["arms"] if name != "full")]
    assert list(result["summary"][0]["arms"]) == names and len(names) == 5
    for one, round_ in zip(result["summary"], result["rounds"]):
        n = one["context"]
        assert all(len(round_["prefill"][name]) == -(-(n - 32) // 128) for name in names)
        assert all(len(round_[phase][name]) == 4 for phase in ("before", "decode") for name in names)
        # the times of a step are those of a step, not of a block
        assert all(len(round_["eviction_steps"][name]) == 1 + measure.SETTLE for name in names)
        even = one["arms"]["paper:budget=64"]
        assert even["rows"] == [n + 1, 65, 65 + 1 + measure.SETTLE + 32]
        assert even["bytes"][0] / even["bytes"][1] == pytest.approx((n + 1) / 65)
        assert even["memory"]["after"]["kv"] < even["memory"]["before"]["kv"]
        share = one["arms"]["snapkv:budget=0.25"]
        assert share["rows"][:2] == [n, n // 4]
        recall = one["arms"]["recall:k=3,budget=64"]
        assert recall["n_recalls"] >= 32 // 4 and recall["rows"][2] <= 64 + 4
        assert recall["memory"]["after"]["parked"] > 0
        assert one["arms"]["pyramidkv:budget=64"]["rows"][1] > 64
        for name in names[1:]:
            assert all(value > 0 for key, value in one["arms"][name]["ratios"].items() if key != "eviction_outside")
        assert set(round_["fresh"]) == {"64", str(n // 4)}
    assert result["arms"]["full"]["dge"] is None and result["arms"]["paper:budget=64"]["dge"]["elastic"]
    assert "full / stock: not measured" in printed and "601 -> 65" in printed
    assert printed.count("tokens, the last 32 of them") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "63"], "--contexts 63 is too short to be measured; take 64 or more"),
        (["--contexts", "400", "128", "--budgets", "128"], "keeps 128 entries, so nothing is evicted"),
        (["--arms", "paper:k=0"], "draft_tokens=0"),
        (["--arms", "lru"], '"lru" is none of full, dge'),
        (["--arms", "full"], "nothing is compared with it"),
        (["--budgets", "4"], "window=8"),
    ],
)
def test_bad_values(bench: Bench, arguments: list[str], message: str) -> None:
    status, printed, told = bench(*arguments)
    assert status == 1 and printed == "" and message in told


def test_a_model_or_file_that_is_not_there(bench: Bench, tmp_path: Path) -> None:
    status, _, told = bench(model="no-such-model")
    assert status == 1 and "no such file" in told
    status, _, told = bench("--json", str(tmp_path))
    assert status == 1 and "cannot write" in told


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--contexts", "many"], ["--rounds", "0"]])
def test_bad_options(bench: Bench, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        bench(*arguments)
    assert error.value.code == 2


def test_a_wrong_stock_interpreter_is_an_error(bench: Bench, tmp_path: Path) -> None:
    # not there at all, one that cannot import llama_cpp, one whose llama_cpp has no library
    for python in (str(tmp_path / "python"), "/bin/false", sys.executable):
        status, printed, told = bench("--stock", python)
        assert status == 1 and printed == "" and "error: arm stock" in told


def test_which_interpreter_is_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    monkeypatch.delenv("LLAMA_DGE_STOCK_PYTHON", raising=False)
    monkeypatch.setattr(llama_cpp, "__file__", str(tmp_path / "__init__.py"))
    assert stock_python(None) is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libllama.so").touch()
    assert stock_python(None) == sys.executable
    monkeypatch.setenv("LLAMA_DGE_STOCK_PYTHON", "from-environment")
    assert stock_python(None) == "from-environment" and stock_python("given") == "given"


def test_a_worker_says_what_failed(zoo: Zoo) -> None:
    with workers.Workers({"full": sys.executable}, workers.Lock()) as some:
        with pytest.raises(workers.BenchError, match=r"arm full: load: ValueError: Model path does not exist"):
            some["full"]("load", model="nothing.gguf", dge=None)
        some["full"]("load", model=str(zoo["g2"].path), dge=None, n_ctx=256)
        with pytest.raises(workers.BenchError, match="arm full: step: RuntimeError: step before first"):
            some["full"]("step", n=1)
        assert some["full"]("stats") is None
        memory = some["full"]("memory")
        assert memory["kv"] == memory["kv_max"] > 0


def test_help_names_the_defaults() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llama_dge", "bench", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "(snapkv paper default recall; quick: paper recall:k=4)" in " ".join(
        done.stdout.split()
    )
