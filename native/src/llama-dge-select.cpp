#include "llama-dge-select.h"

#include "llama-dge-policy.h"
#include "llama-dge.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

bool llama_dge_needs_attention(const llama_dge_select_params & params) {
    return !params.policy || params.policy->scorer != LLAMA_DGE_SCORER_NONE;
}

static bool llama_dge_needs_own_scores(const llama_dge_select_params & params) {
    return llama_dge_needs_attention(params) && params.scores != LLAMA_DGE_SCORES_DRAFT;
}

bool llama_dge_needs_own_queries(const llama_dge_select_params & params) {
    return llama_dge_needs_own_scores(params) && !llama_dge_needs_sums(params);
}

bool llama_dge_needs_sums(const llama_dge_select_params & params) {
    return llama_dge_needs_own_scores(params) && params.policy && params.policy->scorer == LLAMA_DGE_SCORER_SUMS;
}

bool llama_dge_needs_draft_queries(const llama_dge_select_params & params) {
    return llama_dge_needs_attention(params) && params.scores != LLAMA_DGE_SCORES_POLICY;
}

int32_t llama_dge_n_own_queries(const llama_dge_select_params & params, int32_t window) {
    return params.policy && params.policy->scorer == LLAMA_DGE_SCORER_LAST ? 1 : window;
}

// van Herk's maximum: of blocks as long as the window, from the left and from the right
static void llama_dge_pool_max(std::vector<float> & data, int64_t half) {
    const int64_t n = data.size();
    const int64_t k = 2 * half + 1;

    const float none = -std::numeric_limits<float>::infinity();

    // a NaN compares false and loses
    const auto greater = [](float a, float b) {
        return b > a ? b : a;
    };

    std::vector<float> left(n + k, none);
    for (int64_t i = 0; i < n; ++i) {
        left[i + half] = greater(none, data[i]);
    }

    std::vector<float> right = left;

    for (int64_t i = 1; i < n + k; ++i) {
        left[i] = i % k == 0 ? left[i] : greater(left[i - 1], left[i]);
    }
    for (int64_t i = n + k - 2; i >= 0; --i) {
        right[i] = (i + 1) % k == 0 ? right[i] : greater(right[i + 1], right[i]);
    }
    for (int64_t i = 0; i < n; ++i) {
        data[i] = greater(right[i], left[i + k - 1]);
    }
}

static void llama_dge_pool_avg(std::vector<float> & data, int64_t half, int32_t kernel_size) {
    const int64_t n = data.size();

    // sums and counts in front of each entry; what is not finite must not spoil the sums behind it
    std::vector<double>  sum(n + 1, 0.0);
    std::vector<int64_t> n_odd(n + 1, 0);

    for (int64_t i = 0; i < n; ++i) {
        const bool odd = !std::isfinite(data[i]);

        sum[i + 1]   = sum[i] + (odd ? 0.0 : data[i]);
        n_odd[i + 1] = n_odd[i] + odd;
    }

    std::vector<float> res(n);

    for (int64_t i = 0; i < n; ++i) {
        const int64_t i0 = std::max<int64_t>(0, i - half);
        const int64_t i1 = std::min(n, i + half + 1);

        double x = sum[i1] - sum[i0];
        for (int64_t j = i0; n_odd[i1] != n_odd[i0] && j < i1; ++j) {
            x += std::isfinite(data[j]) ? 0.0 : data[j];
        }

        res[i] = (float) (x / kernel_size);
    }

    data = std::move(res);
}

