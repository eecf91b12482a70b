#!/usr/bin/env python3
"""Write wrong variants of the CUDA kernels, and a program that runs each of them: the tests have to see every one.

usage: mutants.py FOLDER_OF_KERNELS OUT_DIR results|mma|races
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """One wrong kernel.

    Parameters
    ----------
    name
        what is wrong
    old, new
        text that occurs once in the source, and what takes its place
    mma
        the source is attn-score-mma.cuh, not attn-score-kernels.cuh
    """

    name: str
    old: str
    new: str
    mma: bool = False


# seen by a result, a sanitizer's report or an abort, in one of the orders of threads
RESULTS = [
    Mutant("no barrier before a chunk is overwritten", "__syncthreads(); // until the chunk before has been read", ""),
    Mutant("no barrier before a chunk is read", "__syncthreads(); // until the chunk is there", ""),
    Mutant("no barrier before column sums are read", "= col[c];\n    }\n    __syncthreads();", "= col[c];\n    }"),
    Mutant(
        "a barrier for half of the block",
        "__syncthreads(); // until the chunk is there",
        "if (threadIdx.x < 64) { __syncthreads(); }",
    ),
    Mutant(
        "two barriers where there is one",
        "__syncthreads(); // until the chunk is there",
        "if (threadIdx.x < 64) { __syncthreads(); } else {\n __syncthreads(); }",
    ),
    Mutant(
        "a group without rows leaves early",
        "    // each thread's own keys\n",
        "    if (row0 + (int) threadIdx.x / ATTN_SCORE_LANES * NR >= n_rows) { return; }\n",
    ),
    Mutant("a shuffle short", "offset = ATTN_SCORE_LANES / 2;", "offset = ATTN_SCORE_LANES / 4;"),
    Mutant("a shuffle too many", "offset = ATTN_SCORE_LANES / 2;", "offset = ATTN_SCORE_LANES;"),
    Mutant(
        "a shuffle of half the width",
        "row_sum[r], offset, ATTN_SCORE_LANES)",
        "row_sum[r], offset, ATTN_SCORE_LANES / 2)",
    ),
    Mutant("a key too many is read", "key0 + key < a.n_kv && i < a.d", "key0 + key <= a.n_kv && i < a.d"),
    Mutant("a row too many is read", "row < n_rows && i < a.d", "row <= n_rows && i < a.d"),
    Mutant("the end of a short head", "key0 + key < a.n_kv && i < a.d", "key0 + key < a.n_kv"),
    Mutant(
        "a tile's rest counts",
        "row < n_rows && key < a.n_kv ? attn_score_logit(a, x[r][c], row, key, seq)",
        "row < n_rows ? attn_score_logit(a, x[r][c], row, key < a.n_kv ? key : 0, seq)",
    ),
    Mutant("the result has a key too many", "< ATTN_SCORE_KEYS && key < a.n_kv", "< ATTN_SCORE_KEYS && key <= a.n_kv"),
    Mutant("a row too many is combined", "if (all >= n_rows", "if (all > n_rows"),
    Mutant("a tile is left out", "(blockIdx.x + 1) / a.n_split)", "(blockIdx.x + 1) / a.n_split) - blockIdx.x"),
    Mutant("what masked keys hold counts", "if (m == -INFINITY) {\n            return -INFINITY;\n        }", ""),
    Mutant(
        "a row that sees nothing",
        "if (m == -INFINITY || weight == 0.0f) {",
        "if (weight == 0.0f) {",
    ),
    Mutant("a query of weight 0 counts", "if (s.y != 0.0f) {", "{"),
    Mutant(
        "an empty half", "if (m > -INFINITY) {\n                row_sum[r] = row_sum[r]", "{ row_sum[r] = row_sum[r]"
    ),
    Mutant("the sink of another head", "a.n_group + row / a.n_q;", "a.n_group + row % a.n_group;"),
    Mutant("the weight of another row", "a.weights[row % a.n_q]", "a.weights[row / a.n_group % a.n_q]"),
    Mutant("the mask of another sequence", "a.mask + seq * a.nbm3", "a.mask + seq / 2 * a.nbm3"),
    Mutant("the cap after the mask", "x *= a.scale;", "x = x * a.scale + m;\n    m = 0.0f;"),
]

# the same, of the kernels with matrix units
MMA = [
    Mutant(
        "no barrier before scales are overwritten", "__syncthreads(); // until the scales before have been read", ""
    ),
    Mutant(
        "no barrier before a chunk is overwritten", "__syncthreads(); // until the products or the chunk before", "//"
    ),
    Mutant("no barrier before a chunk is read", "__syncthreads(); // until the chunk is there", ""),
    Mutant("no barrier before products are written", "__syncthreads(); // until the last chunk has been read", ""),
    Mutant("no barrier before products are read", "__syncthreads(); // until the products are there", ""),
    Mutant(
        "a barrier for half of the block",
        "__syncthreads(); // until the products are there",
        "if (warp < 2) { __syncthreads(); }",
    ),
    Mutant("queries of one half", "wmma::mma_sync(rest[j], q_low, k_part, rest[j]);", ""),
    Mutant("keys of one half", "wmma::mma_sync(rest[j], q_high, k_part, rest[j]);", ""),
    Mutant("low halves are lost", "sum[j].x[t] += rest[j].x[t];", ""),
    Mutant("an element of another place", "rest[j].x[t];", "rest[j].x[t ^ 1];"),
    Mutant("sums of high halves start at the rest", "wmma::fill_fragment(sum[j], 0.0f);", ""),
    Mutant("the low half of a number is 0", "low            = __floats2half2_rn(x - h.x, y - h.y);", "low = half2();"),
    Mutant("nothing is scaled", "e     = e < 15 ? 15 : e > 254 ? 254 : e;", "e = 141;"),
    Mutant("keys are not scaled", "return attn_score_power(res);", "return make_float2(1.0f, 1.0f);"),
    Mutant("keys are scaled by their first block", "i < d / 32; ++i", "i < 1; ++i"),
    Mutant("the scale of a query stays", "+ key] * scale_q *", "+ key] *"),
    Mutant("the scale of a key stays", "(SPLIT ? scale[key].y : 1.0f)", "1.0f"),
    Mutant("the scale of another head", "a.q_scale[pad0 + row]", "a.q_scale[row0 + row]"),
    Mutant("the maximum of half a query", "offset = ATTN_SCORE_WARP / 2;", "offset = ATTN_SCORE_WARP / 4;"),
    Mutant(
        "a stride that is not aligned", "k_part, p, ATTN_SCORE_MMA_STRIDE_K)", "k_part, p, ATTN_SCORE_MMA_STRIDE_K + 4)"
    ),
    Mutant("a stride without the gap", "k_part, p, ATTN_SCORE_MMA_STRIDE_K)", "k_part, p, 64)"),
    Mutant("products with another stride", "ATTN_SCORE_MMA_STRIDE_X, wmma::", "ATTN_SCORE_KEYS, wmma::"),
    Mutant("products the other way round", "wmma::mem_row_major", "wmma::mem_col_major"),
    Mutant("keys the other way round", "half, wmma::col_major>", "half, wmma::row_major>"),
    Mutant("the low half of the row before", "q_high, q + i0 + i, 2 * a.d_pad", "q_high, q + i0 + i, a.d_pad"),
    Mutant("half of a warp stores", "wmma::store_matrix_sync(", "if (threadIdx.x % 32 < 16) wmma::store_matrix_sync("),
    Mutant("all warps have the same rows", "warp % N * M;", "0;"),
    Mutant("warps share keys", "warp / N * N * M;", "warp / N * M;"),
    Mutant("the end of a head is left out", "if (i0 + i >= a.d) {", "if (i0 + i + M > a.d) {"),
    Mutant("a key too many is read", "if (key0 + key < a.n_kv && i0", "if (key0 + key <= a.n_kv && i0"),
    Mutant("the end of a short key", "if (key0 + key < a.n_kv && i0 + i < a.d) {", "if (key0 + key < a.n_kv) {"),
    Mutant("the scale of a key too many", "key < a.n_kv ? K::scale", "key <= a.n_kv ? K::scale"),
    Mutant("the end of a short query", "const bool is_in = 2 * i < n;", "const bool is_in = n > 0;"),
    Mutant("a row too many is read", "row < n_rows ? a.d : 0", "row <= n_rows ? a.d : 0"),
    Mutant("the query of another head", "head_kv * a.n_group + row / a.n_q", "head_kv * a.n_group + row % a.n_group"),
    Mutant(
        "rows are not padded",
        "a.n_rows_pad = (a.n_q * a.n_group + n_tile - 1) / n_tile * n_tile",
        "a.n_rows_pad = a.n_q * a.n_group",
    ),
    Mutant("heads are not padded", "(a.d + ATTN_SCORE_MMA - 1) / ATTN_SCORE_MMA * ATTN_SCORE_MMA", "a.d"),
]
MMA = [mutant._replace(mma=True) for mutant in MMA]

# right in every order of fibers, since what they race for is equal
RACES = [
    Mutant(
        "all lanes write the same row",
        "if (threadIdx.x % ATTN_SCORE_LANES == 0 && row < n_rows) {",
        "if (row < n_rows) {",
    ),
    Mutant(
        "two threads write the same element",
        "* NR * ATTN_SCORE_CHUNK; t += ATTN_SCORE_THREADS",
        "* NR * ATTN_SCORE_CHUNK; t += ATTN_SCORE_THREADS / 2",
    ),
    Mutant("all lanes write the scale of a query", "if (lane == 0) {", "{", mma=True),
    Mutant("two threads write the same key", "4; t += ATTN_SCORE_THREADS", "4; t += ATTN_SCORE_THREADS / 2", mma=True),
]

SETS = {"results": (RESULTS, 3), "mma": (MMA, 3), "races": (RACES, 1)}

HEAD = """// written by mutants.py
#include "cuda-shim-wmma.h"
#include "attn-score-cases.h"
#include "attn-score-types.cuh"
#include <sys/wait.h>
#include <unistd.h>
#define RUN_CUDA_FEW_TYPES
"""

MAIN = """
struct variant {
    const char * name;
    std::vector<float> (*run)(const attn_score_problem &, bool);
    bool mma;
};

