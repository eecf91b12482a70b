// The CUDA kernels of GGML_OP_ATTN_SCORE, run on the CPU, against double precision; threads in order, reversed, shuffled.
// Those in f32, then those for matrix units.

#include "cuda-shim-wmma.h"

#include "attn-score-cases.h"

#include "../../cuda/attn-score-mma.cuh"

#define RUN_CUDA_PLAIN
#define RUN_CUDA_MMA
#include "run-cuda.inc"

// halves come back as they were, and what lies between two of them goes to the nearest
static int check_half() {
    int n_fail = 0;
    for (unsigned i = 0; i < 0x7c00; ++i) {
        const half  h = { (uint16_t) i };
        const float x = __half2float(h);
        const float y = i + 1 < 0x7c00 ? __half2float({ (uint16_t) (i + 1) }) : 65536.0f;

        const unsigned even = i % 2 ? i + 1 : i;
        n_fail += __float2half_rn(x).bits != i || __float2half_rn(-x).bits != (i | 0x8000);
        n_fail += __float2half_rn((x + y) / 2).bits != even;
        n_fail += __float2half_rn(nextafterf((x + y) / 2, 0.0f)).bits != i;
        n_fail += __float2half_rn(nextafterf((x + y) / 2, INFINITY)).bits != i + 1;
    }
    n_fail += __float2half_rn(INFINITY).bits != 0x7c00 || __float2half_rn(1e30f).bits != 0x7c00;
    if (n_fail) {
        printf("FAIL %d conversions of the stand-in to half\n", n_fail);
    }
    return n_fail;
}

static int check(bool mma) {
    int    n_fail = 0;
    int    n_run  = 0;
    double worst  = 0;

#ifdef CUDA_SHIM_THREADS
    const auto                  cases  = attn_score_cases_small();
    const std::vector<unsigned> orders = { 0 }; // the operating system's
#else
    const auto                  cases  = attn_score_cases();
    const std::vector<unsigned> orders = { 0, 1, 2 };
#endif

    for (const auto & c : cases) {
        if (mma && (c.type == GGML_TYPE_F32 || c.type == GGML_TYPE_BF16)) {
            continue;
        }
        n_run++;
        const attn_score_problem p = attn_score_make(c, 1);
        std::vector<float>       first;
        for (unsigned order : orders) {
            shim::order       = order;
            const auto   got  = run(p, mma);
            const double err  = attn_score_error(p, got);
            const bool   same = first.empty() || memcmp(first.data(), got.data(), got.size() * sizeof(float)) == 0;
            first             = got;
            worst             = std::max(worst, err);
            if (!(err <= ATTN_SCORE_ERROR_MAX) || !same) {
                printf("FAIL %s, order %u: error %.2e%s\n", c.name().c_str(), order, err,
                        same ? "" : ", differs from another order");
                n_fail++;
            }
        }
    }
    printf("%s: %d cases, %zu orders of threads: largest relative error %.2e, %d failed\n",
            mma ? "matrix units" : "f32", n_run, orders.size(), worst, n_fail);
    return n_fail;
}

int main() {
    const int n_fail = check_half() + check(false) + check(true);
    return n_fail != 0;
}
