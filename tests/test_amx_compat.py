"""What is put in front of ggml's AMX sources keeps the compiler from dropping the sizes of tiles.

Assembler only: most machines that run this have no AMX.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).parents[1] / "native" / "ggml" / "cpu" / "amx-compat.h"

# the last byte of the configuration comes in the first register of the call
SOURCE = """
#include <immintrin.h>

void configure(unsigned char rows) {
    alignas(64) unsigned char config[64] = {};
    config[0]  = 1;
    config[63] = rows;
    _tile_loadconfig(config);
}
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64") or os.name != "posix", reason="x86-64 on Unix")
def test_the_sizes_of_tiles_are_written(tmp_path: Path) -> None:
    """The register of the argument is read before the configuration is loaded."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or "g++"]
    source = tmp_path / "amx.cpp"
    source.write_text(SOURCE)
    flags = ["-std=c++17", "-O3", "-mamx-tile", "-include", str(HEADER), "-S", "-o", "-"]
    done = subprocess.run([*compiler, *flags, str(source)], capture_output=True, text=True)
    if "mamx-tile" in done.stderr:
        pytest.skip("a compiler without AMX")
    assert done.returncode == 0, done.stderr
    before, loads, _ = done.stdout.partition("ldtilecfg")
    assert loads
    assert "%dil" in before or "%edi" in before
