"""Makes ``llama_cpp`` run on the llama.cpp libraries that ship with llama-dge.

llama-cpp-python reads the folder of its shared libraries from the environment, once, while it is imported. So
this module sets those variables, imports llama_cpp, and puts the environment back as it was: a child process, which
may run another llama-cpp-python, must not inherit our folder. A child that needs our libraries imports llama_dge.

Beside the library lies a description of its C interface, which the build makes of ``llama-dge.h``
(``scripts/header_api.py``); `_bindings` builds its declarations from it.

Environment
-----------
LLAMA_DGE_LIB_PATH
    Folder that holds libllama and libmtmd, instead of the ``lib`` folder of this package. For development.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import linecache
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _frames

logger = logging.getLogger(__name__)

#: The one version of llama-cpp-python whose ctypes bindings fit our libraries; the same one is in pyproject.toml.
LLAMA_CPP_PYTHON_VERSION = "0.3.36"

#: The description of the C interface, in the folder of the library.
API_FILE = "llama-dge-api.json"

LIB_PATH_VARIABLE = "LLAMA_DGE_LIB_PATH"

_LIBRARY_FILES = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.dll")


def lib_dir() -> Path:
    """Return the folder that libllama is loaded from."""
    override = os.environ.get(LIB_PATH_VARIABLE)
    return Path(override) if override else Path(__file__).resolve().parent / "lib"


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check_version(found: str) -> None:
    if found != LLAMA_CPP_PYTHON_VERSION:
        raise ImportError(
            f"llama-dge needs llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}, but {found} is installed. "
            f"Run: pip install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"
        )


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_llama_cpp(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _LIBRARY_FILES):
        raise ImportError(
            f"llama-dge's libllama is not in {folder}. Install the package (pip install . in its source tree builds "
            f"the library), or set {LIB_PATH_VARIABLE} to the folder that holds it."
        )

    # before the import: bindings of another version fail in it with a message that explains nothing
    installed = _installed_version()
    if installed is not None:
        _check_version(installed)

    with _environment(LLAMA_CPP_LIB_PATH=str(folder), MTMD_CPP_LIB=str(folder)):
        try:
            importlib.import_module("llama_cpp")
            # the chat handlers import it when they are first used, and then our variables are gone again
            importlib.import_module("llama_cpp.mtmd_cpp")
        except ModuleNotFoundError as error:
            raise ImportError(
                f"llama-dge needs llama-cpp-python {LLAMA_CPP_PYTHON_VERSION} ({error}). "
                f"Run: pip install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"
            ) from error
        except (AttributeError, OSError, RuntimeError) as error:
            raise ImportError(f"llama_cpp cannot use the libraries in {folder}: {error}") from error


def _line_to_move() -> str:
    """Say which line of the program imports llama_dge, and where to move it."""
    frame, _ = _frames.caller()
    if frame is None:
        return "move its import to the program's first lines"
    path, number = frame.f_code.co_filename, frame.f_lineno
    lines = linecache.getlines(path)
    ours = f"move line {number} of {path}" + (f" ({lines[number - 1].strip()})" if number <= len(lines) else "")
    for i, line in enumerate(lines[: number - 1], 1):
        if re.match(r"\s*(import|from)\s+llama_cpp\b", line):
            return f"{ours} before line {i} ({line.strip()})"
    return f"{ours} to the program's first lines, before what imports llama_cpp"


def _read_api(library: ctypes.CDLL) -> dict[str, Any]:
    path = Path(library._name).with_name(API_FILE)
    try:
        api: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = api["constants"]["LLAMA_DGE_ABI_VERSION"]
    except (OSError, ValueError, KeyError) as error:
        raise ImportError(
            f"the description of {library._name} cannot be read ({path}: {type(error).__name__}: {error}). "
            f"Install llama-dge again, or correct {LIB_PATH_VARIABLE}."
        ) from error
    abi_version = library.llama_dge_abi_version
    abi_version.argtypes = []
    abi_version.restype = ctypes.c_int32
    found = int(abi_version())
    if found != version:
        raise ImportError(
            f"{library._name} has ABI version {found} of Draft-Guided Eviction and {path} describes {version}: "
            f"the two come from different versions of llama-dge. Install it again, or correct {LIB_PATH_VARIABLE}."
        )
    return api


def _load() -> ctypes.CDLL:
    imported_before = "llama_cpp" in sys.modules
    if not imported_before:
        _import_llama_cpp(lib_dir())

    import llama_cpp

    _check_version(llama_cpp.__version__)
    library: ctypes.CDLL = importlib.import_module("llama_cpp.llama_cpp")._lib

    try:
        library.llama_dge_abi_version  # noqa: B018
    except AttributeError:
        if imported_before:
            raise ImportError(
                f"llama_cpp was imported before llama_dge and uses {library._name}, which has no Draft-Guided "
                f"Eviction. Import llama_dge first: {_line_to_move()}."
            ) from None
        raise ImportError(
            f"{library._name} is a stock llama.cpp library, without Draft-Guided Eviction. "
            f"Install llama-dge again, or correct {LIB_PATH_VARIABLE}."
        ) from None

    logger.debug("using %s", library._name)
    return library


#: The shared library that llama_cpp uses, with the llama_dge_* functions in it.
LIBRARY: ctypes.CDLL = _load()

#: What ``llama-dge.h`` declares, as ``scripts/header_api.py`` writes it.
API: dict[str, Any] = _read_api(LIBRARY)

#: LLAMA_DGE_ABI_VERSION of the library.
ABI_VERSION: int = API["constants"]["LLAMA_DGE_ABI_VERSION"]
