"""Scripts around the GPU kernels: ptxas is read right and bounded, the table of docs/gpu.md is the script's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import cuda_compile  # noqa: E402
import gpu_cost  # noqa: E402

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fi' for 'sm_86'
ptxas info    : Function properties for _Z1fi
    {stack} bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {shared} bytes smem, 568 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1gi' for 'sm_90'
ptxas info    : Function properties for _Z1gi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, 376 bytes cmem[0]
"""


def kernels(**changes: int) -> list[Any]:
    return cuda_compile.parse(PTXAS.format(**{"stack": 0, "spill": 0, "registers": 128, "shared": 16384, **changes}))


def test_what_ptxas_says() -> None:
    first, second = kernels(spill=8, registers=77, shared=4096)
    assert (first.name, first.arch, first.registers, first.shared, first.spill) == ("_Z1fi", 86, 77, 4096, 16)
    assert (second.arch, second.registers, second.shared, second.spill) == (90, 31, 0, 0)
    with pytest.raises(cuda_compile.CudaError, match="cannot read"):
        cuda_compile.parse("Compiling entry function 'f' for 'sm_86'")


@pytest.mark.parametrize(
    "changes, what",
    [({"registers": 129}, "129 registers"), ({"shared": 16385}, "16385 bytes of"), ({"spill": 4}, "8 bytes spilled")],
)
def test_bounds(monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], what: str) -> None:
    monkeypatch.setattr(cuda_compile, "N_KERNELS", 1)
    assert cuda_compile.check(kernels(), (86, 90)) == []
    (bad,) = cuda_compile.check(kernels(**changes), (86, 90))
    assert what in bad and "sm_86" in bad


def test_a_kernel_that_is_missing_is_told() -> None:
    bad = cuda_compile.check(kernels(), (86, 89))
    assert bad == [
        f"sm_86: 1 kernels, expected {cuda_compile.N_KERNELS}",
        f"sm_89: 0 kernels, expected {cuda_compile.N_KERNELS}",
    ]


def test_an_nvcc_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(cuda_compile.CudaError, match="NVCC=no-such-nvcc is no program: unset it"):
        cuda_compile.find_nvcc()


def test_the_table_of_the_documentation() -> None:
    assert gpu_cost.table(15, 1024) in (ROOT / "docs/gpu.md").read_text(encoding="utf-8")


def test_cost_by_hand() -> None:
    """One layer, one head, d = 2: 3 keys and 5 queries."""
    steps = gpu_cost.steps(gpu_cost.Model(1, 1, 1, 2, 10.0), n_kv=3, n_rows=5, budget=1, cache="f16")
    score, park, device, host = steps
    assert (score.flops, score.memory, score.link) == (2 * 15 * (4 + 8), 2 * 12 + 12, 12)
    # a row of K and V is 8 bytes, its index 4; the only layer is the one of the rehearsal
    assert (park.memory, park.link) == (24, 24)
    assert (device.memory, device.link) == (2 * 4 * 8 + 2 * 8 + 4, 4)
    assert (host.memory, host.link) == (24 + 3 * 8, 24 + 8)
    card = gpu_cost.Device("a card", flops=36.0, matrix=60.0, memory=36.0, link=12.0, mma=False)
    assert score.seconds(card) == 360 / 36 + 1
    # two products of halves for each of the 120 products of K, by matrix units
    card = gpu_cost.Device("another", flops=24.0, matrix=60.0, memory=36.0, link=12.0, mma=True)
    assert score.seconds(card) == 240 / 24 + 2 * 120 / 60 + 1
    assert gpu_cost.prefill(gpu_cost.Model(1, 1, 1, 2, 10.0), 3) == 60 + 36


@pytest.mark.parametrize("arguments, message", [(["--wet"], "got '--wet'"), (["--out"], "--out needs a file")])
def test_gpu_check_refuses_bad_arguments(arguments: list[str], message: str) -> None:
    run = subprocess.run([str(ROOT / "scripts/gpu_check.sh"), *arguments], capture_output=True, text=True)
    assert run.returncode == 2 and message in run.stderr


def test_gpu_packages_refuses_bad_arguments() -> None:
    run = subprocess.run([str(ROOT / "scripts/gpu_packages.sh"), "opencl"], capture_output=True, text=True)
    assert run.returncode == 2 and "got 'opencl'" in run.stderr
