#include "attn-score.cuh"

#include "attn-score-kernels.cuh"
#include "attn-score-mma.cuh"
#include "ggml-attn-score.h"

#include <cstdlib>
#include <cstring>

// the kernels count bytes of these blocks themselves
static_assert(QK8_0 == 32 && sizeof(block_q8_0) == 34, "q8_0 has changed - update attn-score-*.cuh");
static_assert(QK4_0 == 32 && sizeof(block_q4_0) == 18, "q4_0 has changed - update attn-score-*.cuh");
static_assert(QK4_1 == 32 && sizeof(block_q4_1) == 20, "q4_1 has changed - update attn-score-*.cuh");
static_assert(QK5_0 == 32 && sizeof(block_q5_0) == 22, "q5_0 has changed - update attn-score-*.cuh");
static_assert(QK5_1 == 32 && sizeof(block_q5_1) == 24, "q5_1 has changed - update attn-score-*.cuh");

template <typename K>
static void attn_score_cuda(const attn_score_args & a, cudaStream_t stream) {
    attn_score_launch<K>(a, [stream](auto kernel, dim3 grid, dim3 block, const attn_score_args & args) {
        kernel<<<grid, block, 0, stream>>>(args);
    });
}

// K as the plain kernels read it, H as those with matrix units do
template <typename K, typename H>
static void attn_score_cuda(const attn_score_args & a, bool mma, cudaStream_t stream) {
    if (!mma) {
        attn_score_cuda<K>(a, stream);
        return;
    }
    attn_score_mma_launch<H>(a, [stream](auto kernel, dim3 grid, dim3 block, const attn_score_args & args) {
        kernel<<<grid, block, 0, stream>>>(args);
    });
}

// matrix units of halves that this build has code for. With LLAMA_DGE_MMA=0 in the environment they are left alone
static bool attn_score_has_mma(int device, ggml_type type) {
    if (type == GGML_TYPE_F32 || type == GGML_TYPE_BF16) {
        return false;
    }
    const char * env = getenv("LLAMA_DGE_MMA");
    return !(env && strcmp(env, "0") == 0) && turing_mma_available(ggml_cuda_info().devices[device].cc);
}

// bytes that one load of K takes, to which its rows have to be aligned
static size_t attn_score_load_size(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:  return 16;
        case GGML_TYPE_F16:  return 4;
        case GGML_TYPE_BF16: return 8;
        default:             return 2;
    }
}

static bool attn_score_is_aligned(const ggml_tensor * t, size_t size) {
    return t->view_offs % size == 0 && t->nb[1] % size == 0 && t->nb[2] % size == 0 && t->nb[3] % size == 0;
}

bool ggml_cuda_attn_score_supported(int device, const ggml_tensor * dst) {
    GGML_UNUSED(device);

    const ggml_tensor * q = dst->src[GGML_ATTN_SCORE_SRC_Q];
    const ggml_tensor * k = dst->src[GGML_ATTN_SCORE_SRC_K];

    switch (k->type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1: break;
        default:             return false;
    }

    const int64_t n_rows = q->ne[1] * (q->ne[2] / k->ne[2]);

    // limits of a grid, of an int, and of loads of four
    return q->ne[0] % 4 == 0 && k->ne[2] * k->ne[3] <= 65535 && k->ne[1] <= INT_MAX - ATTN_SCORE_KEYS &&
           n_rows <= 65535 * ATTN_SCORE_GROUPS && n_rows * k->ne[2] * k->ne[3] <= INT_MAX / 2 &&
           attn_score_is_aligned(q, 16) && attn_score_is_aligned(k, attn_score_load_size(k->type));
}

