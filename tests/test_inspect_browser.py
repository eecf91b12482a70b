"""The page of ``llama-dge inspect`` in a headless Chromium (Debian: ``apt-get install chromium``)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_dge.report import page
from reference import browser
from test_inspect import NASTY, made_up

pytestmark = pytest.mark.browser

_FOUND = browser.find()
_READOUT = "document.querySelector('#readout').textContent"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if _FOUND is None:
        pytest.skip(f"no browser here: none of {', '.join(browser.NAMES)} is on the PATH")
    with browser.Page(_FOUND, tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def shown(tab: browser.Page, tmp_path: Path) -> Iterator[browser.Page]:
    """A page of 600 tokens, 3 layers of 2 heads and 3 choices."""
    tab.problems.clear()
    made = made_up(600, 3, 2, 60, n_choices=3, texts=[NASTY, *NASTY, "line\n", "\n"])
    path = tmp_path / "r.html"
    path.write_text(page.render(made), encoding="utf-8")
    tab.call("Emulation.setEmulatedMedia", features=[])
    tab.open(path)
    yield tab
    assert tab.problems == []


def numbers(text: str) -> tuple[int, int, int]:
    """Read which token, and how many of the pairs kept it."""
    found = re.search(r"Token ([\d,]+) of .*?kept by (\d+) of (\d+)", text, re.S)
    assert found is not None, text
    token, kept, pairs = (int(group.replace(",", "")) for group in found.groups())
    return token, kept, pairs


def wanted(n: int, choice: int = -1, only: tuple[int, int] | None = None) -> int:
    """Pairs that kept a token."""
    kept = made_up(600, 3, 2, 60, n_choices=3).choices[choice].kept
    heads = [kept[only[0]][only[1]]] if only else [head for layer in kept for head in layer]
    return sum(n in head for head in heads)


def test_it_draws_something(shown: browser.Page) -> None:
    image = shown.screenshot()
    assert image.startswith(b"\x89PNG") and len(image) > 20_000
    # the map is not blank
    colours = shown.run(
        "(() => { const c = document.querySelector('#depth');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d[i] + ',' + d[i+1] + ',' + d[i+3]);"
        "return s.size })()"
    )
    assert colours > 4


def test_the_text_is_shown_as_text(shown: browser.Page) -> None:
    text = shown.run("document.querySelector('#text').textContent")
    assert "</script><script>alert(1)</script>" in text and "onerror=alert(2)" in text
    assert "\u2407\u241b[31m" in text and "\u27e8202E\u27e9" in text and "👩" in text
    assert shown.run("document.images.length") == 0


def test_hover_tells_the_figures_of_a_token(shown: browser.Page) -> None:
    shown.run("document.querySelector('#text').scrollIntoView({behavior: 'instant'})")
    shown.settle()
    for index in (60, 110, 140):
        x, y = shown.run(
            f"(() => {{ const s = document.querySelector('span[data-i=\"{index}\"]');"
            "s.scrollIntoView({block: 'center', behavior: 'instant'}); const b = s.getClientRects()[0];"
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        shown.move(x, y)
        assert numbers(shown.run(_READOUT)) == (index + 1, wanted(index), 6)


def test_the_keyboard_moves_through_the_text(shown: browser.Page) -> None:
    shown.run("document.querySelector('#text').focus()")
    assert numbers(shown.run(_READOUT))[0] == 1
    for key, token in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", 600), ("Home", 1)):
        shown.key(key)
        assert numbers(shown.run(_READOUT)) == (token, wanted(token - 1), 6)
    shown.key("PageDown")
    assert numbers(shown.run(_READOUT))[0] == 201
    assert shown.run("document.querySelector('.now').dataset.i") == "200"
    shown.key("ArrowDown")
    below = numbers(shown.run(_READOUT))[0]
    assert 201 < below < 300
    shown.key("ArrowUp")
    assert abs(numbers(shown.run(_READOUT))[0] - 201) <= 2
    shown.key("n")
    token, kept, _ = numbers(shown.run(_READOUT))
    assert kept == wanted(token - 1) > 0


def test_a_head_a_layer_and_a_choice_can_be_chosen(shown: browser.Page) -> None:
    shown.run("document.querySelector('#text').focus()")
    shown.key("PageDown")
    shown.run("document.querySelector('#grid td[tabindex=\"0\"]').focus()")
    assert "Layer 0, KV head 0" in shown.run(_READOUT)
    shown.key("ArrowRight")
    shown.key("ArrowDown")
    assert "Layer 1, KV head 1: keeps 60 of 600 entries" in shown.run(_READOUT)
    shown.key("Enter")
    assert numbers(shown.run(_READOUT)) == (201, wanted(200, only=(1, 1)), 1)
    shown.run(
        "(() => { const c = document.querySelector('#choice'); c.value = 0; c.dispatchEvent(new Event('input')) })()"
    )
    assert numbers(shown.run(_READOUT)) == (201, wanted(200, 0, only=(1, 1)), 1)
    assert shown.run("document.querySelector('#choice-text').textContent") == "the eviction"
    shown.run("document.querySelector('#grid td[tabindex=\"0\"]').focus()")
    shown.key("Escape")
    assert numbers(shown.run(_READOUT)) == (201, wanted(200, 0), 6)


def test_the_map_can_be_used_with_keys(shown: browser.Page) -> None:
    shown.run("document.querySelector('#depth').focus()")
    shown.key("ArrowDown")
    shown.key("End")
    assert "Layer 1, tokens" in shown.run(_READOUT) and "to 600" in shown.run(_READOUT)
    shown.key("Enter")
    assert numbers(shown.run(_READOUT))[0] >= 590
    assert shown.run("document.activeElement.id") == "text"


def test_dark_and_print(shown: browser.Page) -> None:
    light = shown.run("getComputedStyle(document.body).backgroundColor")
    shown.media(prefers_color_scheme="dark")
    assert shown.run("getComputedStyle(document.body).backgroundColor") != light
    assert shown.pdf().startswith(b"%PDF")


def test_a_prompt_that_was_not_cut_is_shown(tab: browser.Page, tmp_path: Path) -> None:
    tab.problems.clear()
    path = tmp_path / "full.html"
    made = dataclasses.replace(made_up(50, 1, 1, 8), choices=(), layers=(), stats=None, why_full="it is <short>")
    path.write_text(page.render(made), encoding="utf-8")
    tab.open(path)
    assert tab.run("document.querySelector('#text').innerText").strip().startswith("w0 w1")
    assert "it is <short>" in tab.run("document.querySelector('.only-full').innerText")
    assert tab.run("document.querySelector('#bar').checkVisibility()") is False
    assert tab.problems == []


def test_problems_are_seen(tab: browser.Page, tmp_path: Path) -> None:
    """The tests above can fail."""
    tab.problems.clear()
    path = tmp_path / "r.html"
    path.write_text(page.render(made_up(50, 1, 1, 8)), encoding="utf-8")
    tab.open(path)
    tab.run("console.error('told'); fetch('http://example.invalid/').catch(() => 0)")
    tab.settle()
    assert len(tab.problems) >= 2 and "told" in tab.problems[0]
    assert "Content Security Policy" in tab.problems[1]


def test_30000_tokens_stay_quick(tab: browser.Page, tmp_path: Path) -> None:
    tab.problems.clear()
    path = tmp_path / "long.html"
    path.write_text(page.render(made_up(30_000, 32, 8, 512, n_choices=2)), encoding="utf-8")
    tab.open(path)
    # only what is near the screen is made of spans, and a step does not touch the rest
    tab.run("document.querySelector('#text').focus()")
    tab.key("End")
    tab.settle()
    assert numbers(tab.run(_READOUT))[0] == 30_000
    spans = tab.run("document.querySelectorAll('#text span').length")
    assert 0 < spans < 8000
    tab.key("ArrowLeft")
    tab.key("PageUp")
    assert numbers(tab.run(_READOUT))[0] == 29_799
    seconds = tab.run(
        "(() => { const t = performance.now(); for (let i = 0; i < 50; i++) document.querySelector('#text')"
        ".dispatchEvent(new KeyboardEvent('keydown', {key: i % 2 ? 'ArrowLeft' : 'ArrowRight'}));"
        "return (performance.now() - t) / 50000 })()"
    )
    assert seconds < 0.25  # a few milliseconds where nothing else runs
    assert tab.problems == []
