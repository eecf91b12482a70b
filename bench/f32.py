"""Writes a GGUF file with all weights as f32, so that two libraries compute with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_f32(source: Path, target: Path) -> Path:
    """Dequantise a model, unless that was done before.

    Parameters
    ----------
    source
        A GGUF file.
    target
        What to write; kept where it is newer than the source.

    Returns
    -------
    Path
        The target.
    """
    if target.exists() and target.stat().st_mtime > source.stat().st_mtime:
        return target
    reader: Any = gguf.GGUFReader(str(source))
    scratch = target.with_suffix(".part")
    writer: Any = gguf.GGUFWriter(str(scratch), reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        # the writer makes those of the first kind itself
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return scratch.replace(target)
