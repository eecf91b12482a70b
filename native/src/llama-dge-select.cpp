#include "llama-dge-select.h"

#include "llama-dge.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

const llama_dge_policy_impl * llama_dge_get_policy(int32_t policy) {
    switch (policy) {
        case LLAMA_DGE_POLICY_SNAPKV:       return &llama_dge_policy_snapkv;
        case LLAMA_DGE_POLICY_STREAMINGLLM: return &llama_dge_policy_streamingllm;
        case LLAMA_DGE_POLICY_PYRAMIDKV:    return &llama_dge_policy_pyramidkv;
        case LLAMA_DGE_POLICY_H2O:          return &llama_dge_policy_h2o;
        case LLAMA_DGE_POLICY_CUSTOM:       return &llama_dge_policy_custom;
        default:                            return nullptr;
    }
}

static bool llama_dge_needs_own_scores(const llama_dge_select_params & params) {
    return llama_dge_get_policy(params.policy)->needs_scores && params.scores != LLAMA_DGE_SCORES_DRAFT;
}

bool llama_dge_needs_window_scores(const llama_dge_select_params & params) {
    return llama_dge_needs_own_scores(params) && !llama_dge_get_policy(params.policy)->needs_sums;
}

bool llama_dge_needs_sums(const llama_dge_select_params & params) {
    return llama_dge_needs_own_scores(params) && llama_dge_get_policy(params.policy)->needs_sums;
}

bool llama_dge_needs_draft_scores(const llama_dge_select_params & params) {
    return llama_dge_get_policy(params.policy)->needs_scores && params.scores != LLAMA_DGE_SCORES_POLICY;
}

void llama_dge_pool(std::vector<float> & data, int32_t pooling, int32_t kernel_size) {
    if (pooling == LLAMA_DGE_POOLING_NONE || kernel_size <= 1) {
        return;
    }

    const int64_t n    = data.size();
    const int64_t half = std::min<int64_t>(kernel_size / 2, n);

    const bool  is_max = pooling == LLAMA_DGE_POOLING_MAX;
    const float none   = is_max ? -std::numeric_limits<float>::infinity() : 0.0f;

    // one shift of the whole row after the other: these loops vectorize
    std::vector<float> padded(n + 2 * half, none);
    std::copy(data.begin(), data.end(), padded.begin() + half);

    std::fill(data.begin(), data.end(), none);

    for (int64_t j = 0; j < 2 * half + 1; ++j) {
        const float * src = padded.data() + j;
        float *       dst = data.data();

        if (is_max) {
            for (int64_t i = 0; i < n; ++i) {
                dst[i] = src[i] > dst[i] ? src[i] : dst[i]; // a NaN compares false and loses
            }
        } else {
            for (int64_t i = 0; i < n; ++i) {
                dst[i] += src[i];
            }
        }
    }

    if (!is_max) {
        for (float & x : data) {
            x /= kernel_size;
        }
    }
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
        x = (float) (x / sum);
    }
}

// a NaN has no place in an order
static float llama_dge_key(float x) {
    return std::isnan(x) ? -std::numeric_limits<float>::infinity() : x;
}

// The n-th best score decides who is among the n best: all above it, and of those that are equal the last n_equal.
struct llama_dge_threshold {
    float   score;
    int32_t n_equal;
};

// order: the keys of all rows, is shuffled; 1 <= n <= rows
static llama_dge_threshold llama_dge_find_threshold(std::vector<float> & order, int32_t n) {
    std::nth_element(order.begin(), order.begin() + (n - 1), order.end(), std::greater<float>());

    llama_dge_threshold res = { order[n - 1], 0 };

    // nth_element leaves the n best in front
    for (int32_t i = 0; i < n; ++i) {
        res.n_equal += order[i] == res.score;
    }

    return res;
}

llama_dge_rows llama_dge_top_rows(const std::vector<float> & scores, int32_t n) {
    const int32_t n_all = scores.size();

    n = std::min(n, n_all);

    llama_dge_rows rows;
    if (n <= 0) {
        return rows;
    }

    std::vector<float> order(n_all);
    std::transform(scores.begin(), scores.end(), order.begin(), llama_dge_key);

    auto last = llama_dge_find_threshold(order, n);

    rows.reserve(n);

    for (int32_t i = n_all - 1; i >= 0; --i) {
        const float x = llama_dge_key(scores[i]);

        if (x > last.score || (x == last.score && last.n_equal-- > 0)) {
            rows.push_back(i);
        }
    }

    std::reverse(rows.begin(), rows.end());

    return rows;
}

