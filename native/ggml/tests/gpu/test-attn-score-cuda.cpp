// The CUDA kernels of GGML_OP_ATTN_SCORE, run on the CPU, against double precision; threads in order, reversed, shuffled.

#include "cuda-shim.h"

#include "attn-score-cases.h"

#include "../../cuda/attn-score-kernels.cuh"

#include "run-cuda.inc"

int main() {
    int    n_fail = 0;
    double worst  = 0;

#ifdef CUDA_SHIM_THREADS
    const auto                  cases  = attn_score_cases_small();
    const std::vector<unsigned> orders = { 0 }; // the operating system's
#else
    const auto                  cases  = attn_score_cases();
    const std::vector<unsigned> orders = { 0, 1, 2 };
#endif

    for (const auto & c : cases) {
        const attn_score_problem p = attn_score_make(c, 1);
        std::vector<float>       first;
        for (unsigned order : orders) {
            shim::order       = order;
            const auto   got  = run(p);
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
    printf("%zu cases, %zu orders of threads: largest relative error %.2e, %d failed\n", cases.size(), orders.size(),
            worst, n_fail);
    return n_fail != 0;
}
