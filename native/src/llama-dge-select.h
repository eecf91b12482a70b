#pragma once

#include <cstdint>
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
};

// attention that the past rows of one layer received, [n_head_kv][n_past], mean over query rows and the group
struct llama_dge_layer_scores {
    int32_t n_head_kv = 0;

    std::vector<float> window; // queries: the window
    std::vector<float> draft;  // queries: the rows that produced the first k answer tokens
};

using llama_dge_rows = std::vector<int32_t>;                       // ascending
using llama_dge_kept = std::vector<std::vector<llama_dge_rows>>;   // [layer][head]

struct llama_dge_select_input {
    llama_dge_select_params params;

    int32_t n_past; // rows to choose from
    int32_t n_cap;  // rows to choose, per layer and head; 0 <= n_cap <= n_past

    std::vector<llama_dge_layer_scores> layers;
};

// one policy, one file in policies/
struct llama_dge_policy_impl {
    const char * name;

    bool needs_scores;

    // the rows of one layer and head; rank: [n_past] scores, empty if not needed
    llama_dge_rows (*select)(const llama_dge_select_input & input, const std::vector<float> & rank);
};

extern const llama_dge_policy_impl llama_dge_policy_snapkv;
extern const llama_dge_policy_impl llama_dge_policy_streamingllm;

// nullptr for an unknown policy
const llama_dge_policy_impl * llama_dge_get_policy(int32_t policy);

bool llama_dge_needs_window_scores(const llama_dge_select_params & params);
bool llama_dge_needs_draft_scores (const llama_dge_select_params & params);

// stride 1, as long as the input; max: padding never wins; avg: zero padding, divisor = kernel
void llama_dge_pool(std::vector<float> & data, int32_t pooling, int32_t kernel_size);

// divide by the sum over finite scores; a sum that is not positive leaves the scores alone
void llama_dge_normalize(std::vector<float> & data);

// the n best of `scores`, ascending
llama_dge_rows llama_dge_top_rows(const std::vector<float> & scores, int32_t n);

llama_dge_kept llama_dge_select(const llama_dge_select_input & input);
