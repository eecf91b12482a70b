"""``llama-dge compare``."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llama_dge import Llama
from llama_dge.cli import main
from llama_dge.demo_text import chronicle

if TYPE_CHECKING:
    from conftest import Zoo

DOCUMENT = chronicle(1)[:300]


@pytest.fixture
def compare(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: str) -> tuple[int, str, str]:
        path = tmp_path / "document.txt"
        path.write_text(DOCUMENT, encoding="utf-8")
        status = main(["compare", str(zoo["g2"].path), "-f", str(path), "--threads", "1", *args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def table_of(out: str) -> dict[str, list[str]]:
    lines = out.split("\n\n")[-1].splitlines()
    return {re.split(r"  +", line)[0]: re.split(r"  +", line)[1:] for line in lines}


def test_table(compare: Callable[..., tuple[int, str, str]], zoo: Zoo) -> None:
    status, out, _ = compare("-p", "Who?", "--budget", "32", "--recall", "2", "--max-tokens", "12")
    assert status == 0 and "NOTHING EVICTED" not in out
    rows = table_of(out)
    assert list(rows) == ["", "full cache", "bare policy", "DGE", "recall 2"]
    assert rows[""] == ["KL to full", "entries", "attended", "K and V", "host copy", "tokens/s", "answer"]

    llm = Llama(str(zoo["g2"].path), n_ctx=512, verbose=False)
    prompt = llm.tokenize(f"{DOCUMENT}\n\nWho?".encode())
    assert f"Prompt    {len(prompt)} tokens; g2.gguf" in out
    answer = b"".join(llm.detokenize([token]) for token in islice(llm.generate(prompt, temp=0.0), 12))
    first = answer.decode("utf-8", "replace").strip().splitlines()[0].strip()
    assert rows["full cache"][-1] == re.split(r"  +", first)[0]
    assert int(rows["full cache"][1]) == len(prompt) + 11
    assert rows["full cache"][0] == "-" and rows["full cache"][4] == "-"
    for name in ("bare policy", "DGE", "recall 2"):
        assert float(rows[name][0]) > 0.0
        assert int(rows[name][1]) < 48
    # entries of the answer compete with those of the prompt
    assert int(rows["recall 2"][1]) <= 32 + 2 < int(rows["bare policy"][1])
    assert rows["recall 2"][4].endswith("MiB") and rows["DGE"][4] == "-"


def test_what_is_not_evicted_is_said(compare: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = compare("--budget", "5000", "--max-tokens", "4")
    assert status == 0 and out.count("NOTHING EVICTED: the prompt is not longer than the budget") == 3
    status, out, _ = compare("--budget", "32", "--max-tokens", "4", "--arms", "full", "default:k=9")
    assert status == 0 and "NOTHING EVICTED: the answer ended before the eviction" in out
    assert list(table_of(out)) == ["", "full cache", "default:k=9"]
    status, out, _ = compare(
        "--max-tokens", "6", "--arms", " full", "paper:budget=1.0", "recall:k=2,recall=2,budget=1.0"
    )
    # with recall, the answer outgrows it
    assert status == 0 and out.count("NOTHING EVICTED: the prompt is not longer than the budget") == 1
    assert list(table_of(out)) == ["", "full cache", "paper:budget=1.0", "recall:k=2,recall=2,budget=1.0"]


def test_errors(compare: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = compare("--recall", "often")
    assert status == 1 and 'recall="often": must be' in err
    status, _, err = compare("--style", "chat")
    assert status == 1 and "no chat template" in err
    status, _, err = compare("--budget", "4")
    assert status == 1 and "budget=4: must be at least 8" in err
