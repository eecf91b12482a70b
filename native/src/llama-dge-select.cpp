#include "llama-dge-select.h"

#include "llama-dge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

const llama_dge_policy_impl * llama_dge_get_policy(int32_t policy) {
    switch (policy) {
        case LLAMA_DGE_POLICY_SNAPKV:       return &llama_dge_policy_snapkv;
        case LLAMA_DGE_POLICY_STREAMINGLLM: return &llama_dge_policy_streamingllm;
        default:                            return nullptr;
    }
}

bool llama_dge_needs_window_scores(const llama_dge_select_params & params) {
    return llama_dge_get_policy(params.policy)->needs_scores && params.scores != LLAMA_DGE_SCORES_DRAFT;
}

bool llama_dge_needs_draft_scores(const llama_dge_select_params & params) {
    return llama_dge_get_policy(params.policy)->needs_scores && params.scores != LLAMA_DGE_SCORES_POLICY;
}

void llama_dge_pool(std::vector<float> & data, int32_t pooling, int32_t kernel_size) {
    if (pooling == LLAMA_DGE_POOLING_NONE || kernel_size <= 1) {
        return;
    }

    const int64_t n    = data.size();
    const int64_t half = kernel_size/2;

    std::vector<float> res(n);

    for (int64_t i = 0; i < n; ++i) {
        const int64_t j0 = std::max<int64_t>(i - half, 0);
        const int64_t j1 = std::min<int64_t>(i + half, n - 1);

        if (pooling == LLAMA_DGE_POOLING_MAX) {
            // a NaN compares false and loses
            float best = -std::numeric_limits<float>::infinity();
            for (int64_t j = j0; j <= j1; ++j) {
                best = data[j] > best ? data[j] : best;
            }
            res[i] = best;
        } else {
            double sum = 0.0;
            for (int64_t j = j0; j <= j1; ++j) {
                sum += data[j];
            }
            res[i] = (float) (sum/kernel_size);
        }
    }

    data = std::move(res);
}

void llama_dge_normalize(std::vector<float> & data) {
    double sum = 0.0;
    for (const float x : data) {
        if (std::isfinite(x)) {
            sum += x;
        }
    }

    if (!(sum > 0.0)) {
        return;
    }

    for (float & x : data) {
        x = (float) (x/sum);
    }
}

llama_dge_rows llama_dge_top_rows(const std::vector<float> & scores, int32_t n) {
    llama_dge_rows rows(scores.size());
    std::iota(rows.begin(), rows.end(), 0);

    n = std::min<int32_t>(n, rows.size());

    // NaN would break the strict weak order
    const auto key = [&](int32_t i) {
        return std::isnan(scores[i]) ? -std::numeric_limits<float>::infinity() : scores[i];
    };

    std::nth_element(rows.begin(), rows.begin() + n, rows.end(), [&](int32_t a, int32_t b) {
        const float ka = key(a);
        const float kb = key(b);

        return ka != kb ? ka > kb : a > b;
    });

    rows.resize(n);
    std::sort(rows.begin(), rows.end());

    return rows;
}

// the score by which the rows of one head are ranked
static std::vector<float> llama_dge_rank(const llama_dge_select_input & input, const llama_dge_layer_scores & layer, int32_t ih) {
    const auto & params = input.params;

    const auto head = [&](const std::vector<float> & scores) {
        const auto begin = scores.begin() + (size_t) ih*input.n_past;
        return std::vector<float>(begin, begin + input.n_past);
    };

    std::vector<float> window;
    std::vector<float> draft;

    if (llama_dge_needs_window_scores(params)) {
        window = head(layer.window);
        llama_dge_pool(window, params.pooling, params.kernel_size);
    }

    if (llama_dge_needs_draft_scores(params)) {
        draft = head(layer.draft);

        // unpooled spikes of the draft would drown the pooled window, so "none" means "as the window" here
        const bool same = params.scores == LLAMA_DGE_SCORES_BOTH && params.draft_pooling == LLAMA_DGE_POOLING_NONE;
        llama_dge_pool(draft, same ? params.pooling : params.draft_pooling, params.kernel_size);
    }

    if (window.empty() || draft.empty()) {
        return window.empty() ? draft : window;
    }

    llama_dge_normalize(window);
    llama_dge_normalize(draft);

    for (size_t i = 0; i < window.size(); ++i) {
        window[i] += draft[i];
    }

    return window;
}

llama_dge_kept llama_dge_select(const llama_dge_select_input & input) {
    const auto * policy = llama_dge_get_policy(input.params.policy);

    llama_dge_kept kept(input.layers.size());

    for (size_t i = 0; i < input.layers.size(); ++i) {
        const auto & layer = input.layers[i];

        for (int32_t ih = 0; ih < layer.n_head_kv; ++ih) {
            kept[i].push_back(policy->select(input, llama_dge_rank(input, layer, ih)));
        }
    }

    return kept;
}
