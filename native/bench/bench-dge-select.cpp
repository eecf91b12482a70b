// Time to select the entries of 32 layers x 8 KV heads x 32768 scores on one core, by CPU time.
//
//   make bench-select

#include "llama-dge-policy.h"
#include "llama-dge-select.h"
#include "llama-dge.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <random>
#include <vector>

static double run(llama_dge_select_input & input, int32_t head_budgets, int32_t n_cap) {
    input.params.head_budgets = head_budgets;
    input.n_cap               = n_cap;

    std::vector<double> times;

    for (int i = 0; i < 5; ++i) {
        llama_dge_kept kept;

        const clock_t t0 = clock();
        llama_dge_select(input, kept);
        times.push_back(1e3 * (clock() - t0) / CLOCKS_PER_SEC);
    }

    std::sort(times.begin(), times.end());

    return times[2];
}

int main() {
    std::mt19937                         rng(1);
    std::exponential_distribution<float> dist(1.0f);

    llama_dge_select_input input;

    input.params   = { nullptr, LLAMA_DGE_SCORES_POLICY, LLAMA_DGE_POOLING_MAX, 7, 4, LLAMA_DGE_LAYER_BUDGETS_EXACT,
        LLAMA_DGE_HEAD_BUDGETS_UNIFORM };
    input.n_past   = 32768;
    input.n_prompt = input.n_past + 8;
    input.layers.resize(32);

    for (auto & layer : input.layers) {
        layer.n_head_kv = 8;
        layer.own.resize((size_t) layer.n_head_kv * input.n_past);
        for (float & x : layer.own) {
            x = dist(rng);
        }
    }

    printf("median of 5, ms of one core (wanted: 150 or less)\n");
    printf("%14s %8s %10s %10s\n", "policy", "entries", "uniform", "adaptive");

    for (const auto * policy : llama_dge_policies()) {
        input.params.policy = policy;

        for (const int32_t n_cap : { 504, 2040, 8184 }) {
            printf("%14s %8d %10.1f", policy->name, n_cap, run(input, LLAMA_DGE_HEAD_BUDGETS_UNIFORM, n_cap));

            if (policy->scorer == LLAMA_DGE_SCORER_NONE) {
                printf("%11s\n", "");
            } else {
                printf(" %10.1f\n", run(input, LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE, n_cap));
            }
        }
    }

    return 0;
}