void ggml_cuda_attn_score(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[GGML_ATTN_SCORE_SRC_Q];
    const ggml_tensor * k       = dst->src[GGML_ATTN_SCORE_SRC_K];
    const ggml_tensor * mask    = dst->src[GGML_ATTN_SCORE_SRC_MASK];
    const ggml_tensor * sinks   = dst->src[GGML_ATTN_SCORE_SRC_SINKS];
    const ggml_tensor * weights = dst->src[GGML_ATTN_SCORE_SRC_WEIGHTS];
    const ggml_tensor * acc     = dst->src[GGML_ATTN_SCORE_SRC_ACC];

    attn_score_args a = {};

    a.q       = (const char *) q->data;
    a.k       = (const char *) k->data;
    a.mask    = mask ? (const char *) mask->data : nullptr;
    a.sinks   = sinks ? (const float *) sinks->data : nullptr;
    a.weights = weights ? (const float *) weights->data : nullptr;
    a.acc     = acc ? (const char *) acc->data : nullptr;
    a.dst     = (char *) dst->data;

    a.nbq1 = q->nb[1];
    a.nbq2 = q->nb[2];
    a.nbq3 = q->nb[3];
    a.nbk1 = k->nb[1];
    a.nbk2 = k->nb[2];
    a.nbk3 = k->nb[3];
    a.nbm1 = mask ? mask->nb[1] : 0;
    a.nbm3 = mask ? mask->nb[3] : 0;
    a.nba1 = acc ? acc->nb[1] : 0;
    a.nba2 = acc ? acc->nb[2] : 0;
    a.nbd1 = dst->nb[1];
    a.nbd2 = dst->nb[2];

    a.d         = q->ne[0];
    a.n_kv      = k->ne[1];
    a.n_q       = q->ne[1];
    a.n_head_kv = k->ne[2];
    a.n_group   = q->ne[2] / k->ne[2];
    a.n_seq     = k->ne[3];
    a.mask_f16  = mask && mask->type == GGML_TYPE_F16;

    a.scale         = ggml_get_op_params_f32(dst, GGML_ATTN_SCORE_PARAM_SCALE);
    a.logit_softcap = ggml_get_op_params_f32(dst, GGML_ATTN_SCORE_PARAM_SOFTCAP);
    a.norm          = ggml_get_op_params_f32(dst, GGML_ATTN_SCORE_PARAM_NORM);

    const bool mma = attn_score_has_mma(ctx.device, k->type);

    a.n_split = attn_score_n_split(a, mma ? attn_score_mma_rows_per_thread(a) : attn_score_rows_per_thread(a));

    ggml_cuda_pool_alloc<float2> part(ctx.pool(), attn_score_n_part(a));
    ggml_cuda_pool_alloc<float2> stat(ctx.pool(), attn_score_n_stat(a));
    ggml_cuda_pool_alloc<half>   q_half(ctx.pool());
    ggml_cuda_pool_alloc<float>  q_scale(ctx.pool());

    a.part = part.get();
    a.stat = stat.get();

    if (mma) {
        attn_score_mma_pad(a);
        a.q_half  = q_half.alloc(attn_score_mma_n_rows(a) * 2 * a.d_pad);
        a.q_scale = q_scale.alloc(attn_score_mma_n_rows(a));
    }

    cudaStream_t stream = ctx.stream();

    switch (k->type) {
        case GGML_TYPE_F32:  attn_score_cuda<attn_score_f32>(a, stream); break;
        case GGML_TYPE_F16:  attn_score_cuda<attn_score_f16, attn_score_mma_f16>(a, mma, stream); break;
        case GGML_TYPE_BF16: attn_score_cuda<attn_score_bf16>(a, stream); break;
        case GGML_TYPE_Q8_0: attn_score_cuda<attn_score_q8_0, attn_score_mma_q8_0>(a, mma, stream); break;
        case GGML_TYPE_Q4_0: attn_score_cuda<attn_score_q4_0, attn_score_mma_q4_0>(a, mma, stream); break;
        case GGML_TYPE_Q4_1: attn_score_cuda<attn_score_q4_1, attn_score_mma_q4_1>(a, mma, stream); break;
        case GGML_TYPE_Q5_0: attn_score_cuda<attn_score_q5_0, attn_score_mma_q5_0>(a, mma, stream); break;
        case GGML_TYPE_Q5_1: attn_score_cuda<attn_score_q5_1, attn_score_mma_q5_1>(a, mma, stream); break;
        default:             GGML_ABORT("ATTN_SCORE: no kernel for K of type %s", ggml_type_name(k->type));
    }
}
