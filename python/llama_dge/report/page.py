"""One self-contained HTML page of a record: no request leaves it, and it needs nothing but a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .record import Choice, Record

_FOLDER = Path(__file__).parent
_MIB = 2**20


def pack(positions: npt.NDArray[np.integer[Any]], n: int) -> str:
    """Write positions in [0, n) as text, in the shorter of two ways.

    Parameters
    ----------
    positions
        Ascending.
    n
        Positions that there are.

    Returns
    -------
    str
        Base64 behind one letter. "g": distances to the position before, the first one's to -1, less one, in groups of
        seven bits, lowest first, the eighth set where another follows. "b": one bit per position, lowest first.
    """
    if len(positions) > n // 8:
        bits = np.zeros(n, dtype=np.uint8)
        bits[positions] = 1
        return "b" + base64.b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()
    out = bytearray()
    for gap in np.diff(positions, prepend=-1) - 1:
        value = int(gap)
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
    return "g" + base64.b64encode(bytes(out)).decode()


def _packed(record: Record) -> list[dict[str, Any]]:
    """Choices: of the first one the positions, of each other those that came or left since the one before."""
    n = len(record.tokens)
    packed = []
    before: Choice | None = None
    for choice in record.choices:
        sets = []
        for i, layer in enumerate(choice.kept):
            for j, positions in enumerate(layer):
                change = positions if before is None else np.setxor1d(positions, before.kept[i][j])
                sets.append(pack(change, n))
        packed.append({"number": choice.number, "rows": choice.n_rows, "window": list(choice.window), "sets": sets})
        before = choice
    return packed


def _embedded(data: Any) -> str:
    """Write JSON that nothing in it can end the script element or be taken for markup."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _table(caption: str, rows: Iterable[tuple[str, object]]) -> str:
    cells = "\n".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in rows
    )
    return f"<table><caption>{html.escape(caption)}</caption>\n{cells}\n</table>"


def _mib(n: float) -> str:
    return f"{n / _MIB:,.1f} MiB"


def _facts(record: Record) -> Iterator[tuple[str, object]]:
    stats = record.stats
    yield "model", record.model
    if record.source is not None:
        yield "document", record.source
    if record.question is not None:
        yield "question", record.question
    yield "prompt", f"{record.n_prompt:,} tokens"
    if record.why_full is not None or stats is None:
        yield "entries kept", f"all: {record.why_full}"
        return
    yield "entries per layer and KV head", f"{stats.rows_before:,} before the eviction, {stats.rows_after:,} after it"
    yield "(layer, KV head) pairs", f"{sum(record.heads):,} in {len(record.layers)} layers"
    yield "draft", f"{record.config.draft_tokens} tokens, {record.config.draft_tokens - 1} of them entries"
    yield "eviction", f"{stats.seconds:.3f} s"
    if stats.n_recalls or stats.n_checks:
        yield "recalls", f"{stats.n_recalls:,}, {stats.rows_moved:,} entries moved"


def _memory(record: Record) -> Iterator[tuple[str, object]]:
    stats = record.stats
    if stats is not None and stats.state == "evicted":
        yield "K and V of these entries", f"{_mib(stats.bytes_before)} → {_mib(stats.bytes_after)}"
    for name, field in (
        ("cache", "kv"),
        ("other caches", "other"),
        ("buffers of the graphs", "compute"),
        ("eviction", "dge"),
        ("host copy", "parked"),
        ("weights", "weights"),
    ):
        before, after = (getattr(memory, field) for memory in (record.memory_before, record.memory_after))
        if before or after:
            yield name, f"{_mib(before)} → {_mib(after)}"


def render(record: Record) -> str:
    """Return the page.

    Parameters
    ----------
    record
        What it shows.
    """
    style, page, *scripts = (
        (_FOLDER / name).read_text(encoding="utf-8").strip()
        for name in ("page.css", "page.html", "page.js", "page-maps.js")
    )
    script = "\n\n".join(scripts)
    head = record.head()
    data = {
        "tokens": record.tokens,
        "nPrompt": record.n_prompt,
        "nSinks": record.n_sinks,
        "layers": record.layers,
        "heads": record.heads,
        "choices": _packed(record),
    }
    settings = ((name, value) for name, value in head["settings"].items() if value is not None)
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    parts = {
        "TITLE": html.escape(f"{record.source or 'prompt'}: entries kept by {record.model}"),
        "DIGEST": digest,
        "STYLE": style,
        "FACTS": _table("Eviction", _facts(record)),
        "MEMORY": _table("Memory before the eviction → at the end", _memory(record)),
        "SETTINGS": _table("Settings", [*settings, *head["versions"].items()]),
        "ANSWER": html.escape(record.answer),
        "CUT": "cut" if record.choices else "full",
        "WHY": html.escape(record.why_full or ""),
        "DATA": _embedded(data),
        "SCRIPT": script,
    }
    # split once, so that nothing in a part is taken for a place
    pieces = page.split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces)) + "\n"
