#pragma once

// The fused operation of eviction: how much attention each key gets from given queries. The enum value and the dispatch
// are in patches/0040-*.patch, all other code of it is here.

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// res[j, h, s] = acc[j, h, s] + norm * sum over rows i and heads g of the group of h:
//                weights[i] * softmax over j of (cap(scale * q[:, i, g, s] . k[:, j, h, s]) + mask[j, i, 0, s])
//
// Rows are contiguous, other strides are free (K is a view of the cache); there is at least one query and one key.
//
// q:       F32        [n_embd, n_q,  n_head,    ns]
// k:       any type   [n_embd, n_kv, n_head_kv, ns]
// mask:    F16 or F32 [n_kv,   n_q,  1,         ns]  or NULL
// sinks:   F32        [n_head]                       or NULL; one more logit per head in the denominator
// weights: F32        [n_q]                          or NULL: 1 for each row
// acc:     F32        [n_kv, n_head_kv, ns]          or NULL: 0; else added to in place, and the result is a view of it
// res:     F32        [n_kv, n_head_kv, ns]
//
// cap(x) = logit_softcap * tanh(x / logit_softcap), or x where logit_softcap is 0
//
// What is masked with -inf is as if it was not there: what K holds in that place does not matter, NaN neither, and a row
// of which all is masked adds nothing. Neither does a row whose weight is 0, whatever its query holds.
//
// Attention that caps before it scales: scale and scale * cap in the places of scale and logit_softcap.
GGML_API struct ggml_tensor * ggml_attn_score(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k,
        struct ggml_tensor * mask, struct ggml_tensor * sinks, struct ggml_tensor * weights, struct ggml_tensor * acc,
        float scale, float logit_softcap, float norm);

// where a backend finds them: src[]
enum ggml_attn_score_src {
    GGML_ATTN_SCORE_SRC_Q       = 0,
    GGML_ATTN_SCORE_SRC_K       = 1,
    GGML_ATTN_SCORE_SRC_MASK    = 2,
    GGML_ATTN_SCORE_SRC_SINKS   = 3,
    GGML_ATTN_SCORE_SRC_WEIGHTS = 4,
    GGML_ATTN_SCORE_SRC_ACC     = 5, // dst->data is acc->data
};

// and op_params, as float
enum ggml_attn_score_param {
    GGML_ATTN_SCORE_PARAM_SCALE   = 0,
    GGML_ATTN_SCORE_PARAM_SOFTCAP = 1,
    GGML_ATTN_SCORE_PARAM_NORM    = 2,
};

#ifdef __cplusplus
}
#endif
