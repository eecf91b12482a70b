"""README.md and the pages of docs/ agree with the package."""

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
from llama_dge.config import POLICIES, PRESETS
from llama_dge.demo_text import FACTS
from llama_dge.eval.arms import STARTS, parse_arm, parse_arms, without_budget
from llama_dge.models import fetch, read_manifest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table_of_settings(name: str) -> list[tuple[str, str]]:
    """Names and defaults in the rows of a page that begin with both."""
    return re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page(name), flags=re.MULTILINE)


def settings_of_the_class() -> list[tuple[str, str]]:
    defaults = [(field.name, getattr(DGEConfig(), field.name)) for field in dataclasses.fields(DGEConfig)]
    return [(name, f'"{value}"' if isinstance(value, str) else str(value)) for name, value in defaults]


def test_every_setting_is_documented_with_its_default() -> None:
    assert table_of_settings("docs/settings.md") == settings_of_the_class()


def test_settings_in_the_readme_have_their_default() -> None:
    rows = table_of_settings("README.md")
    assert len(rows) >= 5
    assert set(rows) <= set(settings_of_the_class())


def test_every_preset_is_documented_with_what_it_changes() -> None:
    rows = re.findall(r'^\| `"(\w+)"` \| (.*?) \|', page("docs/settings.md"), flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(PRESETS)
    for name, text in rows:
        written = [(key, value.strip('"')) for key, value in re.findall(r"`(\w+)=([^`]+)`", text)]
        assert written == [(key, str(value)) for key, value in PRESETS[name].items()]


def test_every_policy_has_one_row_with_its_paper() -> None:
    rows = re.findall(r'^\| `"(\w+)"` \| .*? \| \[([\d.]+)\]\((\S+)\) \|', page("docs/policies.md"), flags=re.MULTILINE)
    assert rows == [(info.name, info.paper, f"https://arxiv.org/abs/{info.paper}") for info in POLICIES.values()]


def headings(path: Path) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        file = path.parent / target if target else path
        assert file.exists(), target
        assert not heading or heading in headings(file), f"{target}#{heading}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_targets_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, flags=re.MULTILINE):
        assert target in targets, target
    # `NAME` is a place holder
    for file in re.findall(r"`((?:native|tests|python|scripts|requirements|patches|docs|models)/[\w./-]+)`", text):
        assert "NAME" in file or (ROOT / file).exists(), file
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert (ROOT / "tests" / name).exists(), name


def python_of(name: str, folder: Path) -> str:
    """Run the first block of Python of a page, and return what it prints."""
    code = re.findall(r"```python\n(.*?)```", page(name), flags=re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.model
def test_the_readme_prints_the_answer_that_it_shows(tmp_path: Path) -> None:
    model = fetch(read_manifest()["qwen2.5-coder-0.5b"])
    (tmp_path / model.name).symlink_to(model)
    shown, printed = re.findall(r"```text\n(.*?)```", page("README.md"), re.DOTALL)[0], python_of("README.md", tmp_path)
    # another processor may round to another wording, but the fact and the number of entries kept are the same
    for text in (shown, printed):
        assert FACTS[1].answer in text
        assert text.endswith("-> 256 entries\n")


@pytest.mark.model
def test_the_page_about_python_runs_as_pasted(tmp_path: Path) -> None:
    printed = python_of("docs/python.md", tmp_path)
    counts = re.findall(r"(\d+) restored; (\d+) -> (\d+) entries", printed)
    assert [int(after) for _, _, after in counts] == [256 + 3] * 2  # k - 1 entries of the draft come on top
    assert int(counts[0][0]) == 0
    assert int(counts[1][0]) > 2000


def commands_of(path: Path) -> list[str]:
    """The calls of llama-dge in a page's blocks of shell commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("llama-dge ")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_understood(path: Path) -> None:
    for command in commands_of(path):
        args = _parser().parse_args(flash_attn_flags(shlex.split(command, comments=True)[1:]))
        resolve_model(args)
        parse_arms(getattr(args, "arms", None) or [], getattr(args, "budgets", None) or [64])


def test_commands_are_found() -> None:
    for name in ("README.md", "docs/command-line.md", "docs/results.md"):
        assert len(commands_of(ROOT / name)) > 3


@pytest.mark.parametrize("name", ["results", "benchmarks"])
def test_arms_of_tables_have_their_canonical_name(name: str) -> None:
    text = page(f"docs/{name}.md")
    starts = "|".join(STARTS)
    arms = set(re.findall(rf"^\| `((?:{starts})(?:[:,][\w=.]+)*)` \|", text, flags=re.MULTILINE))
    assert len(arms) > 3
    for arm in arms:
        assert without_budget(parse_arm(arm).name) == arm
