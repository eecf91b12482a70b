"""``llama-dge inspect``: the record, and the page and the picture made of it."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llama_dge import Llama
from llama_dge.cli import main
from llama_dge.config import DGEConfig
from llama_dge.report import page, record
from llama_dge.report.picture import shares
from llama_dge.stats import DGEMemory, DGEStats

if TYPE_CHECKING:
    from conftest import Zoo

DOCUMENT = "the quick brown fox jumps over the lazy dog, and again and again, " * 3
OPTIONS = ["--budget", "16", "--window", "4", "--draft-tokens", "3", "--threads", "1"]
NASTY = (
    "</script><script>alert(1)</script> <!-- &lt; \"q\" 's' 🎉👩‍👩‍👧 日本 caf\u00e9"
    " \x00\x07\x1b[31m \u202e\u2028 \ufeff \\ @@DATA@@ {{x}} <img src=x onerror=alert(2)>"
)


def unpack(text: str, n: int) -> list[int]:
    """Read what `page.pack` wrote, as the page does."""
    data = base64.b64decode(text[1:])
    if text[0] == "b":
        return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:n]).tolist()
    out, at, value, shift = [], -1, 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            at += value + 1
            out.append(at)
            value = shift = 0
    return out


def embedded(text: str) -> dict[str, Any]:
    """Return the data that a page carries."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def made_up(n: int, n_layer: int, n_head: int, budget: int, n_choices: int = 1, texts: list[str] | None = None) -> Any:
    """A record of random selections."""
    rng = np.random.default_rng(7)
    words = [f" w{i % 997}" for i in range(n)]
    words[: len(texts or [])] = texts or []
    window = (n - 8, n)
    choices = [
        record.Choice(
            i,
            n,
            window,
            tuple(
                tuple(np.sort(rng.choice(n, budget, replace=False)).astype(np.int32) for _ in range(n_head))
                for _ in range(n_layer)
            ),
        )
        for i in range(n_choices)
    ]
    memory = DGEMemory(1 << 20, 1 << 20, 1 << 20, 0, 1 << 20, 0, 0, n, n)
    stats = DGEStats(
        "evicted", n - 1, 1, budget, n, budget, budget, 256, n_layer, n - 2, 4096, 1024, 1024, 0.1, 0.1, 0.1, 1
    )
    return record.Record(
        model="m.gguf",
        source="d.txt",
        question=None,
        config=DGEConfig(budget=budget),
        versions=record.versions(),
        tokens=tuple(words),
        n_prompt=n - 1,
        n_sinks=0,
        answer="yes",
        layers=tuple(range(n_layer)),
        choices=tuple(choices),
        why_full=None,
        stats=stats,
        memory_before=memory,
        memory_after=memory,
    )


