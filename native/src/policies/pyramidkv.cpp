#include "llama-dge-select.h"
#include "llama-dge.h"

#include <algorithm>
#include <cmath>
#include <numeric>

// PyramidKV, arXiv 2406.02069: SnapKV's choice with a budget that falls linearly from the first layer to the last

static constexpr int32_t LLAMA_DGE_PYRAMID_BETA = 20;

// the published integers: their floor leaves more rows than the budget, by 40 % for a small one
static std::vector<int32_t> llama_dge_pyramid_reference(int32_t n_layer, int32_t n_past, int32_t n_cap) {
    int32_t lo = n_cap / LLAMA_DGE_PYRAMID_BETA;
    int32_t hi = 2 * n_cap - lo;

    if (hi >= n_past) {
        hi = n_past;
        lo = 2 * n_cap - hi;
    }

    const int32_t step = n_layer > 1 ? (hi - lo) / (n_layer - 1) : 0;

    std::vector<int32_t> caps(n_layer);
    for (int32_t i = 0; i < n_layer; ++i) {
        caps[i] = hi - i * step;
    }

    return caps;
}

// the same line, shared out so that the sum is n_cap*n_layer: floors, then the largest remainders, the first layers first
static std::vector<int32_t> llama_dge_pyramid_exact(int32_t n_layer, int32_t n_past, int32_t n_cap) {
    double lo = (double) n_cap / LLAMA_DGE_PYRAMID_BETA;
    double hi = 2.0 * n_cap - lo;

    if (hi >= n_past) {
        hi = n_past;
        lo = 2.0 * n_cap - hi;
    }

    std::vector<int32_t> caps(n_layer);
    std::vector<int64_t> rest(n_layer); // in millionths: noise of the floating point must not decide a tie

    int32_t sum = 0;
    for (int32_t i = 0; i < n_layer; ++i) {
        const double x = hi - i * (hi - lo) / (n_layer - 1);

        // a whole number that came out a hair too small must not lose one
        caps[i] = (int32_t) std::floor(x + 1e-9);
        rest[i] = std::llround(1e6 * (x - caps[i]));
        sum += caps[i];
    }

    std::vector<int32_t> order(n_layer);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rest[a] > rest[b]; });

    for (int32_t i = 0; sum < n_cap * n_layer; ++i) {
        caps[order[i % n_layer]]++;
        sum++;
    }

    return caps;
}

static std::vector<int32_t> llama_dge_pyramid_caps(const llama_dge_select_input & input) {
    const int32_t n_layer = input.layers.size();

    // a prompt this short has no room for a pyramid
    if (n_layer < 2 || input.n_prompt < 2 * input.n_cap) {
        return std::vector<int32_t>(n_layer, input.n_cap);
    }

    return input.params.layer_budgets == LLAMA_DGE_LAYER_BUDGETS_REFERENCE
                   ? llama_dge_pyramid_reference(n_layer, input.n_past, input.n_cap)
                   : llama_dge_pyramid_exact(n_layer, input.n_past, input.n_cap);
}

static llama_dge_rows llama_dge_select_pyramidkv(
        const llama_dge_select_input & input, const std::vector<float> & rank, int32_t n) {
    (void) input;

    return llama_dge_top_rows(rank, n);
}

const llama_dge_policy_impl llama_dge_policy_pyramidkv = {
    /*.name         =*/"pyramidkv",
    /*.needs_scores =*/true,
    /*.needs_sums   =*/false,
    /*.caps         =*/llama_dge_pyramid_caps,
    /*.select       =*/llama_dge_select_pyramidkv,
};
