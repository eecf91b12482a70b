"""The rule of layers in ``native/src``, checked on made-up trees."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_layers.py"

SOUND = {
    "native/src/llama-dge-rows.h": "#include <vector>\n",
    "native/src/policies/snapkv.cpp": '#include "llama-dge-rows.h"\n#include "llama-dge.h"\n',
    "native/src/llama-dge-kv.h": '#include "llama-dge-rows.h"\n#include "llama-kv-cache.h"\nstruct llama_dge_kv;\n',
    "native/src/llama-dge-kv-entries.cpp": '#include "llama-dge-kv.h"\n#include "llama-dge-ctx.h"\n',
    "native/src/llama-dge-ctx.h": "// llama_dge owns it\n#pragma once\n",
    "native/src/llama-dge-store-file.cpp": "#include <unistd.h>\n",
    "native/src/llama-dge-whole.h": '#include "llama-dge-kv.h"\nstruct llama_dge {};\n',
    "native/src/llama-dge-api.cpp": '#include "llama-dge-whole.h"\n#include "../src/llama-dge-rows.h"\n',
    "patches/0010-friends.patch": "+    friend struct llama_dge_kv;\n+friend class llama_dge_ctx;\n friend x;\n",
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run(root: Path) -> tuple[int, list[str]]:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.stdout == ""
    return result.returncode, result.stderr.splitlines()


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    write_tree(tmp_path, SOUND)
    assert run(tmp_path) == (0, [])


@pytest.mark.parametrize(
    "name, text, message",
    [
        (
            "native/src/llama-dge-kv.h",
            '#pragma once\n#  include "llama-dge-whole.h"\n',
            "llama-dge-kv.h:2: layer adapters includes llama-dge-whole.h of the higher layer whole",
        ),
        (
            "native/src/policies/snapkv.cpp",
            '#include "../llama-dge-kv.h"\n',
            "policies/snapkv.cpp:1: layer plain includes ../llama-dge-kv.h of the higher layer adapters",
        ),
        (
            "native/src/llama-dge-rows.h",
            '/*\n#include "a.h" */\n#include "ggml.h"\n',
            "llama-dge-rows.h:3: layer plain includes ggml.h; only our own headers and llama-dge.h are allowed",
        ),
        (
            "native/src/llama-dge-rows.h",
            "#include <unistd.h>\n",
            "llama-dge-rows.h:1: layer plain includes <unistd.h>; only C++ standard headers are allowed",
        ),
        (
            "native/src/llama-dge-ctx.h",
            "/* of\nllama_dge */\nvoid f(const llama_dge & dge, llama_dge_kv & kv);\n",
            "llama-dge-ctx.h:3: a header of layer adapters names llama_dge",
        ),
        (
            "native/src/llama-dge-extra.cpp",
            "",
            "llama-dge-extra.cpp: in no layer; add it to LAYERS in scripts/check_layers.py",
        ),
        (
            "patches/0020-more.patch",
            " class llama_context {\n+    friend struct llama_dge;\n",
            "0020-more.patch:2: makes llama_dge a friend; only llama_dge_kv and llama_dge_ctx may be",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    write_tree(tmp_path, {**SOUND, name: text})
    assert run(tmp_path) == (1, [message])


def test_an_empty_tree_is_an_error(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == 1


def test_no_file_is_in_two_layers() -> None:
    spec = importlib.util.spec_from_file_location("check_layers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patterns = [pattern for _, patterns in module.LAYERS for pattern in patterns]
    assert len(patterns) == len(set(patterns))
