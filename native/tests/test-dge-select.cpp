// Which rows stay: every function of llama-dge-select.h against brute force, on small inputs exhaustively.

#include "llama-dge-select.h"
#include "llama-dge.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

static int n_failed = 0;

#define CHECK(cond)                                                            \
    do {                                                                       \
        if (!(cond)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
            n_failed++;                                                        \
        }                                                                      \
    } while (0)

static const float f_inf = std::numeric_limits<float>::infinity();
static const float f_nan = std::numeric_limits<float>::quiet_NaN();

// does a win against b? the rule of policies.md, written down once more and differently
static bool wins(const std::vector<float> & s, int a, int b) {
    const bool low_a = std::isnan(s[a]) || s[a] == -f_inf;
    const bool low_b = std::isnan(s[b]) || s[b] == -f_inf;
    if (low_a != low_b) {
        return low_b;
    }
    if (!low_a && s[a] != s[b]) {
        return s[a] > s[b];
    }
    return a > b;
}

static llama_dge_rows top_rows_ref(const std::vector<float> & s, int n) {
    llama_dge_rows res;
    for (int i = 0; i < (int) s.size(); ++i) {
        int n_better = 0;
        for (int j = 0; j < (int) s.size(); ++j) {
            n_better += j != i && wins(s, j, i);
        }
        if (n_better < n) {
            res.push_back(i);
        }
    }
    return res;
}

static void test_top_rows() {
    // every vector of length <= 5 over values that tie, are infinite or are no number
    const float values[] = { 0.0f, 1.0f, -1.0f, f_nan, -f_inf, f_inf };
    for (int len = 0; len <= 5; ++len) {
        int n_cases = 1;
        for (int i = 0; i < len; ++i) {
            n_cases *= 6;
        }
        for (int c = 0; c < n_cases; ++c) {
            std::vector<float> s;
            for (int i = 0, x = c; i < len; ++i, x /= 6) {
                s.push_back(values[x % 6]);
            }
            for (int n = 0; n <= len; ++n) {
                CHECK(llama_dge_top_rows(s, n) == top_rows_ref(s, n));
            }
        }
    }

    std::mt19937 rng(1);
    for (int it = 0; it < 200; ++it) {
        std::vector<float> s(rng() % 90 + 1);
        for (float & x : s) {
            x = (float) (rng() % 20)*(it % 2 ? 1e30f : 1e-30f); // many ties, extreme scale
        }
        const int n = rng() % (s.size() + 1);
        CHECK(llama_dge_top_rows(s, n) == top_rows_ref(s, n));
    }

    CHECK(llama_dge_top_rows({ 1.0f, 2.0f }, 5) == llama_dge_rows({ 0, 1 })); // more than there are
    CHECK(llama_dge_top_rows({}, 3).empty());
    CHECK(llama_dge_top_rows({ 3, 3, 3, 3 }, 2) == llama_dge_rows({ 2, 3 })); // all equal: the latest
}

static void test_pool() {
    std::vector<float> x = { 1, 5, 2, 0, 3 };

    auto y = x;
    llama_dge_pool(y, LLAMA_DGE_POOLING_MAX, 3);
    CHECK(y == std::vector<float>({ 5, 5, 5, 3, 3 }));

    y = x;
    llama_dge_pool(y, LLAMA_DGE_POOLING_AVG, 3);
    const float avg[] = { 2.0f, 8.0f/3, 7.0f/3, 5.0f/3, 1.0f };
    for (int i = 0; i < 5; ++i) {
        CHECK(std::fabs(y[i] - avg[i]) < 1e-6f);
    }

    y = x;
    llama_dge_pool(y, LLAMA_DGE_POOLING_NONE, 3);
    CHECK(y == x);
    llama_dge_pool(y, LLAMA_DGE_POOLING_MAX, 1);
    CHECK(y == x);

    // padding never wins: with negative scores a zero from outside would
    y = { -3, -2, -5 };
    llama_dge_pool(y, LLAMA_DGE_POOLING_MAX, 7);
    CHECK(y == std::vector<float>({ -2, -2, -2 }));

    // a NaN does not spread under max
    y = { f_nan, 1, f_nan, f_nan, f_nan };
    llama_dge_pool(y, LLAMA_DGE_POOLING_MAX, 3);
    CHECK(y[0] == 1 && y[1] == 1 && y[2] == 1 && y[3] == -f_inf);

    // a kernel longer than the data
    y = { 4 };
    llama_dge_pool(y, LLAMA_DGE_POOLING_AVG, 5);
    CHECK(std::fabs(y[0] - 0.8f) < 1e-6f);

    y.clear();
    llama_dge_pool(y, LLAMA_DGE_POOLING_MAX, 7);
    CHECK(y.empty());
}

static void test_normalize() {
    std::vector<float> x = { 1, 3 };
    llama_dge_normalize(x);
    CHECK(x == std::vector<float>({ 0.25f, 0.75f }));

    x = { 0, 0 };
    llama_dge_normalize(x);
    CHECK(x == std::vector<float>({ 0, 0 }));

    x = { f_nan, 2, 2 };
    llama_dge_normalize(x);
    CHECK(std::isnan(x[0]) && x[1] == 0.5f && x[2] == 0.5f);
}

