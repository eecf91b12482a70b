"""The table of all models in Markdown."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence

from . import checks
from .models import SEED, STDEV, arch_of
from .runner import FAILED, INSENSITIVE, PASSED, REFUSED, Row

_HEAD = """# Models

Written by `{command}` on {date}, with the llama.cpp of {upstream}. Do not edit.

llama.cpp's `test-llama-archs` writes a tiny model of each architecture with random weights (seed {seed}, standard
deviation {stdev}). Each is loaded in a process of its own, and is either refused with a reason or has to pass, with an
f16 cache, with flash attention off and, where the model allows it, on:

- **identity**: with eviction enabled and nothing to evict, the logits of a prompt of {n_prompt} tokens and {n_answer}
  more equal those without eviction, bit for bit;
- **mask equivalence**: after an eviction by `streamingllm` to {budget} entries the logits of {n_steps} tokens equal
  those of the full cache from which llama.cpp's own code removed the same entries. The NMSE is at most {bound:.0e}, and
  at most {ratio} of what a single row does that was to be removed and is there (*one row*). Below {floor:.0e} a
  difference is noise, and a model in which a row does not do more proves nothing: *insensitive*. *eviction* is
  the NMSE between that reference and the full cache;
- **scores**: `snapkv` with the scores `draft` and `both` keeps exactly budget and draft, window included, in every
  layer and head; two runs are equal bit for bit;
- **sequences**: two sequences in one stream and in two; an eviction of the first leaves the logits of the second
  bit-identical, and is the same eviction as without the second.

With random weights this shows whether an eviction is exact, not how good answers are.
"""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows)]


def _cells(row: Row) -> list[str]:
    layers = "" if row.n_evicted is None else f"{row.n_evicted} of {row.n_layer}"
    flash = {True: "yes", False: "no", None: ""}[row.flash_attn]
    return [
        row.model,
        row.result,
        layers,
        flash,
        _number(row.nmse),
        _number(row.one_row),
        _number(row.effect),
        _escaped(row.note),
    ]


def summary(rows: Sequence[Row]) -> str:
    """Counts in one line."""
    counts = Counter(row.result for row in rows)
    parts = [f"{counts[result]} {result}" for result in (PASSED, REFUSED, INSENSITIVE, FAILED)]
    archs = len({arch_of(row.model) for row in rows})
    return f"{len(rows)} models of {archs} architectures: {', '.join(parts)}"


def markdown(
    rows: Sequence[Row], *, date: datetime.date, command: str, upstream: str, archs: Sequence[str] = ()
) -> str:
    """Return the page. `archs` are all architectures there are: those without a model are listed."""
    head = _HEAD.format(
        command=command,
        date=date.isoformat(),
        upstream=upstream,
        seed=SEED,
        stdev=STDEV,
        n_prompt=checks.N_PROMPT,
        n_answer=checks.N_DRAFT + checks.N_STEPS,
        budget=checks.BUDGET,
        n_steps=checks.N_STEPS,
        bound=checks.NMSE_BOUND,
        ratio=checks.ROW_RATIO,
        floor=checks.NMSE_FLOOR,
    )
    lines = [head, f"{summary(rows)}.", ""]
    reasons = Counter(row.note for row in rows if row.result == REFUSED)
    if reasons:
        by_number = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        lines += [*_table(["refused because", "models"], [[_escaped(why), str(n)] for why, n in by_number]), ""]
    columns = ["model", "result", "layers evicted", "flash attention", "NMSE", "one row", "eviction", "note"]
    lines += _table(columns, [_cells(row) for row in sorted(rows, key=lambda row: row.model)])
    missing = sorted(set(archs) - {arch_of(row.model) for row in rows})
    if missing:
        lines += ["", f"No model is written of: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"