// 0 where all is right; each in a process of its own, which may abort
static int judge(const variant & v, unsigned order) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        FILE * log = freopen("/dev/null", "w", stderr);
        (void) log;
        shim::order = order;
        for (const auto & c : attn_score_cases_small()) {
            const attn_score_problem p = attn_score_make(c, 1);
            if (!(attn_score_error(p, v.run(p, v.mma)) <= ATTN_SCORE_ERROR_MAX)) {
                _exit(1);
            }
        }
        exit(0); // by the sanitizer's own exit code where it reported
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}

int main() {
    int n_fail = 0, n_right = 0;
    for (const auto & v : variants) {
        std::string seen;
        // up to the first order in which it is seen
        for (unsigned order = 0; order < N_ORDERS && seen.find_first_of("er") == std::string::npos; ++order) {
            const int res = judge(v, order);
            seen += res == 0 ? " -" : res == 1 ? " result" : " report";
        }
        const bool right = strcmp(v.name, "none") == 0;
        const bool ok    = right == (seen.find_first_of("er") == std::string::npos);
        printf("%s %-45s%s\\n", ok ? "ok  " : "FAIL", v.name, seen.c_str());
        n_fail += !ok;
        n_right += right;
    }
    printf("%d wrong kernels, %d not seen or a right one refused\\n", (int) variants.size() - n_right, n_fail);
    return n_fail != 0;
}
"""


def read(path: Path) -> str:
    """Return a source that can be included in a namespace: what it includes of ours is there already."""
    text = path.read_text(encoding="ascii").replace("#pragma once\n", "")
    return re.sub(r'#include "attn-score-.*\n', "", text)


def main() -> None:
    """Write sources of one of the programs."""
    folder, out, which = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    plain, mma = (read(folder / f"attn-score-{name}.cuh") for name in ("kernels", "mma"))
    mutants, orders = SETS[which]
    kinds = sorted({mutant.mma for mutant in mutants})

    out.mkdir(parents=True, exist_ok=True)
    text, table = [HEAD], []
    for i, mutant in enumerate([*(Mutant("none", "", "", kind) for kind in kinds), *mutants]):
        source = mma if mutant.mma else plain
        if mutant.old and source.count(mutant.old) != 1:
            raise SystemExit(f"mutant '{mutant.name}' has to match its source once: mend it in mutants.py")
        changed = source.replace(mutant.old, mutant.new) if mutant.old else source
        (out / f"{which}{i}.cuh").write_text(plain + changed if mutant.mma else changed, encoding="ascii")
        kind = "RUN_CUDA_MMA" if mutant.mma else "RUN_CUDA_PLAIN"
        text.append(f'#define {kind}\nnamespace m{i} {{\n#include "{which}{i}.cuh"\n#include "run-cuda.inc"\n}}\n')
        text.append(f"#undef {kind}\n")
        table.append(f'    {{ "{mutant.name}", m{i}::run, {str(mutant.mma).lower()} }},\n')
    variants = "static const std::vector<struct variant> variants = {\n" + "".join(table) + "};\n"
    body = MAIN.replace("N_ORDERS", str(orders)).replace("\n// 0 where", "\n" + variants + "\n// 0 where", 1)
    (out / f"mutants-{which}.cpp").write_text("".join(text) + body, encoding="ascii")


if __name__ == "__main__":
    main()
