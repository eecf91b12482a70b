"""What README.md and the pages of docs/ say must be so."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llama_dge import DGEConfig
from llama_dge.cli import _parser
from llama_dge.cli._options import flash_attn_flags, resolve_model
from llama_dge.eval.arms import STARTS, parse_arm, parse_arms, without_budget

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
    for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, flags=re.MULTILINE):
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


def commands_of(page: Path) -> list[str]:
    """The calls of llama-dge in a page's blocks of shell commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("llama-dge ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_understood(page: Path) -> None:
    for command in commands_of(page):
        args = _parser().parse_args(flash_attn_flags(shlex.split(command, comments=True)[1:]))
        resolve_model(args)
        parse_arms(getattr(args, "arms", None) or [], getattr(args, "budgets", None) or [64])


def test_commands_are_found() -> None:
    assert len(commands_of(ROOT / "README.md")) > 3 and len(commands_of(ROOT / "docs" / "results.md")) > 3


@pytest.mark.parametrize("name", ["results", "benchmarks"])
def test_arms_of_tables_have_their_canonical_name(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    starts = "|".join(STARTS)
    arms = set(re.findall(rf"^\| `((?:{starts})(?:[:,][\w=.]+)*)` \|", text, flags=re.MULTILINE))
    assert len(arms) > 3
    for arm in arms:
        assert without_budget(parse_arm(arm).name) == arm
