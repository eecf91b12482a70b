"""``llama-dge plot``: values against hand-computed ones, and the figures."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_dge.cli import main
from llama_dge.eval.results import unique
from llama_dge.plots.draw import draw_curves, draw_grids
from llama_dge.plots.figures import Curves, Point, curves, grids, tenth

SVG = "{http://www.w3.org/2000/svg}"


def row(prompt: str, arm: str, score: float | None, *, task: str = "needle", **more: Any) -> dict[str, Any]:
    """A row with the fields of `llama-dge eval` that tables and figures need."""
    budget: Any = None
    if arm != "full":
        text = arm.rpartition("budget=")[2]
        budget = float(text) if "." in text else int(text)
    needle = {"length": 1024, "depth": 0.5} if task == "needle" else {}
    return {
        "version": 2,
        "task": task,
        "set": "numbers",
        "prompt_id": prompt,
        "prompt_sha256": "0" * 64,
        "model": "m.gguf",
        "model_sha256": "1" * 64,
        "arm": arm,
        "budget": budget,
        "score": score,
        "score_draft": 0.0,
        "evicted": arm != "full",
        "n_before_eviction": 1,
        "expected": ["x"],
        "kl": [0.0, 0.25],
        "same_top": [1, 1],
        "kl_mean": None if arm == "full" else 0.25,
        **needle,
        **more,
    }


def needle_rows(arms: Sequence[str], hits: Sequence[float] = (1, 1, 1, 0)) -> list[dict[str, Any]]:
    return [row(f"p{i}", arm, score, depth=(i + 0.5) / len(hits)) for arm in arms for i, score in enumerate(hits)]


ARMS = ["full", "paper:budget=64", "paper:budget=128", "streamingllm:budget=64"]


def by_name(rows: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Curves]:
    return {made.name: made for made in curves(rows, **settings)}


def test_hits_have_wilson_intervals() -> None:
    made = by_name(needle_rows(ARMS))["needle-m.gguf-1024 tokens-numbers-hits"]
    assert list(made.arms) == ["paper", "streamingllm"]
    points = made.arms["paper"]
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
    arm = "paper:budget=64"
    rows = [row(f"a{i}", arm, 1.0, task="longbench", set="a") for i in range(8)]
    rows += [row(f"b{i}", arm, 0.5, task="longbench", set="b") for i in range(2)]
    made = by_name(rows)
    assert set(made) == {"longbench-m.gguf-score", "longbench-m.gguf-kl"}
    (point,) = made["longbench-m.gguf-score"].arms["paper"]
    # scores within a set are equal, so that drawing them again changes nothing
    assert (point.value, point.low, point.high, point.n) == (75.0, 75.0, 75.0, 10)
    assert made["longbench-m.gguf-score"].full is None


def test_divergences_are_those_of_prompts_with_an_eviction() -> None:
    arm = "paper:budget=64"
    values = [0.1, 0.2, 0.6]
    rows = [row(f"p{i}", arm, None, task="kld", kl_mean=value) for i, value in enumerate(values)]
    rows += [row("p3", arm, None, task="kld", kl_mean=None, evicted=False), row("p3", "full", None, task="kld")]
    rows += [row(f"p{i}", "full", None, task="kld") for i in range(3)]
    made = by_name(rows)
    assert set(made) == {"kld-m.gguf-kl"}
    (point,) = made["kld-m.gguf-kl"].arms["paper"]
    assert point.value == pytest.approx(0.3) and point.n == 3 and 0.1 <= point.low < 0.3 < point.high <= 0.6


def test_shares_of_the_prompt_get_a_figure_of_their_own() -> None:
    made = by_name(needle_rows([*ARMS, "paper:budget=0.25"]))
    assert made["needle-m.gguf-1024 tokens-numbers-hits-share"].share
    assert list(made["needle-m.gguf-1024 tokens-numbers-hits"].arms) == ["paper", "streamingllm"]


def test_sets_can_be_pooled_and_repeated_rows_count_once() -> None:
    rows = needle_rows(ARMS) + [{**r, "set": "facts", "prompt_id": "f" + r["prompt_id"]} for r in needle_rows(ARMS)]
    assert len(unique(rows + rows)) == len(rows)
    pooled = by_name(rows, pool=True)["needle-m.gguf-1024 tokens-hits"]
    assert pooled.arms["paper"][0].n == 8
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


def texts_of(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]


def some_curves(log: bool, n_arms: int = 9) -> Curves:
    arms = {
        f"arm{i} <&\"'> $x$": tuple(
            Point(budget, 0.1 + i / 20, i / 20, 0.2 + i / 20, 9 + i) for budget in (32, 64, 1024)
        )
        for i in range(n_arms)
    }
    return Curves("n", "t <&> $y$", "y", "95 %", None if log else Point(0, 0.9, 0.8, 1.0, 9), arms, 1.0, log, False)


@pytest.mark.parametrize("log", [False, True])
def test_curves_are_drawn_with_intervals(matplotlib: Any, monkeypatch: pytest.MonkeyPatch, log: bool) -> None:
    drawn: list[Any] = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda self, *args, **kwargs: drawn.append(self) or save(self, *args, **kwargs),
    )
    made = some_curves(log)
    texts = texts_of(draw_curves(made))
    assert {"t <&> $y$", "95 %", "y", "entries kept per layer and KV head", "32", "64", "1,024"} <= set(texts)
    assert ("full cache, 9 prompts" in texts) != log and "arm3 <&\"'> $x$, 12 prompts" in texts

    (axes,) = drawn[0].axes
    assert axes.get_xscale() == "log" and axes.get_yscale() == ("log" if log else "linear")
    assert len(axes.containers) == 9
    looks = set()
    for (line, _, (bars,)), (arm, points) in zip(axes.containers, made.arms.items()):
        assert [y for _, y in line.get_xydata()] == pytest.approx([point.value for point in points]), arm
        for (low, high), point in zip(bars.get_segments(), points):
            assert (low[1], high[1]) == pytest.approx((point.low, point.high))
            assert low[0] == high[0] == pytest.approx(point.budget, rel=0.2)
        looks.add((line.get_marker(), line.get_linestyle(), line.get_color()))
    assert len(looks) == 9  # told apart by more than colour, of which there are six
    band = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
    assert [(box.y0, box.y1) for box in band] == ([] if log else [pytest.approx((0.8, 1.0))])


def test_labels_of_budgets_do_not_touch(matplotlib: Any) -> None:
    budgets = (0.25, 0.251, 0.5, 1.0)
    arms = {"arm": tuple(Point(budget, 0.5, 0.4, 0.6, 9) for budget in budgets)}
    texts = texts_of(draw_curves(Curves("n", "t", "y", "95 %", None, arms, 1.0, False, True)))
    assert {"25 %", "50 %", "100 %"} <= set(texts) and "25.1 %" not in texts
    assert "share of the prompt that is kept" in texts


def test_grids_are_drawn(matplotlib: Any) -> None:
    (made,) = grids(needle_rows(ARMS))
    texts = texts_of(draw_grids(made))
    assert set(ARMS) <= set(texts) and {"10 - 20 %", "80 - 90 %", "1,024"} <= set(texts)
    assert texts.count("1/1") == 12 and texts.count("0/1") == 4


@pytest.mark.parametrize("budgets", [(64,), (64, 128)])
def test_figures_do_not_differ_from_run_to_run(matplotlib: Any, budgets: tuple[int, ...]) -> None:
    rows = needle_rows(["full", *(f"paper:budget={budget}" for budget in budgets)])
    made = by_name(rows)["needle-m.gguf-1024 tokens-numbers-hits"]
    assert draw_curves(made) == draw_curves(made) and draw_grids(grids(rows)[0]) == draw_grids(grids(rows)[0])
    assert "<dc:date>" not in draw_curves(made)


@pytest.fixture
def matplotlib() -> Any:
    pytest.importorskip("matplotlib.figure")
    return sys.modules["matplotlib"]


@pytest.fixture
def plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(rows: Sequence[dict[str, Any]], *args: str) -> tuple[int, str, str]:
        path = tmp_path / "r.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        status = main(["plot", str(path), "-o", str(tmp_path / "out"), *args])
        return (status, *capsys.readouterr())

    return run


def test_the_command_writes_figures(matplotlib: Any, plot: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
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
        ET.fromstring(text)
        # nothing outside of the file is referred to
        assert all("".join(found).startswith("#") for found in re.findall(r'href="([^"]*)"|url\(([^)]*)\)', text))


def test_models_of_like_names(matplotlib: Any, plot: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    rows = [
        {**entry, "model": name, "model_sha256": name} for name in ("a_b", "a-b", "\x07") for entry in needle_rows(ARMS)
    ]
    status, out, err = plot(rows)
    assert status == 0, err
    paths = [Path(line) for line in out.splitlines()]
    assert len(set(paths)) == len(paths) == 9
    titles = [" ".join(texts_of(path.read_text(encoding="utf-8"))) for path in paths]
    assert sum("a_b" in title for title in titles) == sum("a-b" in title for title in titles) == 3


def test_only_what_the_full_cache_knows(
    matplotlib: Any, plot: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    status, _, err = plot(needle_rows(ARMS), "--known")
    assert status == 0, err
    text = (tmp_path / "out" / "needle-m.gguf-1024-tokens-numbers-hits.svg").read_text(encoding="utf-8")
    assert "full cache, 3 prompts" in texts_of(text)


def test_without_matplotlib_it_says_what_to_install(
    plot: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = plot(needle_rows(ARMS))
    assert status == 1 and "llama-dge[plot]" in err


def test_mistakes_are_named(matplotlib: Any, plot: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, _, err = plot([row("p", "full", 1.0, task="kld")])
    assert status == 1 and "nothing to draw" in err
    status, _, err = plot([{"version": 2, "task": "needle"}])
    assert status == 1 and "error" in err
    status, _, err = plot([{"version": 7}])
    assert status == 1 and "version 2" in err
    broken = needle_rows(ARMS)
    del broken[-1]["set"]
    status, _, err = plot(broken)
    assert status == 1 and "not as `llama-dge eval` writes it" in err
    assert main(["plot", str(tmp_path / "none.jsonl"), "-o", str(tmp_path)]) == 1
