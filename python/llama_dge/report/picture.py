"""A record as a PNG: which parts of the prompt each layer kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .record import Record

_WIDTH = 1000  # pixels of the map
_LEFT, _TOP, _RIGHT, _BOTTOM = 64, 56, 24, 84
_INK, _DIM, _PAGE, _SHADE = (31, 35, 40), (89, 99, 110), (255, 255, 255), (9, 105, 218)


def require_pillow() -> Any:
    """Return Pillow's modules Image, ImageDraw and ImageFont; raises ModuleNotFoundError that says what to install."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ModuleNotFoundError:
        raise ModuleNotFoundError("a PNG needs Pillow: pip install 'llama-dge[plot]'") from None
    return Image, ImageDraw, ImageFont


def shares(record: Record, n_bins: int) -> npt.NDArray[np.float64]:
    """Return the share of entries that each layer's heads kept at the last choice, shape [n_layer, n_bins].

    Parameters
    ----------
    record
        With at least one choice.
    n_bins
        Parts of the prompt, of (nearly) equal size; at most as many as there are tokens.
    """
    choice = record.choices[-1]
    edges = np.arange(n_bins + 1) * choice.n_rows // n_bins
    out = np.zeros((len(choice.kept), n_bins))
    for row, heads in enumerate(choice.kept):
        counts = np.bincount(np.concatenate(heads), minlength=choice.n_rows)
        out[row] = np.add.reduceat(counts, edges[:-1]) / (np.diff(edges) * len(heads))
    return out


def _blend(alpha: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    page, shade = np.array(_PAGE, dtype=float), np.array(_SHADE, dtype=float)
    mixed: npt.NDArray[np.uint8] = np.rint(page + (shade - page) * alpha[..., None]).astype(np.uint8)
    return mixed


def write_png(record: Record, path: Path) -> None:
    """Draw the map of layers and places at the last choice.

    Parameters
    ----------
    record
        With at least one choice.
    path
        Of the file.

    Raises
    ------
    ModuleNotFoundError
        Pillow is not installed.
    OSError
        The file cannot be written.
    """
    image_module, draw_module, font_module = require_pillow()
    n_rows, n_layer = record.choices[-1].n_rows, len(record.layers)
    values = shares(record, min(n_rows, _WIDTH))
    row_height = max(6, min(24, 480 // n_layer))
    height = n_layer * row_height
    columns = np.arange(_WIDTH) * values.shape[1] // _WIDTH
    pixels = _blend(np.sqrt(np.repeat(values[:, columns], row_height, axis=0)))

    image = image_module.new("RGB", (_LEFT + _WIDTH + _RIGHT, _TOP + height + _BOTTOM), _PAGE)
    image.paste(image_module.fromarray(pixels), (_LEFT, _TOP))
    pen = draw_module.Draw(image)
    font = font_module.load_default(size=14)
    bottom = _TOP + height

    pen.rectangle((_LEFT - 1, _TOP - 1, _LEFT + _WIDTH, bottom), outline=_DIM)
    title = f"Share of heads that kept each part of the prompt: {record.model}, {n_rows:,} entries"
    pen.text((_LEFT, 18), _printable(title), fill=_INK, font=font)
    every = -(-18 // row_height)
    for row, layer in enumerate(record.layers):
        if row % every == 0:
            pen.text((_LEFT - 8, _TOP + (row + 0.5) * row_height), str(layer), fill=_INK, font=font, anchor="rm")
    pen.text((8, 18), "layer", fill=_DIM, font=font)
    for i in range(6):
        x, text = _LEFT + i * _WIDTH // 5, f"{i * n_rows // 5:,}"
        pen.line((x, bottom, x, bottom + 5), fill=_DIM)
        pen.text((x, bottom + 8), text, fill=_INK, font=font, anchor="mt" if i < 5 else "rt")
    x = _LEFT + record.n_prompt * _WIDTH // n_rows
    pen.line((x, _TOP - 6, x, bottom), fill=_INK)
    pen.text((x, _TOP - 8), "answer", fill=_DIM, font=font, anchor="rs")

    for i, share in enumerate((0.0, 1 / 16, 1 / 4, 9 / 16, 1.0)):
        left, top = _LEFT + 90 * i, bottom + 40
        pen.rectangle((left, top, left + 24, top + 16), fill=tuple(_blend(np.sqrt(np.array(share)))), outline=_DIM)
        pen.text((left + 30, top + 8), f"{100 * share:.0f} %", fill=_INK, font=font, anchor="lm")
    image.save(path, format="PNG")


def _printable(text: str) -> str:
    """Replace what the built-in font lacks."""
    return "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in text)
