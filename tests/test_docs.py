"""What README.md says must be so."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_dge import DGEConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_table_of_settings() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", readme(), flags=re.MULTILINE)
    default = DGEConfig()
    want = [(field.name, getattr(default, field.name)) for field in dataclasses.fields(DGEConfig)]
    assert rows == [(name, f'"{value}"' if isinstance(value, str) else str(value)) for name, value in want]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_targets_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for target in re.findall(r"\bmake ([a-z][a-z-]*)", text):
        assert target in targets, target
    # `NAME` is a place holder
    for path in re.findall(r"`((?:native|tests|python|scripts|requirements|patches|docs|models)/[\w./-]+)`", text):
        assert "NAME" in path or (ROOT / path).exists(), path
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert (ROOT / "tests" / name).exists(), name


@pytest.mark.model
def test_python_of_the_readme_runs_as_pasted() -> None:
    code = re.findall(r"```python\n(.*?)```", readme(), flags=re.DOTALL)[0]  # test_integrations.py has the others
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = re.search(r"(\d+) -> (\d+) rows", done.stdout).groups()  # type: ignore[union-attr]
    assert int(before) > 2000
    assert int(after) == 256 + 3  # k - 1 rows of the draft come on top
