#pragma once

#include "llama-dge-rows.h"

#include <cstdint>
#include <functional>
#include <vector>

// Which entries are kept: plain C++ without ggml, a model or a device.
//
// "past" are the entries of the prompt in front of the observation window. Window and draft tokens are kept by
// construction and do not appear here.
//
// Ties, everywhere: the higher score first; of equal scores the later entry. NaN and -inf lose against any finite score.

struct llama_dge_policy;

// values of the enums in llama-dge.h
struct llama_dge_select_params {
    const llama_dge_policy * policy; // nullptr: a callback selects

    int32_t scores; // never SCORES_AUTO
    int32_t pooling;
    int32_t kernel_size;
    int32_t sinks;
    int32_t layer_budgets;
    int32_t head_budgets;
};

// attention that the past entries of one layer received, [n_head_kv][n_past], mean over queries and the group
struct llama_dge_layer_scores {
    int32_t n_head_kv = 0;

    std::vector<float> own;   // queries of the policy's own score
    std::vector<float> draft; // queries that produced the first k answer tokens
};

struct llama_dge_select_input {
    llama_dge_select_params params;

    int32_t n_prompt;
    int32_t n_past; // entries to choose from: the prompt without the window
    int32_t n_cap;  // entries to keep of them on average, per layer and head; 0 <= n_cap <= n_past

    std::vector<llama_dge_layer_scores> layers;

    // HEAD_BUDGETS_TABLE: entries of each layer and head, [layer][head]; others: empty
    std::vector<std::vector<int32_t>> table;

    // the callback: entries of layer i; false: refused
    std::function<bool(size_t i, int32_t n, const llama_dge_ranks & ranks, std::vector<llama_dge_rows> & rows)> custom;
};

// what has to be computed for these settings
bool llama_dge_needs_attention(const llama_dge_select_params & params); // anything at all
bool llama_dge_needs_own_queries(const llama_dge_select_params & params);
bool llama_dge_needs_draft_queries(const llama_dge_select_params & params);
bool llama_dge_needs_sums(const llama_dge_select_params & params);

// last tokens of the prompt whose queries make the policy's own score
int32_t llama_dge_n_own_queries(const llama_dge_select_params & params, int32_t window);

// stride 1, as long as the input; max: padding never wins; avg: zero padding, divisor = kernel. Linear in the input
void llama_dge_pool(std::vector<float> & data, int32_t pooling, int32_t kernel_size);

// divide by the sum over finite scores; a sum that is not positive leaves the scores alone
void llama_dge_normalize(std::vector<float> & data);

// the n best of `scores`, ascending
llama_dge_rows llama_dge_top_rows(const std::vector<float> & scores, int32_t n);

// Ada-KV (arXiv 2407.11550): shares n*n_head entries of a layer out to its heads by where the layer's best scores are; a
// part alpha = 0.2 is every head's floor. ranks: [head][n_past]. The sum is exactly n*n_head, no head exceeds n_past.
std::vector<int32_t> llama_dge_adaptive_caps(const llama_dge_ranks & ranks, int32_t n);

// past entries that each head may keep, [layer][head]; with HEAD_BUDGETS_ADAPTIVE, where scores decide, the most
std::vector<std::vector<int32_t>> llama_dge_most_rows(const llama_dge_select_input & input);

// false: the callback refused, or returned entries that are not ascending or out of range
bool llama_dge_select(const llama_dge_select_input & input, llama_dge_kept & kept);
