"""``python -m arch_sweep``: is every architecture evicted exactly, or refused with a reason? See docs/models.md."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from . import models
from .runner import FAILED, Row, check_model
from .table import markdown, summary


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m arch_sweep", description=__doc__)
    p.add_argument("--folder", type=Path, default=models.ROOT / "build" / "archs", help="of the models (build/archs)")
    p.add_argument("--keep", action="store_true", help="take the models that are in the folder, write none")
    p.add_argument("--only", nargs="+", metavar="ARCH", help="these architectures alone")
    p.add_argument("--table", type=Path, metavar="FILE", help="write the table to this Markdown file")
    p.add_argument("--command", default="make sweep", help="what the table says it was made by (make sweep)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.keep:
        paths = sorted(args.folder.glob("*.gguf"))
        paths = [path for path in paths if not args.only or models.arch_of(path.stem) in args.only]
    else:
        paths = models.write_models(args.folder, args.only)
    if not paths:
        print(f"no models in {args.folder}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for path in paths:
        row = check_model(path)
        rows.append(row)
        print(f"{row.model:28} {row.result:12} {row.note}", flush=True)
    print(summary(rows))
    if args.table:
        upstream = (models.ROOT / "patches" / "UPSTREAM").read_text(encoding="utf-8").split()[0].replace("==", " ")
        archs = models.all_archs() if not args.only else ()
        page = markdown(rows, date=datetime.date.today(), command=args.command, upstream=upstream, archs=archs)
        args.table.write_text(page, encoding="utf-8")
    return 1 if any(row.result == FAILED for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
