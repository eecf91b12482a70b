// Which rows stay: every function of llama-dge-select.h against brute force, on small inputs exhaustively.

#include "llama-dge-policy.h"
#include "llama-dge-select.h"
#include "llama-dge.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

static int n_failed = 0;

#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond);                                         \
            n_failed++;                                                                                                \
        }                                                                                                              \
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
            x = (float) (rng() % 20) * (it % 2 ? 1e30f : 1e-30f); // many ties, extreme scale
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
    const float avg[] = { 2.0f, 8.0f / 3, 7.0f / 3, 5.0f / 3, 1.0f };
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

// every kernel over values that are infinite or no number, against the definition
static void test_pool_any() {
    std::mt19937 rng(5);
    const float  special[] = { f_nan, -f_inf, f_inf, 0.0f };

    for (int it = 0; it < 2000; ++it) {
        std::vector<float> x(rng() % 40 + 1);
        for (float & v : x) {
            v = rng() % 8 == 0 ? special[rng() % 4] : (float) (rng() % 100) / 8; // sums of these are exact
        }

        const int n      = x.size();
        const int kernel = 2 * (rng() % 50) + 1;

        auto max = x;
        auto avg = x;
        llama_dge_pool(max, LLAMA_DGE_POOLING_MAX, kernel);
        llama_dge_pool(avg, LLAMA_DGE_POOLING_AVG, kernel);

        for (int i = 0; i < n && kernel > 1; ++i) {
            float  best = -f_inf;
            double sum  = 0.0;
            for (int j = std::max(0, i - kernel / 2); j <= std::min(n - 1, i + kernel / 2); ++j) {
                best = x[j] > best ? x[j] : best;
                sum += x[j];
            }
            CHECK(max[i] == best);
            CHECK(std::isnan(sum) ? std::isnan(avg[i]) : avg[i] == (float) (sum / kernel));
        }
    }
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

static llama_dge_kept select_ok(const llama_dge_select_input & input) {
    llama_dge_kept kept;
    CHECK(llama_dge_select(input, kept));
    return kept;
}

static llama_dge_select_input make_input(const char * policy, int scores, int n_past, int n_cap, int n_head_kv) {
    llama_dge_select_input input;
    input.params   = { llama_dge_find_policy(policy), scores, LLAMA_DGE_POOLING_MAX, 1, 4, 0, 0 };
    input.n_prompt = n_past + 8;
    input.n_past   = n_past;
    input.n_cap    = n_cap;
    input.layers.resize(1);
    input.layers[0].n_head_kv = n_head_kv;
    return input;
}

static void test_streamingllm() {
    for (int n_past = 0; n_past <= 12; ++n_past) {
        for (int n_cap = 0; n_cap <= n_past; ++n_cap) {
            for (int sinks = 0; sinks <= 13; ++sinks) {
                auto input         = make_input("streamingllm", LLAMA_DGE_SCORES_DRAFT, n_past, n_cap, 2);
                input.params.sinks = sinks;

                const auto kept = select_ok(input);
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
    auto input            = make_input("snapkv", LLAMA_DGE_SCORES_POLICY, 4, 2, 2);
    input.layers[0].own   = { 9, 0, 0, 8, 0, 7, 6, 0 };
    input.layers[0].draft = { 0, 1, 1, 0, 1, 0, 0, 1 };

    auto kept = select_ok(input);
    CHECK(kept[0][0] == llama_dge_rows({ 0, 3 }));
    CHECK(kept[0][1] == llama_dge_rows({ 1, 2 }));

    input.params.scores = LLAMA_DGE_SCORES_DRAFT;
    kept                = select_ok(input);
    CHECK(kept[0][0] == llama_dge_rows({ 1, 2 }));
    CHECK(kept[0][1] == llama_dge_rows({ 0, 3 }));

    // both: shares of the sum are added. window 9/17 and 8/17 against draft 1/2
    input.params.scores = LLAMA_DGE_SCORES_BOTH;
    kept                = select_ok(input);
    CHECK(kept[0][0] == llama_dge_rows({ 0, 2 })); // 0.529 0.5 0.5 0.471; of the equal ones the later

    // own score and draft are pooled alike
    input                    = make_input("snapkv", LLAMA_DGE_SCORES_DRAFT, 7, 3, 1);
    input.params.kernel_size = 3;
    input.params.pooling     = LLAMA_DGE_POOLING_NONE;
    input.layers[0].draft    = { 0, 9, 0, 1, 2, 0, 0 };
    CHECK(select_ok(input)[0][0] == llama_dge_rows({ 1, 3, 4 }));
    input.params.pooling = LLAMA_DGE_POOLING_MAX;
    CHECK(select_ok(input)[0][0] == llama_dge_rows({ 0, 1, 2 }));

    input.params.scores = LLAMA_DGE_SCORES_BOTH;
    input.layers[0].own = { 0, 0, 0, 0, 0, 0, 0 };
    CHECK(select_ok(input)[0][0] == llama_dge_rows({ 0, 1, 2 }));

    // nothing but the window stays
    input.n_cap = 0;
    CHECK(select_ok(input)[0][0].empty());

    // everything stays
    input.n_cap = 7;
    CHECK(select_ok(input)[0][0].size() == 7);
}

// kept rows are those with the highest scores, whatever the scores
static void test_property() {
    std::mt19937 rng(7);
    for (int it = 0; it < 300; ++it) {
        const int n_past = rng() % 60 + 1;
        const int n_head = rng() % 4 + 1;

        auto input = make_input("snapkv", LLAMA_DGE_SCORES_POLICY, n_past, rng() % (n_past + 1), n_head);
        for (int i = 0; i < n_head * n_past; ++i) {
            const float special[] = { f_nan, -f_inf, f_inf, 1e30f, 0.0f };
            input.layers[0].own.push_back(rng() % 9 == 0 ? special[rng() % 5] : (float) (rng() % 1000));
        }

        const auto kept = select_ok(input);
        for (int ih = 0; ih < n_head; ++ih) {
            const auto begin = input.layers[0].own.begin() + ih * n_past;
            CHECK(kept[0][ih] == top_rows_ref(std::vector<float>(begin, begin + n_past), input.n_cap));
        }
    }
}

static std::vector<int32_t> pyramid(int n_layer, int n_prompt, int n_past, int n_cap, int layer_budgets) {
    llama_dge_select_input input = make_input("pyramidkv", LLAMA_DGE_SCORES_POLICY, n_past, n_cap, 1);
    input.n_prompt               = n_prompt;
    input.params.layer_budgets   = layer_budgets;
    input.layers.assign(n_layer, input.layers[0]);

    return input.params.policy->caps(input);
}

static void test_pyramidkv() {
    const int ref   = LLAMA_DGE_LAYER_BUDGETS_REFERENCE;
    const int exact = LLAMA_DGE_LAYER_BUDGETS_EXACT;

    // published: B = 32, w = 8 gives 47 ... 20 on 28 layers and 47 ... 16 on 32, in steps of one
    for (const int n_layer : { 28, 32 }) {
        const auto caps = pyramid(n_layer, 7500, 7492, 24, ref);
        for (int i = 0; i < n_layer; ++i) {
            CHECK(caps[i] == 47 - i);
        }
    }

    for (int n_layer = 1; n_layer <= 48; ++n_layer) {
        for (int n_cap = 0; n_cap <= 130; ++n_cap) {
            for (const int n_past : { n_cap, n_cap + 1, 3 * n_cap / 2 + 1, 2 * n_cap, 2 * n_cap + 1, 5000 }) {
                const int  n_prompt = n_past + 8;
                const auto caps     = pyramid(n_layer, n_prompt, n_past, n_cap, exact);

                int sum = 0;
                for (int i = 0; i < n_layer; ++i) {
                    sum += caps[i];
                    CHECK(caps[i] >= 0 && caps[i] <= std::max(n_past, n_cap));
                    CHECK(i == 0 || caps[i] <= caps[i - 1]);
                }
                CHECK(sum == n_cap * n_layer);
                if (n_prompt < 2 * n_cap) {
                    CHECK(caps == std::vector<int32_t>(n_layer, n_cap));
                }
                for (const int32_t cap : pyramid(n_layer, n_prompt, n_past, n_cap, ref)) {
                    CHECK(cap >= 0 && cap <= std::max(n_past, n_cap));
                }
            }
        }
    }

    // each layer takes its own number of the best rows
    auto input = make_input("pyramidkv", LLAMA_DGE_SCORES_POLICY, 40, 5, 1);
    input.layers[0].own.resize(40);
    for (int i = 0; i < 40; ++i) {
        input.layers[0].own[i] = (float) i;
    }
    input.layers.assign(3, input.layers[0]);
    const auto kept = select_ok(input); // 9.75, 5, 0.25 -> 10, 5, 0
    CHECK(kept[0][0].size() == 10 && kept[1][0].size() == 5 && kept[2][0].empty());
    CHECK(kept[1][0] == llama_dge_rows({ 35, 36, 37, 38, 39 }));
}

static int sum_of(const std::vector<int32_t> & x) {
    int sum = 0;
    for (const int32_t v : x) {
        sum += v;
    }
    return sum;
}

static void test_adaptive() {
    // 8 of 8 best scores in head 0: 0.8*8 rounded + 1 floor, capped and repaired
    CHECK(llama_dge_adaptive_caps({ { 9, 9, 9, 9, 9, 9, 9, 9, 9, 9 }, std::vector<float>(10, 0.0f) }, 5) ==
            std::vector<int32_t>({ 9, 1 }));

    // all equal: the tie goes to the later head, and the floor stays with the first
    CHECK(sum_of(llama_dge_adaptive_caps({ std::vector<float>(20, 1.0f), std::vector<float>(20, 1.0f) }, 10)) == 20);

    std::mt19937 rng(3);
    const float  special[] = { f_nan, -f_inf, f_inf, 1e30f, -1e30f, 0.0f };

    for (int it = 0; it < 3000; ++it) {
        const int n_head = rng() % 8 + 1;
        const int n_past = rng() % 40 + 1;
        const int n      = rng() % (n_past + 1);

        llama_dge_ranks ranks(n_head, std::vector<float>(n_past));
        const int       kind = rng() % 4;
        for (int ih = 0; ih < n_head; ++ih) {
            for (float & x : ranks[ih]) {
                switch (kind) {
                    case 0: x = 1.0f; break;                   // all equal
                    case 1: x = ih == 0 ? 1e30f : 0.0f; break; // one head takes all
                    case 2: x = special[rng() % 6]; break;
                    case 3: x = (float) (rng() % 1000); break;
                }
            }
        }

        const auto caps = llama_dge_adaptive_caps(ranks, n);
        CHECK(sum_of(caps) == n * n_head);
        for (const int32_t cap : caps) {
            CHECK(cap >= 0 && cap <= n_past);
            // the floor holds unless the repair had to take from it: never by more than the rounding
            CHECK(cap >= std::min(n / 5, n_past) - n_head);
        }
    }

    // a head with more of the best scores never gets fewer rows
    const auto caps =
            llama_dge_adaptive_caps({ { 1, 1, 1, 9, 9, 9, 9, 9, 9, 9 }, { 5, 5, 5, 0, 0, 0, 0, 0, 0, 0 } }, 5);
    CHECK(sum_of(caps) == 10 && caps[0] > caps[1]);

    auto input                = make_input("snapkv", LLAMA_DGE_SCORES_POLICY, 4, 2, 2);
    input.params.head_budgets = LLAMA_DGE_HEAD_BUDGETS_TABLE;
    input.table               = { { 0, 9 } };
    input.layers[0].own       = { 9, 0, 0, 8, 0, 7, 6, 0 };
    const auto kept           = select_ok(input);
    CHECK(kept[0][0].empty() && kept[0][1] == llama_dge_rows({ 0, 1, 2, 3 })); // no more than there are
}

// what an estimate says before there are scores is never less than what is kept
static void test_most_rows() {
    std::mt19937 rng(11);

    for (int it = 0; it < 500; ++it) {
        const int    n_past   = rng() % 60 + 1;
        const int    n_head   = rng() % 4 + 1;
        const char * policy[] = { "snapkv", "pyramidkv", "streamingllm", "h2o" };

        auto input = make_input(policy[rng() % 4], LLAMA_DGE_SCORES_POLICY, n_past, rng() % (n_past + 1), n_head);
        input.params.head_budgets = input.params.policy->scorer != LLAMA_DGE_SCORER_NONE ? rng() % 2 : 0;
        for (int i = 0; i < n_head * n_past; ++i) {
            input.layers[0].own.push_back((float) (rng() % 1000));
        }
        input.layers.assign(3, input.layers[0]);

        const auto most = llama_dge_most_rows(input);
        const auto kept = select_ok(input);
        for (int i = 0; i < 3; ++i) {
            for (int ih = 0; ih < n_head; ++ih) {
                const int n = kept[i][ih].size();
                CHECK(input.params.head_budgets ? n <= most[i][ih] : n == most[i][ih]);
            }
        }
    }
}

static void test_h2o() {
    // the policy's own score is a sum over the whole prompt and is not pooled
    auto input               = make_input("h2o", LLAMA_DGE_SCORES_POLICY, 5, 2, 1);
    input.params.kernel_size = 3;
    input.layers[0].own      = { 0, 9, 0, 0, 8 };
    CHECK(select_ok(input)[0][0] == llama_dge_rows({ 1, 4 }));

    CHECK(llama_dge_needs_sums(input.params) && !llama_dge_needs_own_queries(input.params));
    input.params.scores = LLAMA_DGE_SCORES_DRAFT;
    CHECK(!llama_dge_needs_sums(input.params) && llama_dge_needs_draft_queries(input.params));
}

static void test_custom() {
    auto input          = make_input(nullptr, LLAMA_DGE_SCORES_POLICY, 4, 2, 1);
    input.layers[0].own = { 4, 3, 2, 1 };

    llama_dge_rows answer = { 1, 3 };
    bool           ok     = true;

    input.custom = [&](size_t i, int32_t n, const llama_dge_ranks & ranks, std::vector<llama_dge_rows> & rows) {
        CHECK(i == 0 && n == 2 && ranks.size() == 1 && ranks[0] == std::vector<float>({ 4, 3, 2, 1 }));
        rows[0] = answer;
        return ok;
    };

    llama_dge_kept kept;
    CHECK(llama_dge_select(input, kept) && kept[0][0] == answer);

    for (const llama_dge_rows & bad :
            { llama_dge_rows { 3, 1 }, llama_dge_rows { 1, 1 }, llama_dge_rows { -1 }, llama_dge_rows { 4 } }) {
        answer = bad;
        CHECK(!llama_dge_select(input, kept));
    }

    answer = { 0 };
    ok     = false;
    CHECK(!llama_dge_select(input, kept));
}

int main() {
    CHECK(llama_dge_find_policy("no such policy") == nullptr && llama_dge_find_policy(nullptr) == nullptr);

    test_top_rows();
    test_pool();
    test_pool_any();
    test_normalize();
    test_streamingllm();
    test_snapkv();
    test_property();
    test_pyramidkv();
    test_adaptive();
    test_most_rows();
    test_h2o();
    test_custom();

    if (n_failed > 0) {
        fprintf(stderr, "%d checks failed\n", n_failed);
        return 1;
    }

    printf("OK\n");
    return 0;
}
