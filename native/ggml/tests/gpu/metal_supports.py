#!/usr/bin/env python3
"""Take what a device supports out of ggml-metal's Objective-C: that function is C, and needs no Mac.

usage: metal_supports.py ggml-metal-device.m OUT.c
"""

import sys
from pathlib import Path

# the one member that it looks at
DEVICE = """
struct ggml_metal_device {
    struct ggml_metal_device_props props;
};

"""


def extract(text: str) -> str:
    """Return the quoted imports, the function and its helper."""
    head = text[: text.index("#include <Foundation/Foundation.h>")].replace("#import", "#include")
    helper = text.index("static bool ggml_metal_supports_mul_mat_op(")
    start = text.index("\nbool ggml_metal_device_supports_op(", helper)
    return head + DEVICE + text[helper : text.index("\n}\n", start) + 3]


if __name__ == "__main__":
    source = Path(sys.argv[1])
    Path(sys.argv[2]).write_text(extract(source.read_text(encoding="utf-8")), encoding="utf-8")
