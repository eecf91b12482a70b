#!/usr/bin/env python3
"""Turn Metal source into C++ that clang takes with metal-stub/: drop attributes, make vector constructors calls.

usage: msl2cpp.py SOURCE.metal OUT.cpp
"""

import re
import sys
from pathlib import Path

VECTOR = r"(?:float|half|int|uint|short|ushort|char|uchar)[234]"


def convert(text: str) -> str:
    """Return C++ with the same lines."""
    text = re.sub(r"\[\[[^\[\]]*\]\]", "", text)
    text = re.sub(rf"\b({VECTOR})\s*\((?!\s*[*&])", r"make_\1(", text)
    # an explicit instantiation
    return re.sub(r"^(\s*template\s+)kernel\b", r"\1", text, flags=re.MULTILINE)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    out = f'#line 1 "{source.name}"\n' + convert(source.read_text(encoding="ascii"))
    Path(sys.argv[2]).write_text(out, encoding="ascii")
