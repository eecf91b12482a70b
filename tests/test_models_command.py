"""``llama-dge models``: the list, and downloads with pip of wheels that are made here."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_dge import models
from llama_dge.cli import main
from llama_dge.models import ModelError

DATA = bytes(range(256)) * 500
README = Path(__file__).parent.parent / "models" / "README.md"


class Registry:
    """A folder of wheels that pip uses as a registry, and a manifest of one model in them."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.manifest = folder / "manifest.toml"
        self.imported = folder / "imported"

    def add_wheel(self, name: str, members: dict[str, bytes], version: str = "1.0") -> None:
        # whoever imports the package leaves a trace
        code = f"open({str(self.imported)!r}, 'w').close()\n".encode()
        info = f"{name}-{version}.dist-info"
        files = {
            f"{name}/__init__.py": code,
            **members,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
        }
        with zipfile.ZipFile(self.wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for path, content in files.items():
                wheel.writestr(path, content)

    def write_manifest(self, **changes: Any) -> None:
        entry: dict[str, Any] = {
            "file": "tiny.gguf",
            "package": "dge-tiny",
            "version": "1.0",
            "parts": 1,
            "member": "dge_tiny/*.gguf",
            "size": len(DATA),
            "sha256": hashlib.sha256(DATA).hexdigest(),
            "architecture": "llama",
            "context": 128,
            "licence": "CC0",
            **changes,
        }
        lines = [f"{key} = {value if isinstance(value, int) else repr(value)}" for key, value in entry.items()]
        self.manifest.write_text("[tiny]\n" + "\n".join(lines) + "\n")

    def split(self, n_parts: int) -> None:
        """Split the model over wheels, and shuffle nothing but the names: part 10 comes before part 2 in a listing."""
        step = -(-len(DATA) // n_parts)
        for i in range(n_parts):
            part = {f"dge_tiny_part{i + 1}/data/part{i + 1:02}.bin": DATA[i * step : (i + 1) * step]}
            self.add_wheel(f"dge_tiny_part{i + 1}", part)
        self.write_manifest(parts=n_parts, package="dge-tiny-part{part}", member="*/data/part*.bin")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry.wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return registry


@pytest.fixture
def get(registry: Registry, tmp_path: Path) -> Callable[..., int]:
    def get(name: str = "tiny", *options: str) -> int:
        return main(
            ["models", "get", name, "-o", str(tmp_path / "out"), "--manifest", str(registry.manifest), *options]
        )

    return get


Refused = Callable[[str], None]


@pytest.fixture
def refused(registry: Registry, get: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Asserts that the command fails with a message, and leaves no file and nothing imported."""

    def check(message: str) -> None:
        assert get() == 1
        error = capsys.readouterr().err
        assert error.startswith("llama-dge models: error: ") and message in error
        out = tmp_path / "out"
        assert not out.exists() or list(out.iterdir()) == []
        assert not registry.imported.exists()

    return check


def test_one_wheel(
    registry: Registry, get: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.add_wheel("dge_tiny", {"dge_tiny/tiny.Q4.gguf": DATA, "dge_tiny/readme.txt": b"no"})
    registry.write_manifest()
    assert get() == 0
    file = tmp_path / "out" / "tiny.gguf"
    assert file.read_bytes() == DATA
    assert list(file.parent.iterdir()) == [file]
    captured = capsys.readouterr()
    assert captured.out == f"{file}\n"
    assert captured.err == ""  # no terminal, no -v
    assert not registry.imported.exists() and "dge_tiny" not in sys.modules


def test_eleven_parts_are_joined_in_numeric_order(
    registry: Registry, get: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.split(11)
    assert get("tiny", "-v") == 0
    assert (tmp_path / "out" / "tiny.gguf").read_bytes() == DATA
    progress = capsys.readouterr().err
    assert "dge-tiny-part10 1.0 (10/11)" in progress and "verifying" in progress


def test_a_file_that_is_there_is_not_downloaded_again(
    registry: Registry, get: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.write_manifest()
    file = tmp_path / "out" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(DATA)
    with monkeypatch.context() as patch:
        patch.setattr(models.subprocess, "run", lambda *args, **kwargs: pytest.fail("pip was run"))
        assert get() == 0

    file.write_bytes(DATA[::-1])  # damaged
    registry.add_wheel("dge_tiny", {"dge_tiny/tiny.gguf": DATA})
    assert get() == 0
    assert file.read_bytes() == DATA


def test_cache_folder(registry: Registry, tmp_path: Path) -> None:
    registry.add_wheel("dge_tiny", {"dge_tiny/tiny.gguf": DATA})
    registry.write_manifest()
    assert main(["models", "get", "tiny", "--manifest", str(registry.manifest)]) == 0
    assert (tmp_path / "cache" / "llama-dge" / "models" / "tiny.gguf").read_bytes() == DATA


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sha256": "0" * 64}, "sha256 is "),
        ({"size": len(DATA) + 1}, f"downloaded {len(DATA):,} bytes instead of {len(DATA) + 1:,}"),
        ({"version": "2.0"}, "pip could not download dge-tiny 2.0: ERROR"),
        ({"package": "dge-nothing"}, "pip could not download dge-nothing 1.0: ERROR"),
        ({"member": "*.bin"}, "holds 0 files that match *.bin"),
        ({"member": "dge_tiny/*"}, "holds 3 files that match dge_tiny/*"),
        ({"parts": 2, "package": "dge-tiny{part}"}, "pip could not download dge-tiny1 1.0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_failed_download(registry: Registry, refused: Refused, changes: dict[str, Any], message: str) -> None:
    registry.add_wheel("dge_tiny", {"dge_tiny/tiny.gguf": DATA, "dge_tiny/readme.txt": b"no"})
    registry.write_manifest(**changes)
    refused(message)


def test_sdist_is_refused(registry: Registry, refused: Refused, tmp_path: Path) -> None:
    """Pip runs the code of an sdist to download it."""
    source = tmp_path / "dge_tiny-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(registry.imported)!r}, 'w').close()\n")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: dge-tiny\nVersion: 1.0\n")
    with tarfile.open(registry.wheels / "dge_tiny-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    registry.write_manifest()
    refused("pip could not download")


def test_pip_is_missing(registry: Registry, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.write_manifest()
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    refused("needs pip")


@pytest.mark.parametrize(
    "code, message", [(errno.ENOSPC, "no space left in"), (errno.EACCES, "cannot write to")], ids=["full", "denied"]
)
def test_disk(registry: Registry, refused: Refused, monkeypatch: pytest.MonkeyPatch, code: int, message: str) -> None:
    def fail(*args: Any) -> None:
        raise OSError(code, "mocked")

    registry.add_wheel("dge_tiny", {"dge_tiny/tiny.gguf": DATA})
    registry.write_manifest()
    monkeypatch.setattr(models.shutil, "copyfileobj", fail)
    refused(message)


def test_damaged_wheel(registry: Registry, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "damaged.whl"

    def download(*args: Any) -> Path:
        damaged.write_bytes(b"PK not a zip file")
        return damaged

    registry.write_manifest()
    monkeypatch.setattr(models, "_download", download)
    refused("damaged.whl is not a readable zip file")


def test_unknown_model(registry: Registry, get: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    registry.write_manifest()
    assert get("nope") == 1
    assert capsys.readouterr().err == "llama-dge models: error: no model nope; the models are tiny\n"


@pytest.mark.parametrize("text", ["[a", "[a]\nfile = 'x'\n", "a = 1\n"], ids=repr)
def test_bad_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    manifest = tmp_path / "manifest.toml"
    manifest.write_text(text)
    assert main(["models", "list", "--manifest", str(manifest)]) == 1
    assert str(manifest) in capsys.readouterr().err


def test_built_in_manifest() -> None:
    manifest = models.read_manifest()
    assert "smollm2-135m" in manifest
    for model in manifest.values():
        assert len(model.sha256) == 64 and int(model.sha256, 16)
        assert model.file.endswith(".gguf") and Path(model.file).name == model.file
        assert model.size > 0 and model.context > 0 and model.licence and model.architecture
        assert len(set(model.packages)) == model.parts >= 1


@pytest.mark.parametrize(
    "code, manifest",
    [
        ("site-packages/llama_dge/models.py", "site-packages/llama_dge/models.toml"),
        ("python/llama_dge/models.py", "models/models.toml"),
    ],
    ids=["wheel", "source tree"],
)
def test_where_the_manifest_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, manifest: str) -> None:
    for source, target in ((Path(models.__file__), code), (models.MANIFEST, manifest)):
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / target)
    spec = importlib.util.spec_from_file_location("models_elsewhere", tmp_path / code)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # for its dataclass
    spec.loader.exec_module(module)
    assert module.MANIFEST.samefile(tmp_path / manifest)
    assert list(module.read_manifest()) == list(models.read_manifest())


def test_the_page_on_models_explains_every_field() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(models.Model) if field.name != "name"]


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *models.read_manifest()]


def test_find(tmp_path: Path) -> None:
    manifest = models.read_manifest()
    file = tmp_path / "smollm2-135m"
    file.touch()
    assert models.find(str(file), manifest) == file
    assert models.find("smollm2-135m", manifest) == manifest["smollm2-135m"]
    with pytest.raises(ModelError, match="no such file, and no such model; the models are smollm2-135m"):
        models.find(str(tmp_path / "nope"), manifest)


@pytest.mark.model
def test_get_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the registry itself: `fetch` verifies size and hash."""
    assert main(["models", "get", "smollm2-135m", "-o", str(tmp_path)]) == 0
    file = Path(capsys.readouterr().out.strip())
    assert file.parent == tmp_path
    assert file.read_bytes()[:4] == b"GGUF"
