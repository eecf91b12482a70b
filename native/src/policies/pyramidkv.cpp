#include "llama-dge-policy.h"
#include "llama-dge.h"

#include <algorithm>
#include <cmath>
#include <numeric>

// PyramidKV, arXiv 2406.02069: SnapKV's score with a budget that falls linearly from the first layer to the last

static constexpr int32_t LLAMA_DGE_PYRAMID_BETA = 20;

// the published integers: their floor keeps more than the budget, 40 % more for a small one
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

// the same line with the sum n_cap*n_layer: floors, then the largest remainders are rounded up, first layers first
static std::vector<int32_t> llama_dge_pyramid_exact(int32_t n_layer, int32_t n_past, int32_t n_cap) {
    double lo = (double) n_cap / LLAMA_DGE_PYRAMID_BETA;
    double hi = 2.0 * n_cap - lo;

    if (hi >= n_past) {
        hi = n_past;
        lo = 2.0 * n_cap - hi;
    }

    std::vector<int32_t> caps(n_layer);
    std::vector<int64_t> rest(n_layer); // in millionths: rounding noise must not decide a tie

    int32_t sum = 0;
    for (int32_t i = 0; i < n_layer; ++i) {
        const double x = hi - i * (hi - lo) / (n_layer - 1);

        // rounding noise below a whole number must not lose one
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

static const llama_dge_policy llama_dge_pyramidkv = {
    /*.name        =*/"pyramidkv",
    /*.summary     =*/"scores as snapkv, with more entries in the first layers than in the last",
    /*.paper       =*/"2406.02069",
    /*.scorer      =*/LLAMA_DGE_SCORER_WINDOW,
    /*.auto_scores =*/LLAMA_DGE_SCORES_DRAFT,
    /*.pools       =*/true,
    /*.rank        =*/nullptr,
    /*.caps        =*/llama_dge_pyramid_caps,
    /*.n_fixed     =*/nullptr,
};

LLAMA_DGE_REGISTER(llama_dge_pyramidkv);
