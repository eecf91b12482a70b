#include "ggml-attn-score.h"

#include "ggml-impl.h"

ggml_tensor * ggml_attn_score(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * mask,
        ggml_tensor * sinks, ggml_tensor * weights, ggml_tensor * acc, float scale, float logit_softcap, float norm) {
    const int64_t n_q       = q->ne[1];
    const int64_t n_head    = q->ne[2];
    const int64_t n_kv      = k->ne[1];
    const int64_t n_head_kv = k->ne[2];
    const int64_t ns        = k->ne[3];

    GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float));
    GGML_ASSERT(q->ne[0] == k->ne[0] && q->ne[3] == ns);
    GGML_ASSERT(n_head % n_head_kv == 0);
    GGML_ASSERT(n_q > 0 && n_kv > 0);

    GGML_ASSERT(k->type == GGML_TYPE_F32 || ggml_get_type_traits(k->type)->to_float);
    GGML_ASSERT(k->nb[0] == ggml_type_size(k->type));

    if (mask) {
        GGML_ASSERT(mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32);
        GGML_ASSERT(mask->nb[0] == ggml_type_size(mask->type));
        GGML_ASSERT(mask->ne[0] == n_kv && mask->ne[1] == n_q && mask->ne[2] == 1 && mask->ne[3] == ns);
    }

    if (sinks) {
        GGML_ASSERT(sinks->type == GGML_TYPE_F32 && sinks->nb[0] == sizeof(float));
        GGML_ASSERT(ggml_nelements(sinks) == n_head && sinks->ne[0] == n_head);
    }

    if (weights) {
        GGML_ASSERT(weights->type == GGML_TYPE_F32 && weights->nb[0] == sizeof(float));
        GGML_ASSERT(ggml_nelements(weights) == n_q && weights->ne[0] == n_q);
    }

    if (acc) {
        GGML_ASSERT(acc->type == GGML_TYPE_F32 && acc->nb[0] == sizeof(float));
        GGML_ASSERT(acc->ne[0] == n_kv && acc->ne[1] == n_head_kv && acc->ne[2] == ns && acc->ne[3] == 1);
    }

    ggml_tensor * res = acc ? ggml_view_tensor(ctx, acc) : ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_kv, n_head_kv, ns);

    ggml_set_op_params_f32(res, GGML_ATTN_SCORE_PARAM_SCALE, scale);
    ggml_set_op_params_f32(res, GGML_ATTN_SCORE_PARAM_SOFTCAP, logit_softcap);
    ggml_set_op_params_f32(res, GGML_ATTN_SCORE_PARAM_NORM, norm);

    res->op = GGML_OP_ATTN_SCORE;

    res->src[GGML_ATTN_SCORE_SRC_Q]       = q;
    res->src[GGML_ATTN_SCORE_SRC_K]       = k;
    res->src[GGML_ATTN_SCORE_SRC_MASK]    = mask;
    res->src[GGML_ATTN_SCORE_SRC_SINKS]   = sinks;
    res->src[GGML_ATTN_SCORE_SRC_WEIGHTS] = weights;
    res->src[GGML_ATTN_SCORE_SRC_ACC]     = acc;

    return res;
}
