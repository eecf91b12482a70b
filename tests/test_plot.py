"""``llama-dge plot``: figures against hand-computed ones, and the pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_dge.cli import main
from llama_dge.eval.results import unique
from llama_dge.plots.figures import Curves, Point, curves, grids, tenth
from llama_dge.plots.svg import draw_curves, draw_grids, log_ticks, nice_ticks

SVG = "{http://www.w3.org/2000/svg}"


def row(prompt: str, arm: str, score: float | None, *, task: str = "needle", **more: Any) -> dict[str, Any]:
    """A row with the fields of `llama-dge eval` that pictures need."""
    budget: Any = None
    if arm != "full":
        text = arm.rpartition("budget=")[2]
        budget = float(text) if "." in text else int(text)
    needle = {"length": 1024, "depth": 0.5} if task == "needle" else {}
    return {
        "version": 1,
        "task": task,
        "set": "numbers",
        "prompt_id": prompt,
        "prompt_sha256": "0" * 64,
        "model": "m.gguf",
        "model_sha256": "1" * 64,
        "arm": arm,
        "budget": budget,
        "score": score,
        "cut": arm != "full",
        "expected": ["x"],
        "kl_mean": None if arm == "full" else 0.25,
        **needle,
        **more,
    }


def needle_rows(arms: Sequence[str], hits: Sequence[float] = (1, 1, 1, 0)) -> list[dict[str, Any]]:
    return [row(f"p{i}", arm, score, depth=(i + 0.5) / len(hits)) for arm in arms for i, score in enumerate(hits)]


ARMS = ["full", "snapkv:k=2,budget=64", "snapkv:k=2,budget=128", "streamingllm:k=1,budget=64"]


def by_name(rows: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Curves]:
    return {made.name: made for made in curves(rows, **settings)}


def test_hits_have_wilson_intervals() -> None:
    made = by_name(needle_rows(ARMS))["needle-m.gguf-1024 tokens-numbers-hits"]
    assert list(made.arms) == ["snapkv:k=2", "streamingllm:k=1"]
    points = made.arms["snapkv:k=2"]
    assert [point.budget for point in points] == [64, 128]
    for point in (*points, made.full):
        assert point is not None
        # (p + z^2/2n -+ z sqrt(p q / n + z^2 / 4 n^2)) / (1 + z^2 / n) with p = 3/4, n = 4, z = 1.96
        assert (point.value, point.n) == (0.75, 4)
        assert point.low == pytest.approx(0.3006, abs=1e-4) and point.high == pytest.approx(0.9544, abs=1e-4)


def test_arms_are_compared_on_the_prompts_that_all_have() -> None:
    rows = needle_rows(ARMS)
    rows = [r for r in rows if not (r["arm"] == ARMS[2] and r["prompt_id"] == "p3")]
    made = by_name(rows)["needle-m.gguf-1024 tokens-numbers-hits"]
    assert {point.n for points in made.arms.values() for point in points} == {3}
    assert made.full is not None and (made.full.value, made.full.n) == (1.0, 3)


def test_scores_are_averaged_over_sets_and_not_over_prompts() -> None:
    arm = "snapkv:k=2,budget=64"
    rows = [row(f"a{i}", arm, 1.0, task="longbench", set="a") for i in range(8)]
    rows += [row(f"b{i}", arm, 0.5, task="longbench", set="b") for i in range(2)]
    made = by_name(rows)
    assert set(made) == {"longbench-m.gguf-score", "longbench-m.gguf-kl"}
    (point,) = made["longbench-m.gguf-score"].arms["snapkv:k=2"]
    # scores within a set are equal, so that drawing them again changes nothing
    assert (point.value, point.low, point.high, point.n) == (75.0, 75.0, 75.0, 10)
    assert made["longbench-m.gguf-score"].full is None


def test_divergences_are_those_of_prompts_that_were_cut() -> None:
    arm = "snapkv:k=2,budget=64"
    values = [0.1, 0.2, 0.6]
    rows = [row(f"p{i}", arm, None, task="kld", kl_mean=value) for i, value in enumerate(values)]
    rows += [row("p3", arm, None, task="kld", kl_mean=None, cut=False), row("p3", "full", None, task="kld")]
    rows += [row(f"p{i}", "full", None, task="kld") for i in range(3)]
    made = by_name(rows)
    assert set(made) == {"kld-m.gguf-kl"}
    (point,) = made["kld-m.gguf-kl"].arms["snapkv:k=2"]
    assert point.value == pytest.approx(0.3) and point.n == 3 and 0.1 <= point.low < 0.3 < point.high <= 0.6


def test_shares_of_the_prompt_get_a_picture_of_their_own() -> None:
    made = by_name(needle_rows([*ARMS, "snapkv:k=2,budget=0.25"]))
    assert made["needle-m.gguf-1024 tokens-numbers-hits-share"].share
    assert list(made["needle-m.gguf-1024 tokens-numbers-hits"].arms) == ["snapkv:k=2", "streamingllm:k=1"]
    assert "25 %" in draw_curves(made["needle-m.gguf-1024 tokens-numbers-hits-share"])


def test_sets_can_be_pooled_and_repeated_rows_count_once() -> None:
    rows = needle_rows(ARMS) + [{**r, "set": "facts", "prompt_id": "f" + r["prompt_id"]} for r in needle_rows(ARMS)]
    assert len(unique(rows + rows)) == len(rows)
    pooled = by_name(rows, pool=True)["needle-m.gguf-1024 tokens-hits"]
    assert pooled.arms["snapkv:k=2"][0].n == 8
    assert len(grids(rows)) == 2 and len(grids(rows, pool=True)) == 1


def test_grids_count_hits_by_depth_and_length() -> None:
    rows = [*needle_rows(ARMS), row("long", "full", 1.0, length=2048, depth=1.0)]
    (made,) = grids(rows)
    assert [grid.arm for grid in made.grids] == ["full", ARMS[1], ARMS[3], ARMS[2]]  # by budget
    assert made.grids[0].lengths == (1024, 2048) and made.grids[0].depths == (1, 3, 6, 8, 9)
    assert made.grids[0].cells == {
        (1, 1024): (1, 1),
        (3, 1024): (1, 1),
        (6, 1024): (1, 1),
        (8, 1024): (0, 1),
        (9, 2048): (1, 1),
    }
    assert [tenth(depth) for depth in (0.0, 0.0999, 0.1, 0.95, 1.0)] == [0, 0, 1, 9, 9]


@pytest.mark.parametrize(
    "high, ticks", [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (34.0, [0, 10, 20, 30, 40]), (0.0, [0, 1])]
)
def test_ticks_are_round(high: float, ticks: list[float]) -> None:
    assert nice_ticks(high) == pytest.approx(ticks)


def test_ticks_of_orders_of_magnitude() -> None:
    assert log_ticks(0.02, 3.0) == pytest.approx([0.01, 0.1, 1, 10])
    assert log_ticks(1.0, 1.0) == pytest.approx([1, 10])


def numbers_of(element: ET.Element) -> list[float]:
    return [float(element.get(name, "0")) for name in ("x", "y", "width", "height")]


@pytest.mark.parametrize("log", [False, True])
def test_curves_are_drawn_inside_the_picture(log: bool) -> None:
    arms = {
        f"arm{i} <&\"'>": tuple(Point(budget, 0.1 + i / 20, 0.0, 0.2 + i / 20, 9) for budget in (32, 64, 1024))
        for i in range(9)
    }
    made = Curves("n", "t <&>", "y", "i", None if log else Point(0, 0.9, 0.8, 1.0, 9), arms, None, log, False)
    root = ET.fromstring(draw_curves(made))
    height, width = float(root.get("height", "0")), float(root.get("width", "0"))
    assert len(root.findall(f"{SVG}polyline")) == 9
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "arm3 <&\"'>, 1,024: 0.25 (0 .. 0.35), 9 prompts" in titles
    assert ("full cache, all rows: 0.9 (0.8 .. 1), 9 prompts" in titles) != log
    for polyline in root.findall(f"{SVG}polyline"):
        for pair in polyline.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert 0 < x < width and 0 < y < height
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("x", "0")) < width and 0 < float(text.get("y", "0")) < height


def test_arms_differ_by_more_than_colour() -> None:
    made = by_name(needle_rows([f"snapkv:k={k},budget=64" for k in range(1, 13)]))
    root = ET.fromstring(draw_curves(made["needle-m.gguf-1024 tokens-numbers-hits"]))
    looks = [(line.get("stroke"), line.get("stroke-dasharray")) for line in root.findall(f"{SVG}polyline")]
    assert len(set(looks)) == 12


def test_grids_are_drawn() -> None:
    (made,) = grids(needle_rows(ARMS))
    root = ET.fromstring(draw_grids(made))
    assert len([r for r in root.iter(f"{SVG}rect") if r.get("class") == "cell"]) == 16
    assert "full: 0 of 1, 1024 tokens, depth 80 - 90 %" in [title.text for title in root.iter(f"{SVG}title")]
    height, width = float(root.get("height", "0")), float(root.get("width", "0"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = numbers_of(rect)
        assert x + w <= width and y + h <= height


@pytest.fixture
def plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(rows: Sequence[dict[str, Any]], *args: str) -> tuple[int, str, str]:
        path = tmp_path / "r.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        status = main(["plot", str(path), "-o", str(tmp_path / "out"), *args])
        return (status, *capsys.readouterr())

    return run


def test_the_command_writes_pictures(plot: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, out, err = plot(needle_rows(ARMS))
    assert status == 0, err
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "needle-m.gguf-1024-tokens-numbers-hits.svg",
        "needle-m.gguf-1024-tokens-numbers-kl.svg",
        "needle-m.gguf-numbers-grid.svg",
    ]
    assert sorted(Path(line).name for line in out.splitlines()) == names
    for path in (tmp_path / "out").iterdir():
        text = path.read_text(encoding="utf-8")
        assert "href" not in text and "url(" not in text
        ET.fromstring(text)


def test_models_of_like_names(plot: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    rows = [
        {**entry, "model": name, "model_sha256": name} for name in ("a_b", "a-b", "\x07") for entry in needle_rows(ARMS)
    ]
    status, out, err = plot(rows)
    assert status == 0, err
    paths = [Path(line) for line in out.splitlines()]
    assert len(set(paths)) == len(paths) == 9
    titles = [ET.fromstring(path.read_text(encoding="utf-8")).findtext(f"{SVG}title") or "" for path in paths]
    assert sum("a_b" in title for title in titles) == sum("a-b" in title for title in titles) == 3


def test_only_what_the_full_cache_knows(plot: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, _, err = plot(needle_rows(ARMS), "--known")
    assert status == 0, err
    text = (tmp_path / "out" / "needle-m.gguf-1024-tokens-numbers-hits.svg").read_text(encoding="utf-8")
    assert "full cache, all rows: 1 (0.439 .. 1), 3 prompts" in text


def test_mistakes_are_told(plot: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, _, err = plot([row("p", "full", 1.0, task="kld")])
    assert status == 1 and "nothing to draw" in err
    status, _, err = plot([{"version": 1, "task": "needle"}])
    assert status == 1 and "error" in err
    status, _, err = plot([{"version": 7}])
    assert status == 1 and "version 1" in err
    broken = needle_rows(ARMS)
    del broken[-1]["set"]
    status, _, err = plot(broken)
    assert status == 1 and "not as `llama-dge eval` writes it" in err
    assert main(["plot", str(tmp_path / "none.jsonl"), "-o", str(tmp_path)]) == 1
