"""Which libllama ``import llama_dge`` makes llama_cpp use, and what it says where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llama_dge import _library

LIBRARY = Path(_library.LIBRARY._name)
VARIABLES = ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB")


def run(code: str, *path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with folders in front of its module search path."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment.update(variables)
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def succeeds(code: str, *path: Path, **variables: str) -> str:
    result = run(code, *path, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def fails_to_import(code: str, *path: Path, **variables: str) -> str:
    """Return the ImportError that is the last line of stderr."""
    result = run(code, *path, **variables)
    assert result.returncode == 1, result.stdout
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), result.stderr
    return last


def fake_llama_cpp(folder: Path, library: str, version: str = _library.LLAMA_CPP_PYTHON_VERSION) -> Path:
    """Write a llama_cpp that stands for one with another library."""
    package = folder / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(f'from . import llama_cpp\n__version__ = "{version}"\n')
    (package / "llama_cpp.py").write_text(f"import ctypes\n{library}\n")
    (package / "mtmd_cpp.py").touch()
    return folder


def test_llama_cpp_uses_our_library() -> None:
    code = """if True:
        import llama_dge, llama_cpp.llama_cpp, llama_cpp.mtmd_cpp
        print(llama_cpp.llama_cpp._lib._name)
        print(llama_cpp.mtmd_cpp._libmtmd._name)"""
    llama, mtmd = succeeds(code).split()
    assert Path(llama) == LIBRARY
    assert Path(mtmd).parent == LIBRARY.parent


def test_version_is_the_one_that_the_package_requires() -> None:
    import llama_cpp

    assert llama_cpp.__version__ == _library.LLAMA_CPP_PYTHON_VERSION


@pytest.mark.parametrize("value", [None, "/some/where"])
def test_environment_is_left_as_it_was(value: str | None) -> None:
    variables = {} if value is None else dict.fromkeys(VARIABLES, value)
    code = "import os, llama_dge; print([os.environ.get(name) for name in ('LLAMA_CPP_LIB_PATH', 'MTMD_CPP_LIB')])"
    assert succeeds(code, **variables).strip() == str([value, value])


def test_llama_cpp_imported_first_with_our_library() -> None:
    code = "import llama_cpp, llama_dge; print(llama_dge.__version__)"
    assert succeeds(code, LLAMA_CPP_LIB_PATH=str(LIBRARY.parent)).strip()


def test_llama_cpp_imported_first_with_another_library(tmp_path: Path) -> None:
    other = LIBRARY.with_name(LIBRARY.name.replace("llama", "ggml-base"))
    fake = fake_llama_cpp(tmp_path, f"_lib = ctypes.CDLL({str(other)!r})")
    message = fails_to_import("import llama_cpp, llama_dge", fake)
    assert "Import llama_dge first" in message
    assert str(other) in message


@pytest.mark.parametrize("second", ["from llama_dge import Llama", "    import llama_dge, json"])
def test_the_line_to_move_is_named(tmp_path: Path, second: str) -> None:
    """As isort arranges them: llama_cpp comes first."""
    other = LIBRARY.with_name(LIBRARY.name.replace("llama", "ggml-base"))
    fake = fake_llama_cpp(tmp_path, f"_lib = ctypes.CDLL({str(other)!r})")
    program = tmp_path / "program.py"
    program.write_text(f"import json\nif True:\n    from llama_cpp import llama_cpp\nif True:\n    {second.strip()}\n")
    message = fails_to_import(f"import runpy; runpy.run_path({str(program)!r})", fake)
    line = f"move line 5 of {program} ({second.strip()}) before line 3 (from llama_cpp import llama_cpp)"
    assert line in message


def test_the_import_to_move_where_a_module_imported_llama_cpp(tmp_path: Path) -> None:
    other = LIBRARY.with_name(LIBRARY.name.replace("llama", "ggml-base"))
    fake = fake_llama_cpp(tmp_path, f"_lib = ctypes.CDLL({str(other)!r})")
    (tmp_path / "library_of_somebody.py").write_text("import llama_cpp\n")
    program = tmp_path / "program.py"
    program.write_text("import library_of_somebody\nimport llama_dge\n")
    message = fails_to_import(f"import runpy; runpy.run_path({str(program)!r})", fake)
    assert f"move line 2 of {program} (import llama_dge) to the program's first lines, before what imports" in message


def test_stock_library_in_our_folder(tmp_path: Path) -> None:
    other = LIBRARY.with_name(LIBRARY.name.replace("llama", "ggml-base"))
    fake = fake_llama_cpp(tmp_path, f"_lib = ctypes.CDLL({str(other)!r})")
    message = fails_to_import("import llama_dge", fake)
    assert "stock llama.cpp" in message and "LLAMA_DGE_LIB_PATH" in message


def test_library_of_another_abi(tmp_path: Path) -> None:
    shutil.copy(LIBRARY.with_name(_library.API_FILE), tmp_path)
    name = str(tmp_path / "libother.so")
    library = (
        f"class _lib:\n    _name = {name!r}\n    class llama_dge_abi_version:\n        def __new__(cls): return 99"
    )
    message = fails_to_import("import llama_dge", fake_llama_cpp(tmp_path, library))
    assert "libother.so has ABI version 99" in message
    assert f"describes {_library.ABI_VERSION}" in message


@pytest.mark.parametrize("text", [None, "", "{}", '{"constants": {}}'])
def test_library_without_its_description(tmp_path: Path, text: str | None) -> None:
    name = str(tmp_path / "libother.so")
    library = f"class _lib:\n    _name = {name!r}\n    def llama_dge_abi_version(): return 99"
    if text is not None:
        (tmp_path / _library.API_FILE).write_text(text)
    message = fails_to_import("import llama_dge", fake_llama_cpp(tmp_path, library))
    assert _library.API_FILE in message and "Install llama-dge again" in message


def test_library_is_missing(tmp_path: Path) -> None:
    message = fails_to_import("import llama_dge", LLAMA_DGE_LIB_PATH=str(tmp_path))
    assert str(tmp_path) in message
    assert "pip install" in message and "LLAMA_DGE_LIB_PATH" in message


def test_library_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / LIBRARY.name).write_bytes(b"no library")
    message = fails_to_import("import llama_dge", LLAMA_DGE_LIB_PATH=str(tmp_path))
    assert str(tmp_path) in message


def test_library_without_the_functions_that_llama_cpp_binds(tmp_path: Path) -> None:
    other = LIBRARY.with_name(LIBRARY.name.replace("llama", "ggml-base"))
    (tmp_path / LIBRARY.name).symlink_to(other)
    message = fails_to_import("import llama_dge", LLAMA_DGE_LIB_PATH=str(tmp_path))
    assert "cannot use the libraries in" in message and str(tmp_path) in message


def test_other_version_of_llama_cpp_python(tmp_path: Path) -> None:
    metadata = tmp_path / "llama_cpp_python-0.3.35.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.35\n")
    message = fails_to_import("import llama_dge", tmp_path)
    assert "0.3.35 is installed" in message
    assert f"pip install llama-cpp-python=={_library.LLAMA_CPP_PYTHON_VERSION}" in message


def test_other_version_imported_first(tmp_path: Path) -> None:
    fake = fake_llama_cpp(tmp_path, "_lib = None", version="0.3.99")
    assert "0.3.99 is installed" in fails_to_import("import llama_cpp, llama_dge", fake)


def test_llama_cpp_python_is_missing() -> None:
    code = """if True:
        import sys
        class Blocker:
            def find_spec(name, path=None, target=None):
                if name == "llama_cpp":
                    raise ModuleNotFoundError("No module named 'llama_cpp'")
        sys.meta_path.insert(0, Blocker)
        import llama_dge"""
    assert f"pip install llama-cpp-python=={_library.LLAMA_CPP_PYTHON_VERSION}" in fails_to_import(code)
