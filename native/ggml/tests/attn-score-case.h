#pragma once

// A case of ATTN_SCORE: tensors as eviction has them (views into larger ones, strided, poison around them), the operation,
// the graph of other operations that it stands for, and the answer in double precision.

#include "ggml-attn-score.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <string>
#include <vector>

enum attn_score_mask {
    ATTN_SCORE_MASK_NONE,
    ATTN_SCORE_MASK_CAUSAL,   // the last query sees all keys
    ATTN_SCORE_MASK_HOLES,    // causal, and some keys are nobody's: their K is NaN
    ATTN_SCORE_MASK_FAR,      // only the first keys are seen
    ATTN_SCORE_MASK_ROWS,     // some rows see nothing
    ATTN_SCORE_MASK_ADDITIVE, // finite numbers
};

struct attn_score_case {
    ggml_type type_k  = GGML_TYPE_F16;
    int64_t   n_embd  = 64;
    int64_t   n_q     = 8;
    int64_t   n_kv    = 300;
    int64_t   n_heads = 2; // of K
    int64_t   n_group = 2;
    int64_t   n_seq   = 1;

    attn_score_mask mask   = ATTN_SCORE_MASK_CAUSAL;
    ggml_type       type_m = GGML_TYPE_F16;

    bool  sinks   = false;
    bool  weights = false;
    bool  acc     = false;
    float cap     = 0.0f;

    float scale = 0.125f;
    float norm  = 1.0f;

    bool  poison = true; // NaN around the views
    float peak   = 3.0f; // standard deviation of the logits, about

    std::string text() const;

    // does the graph give the same answer? not where a row sees nothing, nor with NaN in keys
    bool has_graph() const { return mask != ATTN_SCORE_MASK_HOLES && mask != ATTN_SCORE_MASK_ROWS; }
};

// the inputs on a backend
struct attn_score_data {
    attn_score_data(const attn_score_case & c, ggml_backend_t backend, uint32_t seed);

    // res[0] = op, or the graph
    ggml_tensor * build_op(ggml_context * ctx) const;
    ggml_tensor * build_graph(ggml_context * ctx) const;

    // runs one of them; empty: not supported, or failed
    std::vector<float> run(bool fused) const;

    std::vector<float> reference() const;

    // bytes of `sums` that are not in the view changed
    bool damaged() const;

    attn_score_case c;
    ggml_backend_t  backend;

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

    ggml_tensor * q_all;
    ggml_tensor * k_all;
    ggml_tensor * mask_all = nullptr;
    ggml_tensor * sinks    = nullptr;
    ggml_tensor * weights  = nullptr;
    ggml_tensor * sums_all = nullptr;

    ggml_tensor * q;
    ggml_tensor * k;
    ggml_tensor * mask = nullptr;
    ggml_tensor * acc  = nullptr;

    // what they hold, K as it is after rounding
    std::vector<float> q_data;    // [n_seq][n_q][n_head][n_embd]
    std::vector<float> k_data;    // [n_seq][n_kv][n_heads][n_embd]
    std::vector<float> mask_data; // [n_seq][n_q][n_kv]
    std::vector<float> sinks_data;
    std::vector<float> weights_data;
    std::vector<float> sums_data; // all of it
};
