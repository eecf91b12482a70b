"""What a user can do about a failure that the library reports in one word."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

from . import _native, _params
from .config import DGEConfig

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$")
# numbers of enum ggml_type: f32, f16, bf16
_UNQUANTISED = (None, 0, 1, 30)


def of_loading(path: str, settings: dict[str, Any]) -> str | None:
    """Return why a model or its context could not be made, where that can be told from the file and the settings."""
    if settings.get("type_v") not in _UNQUANTISED and not settings.get("flash_attn"):
        return f"type_v={settings['type_v']}: a quantised V cache needs flash attention; pass flash_attn=True"
    return _of_split(path) or _of_file(path)


def _of_split(path: str) -> str | None:
    split = _SPLIT.match(path)
    if split is None:
        return None
    part, n_parts = int(split[2]), int(split[3])
    names = [f"{split[1]}-{i:05}-of-{split[3]}.gguf" for i in range(1, n_parts + 1)]
    if part != 1:
        return f"model_path={path!r} is part {part} of {n_parts}; name the first part: {names[0]}"
    missing = [name for name in names if not os.path.exists(name)]
    if missing:
        return f"model_path={path!r}: {len(missing)} of {n_parts} parts are missing: {', '.join(missing)}"
    return None


def _of_file(path: str) -> str | None:
    if os.path.isdir(path):
        return f"model_path={path!r} is a folder; name a GGUF file in it"
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as error:
        return f"model_path={path!r} cannot be read: {error.strerror}"
    return None if start == b"GGUF" else f"model_path={path!r} is no GGUF file: it begins with {start!r}"


def of_host_copy(ctx: int, config: DGEConfig, error: str, n_prompt: int) -> str | None:
    """Return why the host copy of a prompt could not be made, with numbers, where that was the trouble."""
    if error != _native.status_text(_native.ERR_PARK):
        return None
    needed = _native.estimate(ctx, config, n_prompt, _native.is_elastic(ctx)).parked
    others = _native.memory(ctx).parked
    if config.park_limit is not None and others + needed > config.park_limit:
        why = f"its host copy needs {needed:,} bytes, which exceeds park_limit={config.park_limit}"
        remedy = "raise park_limit"
    elif config.parks == "disk":
        folder = _params.park_dir(config)
        why = f"its host copy of {needed:,} bytes could not be written to {folder}{_free(folder)}"
        remedy = "choose another park_dir"
    else:
        return None
    return f'{why}; {remedy}, or pass park="off", with which a later turn evaluates its prompt from the start'


def _free(folder: str) -> str:
    try:
        return f", which has {shutil.disk_usage(folder).free:,} bytes free"
    except OSError as error:
        return f" ({error.strerror})"