// the score by which the rows of one head are ranked
static std::vector<float> llama_dge_rank(
        const llama_dge_select_input & input, const llama_dge_layer_scores & layer, int32_t ih) {
    const auto & params = input.params;

    const auto head = [&](const std::vector<float> & scores) {
        const auto begin = scores.begin() + (size_t) ih * input.n_past;
        return std::vector<float>(begin, begin + input.n_past);
    };

    std::vector<float> own;
    std::vector<float> draft;

    if (llama_dge_needs_own_scores(params)) {
        own = head(layer.window);

        // sums over the whole prompt are smooth already, and H2O does not pool them
        if (!llama_dge_needs_sums(params)) {
            llama_dge_pool(own, params.pooling, params.kernel_size);
        }
    }

    if (llama_dge_needs_draft_scores(params)) {
        draft = head(layer.draft);

        // unpooled spikes of the draft would drown the pooled window, so "none" means "as the window" here
        const bool same = params.scores == LLAMA_DGE_SCORES_BOTH && params.draft_pooling == LLAMA_DGE_POOLING_NONE;
        llama_dge_pool(draft, same ? params.pooling : params.draft_pooling, params.kernel_size);
    }

    if (own.empty() || draft.empty()) {
        return own.empty() ? draft : own;
    }

    llama_dge_normalize(own);
    llama_dge_normalize(draft);

    for (size_t i = 0; i < own.size(); ++i) {
        own[i] += draft[i];
    }

    return own;
}

std::vector<int32_t> llama_dge_adaptive_caps(const llama_dge_ranks & ranks, int32_t n) {
    const int32_t n_head  = ranks.size();
    const int32_t n_past  = ranks[0].size();
    const int32_t n_total = n * n_head;

    // where the n_total best scores of the layer are; a row of a later head wins a tie, as a later row does
    std::vector<int32_t> count(n_head, 0);

    if (n_total > 0) {
        std::vector<float> order((size_t) n_head * n_past);
        for (int32_t ih = 0; ih < n_head; ++ih) {
            std::transform(ranks[ih].begin(), ranks[ih].end(), order.begin() + (size_t) ih * n_past, llama_dge_key);
        }

        auto last = llama_dge_find_threshold(order, n_total);

        for (int32_t ih = n_head - 1; ih >= 0; --ih) {
            int32_t n_above = 0;
            int32_t n_equal = 0;
            for (const float score : ranks[ih]) {
                const float x = llama_dge_key(score);

                n_above += x > last.score;
                n_equal += x == last.score;
            }

            n_equal = std::min(n_equal, last.n_equal);
            last.n_equal -= n_equal;
            count[ih] = n_above + n_equal;
        }
    }

    // integers all the way: 0.8*count rounded half up, and floor(0.2*n)
    std::vector<int32_t> caps(n_head);
    int32_t              sum = 0;
    for (int32_t ih = 0; ih < n_head; ++ih) {
        caps[ih] = std::min((int32_t) ((8ll * count[ih] + 5) / 10) + n / 5, n_past);
        sum += caps[ih];
    }

    // the repair of the total goes round the heads, those with the most of the best scores first
    std::vector<int32_t> order(n_head);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return count[a] > count[b]; });

    while (sum != n_total) {
        const int32_t step = sum < n_total ? 1 : -1;

        for (const int32_t ih : order) {
            const int32_t cap = caps[ih] + step;
            if (sum != n_total && cap >= 0 && cap <= n_past) {
                caps[ih] = cap;
                sum += step;
            }
        }
    }

    return caps;
}

static bool llama_dge_rows_ok(const llama_dge_rows & rows, int32_t n_past) {
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] < (i > 0 ? rows[i - 1] + 1 : 0) || rows[i] >= n_past) {
            return false;
        }
    }

    return true;
}

bool llama_dge_select(const llama_dge_select_input & input, llama_dge_kept & kept) {
    const auto * policy = llama_dge_get_policy(input.params.policy);

    const std::vector<int32_t> layer_caps =
            policy->caps ? policy->caps(input) : std::vector<int32_t>(input.layers.size(), input.n_cap);

    kept.assign(input.layers.size(), {});

    for (size_t i = 0; i < input.layers.size(); ++i) {
        const auto & layer = input.layers[i];

        llama_dge_ranks ranks;
        for (int32_t ih = 0; ih < layer.n_head_kv; ++ih) {
            ranks.push_back(llama_dge_rank(input, layer, ih));
        }

        if (!policy->select) {
            kept[i].resize(layer.n_head_kv);

            if (!input.custom(i, layer_caps[i], ranks, kept[i])) {
                return false;
            }
            for (const auto & rows : kept[i]) {
                if (!llama_dge_rows_ok(rows, input.n_past)) {
                    return false;
                }
            }

            continue;
        }

        std::vector<int32_t> caps(layer.n_head_kv, layer_caps[i]);
        if (input.params.head_budgets == LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE) {
            caps = llama_dge_adaptive_caps(ranks, layer_caps[i]);
        } else if (input.params.head_budgets == LLAMA_DGE_HEAD_BUDGETS_TABLE) {
            caps = input.table[i];
        }

        for (int32_t ih = 0; ih < layer.n_head_kv; ++ih) {
            kept[i].push_back(policy->select(input, ranks[ih], std::min(caps[ih], input.n_past)));
        }
    }

    return true;
}
