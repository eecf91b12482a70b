#!/usr/bin/env python3
"""Run wrong variants of ATTN_SCORE's part of ggml-metal: the test has to see every one, and to pass what is right.

usage: metal_host_mutants.py SOURCE.cpp COMPILER ARGUMENT...   (arguments: options, the test's source, objects)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

BARRIER = "    ggml_metal_encoder_memory_barrier(enc);\n"

# what is wrong, text that occurs once in the source (twice: of the first and the third pass), what takes its place
MUTANTS = [
    ("none", "", ""),
    ("no barrier in front of the second pass", "// as of the whole rows\n" + BARRIER, ""),
    ("no barrier in front of the third pass", "// sums over the rows\n" + BARRIER, ""),
    ("the first two passes' memory overlaps", "bid_stat.offs += attn_score_part_size(op);", ""),
    ("memory starts in the result", "bid_dst.offs + ggml_nbytes(op), sizeof", "bid_dst.offs, sizeof"),
    ("a part less than there are", "enc, args.n_split, (int)", "enc, args.n_split - 1, (int)"),
    ("too little memory", "return attn_score_part_size(op) + attn_score_n_rows(op)", "return attn_score_n_rows(op)"),
    (
        "too little memory for few rows",
        "std::max<int64_t>(attn_score_n_rows(op),",
        "std::min<int64_t>(attn_score_n_rows(op),",
    ),
    ("too little threadgroup memory", "ATTN_SCORE_SHARED, 0)", "ATTN_SCORE_SHARED / 2, 0)"),
    ("heads for groups", "(int32_t) (q->ne[2] / k->ne[2]);", "(int32_t) q->ne[2];"),
    ("masks of one sequence for all", "mask ? mask->nb[3] : 0", "0"),
    ("the other kind of mask", "== GGML_TYPE_F16 ? 1 : 2;", "== GGML_TYPE_F16 ? 2 : 1;"),
    ("sinks in the place of weights", "set_buffer(enc, bid_weights, 3)", "set_buffer(enc, bid_sinks, 3)"),
    ("nothing in the place of weights", "weights ? attn_score_buffer(weights) : bid_q", "bid_q"),
    ("a soft cap of none", "GGML_ATTN_SCORE_PARAM_SOFTCAP);", "GGML_ATTN_SCORE_PARAM_SOFTCAP) * 0.0f;"),
    ("a tile of keys less", "enc, n_tiles, args.n_head_kv", "enc, n_tiles - 1, args.n_head_kv"),
    ("a name that no kernel has", '"kernel_attn_score_rows"', '"kernel_attn_score_row"'),
    ("a type less", "        case GGML_TYPE_Q4_1:\n", ""),
    ("in place", "if (op->src[GGML_ATTN_SCORE_SRC_ACC]) {", "if (false) {"),
    ("any head size", "q->ne[0] % 4 != 0 || ", ""),
    ("queries anywhere", "!attn_score_is_aligned(q, 16)", "!attn_score_is_aligned(q, 4)"),
    ("keys anywhere", "type == GGML_TYPE_F32 ? 16 : 2", "2"),
    ("any number of rows", "INT_MAX - ATTN_SCORE_THREADS", "INT64_MAX"),
    ("any number of keys", "k->ne[1] > INT_MAX - ATTN_SCORE_KEYS ||", ""),
    ("any device", "!props->has_simdgroup_reduction || ", ""),
    ("any threadgroup memory", " || props->max_theadgroup_memory_size < ATTN_SCORE_SHARED", ""),
    ("pipelines that are missing", "!pipeline.pipeline || ", ""),
    ("too few threads", "(pipeline) < ATTN_SCORE_THREADS", "(pipeline) < 32"),
    ("compiled each time", "return (*libraries)[dev] = lib;", "return lib;"),
]


def main() -> int:
    """Compile the test once, then each variant, and run it."""
    text, compiler, arguments, bad = Path(sys.argv[1]).read_text(encoding="ascii"), sys.argv[2], sys.argv[3:], 0
    at = next(i for i, argument in enumerate(arguments) if argument.endswith(".cpp"))
    options, test, objects = arguments[:at], arguments[at], arguments[at + 1 :]

    with tempfile.TemporaryDirectory() as folder:
        common, source, program = (str(Path(folder) / name) for name in ("test.o", "mutant.cpp", "mutant"))
        subprocess.run([compiler, *options, "-DFEW_CASES", "-c", test, "-o", common], check=True)
        for name, old, new in MUTANTS:
            if old and text.count(old) != (2 if "SHARED, 0" in old else 1):
                raise SystemExit(f"mutant '{name}' has to match {sys.argv[1]}: mend it in metal_host_mutants.py")
            Path(source).write_text(text.replace(old, new) if old else text, encoding="ascii")
            subprocess.run([compiler, *options, source, common, *objects, "-o", program], check=True)
            status = subprocess.run([program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
            seen = {0: "passes", 1: "result"}.get(status, "report")
            ok = (seen == "passes") == (name == "none")
            bad += not ok
            sys.stdout.write(f"{'ok  ' if ok else 'FAIL'} {name:50s} {seen}\n")
    sys.stdout.write(f"{len(MUTANTS) - 1} wrong variants, {bad} not seen or the right one refused\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
