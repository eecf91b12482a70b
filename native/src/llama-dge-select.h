#pragma once

#include <cstdint>
#include <functional>
#include <vector>

// Which rows stay: plain C++ without ggml, a model or a device.
//
// "past" are the rows of the prompt in front of the window. Window and draft rows stay by construction and do not
// appear here.
//
// Ties, everywhere: the higher score first; of equal scores the later row. NaN and -inf lose against any finite score.

// values of the enums in llama-dge.h
struct llama_dge_select_params {
    int32_t policy;
    int32_t scores;
    int32_t pooling;
    int32_t draft_pooling;
    int32_t kernel_size;
    int32_t sinks;
    int32_t layer_budgets;
    int32_t head_budgets;
};

// attention that the past rows of one layer received, [n_head_kv][n_past], mean over query rows and the group
struct llama_dge_layer_scores {
    int32_t n_head_kv = 0;

    std::vector<float> window; // queries: the window; with H2O: the sum over all rows of the prompt and the draft
    std::vector<float> draft;  // queries: the rows that produced the first k answer tokens
};

using llama_dge_rows  = std::vector<int32_t>;                     // ascending
using llama_dge_kept  = std::vector<std::vector<llama_dge_rows>>; // [layer][head]
using llama_dge_ranks = std::vector<std::vector<float>>;          // [head][n_past], empty rows if not needed

struct llama_dge_select_input {
    llama_dge_select_params params;

    int32_t n_prompt;
    int32_t n_past; // rows to choose from: the prompt without the window
    int32_t n_cap;  // rows to choose on average, per layer and head; 0 <= n_cap <= n_past

    std::vector<llama_dge_layer_scores> layers;

    // LLAMA_DGE_HEAD_BUDGETS_TABLE: rows of each layer and head, [layer][head]; others: empty
    std::vector<std::vector<int32_t>> table;

    // LLAMA_DGE_POLICY_CUSTOM: rows of layer i; false: refused
    std::function<bool(size_t i, int32_t n, const llama_dge_ranks & ranks, std::vector<llama_dge_rows> & rows)> custom;
};

// one policy, one file in policies/
struct llama_dge_policy_impl {
    const char * name;

    bool needs_scores; // ranks rows by their scores
    bool needs_sums;   // its own score is the attention of all rows, summed while they are evaluated

    // rows per head of each layer; null: n_cap in every layer
    std::vector<int32_t> (*caps)(const llama_dge_select_input & input);

    // the n rows of one layer and head; rank: [n_past] scores, empty if not needed
    llama_dge_rows (*select)(const llama_dge_select_input & input, const std::vector<float> & rank, int32_t n);
};

extern const llama_dge_policy_impl llama_dge_policy_snapkv;
extern const llama_dge_policy_impl llama_dge_policy_pyramidkv;
extern const llama_dge_policy_impl llama_dge_policy_h2o;
extern const llama_dge_policy_impl llama_dge_policy_streamingllm;
extern const llama_dge_policy_impl llama_dge_policy_custom;

// nullptr for an unknown policy
const llama_dge_policy_impl * llama_dge_get_policy(int32_t policy);

// what has to be computed for these settings; H2O's own score comes from sums and not from the window
bool llama_dge_needs_window_scores(const llama_dge_select_params & params);
bool llama_dge_needs_draft_scores(const llama_dge_select_params & params);
bool llama_dge_needs_sums(const llama_dge_select_params & params);

// stride 1, as long as the input; max: padding never wins; avg: zero padding, divisor = kernel
void llama_dge_pool(std::vector<float> & data, int32_t pooling, int32_t kernel_size);

// divide by the sum over finite scores; a sum that is not positive leaves the scores alone
void llama_dge_normalize(std::vector<float> & data);

// the n best of `scores`, ascending
llama_dge_rows llama_dge_top_rows(const std::vector<float> & scores, int32_t n);

// Ada-KV (arXiv 2407.11550): shares n*n_head rows of a layer out to its heads by where the layer's best scores are; a
// part alpha = 0.2 is every head's floor. ranks: [head][n_past]. The sum is exactly n*n_head, no head exceeds n_past.
std::vector<int32_t> llama_dge_adaptive_caps(const llama_dge_ranks & ranks, int32_t n);

// false: the custom policy refused, or returned rows that are not ascending or out of range
bool llama_dge_select(const llama_dge_select_input & input, llama_dge_kept & kept);
