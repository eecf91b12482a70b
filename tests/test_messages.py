"""What users do wrong: each message names the cause, the value and the next step."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llama_dge import DGEConfig, DGEError, Llama, _troubles
from reference.instances import DGE, Instances, greedy
from reference.scenario import tokens_of

if TYPE_CHECKING:
    from conftest import Zoo

PROMPT = tokens_of(150, 0)
QUIET: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False}


def refused(path: Any, **settings: Any) -> str:
    with pytest.raises(ValueError, match=r"Failed to|does not exist") as caught:
        Llama(path, **{**QUIET, **settings})
    return str(caught.value)


@contextlib.contextmanager
def loaded(path: Any, **settings: Any) -> Iterator[Llama]:
    llm = Llama(path, **{**QUIET, **settings})
    try:
        yield llm
    finally:
        llm.close()


# the file


def test_a_path_object(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zoo["g2"].path
    with loaded(path) as llm:
        assert llm.model_path == str(path) and greedy(llm, PROMPT, 3)
    monkeypatch.setenv("HOME", str(path.parent))
    monkeypatch.setenv("USERPROFILE", str(path.parent))
    with loaded(f"~/{path.name}") as llm:
        assert llm.model_path == str(path)


def test_a_lora_path_object(zoo: Zoo, tmp_path: Path) -> None:
    from reference.models import write_lora

    lora = write_lora(zoo["g2"].weights, tmp_path / "lora.gguf")
    with loaded(zoo["g2"].path, lora_path=lora) as llm:
        assert llm.lora_path == str(lora)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"<html>not found")
    assert "is no GGUF file: it begins with b'<htm'" in refused(file) and str(file) in refused(file)
    assert f"model_path={str(tmp_path)!r} is a folder; name a GGUF file in it" in refused(tmp_path)
    assert str(tmp_path / "gone.gguf") in refused(tmp_path / "gone.gguf")
    file.write_bytes(b"GGUF" + bytes(100))  # what llama.cpp says stays as it is
    assert refused(file) == f"Failed to load model from file: {file}"


def test_a_model_in_parts(zoo: Zoo, tmp_path: Path) -> None:
    """llama.cpp says the same for a missing part as for any file that it cannot load."""
    first, second = (tmp_path / f"model-0000{i}-of-00003.gguf" for i in (1, 2))
    write_split(zoo["g2"].path, first, 3)
    shutil.copy(first, second)
    third = tmp_path / "model-00003-of-00003.gguf"
    assert refused(second).endswith(f"is part 2 of 3; name the first part: {first}")
    assert refused(first).endswith(f"1 of 3 parts are missing: {third}")


def write_split(source: Path, target: Path, n_parts: int) -> None:
    """Write a copy of a model that says that it has several parts."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "general.architecture")):
            continue
        kind, *rest = field.types
        writer.add_key_value(name, field.contents(), kind, sub_type=rest[0] if rest else None)
    writer.add_key_value("split.no", 0, GGUFValueType.UINT16)
    writer.add_key_value("split.count", n_parts, GGUFValueType.UINT16)
    writer.add_key_value("split.tensors.count", len(reader.tensors), GGUFValueType.INT32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# settings


@pytest.mark.parametrize("dge", [None, DGE])
def test_a_quantised_v_cache_without_flash_attention(zoo: Zoo, dge: Any) -> None:
    message = refused(zoo["g2"].path, type_v=8, dge=dge)
    assert message.endswith("type_v=8: a quantised V cache needs flash attention; pass flash_attn=True")
    with loaded(zoo["g2"].path, type_v=8, flash_attn=True, dge=dge) as llm:
        assert greedy(llm, PROMPT, 3)


def test_settings_outside_of_dge(new_llm: Instances) -> None:
    for name in ("budget", "recall", "refresh", "policy", "DGE", "Dge_config"):
        with pytest.raises(TypeError, match=f"unknown parameter {name}; settings go into dge"):
            new_llm(**{name: 64})


def test_settings_in_force_are_logged_once_if_verbose(
    new_llm: Instances, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="llama_dge")
    greedy(new_llm(DGEConfig.preset("paper", budget=64), verbose=True), PROMPT, 20)
    (record,) = [record for record in caplog.records if record.levelno == logging.INFO]
    text = record.getMessage()
    assert text.startswith("eviction after 2 tokens, ranked by draft: DGEConfig(") and "pooling='none'" in text
    assert "DGEConfig" not in capfd.readouterr().err
    caplog.clear()
    greedy(new_llm(DGEConfig.preset("paper", budget=64)), PROMPT, 20)
    assert not [record for record in caplog.records if record.levelno == logging.INFO]


@pytest.mark.parametrize("old, new", [("n_cuts", "n_evictions"), ("n_refresh", "n_recalls")])
def test_old_names_of_statistics_give_the_new_one(new_llm: Instances, old: str, new: str) -> None:
    llm = new_llm(DGE)
    greedy(llm, PROMPT, 10)
    with pytest.raises(AttributeError, match=f"no attribute '{old}'; it is called {new}"):
        getattr(llm.dge_stats, old)
    assert pickle.loads(pickle.dumps(llm.dge_stats)) == llm.dge_stats


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_call_without_a_path_is_one_error() -> None:
    with pytest.raises(TypeError, match="model_path"):
        Llama()  # type: ignore[call-arg]
    gc.collect()


def test_a_warning_names_the_line_of_the_user(new_llm: Instances) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        llm = Llama(new_llm.model, dge={"budget": 4096}, **QUIET)
    llm.close()
    assert [warning.filename for warning in seen] == [__file__]


# host copies


@pytest.mark.parametrize("park", ["ram", "disk"])
def test_a_park_limit_that_is_exceeded(new_llm: Instances, tmp_path: Path, park: str) -> None:
    dge = {**DGE, "park": park, "park_dir": tmp_path, "park_limit": 1000}
    llm = new_llm(dge)
    what = r"host copy needs (\d{3},\d{3}) bytes, which exceeds park_limit=1000; raise park_limit, or pass park=\"off\""
    with pytest.warns(RuntimeWarning, match=what) as seen:
        greedy(llm, PROMPT, 10)
    # the number is what it takes: with as much there is no warning
    found = re.search(what, str(seen[0].message))
    assert found is not None
    other = new_llm({**dge, "park_limit": int(found[1].replace(",", ""))})
    greedy(other, PROMPT, 10)
    assert other.dge_stats.state == "evicted" and other.dge_stats.bytes_parked <= other.dge_config.park_limit

    by_hand = new_llm(dge)
    by_hand.eval(PROMPT)
    with pytest.raises(DGEError, match=what) as caught:
        by_hand.evict()
    assert caught.value.status == -12


def test_a_folder_that_is_not_there(new_llm: Instances, tmp_path: Path) -> None:
    settings = {**DGE, "park": "disk", "park_dir": "/no/such/folder"}
    with pytest.raises(ValueError, match="park_dir='/no/such/folder': there is no such folder"):
        new_llm(settings)
    new_llm({**settings, "park": "ram"})


def test_a_folder_that_cannot_be_written(new_llm: Instances, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The administrator may write anywhere, so the system's refusal is a stand-in."""

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=rf"^park_dir='{tmp_path}': no file can be created there: Permission denied"):
        new_llm({**DGE, "park": "disk", "park_dir": tmp_path})


def test_a_folder_that_goes_away(new_llm: Instances, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    llm = new_llm({**DGE, "park": "disk", "park_dir": folder})
    folder.rmdir()
    with pytest.warns(
        RuntimeWarning, match=rf"could not be written to {folder} \(No such file.*\); choose another park_dir"
    ):
        greedy(llm, PROMPT, 10)
    assert llm.dge_stats.state == "full"


def test_a_folder_below_the_home_directory(new_llm: Instances, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "copies").mkdir()
    llm = new_llm({**DGE, "park": "disk", "park_dir": Path("~/copies")})
    greedy(llm, PROMPT, 10)
    assert len(os.listdir(tmp_path / "copies")) == 1


def test_free_space_is_named(tmp_path: Path) -> None:
    assert "bytes free" in _troubles._free(str(tmp_path))
