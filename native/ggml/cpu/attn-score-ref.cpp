#include "attn-score-ref.h"

#include "ggml-attn-score.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

void llama_dge_to_float(ggml_type type, const void * x, float * y, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32:  memcpy(y, x, n * sizeof(float)); break;
        case GGML_TYPE_F16:  ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) x, y, n); break;
        case GGML_TYPE_BF16: ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) x, y, n); break;
        default:             ggml_get_type_traits(type)->to_float(x, y, n); break;
    }
}

// attention of one query row of one head: x[j] = exp(logit - maximum) / sum; false where it attends to nothing
static bool llama_dge_attn_ref(const ggml_tensor * dst, int64_t i, int64_t g, int64_t s, std::vector<double> & x) {
    const ggml_tensor * q     = dst->src[GGML_ATTN_SCORE_SRC_Q];
    const ggml_tensor * k     = dst->src[GGML_ATTN_SCORE_SRC_K];
    const ggml_tensor * mask  = dst->src[GGML_ATTN_SCORE_SRC_MASK];
    const ggml_tensor * sinks = dst->src[GGML_ATTN_SCORE_SRC_SINKS];

    const float scale = ggml_get_op_params_f32(dst, GGML_ATTN_SCORE_PARAM_SCALE);
    const float cap   = ggml_get_op_params_f32(dst, GGML_ATTN_SCORE_PARAM_SOFTCAP);

    const int64_t n_embd = k->ne[0];
    const int64_t n_kv   = k->ne[1];
    const int64_t h      = g / (q->ne[2] / k->ne[2]);

    const float * q_row = (const float *) ((const char *) q->data + i * q->nb[1] + g * q->nb[2] + s * q->nb[3]);

    std::vector<float> k_row(n_embd);

    const double sink = sinks ? ((const float *) sinks->data)[g] : -INFINITY;

    double m = sink;

    for (int64_t j = 0; j < n_kv; ++j) {
        float add = 0.0f;

        if (mask) {
            llama_dge_to_float(mask->type,
                    (const char *) mask->data + j * mask->nb[0] + i * mask->nb[1] + s * mask->nb[3], &add, 1);
        }
        if (add == -INFINITY) {
            x[j] = -INFINITY;
            continue;
        }

        llama_dge_to_float(
                k->type, (const char *) k->data + j * k->nb[1] + h * k->nb[2] + s * k->nb[3], k_row.data(), n_embd);

        double dot = 0.0;
        for (int64_t c = 0; c < n_embd; ++c) {
            dot += (double) q_row[c] * k_row[c];
        }

        x[j] = (cap != 0.0f ? cap * tanh(dot * scale / cap) : dot * scale) + add;
        m    = std::max(m, x[j]);
    }

    if (m == -INFINITY) {
        return false;
    }

    double total = exp(sink - m);
    for (int64_t j = 0; j < n_kv; ++j) {
        total += exp(x[j] - m);
    }
    for (int64_t j = 0; j < n_kv; ++j) {
        x[j] = exp(x[j] - m) / total;
    }

    return true;
}

void llama_dge_attn_score_ref(ggml_tensor * dst, int ith, int nth) {
    const ggml_tensor * q       = dst->src[GGML_ATTN_SCORE_SRC_Q];
    const ggml_tensor * k       = dst->src[GGML_ATTN_SCORE_SRC_K];
    const ggml_tensor * weights = dst->src[GGML_ATTN_SCORE_SRC_WEIGHTS];

    const float norm = ggml_get_op_params_f32(dst, GGML_ATTN_SCORE_PARAM_NORM);

    const int64_t n_kv      = k->ne[1];
    const int64_t n_head_kv = k->ne[2];
    const int64_t n_group   = q->ne[2] / n_head_kv;

    std::vector<double> x(n_kv);
    std::vector<double> sum(n_kv);

    for (int64_t o = ith; o < n_head_kv * k->ne[3]; o += nth) {
        const int64_t h = o % n_head_kv;
        const int64_t s = o / n_head_kv;

        std::fill(sum.begin(), sum.end(), 0.0);

        for (int64_t g = h * n_group; g < (h + 1) * n_group; ++g) {
            for (int64_t i = 0; i < q->ne[1]; ++i) {
                const float w = weights ? ((const float *) weights->data)[i] : 1.0f;

                if (w == 0.0f || !llama_dge_attn_ref(dst, i, g, s, x)) {
                    continue;
                }
                for (int64_t j = 0; j < n_kv; ++j) {
                    sum[j] += (double) norm * w * x[j];
                }
            }
        }

        float *    out        = (float *) ((char *) dst->data + h * dst->nb[1] + s * dst->nb[2]);
        const bool accumulate = dst->src[GGML_ATTN_SCORE_SRC_ACC] != nullptr;

        for (int64_t j = 0; j < n_kv; ++j) {
            out[j] = (accumulate ? out[j] : 0.0f) + sum[j];
        }
    }
}
