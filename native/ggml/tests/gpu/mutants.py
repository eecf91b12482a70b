#!/usr/bin/env python3
"""Write wrong variants of the CUDA kernels, and a program that runs each of them: the tests have to see every one.

usage: mutants.py KERNELS.cuh OUT_DIR results|races
"""

from __future__ import annotations

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
    """

    name: str
    old: str
    new: str


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
]

HEAD = """// written by mutants.py
#include "cuda-shim.h"
#include "attn-score-cases.h"
#include <sys/wait.h>
#include <unistd.h>
#define RUN_CUDA_FEW_TYPES
"""

MAIN = """
struct variant {
    const char * name;
    std::vector<float> (*run)(const attn_score_problem &);
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
            if (!(attn_score_error(p, v.run(p)) <= ATTN_SCORE_ERROR_MAX)) {
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
    int n_fail = 0;
    for (const auto & v : variants) {
        std::string seen;
        for (unsigned order = 0; order < N_ORDERS; ++order) {
            const int res = judge(v, order);
            seen += res == 0 ? " -" : res == 1 ? " result" : " report";
        }
        const bool right = &v == &variants[0];
        const bool ok    = right == (seen.find_first_of("er") == std::string::npos);
        printf("%s %-45s%s\\n", ok ? "ok  " : "FAIL", v.name, seen.c_str());
        n_fail += !ok;
    }
    printf("%d wrong kernels, %d not seen or the right one refused\\n", (int) variants.size() - 1, n_fail);
    return n_fail != 0;
}
"""


def main() -> None:
    """Write sources of one of the two programs."""
    source_path, out, which = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    source = source_path.read_text(encoding="ascii").replace("#pragma once\n", "")
    mutants, orders = (RESULTS, 3) if which == "results" else (RACES, 1)

    out.mkdir(parents=True, exist_ok=True)
    text, table = [HEAD], []
    for i, mutant in enumerate([Mutant("none", "", ""), *mutants]):
        if i and source.count(mutant.old) != 1:
            raise SystemExit(f"mutant '{mutant.name}' has to match {source_path} once: mend it in mutants.py")
        changed = source.replace(mutant.old, mutant.new) if i else source
        (out / f"{which}{i}.cuh").write_text(changed, encoding="ascii")
        text.append(f'namespace m{i} {{\n#include "{which}{i}.cuh"\n#include "run-cuda.inc"\n}}\n')
        table.append(f'    {{ "{mutant.name}", m{i}::run }},\n')
    variants = "static const std::vector<struct variant> variants = {\n" + "".join(table) + "};\n"
    body = MAIN.replace("N_ORDERS", str(orders)).replace("\n// 0 where", "\n" + variants + "\n// 0 where", 1)
    (out / f"mutants-{which}.cpp").write_text("".join(text) + body, encoding="ascii")


if __name__ == "__main__":
    main()