void llama_dge_pool(std::vector<float> & data, int32_t pooling, int32_t kernel_size) {
    if (pooling == LLAMA_DGE_POOLING_NONE || kernel_size <= 1 || data.empty()) {
        return;
    }

    const int64_t half = std::min<int64_t>(kernel_size / 2, data.size());

    if (pooling == LLAMA_DGE_POOLING_MAX) {
        llama_dge_pool_max(data, half);
    } else {
        llama_dge_pool_avg(data, half, kernel_size);
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

static llama_dge_ranks llama_dge_split(const std::vector<float> & scores, int32_t n_head, int32_t n_past) {
    llama_dge_ranks res(n_head);

    for (int32_t ih = 0; ih < n_head && !scores.empty(); ++ih) {
        const auto begin = scores.begin() + (size_t) ih * n_past;

        res[ih].assign(begin, begin + n_past);
    }

    return res;
}

// the scores by which the entries of a layer's heads are ranked
static llama_dge_ranks llama_dge_rank(const llama_dge_select_input & input, const llama_dge_layer_scores & layer) {
    const auto & params = input.params;
    const auto * policy = params.policy;

    const bool is_own   = params.scores != LLAMA_DGE_SCORES_DRAFT || !llama_dge_needs_attention(params);
    const bool is_draft = llama_dge_needs_draft_queries(params);

    auto own   = llama_dge_split(is_own ? layer.own : std::vector<float>(), layer.n_head_kv, input.n_past);
    auto draft = llama_dge_split(is_draft ? layer.draft : std::vector<float>(), layer.n_head_kv, input.n_past);

    if (is_own && policy && policy->rank) {
        policy->rank(input, own);
    }

    for (int32_t ih = 0; ih < layer.n_head_kv; ++ih) {
        if (is_own && (!policy || policy->pools)) {
            llama_dge_pool(own[ih], params.pooling, params.kernel_size);
        }
        if (is_draft) {
            llama_dge_pool(draft[ih], params.pooling, params.kernel_size);
        }
        if (is_own && is_draft) {
            llama_dge_normalize(own[ih]);
            llama_dge_normalize(draft[ih]);

            for (size_t i = 0; i < own[ih].size(); ++i) {
                own[ih][i] += draft[ih][i];
            }
        }
    }

    return is_own ? own : draft;
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

static std::vector<int32_t> llama_dge_layer_caps(const llama_dge_select_input & input) {
    const auto * policy = input.params.policy;

    return policy && policy->caps ? policy->caps(input) : std::vector<int32_t>(input.layers.size(), input.n_cap);
}

std::vector<std::vector<int32_t>> llama_dge_most_rows(const llama_dge_select_input & input) {
    const auto caps = llama_dge_layer_caps(input);

    std::vector<std::vector<int32_t>> res;

    for (size_t i = 0; i < input.layers.size(); ++i) {
        const int32_t n_head = input.layers[i].n_head_kv;

        int32_t n = caps[i];

        // one head may have all of the layer's best scores
        if (input.params.head_budgets == LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE && n_head > 1) {
            n = (int32_t) ((8ll * n * n_head + 5) / 10) + n / 5 + 1;
        }

        res.push_back(input.table.empty() ? std::vector<int32_t>(n_head, n) : input.table[i]);

        for (int32_t & cap : res.back()) {
            cap = std::min(cap, input.n_past);
        }
    }

    return res;
}

bool llama_dge_select(const llama_dge_select_input & input, llama_dge_kept & kept) {
    const auto caps = llama_dge_layer_caps(input);

    kept.assign(input.layers.size(), {});

    for (size_t i = 0; i < input.layers.size(); ++i) {
        const int32_t n_head = input.layers[i].n_head_kv;

        const auto ranks = llama_dge_rank(input, input.layers[i]);

        if (!input.params.policy) {
            kept[i].resize(n_head);

            const auto is_ok = [&](const llama_dge_rows & rows) {
                return llama_dge_rows_ok(rows, input.n_past);
            };

            if (!input.custom(i, caps[i], ranks, kept[i]) || !std::all_of(kept[i].begin(), kept[i].end(), is_ok)) {
                return false;
            }
            continue;
        }

        std::vector<int32_t> head_caps(n_head, caps[i]);
        if (input.params.head_budgets == LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE) {
            head_caps = llama_dge_adaptive_caps(ranks, caps[i]);
        } else if (input.params.head_budgets == LLAMA_DGE_HEAD_BUDGETS_TABLE) {
            head_caps = input.table[i];
        }

        for (int32_t ih = 0; ih < n_head; ++ih) {
            kept[i].push_back(llama_dge_top_rows(ranks[ih], std::min(head_caps[ih], input.n_past)));
        }
    }

    return true;
}
