"""Files of results: rows, and runs that go on where one ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llama_dge.cli import main
from llama_dge.eval import results as results_module
from llama_dge.eval.engine import Engine
from llama_dge.eval.prompts import Prompt
from llama_dge.eval.results import Results, ResultsError, file_sha256, key_of, read_rows
from llama_dge.eval.summary import summary

if TYPE_CHECKING:
    from conftest import Zoo


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def needle(zoo: Zoo, tmp_path: Path) -> Callable[..., Path]:
    def run(*args: str, name: str = "out.jsonl") -> Path:
        out = tmp_path / name
        options = ["--lengths", "500", "--kinds", "codes", "--facts", "2", "--texts", "2", "--max-tokens", "6"]
        assert main(["eval", "needle", str(zoo["g2"].path), "--out", str(out), "--threads", "1", *options, *args]) == 0
        return out

    return run


ARMS = ("--arms", "full", "paper", "snapkv", "--budgets", "32")


def without_times(rows: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_rows(needle: Callable[..., Path], zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    out = needle(*ARMS)
    rows = list(read_rows(out))
    assert "12 rows were added" in capsys.readouterr().out
    assert len(rows) == 2 * 2 * 3  # texts, questions, arms
    assert len({key_of(row) for row in rows}) == len(rows)
    for row in rows:
        assert row["model_sha256"] == file_sha256(zoo["g2"].path) and row["versions"]["llama_dge"]
        assert 0.0 <= row["depth"] <= 1.0 and row["length"] == 500 and row["style"] == "completion"
        assert row["score"] in (0.0, 1.0) and len(row["kl"]) == len(row["same_top"]) <= 6
        if row["arm"] == "full":
            assert row["settings"] is None and row["budget"] is None and not row["evicted"] and not any(row["kl"])
        else:
            assert row["settings"]["budget"] == row["budget"] == 32 and row["dge"]["rows_before"] >= row["n_prompt"]
            if row["evicted"]:
                assert row["dge"]["rows_after"] == 32 + row["n_before_eviction"] - 1
    tables = summary(rows, depths=True)
    assert "| 500 | codes | 32 | paper |" in tables and "paper:budget=32\n\n| depth | 500 tokens |" in tables


def test_an_interrupted_run_goes_on(needle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = needle(*ARMS, name="whole.jsonl")
    add = results_module.Results.add

    def interrupt(self: Any, row: dict[str, Any]) -> None:
        if len(self.done) == 5:
            raise KeyboardInterrupt
        add(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(results_module.Results, "add", interrupt)
        with pytest.raises(AssertionError):  # the command ends with 130
            needle(*ARMS)
    out = whole.with_name("out.jsonl")
    assert len(list(read_rows(out))) == 5
    with open(out, "a", encoding="utf-8") as file:  # killed in the middle of a line
        file.write('{"version":2,"task"')
    assert without_times(read_rows(needle(*ARMS))) == without_times(read_rows(whole))

    # nothing is missing, so no prompt is read
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", lambda *args, **kwargs: pytest.fail("read again"))
        before = out.read_bytes()
        assert needle(*ARMS).read_bytes() == before
    # one more arm: only that is run
    more = list(read_rows(needle(*ARMS[:-2], "streamingllm", *ARMS[-2:])))
    assert without_times(more[:12]) == without_times(read_rows(whole))
    assert [row["arm"] for row in more[12:]] == ["streamingllm:budget=32"] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kl-tokens", "3"], "'kl_tokens': 64}, not {'max_tokens': 6, 'kl_tokens': 3}: take another file"),
        (["--max-tokens", "5"], "limits {'max_tokens': 6, 'kl_tokens': 64}, not {'max_tokens': 5"),
        (["--type-k", "q8_0"], "with cache {'type_k': 'f16'"),
        (["--first-seed", "7", "--type-k", "q8_0"], "with cache {'type_k': 'f16'"),  # other prompts, the same tables
    ],
)
@pytest.mark.parametrize("arms", [["full", "paper:budget=32"], ["paper:budget=32"]])
def test_rows_that_do_not_compare_are_refused(
    needle: Callable[..., Path],
    zoo: Zoo,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
    arms: list[str],
) -> None:
    """A file goes on with the same cache and lengths only, be the arms new or not."""
    out = needle("--arms", "full")
    before = out.read_bytes()
    with pytest.raises(AssertionError):  # the command ends with 1
        needle("--arms", *arms, *options)
    assert message in capsys.readouterr().err
    assert out.read_bytes() == before


def test_damaged_files(needle: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("nonsense\n", encoding="utf-8")
    with pytest.raises(ResultsError, match=r"bad\.jsonl, line 1"):
        list(read_rows(path))
    path.write_text('{"version": 99}\n', encoding="utf-8")
    with pytest.raises(ResultsError, match="not a result of version 2"):
        list(read_rows(path))
    (tmp_path / "old.jsonl").write_text('{"version": 1}\n', encoding="utf-8")
    with pytest.raises(ResultsError, match="line 1: of version 1, whose arms have other names: run its command again"):
        list(read_rows(tmp_path / "old.jsonl"))
    with pytest.raises(ResultsError, match="cannot read"):
        list(read_rows(tmp_path / "none"))
    with pytest.raises(ResultsError, match="a row has no 'task'"):
        key_of({})
    assert main(["eval", "summary", str(path)]) == 1
    assert "line 1: not a result" in capsys.readouterr().err


def test_a_file_of_something_else_is_left_alone(
    needle: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.txt"
    for text in ("my only notes", "{}", '{"version":3,'):
        notes.write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError):
            needle("--arms", "full", name="notes.txt")
        assert "not a file of results" in capsys.readouterr().err and notes.read_text(encoding="utf-8") == text


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        with pytest.raises(ResultsError, match="another run"):
            Results(path)
        results.add(row("full", "p0", 1.0, [0.0]))
    with Results(path) as results:
        assert len(results.done) == 1


def test_what_rows_have_to_agree_in(tmp_path: Path) -> None:
    def refused(made: list[dict[str, Any]], part: str, about: dict[str, Any], task: str = "kld") -> bool:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(entry) + "\n" for entry in made), encoding="utf-8")
        prompt = Prompt(task, part, "new", (1,), ("x",), {})
        with Results(path) as results:
            try:
                return results.has(prompt, "full", {"model_sha256": "m", **about})
            except ResultsError:
                return True

    short, long = ({"max_tokens": n, "kl_tokens": 8} for n in (6, 16))
    a = row("full", "p0", 1.0, [0.0], task="kld", set="a.txt", limits=short, cache={"type_k": "f16"})
    assert not refused([a], "b.txt", {"limits": short, "cache": {"type_k": "f16"}})
    assert refused([a], "b.txt", {"limits": long}) and refused([a], "b.txt", {"cache": {"type_k": "q8_0"}})
    # the sets of LongBench have limits of their own, and one type of cache
    b = {**a, "task": "longbench"}
    assert not refused([b], "trec", {"limits": long, "cache": {"type_k": "f16"}}, "longbench")
    assert refused([b], "a.txt", {"limits": long}, "longbench")
    assert refused([b], "trec", {"cache": {"type_k": "q8_0"}}, "longbench")
    # rows of an older version that were mixed: nothing agrees with both
    mixed = [a, {**a, "prompt_id": "p1", "limits": long}]
    assert refused(mixed, "a.txt", {"limits": short}) and refused(mixed, "a.txt", {"limits": long})
    with pytest.raises(ResultsError, match="incomplete: 'set'"):
        refused([{key: a[key] for key in a if key != "set"}], "a.txt", {})


def test_prompts_that_are_asked_for_twice(needle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(read_rows(needle("--arms", "full", "--kinds", "codes", "codes")))
    assert "4 rows were added" in capsys.readouterr().out and len(rows) == 4


def test_hash_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "file", tmp_path / "kept" / "hashes.json"
    path.write_bytes(b"abc")
    want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(path, cache) == want
    assert list(json.loads(cache.read_text()).values()) == [want]
    monkeypatch.setattr(results_module.hashlib, "sha256", lambda: pytest.fail("read again"))
    assert file_sha256(path, cache) == want
    monkeypatch.undo()
    path.write_bytes(b"abcd")
    assert file_sha256(path, cache) != want
    cache.write_text("nonsense")
    assert file_sha256(path, cache) == file_sha256(path, tmp_path / "file" / "impossible")


def row(arm: str, prompt: str, score: float, kl: list[float], **more: Any) -> dict[str, Any]:
    made = {
        "version": 2, "task": "needle", "set": "numbers", "prompt_id": prompt, "prompt_sha256": prompt, "length": 1024,
        "depth": 0.5, "model": "m", "model_sha256": "m", "arm": arm, "budget": None if arm == "full" else 64,
        "score": score, "score_draft": 0.0, "kl": kl, "same_top": [int(value < 1) for value in kl],
        "evicted": arm != "full", "n_before_eviction": 1, "expected": ["x"],
    }  # fmt: skip
    return {**made, **more}


def test_summary() -> None:
    arm = "snapkv:k=1,budget=64"
    rows = [
        *(row("full", f"p{i}", float(i < 3), [0.0] * 3) for i in range(4)),
        *(row(arm, f"p{i}", float(i < 2), [0.0, 0.5, 1.5]) for i in range(4)),
    ]
    text = summary(rows)
    assert "| m | 1024 | numbers | all | full | 3/4 | 0.30 .. 0.95 |" in text
    assert "| m | 1024 | numbers | 64 | snapkv:k=1 | 2/4 | 0.15 .. 0.85 | 2 | 1.000 | 1.50 | 1.000 | 50.0 | 4 |" in text
    assert "| snapkv:k=1 | 2/3 |" in summary(rows, known=True)
    assert "| 1024 | all | 64 |" in summary(rows, by_set=False)
    assert f"m, numbers, {arm}\n\n| depth | 1024 tokens |\n| --- | --- |\n| 0.55 | 2/4 |" in summary(rows, depths=True)
    assert summary(rows + rows) == text
    # another file of the same name, another set
    other = [{**entry, "model_sha256": "abcdefghij", "set": "facts"} for entry in rows]
    text = summary(rows + other, depths=True, by_set=False)
    assert "| m m | 1024 | all | 64 | snapkv:k=1 | 2/4 |" in text and f"m abcdefgh, all, {arm}\n" in text
    facts = [{**entry, "set": "facts", "prompt_id": entry["prompt_id"] + "f"} for entry in rows]
    text = summary(rows + facts, depths=True)
    assert f"m, facts, {arm}\n" in text and f"m, numbers, {arm}\n" in text


def test_summary_as_a_grid() -> None:
    rows = [row("full", f"p{i}", float(i < 3), [0.0] * 3) for i in range(4)]
    for budget, score in ((64, 0.0), (128, 1.0)):
        more = {"budget": budget, "set": "facts"}
        rows += [row(f"snapkv:k=1,budget={budget}", f"p{i}", score, [0.0, 0.5, 1.5], **more) for i in range(4)]
    rows.append(row("streamingllm:k=1,budget=64", "p0", 1.0, [0.0]))
    text = summary(rows, by_set=False, grid=True)
    assert (
        "m, 1024 tokens, all: hits, KL after the eviction: mean, p99" in text
        and "| arm | 64 entries | 128 entries |" in text
    )
    assert "| full cache | 3/4 | 3/4 |\n| `snapkv:k=1` | 0/4, 1.000, 1.50 | 4/4, 1.000, 1.50 |" in text
    assert "| `streamingllm:k=1` | 1/1 |  |" in text
    assert "m, 1024 tokens, facts: hits" in summary(rows, grid=True)
    assert "| arm | all entries |\n| --- | --- |\n| full cache | 3/4 |" in summary(rows[:4], grid=True)
    share = [row("snapkv:k=1,budget=0.25", "p0", 1.0, [0.0], budget=0.25)]
    assert "| arm | 25 % of the entries |" in summary(share, grid=True)


def test_summary_of_answers_to_several_questions() -> None:
    """Their score is the share that was found; they have no depth."""
    more: dict[str, Any] = {"expected": ["a", "b", "c"], "set": "together", "depth": None}
    more["score_draft"] = 1 / 3
    rows = [row("full", f"p{i}", score, [0.0] * 3, **more) for i, score in enumerate((1, 2 / 3))]
    rows.append(row("snapkv:k=1,budget=64", "p0", 2 / 3, [0.0] * 3, **more))
    text = summary(rows, depths=True)
    assert "| full | 5/6 | 0.44 .. 0.97 |" in text and "| snapkv:k=1 | 2/3 | 0.21 .. 0.94 | 1 |" in text
    assert "0.55" not in text and "\n\n\n" not in text
    # a number was right up to the end of the draft and is not any more: no hit, and not one less of the others
    rows.append(row("snapkv:k=1,budget=64", "p1", 0.0, [0.0] * 3, **more))
    assert "| snapkv:k=1 | 2/6 | 0.10 .. 0.70 | 1 |" in summary(rows)
    assert "known to answer rightly" in summary(rows[1:], known=True) and "| full |" in summary(rows, known=True)


def test_summary_of_scores() -> None:
    rows = []
    for name, full, cut in (("a", 1.0, 0.5), ("b", 0.5, 0.5)):
        for i in range(2):
            rows.append(row("full", f"{name}{i}", full, [0.0] * 2, task="longbench", set=name))
            rows.append(row("snapkv:k=1,budget=64", f"{name}{i}", cut, [0.0, 0.25], task="longbench", set=name))
    rows.append(row("full", "a9", 0.0, [0.0], task="longbench", set="a"))  # the other arm has not answered it
    text = summary(rows)
    assert "| arm | a (2) | b (2) | average | less the full cache, 95 % |" in text
    assert "| full | 100.0 | 50.0 | 75.00 |  |" in text
    assert "| snapkv:k=1,budget=64 | 50.0 | 50.0 | 50.00 | -25.00 (-25.00 .. -25.00) | 0.250 |" in text
    # divergences, too, are those of prompts that all arms have answered
    rows.append(row("streamingllm:k=1,budget=64", "a0", 0.0, [0.0, 0.75], task="longbench", set="a"))
    more = row("streamingllm:k=1,budget=64", "a8", 0.0, [0.0, 9.0], task="longbench", set="a")
    text = summary([*rows, more])
    assert "| arm | a (1) | average |" in text and "| -100.00 (-100.00 .. -100.00) | 0.750 | 0.75 | 0.750 |" in text
    text = summary([{**entry, "task": "kld", "score": None} for entry in [*rows, more]])
    assert "| streamingllm:k=1,budget=64 | 1 | 0.750 |" in text and "| full | 1 |" in text
    assert "No prompt was answered by all arms" in summary([rows[0], more])


def test_summary_of_incomplete_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    entry = row("snapkv:k=1,budget=64", "p0", 1.0, [0.0, 1.0])
    for name in ("kl", "expected", "model", "task"):
        path.write_text(json.dumps({key: entry[key] for key in entry if key != name}) + "\n", encoding="utf-8")
        assert main(["eval", "summary", str(path)]) == 1
        assert "a row" in capsys.readouterr().err
