"""``make probes``: each assumption about llama.cpp is checked, and one that no longer holds is reported.

The tests that are marked slow break every assumption of the list in a copy of the pinned source.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
UPSTREAM = ROOT / "build" / "upstream" / "llama.cpp"
CXX = os.environ.get("CXX") or "c++"

needs_compiler = pytest.mark.skipif(shutil.which(CXX) is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("upstream_probe")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (UPSTREAM / ".git").exists():
        pytest.skip("no llama.cpp unpacked: make patches-apply")
    tree = tmp_path_factory.mktemp("pristine")
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "-C",
        str(UPSTREAM),
        "archive",
        "pristine",
        "include",
        "src",
        "ggml",
        "tests",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(tree)], stdin=archive.stdout, check=True)
    assert archive.returncode == 0
    return tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "include/llama.h": "typedef int llama_pos;\n",
        "src/llama-cache.h": '#include "llama.h"\nclass cache {\nprivate:\n    llama_pos   first;\n};\n',
        "src/llama-cache.cpp": "void decode() {\n    reserve();\n\n    update( false);\n}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@needs_compiler
@pytest.mark.parametrize(
    "old, new, message",
    [
        ("", "", None),
        ("llama_pos   first", "llama_pos last", "first"),  # renamed
        ("llama_pos   first", "long first", "cache::first has another type"),
    ],
)
def test_code(tool: ModuleType, tree: Path, old: str, new: str, message: str | None) -> None:
    header = tree / "src/llama-cache.h"
    header.write_text(header.read_text().replace(old, new))
    code = '\n#include "llama-cache.h"\nHAS(cache::first, llama_pos);\n'
    probe = tool.Probe("first", "src/llama-cache.h", "`first`", "the test", ("src/x.cpp",), code=code)
    problems = tool.check(probe, tree, CXX)
    assert bool(problems) == (message is not None)
    if message is not None:
        assert message in problems[0]
        text = tool.report(probe, problems)
        assert "used for: the test" in text and "open: native/src/x.cpp" in text


@pytest.mark.parametrize(
    "source, n, problem",
    [
        ("void decode() { reserve(); update( false); }", 1, None),
        ("void decode() { update( false); reserve(); }", 1, "lacks, or has at another place: update( false);"),
        ("void decode() { reserve(); } // update( false); update( false);", 1, "occurs 2 times, not 1"),
        (None, 1, "lacks, or has at another place: the file"),
    ],
)
def test_texts(tool: ModuleType, tree: Path, source: str | None, n: int, problem: str | None) -> None:
    path = tree / "src/llama-cache.cpp"
    if source is None:
        path.unlink()
    else:
        path.write_text(source)
    order = tool.Order("src/llama-cache.cpp", ("void decode() {", "reserve();", "update( false);"))
    rules = (order,) if source is None else (order, sys.modules["probes"].Count("src/*.cpp", "update(", n))
    probe = tool.Probe("order", "src/llama-cache.cpp", "order", "the test", (), texts=rules)
    problems = tool.check(probe, tree, CXX)
    assert [problem in text for text in problems] == ([True] if problem else []), problems


def test_command(tree: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/upstream_probe.py"), "--tree", str(tree), "decode-order"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "decode-order: src/llama-context.cpp: `decode` runs `sched_reserve`" in result.stdout
    assert "0 of 1 assumptions hold" in result.stdout


def test_table_in_the_readme_and_the_files_it_names(tool: ModuleType) -> None:
    assert tool.split_readme()[1] == tool.table(tool.PROBES), "run make probes-table"
    names = [probe.name for probe in tool.PROBES]
    assert len(names) == len(set(names))
    for probe in tool.PROBES:
        for name in probe.ours:
            assert (ROOT / tool.our_path(name)).is_file(), f"{probe.name}: {name}"


@pytest.mark.slow
@needs_compiler
def test_all_hold_in_the_pinned_source(tool: ModuleType, pristine: Path) -> None:
    assert tool.run(tool.PROBES, pristine, CXX) == 0


@pytest.mark.slow
@needs_compiler
def test_each_probe_sees_a_change(tool: ModuleType, pristine: Path) -> None:
    """Code must not compile once `broken` is applied; every text is missed."""
    blind = []
    for probe in tool.PROBES:
        assert probe.code or probe.texts, probe.name
        for rule in probe.texts:
            if isinstance(rule, tool.Order):
                source = tool.squeeze((pristine / rule.file).read_text())
                assert tool.missing(source, rule.texts) is None
                blind += [
                    f"{probe.name}: {text}"
                    for text in rule.texts
                    if tool.missing(source.replace(tool.squeeze(text), ""), rule.texts) is None
                ]
        if probe.code:
            path, original = pristine / probe.file, (pristine / probe.file).read_text()
            pattern = r"\s+".join(map(re.escape, probe.broken[0].split()))
            changed, n = re.subn(pattern, lambda match, new=probe.broken[1]: new, original, count=1)
            assert n == 1, f"{probe.name}: {probe.file} has no {probe.broken[0]}"
            path.write_text(changed)
            try:
                if not tool.check_code(probe, pristine, CXX):
                    blind.append(f"{probe.name}: {probe.broken[1]}")
            finally:
                path.write_text(original)
    assert blind == []


def test_bump_writes_every_version_or_none(tool: ModuleType, tmp_path: Path) -> None:
    bump = importlib.import_module("upstream_bump")
    old = bump.read_pin()
    new = bump.Pin(old.name, "9.8.7", "0" * 64)
    for name in (*bump.NAMED_IN, "patches/UPSTREAM"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    bump.write_version(old, new, tmp_path)
    for name, n in bump.NAMED_IN.items():
        text = (tmp_path / name).read_text()
        assert (text.count("9.8.7"), text.count(old.version)) == (n, 0)
    assert (tmp_path / "patches/UPSTREAM").read_text() == f"{old.name}==9.8.7 --hash=sha256:{'0' * 64}\n"

    with pytest.raises(bump.UpstreamError, match=r"pyproject\.toml names .* 0 times, not 1"):
        bump.write_version(old, new, tmp_path)