@pytest.fixture
def inspect(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command on a tiny model and a document."""

    def run(*args: str, text: str = DOCUMENT) -> tuple[int, str, str]:
        (tmp_path / "d.txt").write_text(text, encoding="utf-8")
        status = main(["inspect", str(zoo["g2"].path), "-f", str(tmp_path / "d.txt"), *OPTIONS, *args])
        return (status, *capsys.readouterr())

    return run


# --- the record


def test_the_eviction_is_what_dge_kept_says(inspect: Callable[..., tuple[int, str, str]], zoo: Zoo) -> None:
    status, out, err = inspect("--json", "--max-tokens", "8")
    assert status == 0, err
    data = json.loads(out)
    config = {"budget": 16, "window": 4, "draft_tokens": 3}
    llm = Llama(str(zoo["g2"].path), n_ctx=512, n_threads=1, verbose=False, dge=config)
    tokens = llm.tokenize(DOCUMENT.encode())
    list(islice(llm.generate(tokens, temp=0.0), 8))

    assert data["n_prompt"] == len(tokens) and data["layers"] == llm.dge_layers
    (choice,) = data["choices"]
    counts = [0] * choice["n_rows"]
    for row, layer in enumerate(llm.dge_layers):
        for head, positions in enumerate(choice["kept"][row]):
            assert positions == llm.dge_kept(layer, head).tolist()
            for position in positions:
                counts[position] += 1
    assert choice["counts"] == counts and sum(counts) > 0
    n = len(tokens)
    assert choice["window"] == [n - 4, n] and choice["n_rows"] == n + 2
    assert choice["counts"][-6:] == [sum(data["heads"])] * 6  # window and draft
    assert "".join(data["tokens"][1:n]).strip() == DOCUMENT.strip()  # the first is <s>
    assert data["settings"]["budget"] == 16 and data["stats"]["state"] == "evicted"
    assert data["stats"]["bytes_before"] > data["stats"]["bytes_after"] > 0
    assert data["memory"]["before"]["parked"] == 0 < data["memory"]["after"]["parked"]
    assert str(Path.home()) not in out and "/" not in data["model"] + data["source"]


def test_each_recall_is_recorded(inspect: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = inspect("--json", "--max-tokens", "22", "--recall", "5")
    assert status == 0, err
    data = json.loads(out)
    assert [choice["number"] for choice in data["choices"]] == list(range(data["stats"]["n_recalls"] + 1))
    assert data["stats"]["n_recalls"] >= 3
    for before, after in zip(data["choices"], data["choices"][1:]):
        assert after["n_rows"] == before["n_rows"] + 5
        assert after["window"] == [after["n_rows"] - 4, after["n_rows"]]
        assert before["kept"] != after["kept"]
        assert len(after["kept"][0][0]) == 16


def test_selections_are_thinned_out_but_the_last_stays(
    inspect: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MAX_CHOICES", 4)
    _, out, _ = inspect("--json", "--max-tokens", "30", "--recall", "3")
    data = json.loads(out)
    numbers = [choice["number"] for choice in data["choices"]]
    assert numbers[0] == 0 and numbers[-1] == data["stats"]["n_recalls"] > 5
    assert len(numbers) <= 5 and numbers == sorted(set(numbers))


def test_a_prompt_that_is_not_evicted_says_why(inspect: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, out, err = inspect(
        "--json", "-o", str(tmp_path / "r.html"), "--png", str(tmp_path / "r.png"), text="short"
    )  # fmt: skip
    assert status == 0
    data = json.loads(out)
    assert data["choices"] == [] and data["why_full"] == "the prompt is not longer than the budget"
    assert "not longer than the budget" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "nothing was evicted" in err and not (tmp_path / "r.png").exists()


def test_texts_of_tokens_join_to_the_prompt(zoo: Zoo) -> None:
    llm = Llama(str(zoo["g2"].path), n_ctx=512, n_threads=1, verbose=False)
    text = "caf\u00e9 🎉 日本"
    texts = record.token_texts(llm, llm.tokenize(text.encode(), add_bos=False))
    assert "".join(texts).strip() == text


# --- the page


@pytest.mark.parametrize("n, k", [(1, 0), (1, 1), (9, 3), (1000, 3), (1000, 400), (30_000, 64)])
def test_positions_survive_packing(n: int, k: int) -> None:
    positions = np.sort(np.random.default_rng(n + k).choice(n, k, replace=False)).astype(np.int32)
    assert unpack(page.pack(positions, n), n) == positions.tolist()


def test_the_page_carries_the_positions(inspect: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    _, out, _ = inspect("--json", "-o", str(tmp_path / "r.html"), "--max-tokens", "22", "--recall", "5")
    wanted = json.loads(out)
    data = embedded((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert data["tokens"] == wanted["tokens"] and data["heads"] == wanted["heads"]
    n = len(data["tokens"])
    state: list[set[int]] = [set() for _ in range(sum(data["heads"]))]
    for choice, expected in zip(data["choices"], wanted["choices"]):
        state = [old ^ set(unpack(text, n)) for old, text in zip(state, choice["sets"])]
        assert [sorted(s) for s in state] == [head for layer in expected["kept"] for head in layer]


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_the_page_needs_nothing_else_and_escapes_everything() -> None:
    made = made_up(200, 2, 2, 32, texts=[NASTY, *NASTY])
    made = dataclasses.replace(made, source=NASTY, question=NASTY, answer=NASTY, model=NASTY)
    text = page.render(made)
    parser = _Elements()
    parser.feed(text)
    tags = [tag for tag, _ in parser.elements]
    assert tags.count("script") == 2 and not {"img", "link", "iframe", "object", "base"} & set(tags)
    for _, attributes in parser.elements:
        assert not {"src", "onerror", "onclick", "style"} & set(attributes)
        assert str(attributes.get("href", "#")).startswith("#")
    assert "default-src 'none'" in text and "@import" not in text and "url(" not in text and "://" not in text
    assert embedded(text)["tokens"][0] == NASTY
    assert "<script>alert" not in text and "<img" not in text
    script = re.findall(r"<script>(.*?)</script>", text, re.S)[0]
    assert "fetch(" not in script and "XMLHttpRequest" not in script and "import(" not in script


def test_a_page_of_30000_tokens_is_small() -> None:
    made = made_up(30_000, 32, 8, 1024)
    size = len(page.render(made).encode())
    # 256 sets of 1,024 entries, a byte and a third each, and the words
    assert size < 256 * 1024 * 1.5 + 30_000 * 12 + 60_000
    assert len(page.render(made_up(30_000, 32, 8, 15_000)).encode()) < 256 * 30_000 / 8 * 1.4 + 30_000 * 12 + 60_000


# --- the picture, and what goes wrong


def test_shares_of_the_picture() -> None:
    made = made_up(100, 3, 2, 25)
    exact = shares(made, 100)
    assert exact.shape == (3, 100) and set(np.unique(exact)) <= {0.0, 0.5, 1.0}
    assert np.allclose(exact.mean(axis=1), 0.25)
    assert np.allclose(shares(made, 10), exact.reshape(3, 10, 10).mean(axis=2))


def test_a_png_is_written(inspect: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    status, _, err = inspect("--png", str(tmp_path / "r.png"), "--max-tokens", "6")
    assert status == 0, err
    with image.open(tmp_path / "r.png") as picture:
        assert picture.size[0] > 1000 and len(picture.getcolors(1 << 20)) > 10


def test_without_pillow_it_says_what_to_install(
    inspect: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    status, _, err = inspect("--png", str(tmp_path / "r.png"))
    assert status == 1 and "llama-dge[plot]" in err


def test_mistakes_are_told_at_once(inspect: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, _, err = inspect()
    assert status == 1 and "-o" in err and "--json" in err
    status, _, err = inspect("-o", str(tmp_path / "no" / "r.html"))
    assert status == 1 and "no such folder" in err
    status, _, err = inspect("--json", "--budget", "2")
    assert status == 1 and "window=4" in err
    status, _, err = inspect("--json", "--n-ctx", "64")
    assert status == 1 and "do not fit" in err