static llama_dge_select_input make_input(int policy, int scores, int n_past, int n_cap, int n_head_kv) {
    llama_dge_select_input input;
    input.params = { policy, scores, LLAMA_DGE_POOLING_MAX, LLAMA_DGE_POOLING_NONE, 1, 4 };
    input.n_past = n_past;
    input.n_cap  = n_cap;
    input.layers.resize(1);
    input.layers[0].n_head_kv = n_head_kv;
    return input;
}

static void test_streamingllm() {
    for (int n_past = 0; n_past <= 12; ++n_past) {
        for (int n_cap = 0; n_cap <= n_past; ++n_cap) {
            for (int sinks = 0; sinks <= 13; ++sinks) {
                auto input = make_input(LLAMA_DGE_POLICY_STREAMINGLLM, LLAMA_DGE_SCORES_DRAFT, n_past, n_cap, 2);
                input.params.sinks = sinks;

                const auto kept = llama_dge_select(input);
                CHECK(kept.size() == 1 && kept[0].size() == 2 && kept[0][0] == kept[0][1]);

                const auto & rows = kept[0][0];
                CHECK((int) rows.size() == n_cap);
                CHECK(std::is_sorted(rows.begin(), rows.end()));
                CHECK(std::adjacent_find(rows.begin(), rows.end()) == rows.end());
                for (int i = 0; i < n_cap; ++i) {
                    CHECK(rows[i] == (i < sinks ? i : n_past - n_cap + i));
                }
            }
        }
    }
}

static void test_snapkv() {
    // heads choose on their own
    auto input = make_input(LLAMA_DGE_POLICY_SNAPKV, LLAMA_DGE_SCORES_POLICY, 4, 2, 2);
    input.layers[0].window = { 9, 0, 0, 8,   0, 7, 6, 0 };
    input.layers[0].draft  = { 0, 1, 1, 0,   1, 0, 0, 1 };

    auto kept = llama_dge_select(input);
    CHECK(kept[0][0] == llama_dge_rows({ 0, 3 }));
    CHECK(kept[0][1] == llama_dge_rows({ 1, 2 }));

    input.params.scores = LLAMA_DGE_SCORES_DRAFT;
    kept = llama_dge_select(input);
    CHECK(kept[0][0] == llama_dge_rows({ 1, 2 }));
    CHECK(kept[0][1] == llama_dge_rows({ 0, 3 }));

    // both: shares of the sum are added. window 9/17 and 8/17 against draft 1/2
    input.params.scores = LLAMA_DGE_SCORES_BOTH;
    kept = llama_dge_select(input);
    CHECK(kept[0][0] == llama_dge_rows({ 0, 2 })); // 0.529 0.5 0.5 0.471; of the equal ones the later

    // the draft is pooled only when asked to ...
    input = make_input(LLAMA_DGE_POLICY_SNAPKV, LLAMA_DGE_SCORES_DRAFT, 7, 3, 1);
    input.params.kernel_size = 3;
    input.layers[0].draft = { 0, 9, 0, 1, 2, 0, 0 };
    CHECK(llama_dge_select(input)[0][0] == llama_dge_rows({ 1, 3, 4 }));
    input.params.draft_pooling = LLAMA_DGE_POOLING_MAX;
    CHECK(llama_dge_select(input)[0][0] == llama_dge_rows({ 0, 1, 2 }));

    // ... and with "both" and no pooling of its own it is pooled like the window
    input.params.draft_pooling = LLAMA_DGE_POOLING_NONE;
    input.params.scores        = LLAMA_DGE_SCORES_BOTH;
    input.layers[0].window     = { 0, 0, 0, 0, 0, 0, 0 };
    CHECK(llama_dge_select(input)[0][0] == llama_dge_rows({ 0, 1, 2 }));

    // nothing but the window stays
    input.n_cap = 0;
    CHECK(llama_dge_select(input)[0][0].empty());

    // everything stays
    input.n_cap = 7;
    CHECK(llama_dge_select(input)[0][0].size() == 7);
}

// kept rows are those with the highest scores, whatever the scores
static void test_property() {
    std::mt19937 rng(7);
    for (int it = 0; it < 300; ++it) {
        const int n_past = rng() % 60 + 1;
        const int n_head = rng() % 4  + 1;

        auto input = make_input(LLAMA_DGE_POLICY_SNAPKV, LLAMA_DGE_SCORES_POLICY, n_past, rng() % (n_past + 1), n_head);
        for (int i = 0; i < n_head*n_past; ++i) {
            const float special[] = { f_nan, -f_inf, f_inf, 1e30f, 0.0f };
            input.layers[0].window.push_back(rng() % 9 == 0 ? special[rng() % 5] : (float) (rng() % 1000));
        }

        const auto kept = llama_dge_select(input);
        for (int ih = 0; ih < n_head; ++ih) {
            const auto begin = input.layers[0].window.begin() + ih*n_past;
            CHECK(kept[0][ih] == top_rows_ref(std::vector<float>(begin, begin + n_past), input.n_cap));
        }
    }
}

int main() {
    CHECK(llama_dge_get_policy(-1) == nullptr && llama_dge_get_policy(99) == nullptr);

    test_top_rows();
    test_pool();
    test_normalize();
    test_streamingllm();
    test_snapkv();
    test_property();

    if (n_failed > 0) {
        fprintf(stderr, "%d checks failed\n", n_failed);
        return 1;
    }

    printf("OK\n");
    return 0;
}
