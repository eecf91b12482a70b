#include "llama-dge-attn.h"

#include "ggml-attn-score.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

bool llama_dge_use_fused() {
    const char * env = getenv("LLAMA_DGE_FUSED");

    return !env || strcmp(env, "0") != 0;
}

//
// the fused operation
//

static bool llama_dge_supports(ggml_backend_buffer_t buf, const ggml_tensor * op) {
    if (!buf) {
        return true; // the CPU, which has it
    }

    auto * dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buf));

    // plain host memory is of no device
    if (!dev && ggml_backend_buffer_is_host(buf)) {
        dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }

    // one that spreads tensors over others does not know how to spread this
    return dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_META && ggml_backend_dev_supports_op(dev, op);
}

static ggml_tensor * llama_dge_build_op(ggml_context * ctx, const llama_dge_score_args & args, ggml_tensor * acc) {
    const auto & attn = args.attn;

    // flash attention scales before the cap, the other path after it
    const float cap = attn.soft_cap * (attn.flash_attn ? 1.0f : attn.kq_scale);

    return ggml_attn_score(
            ctx, args.q, args.k, args.mask, attn.sinks, args.weights, acc, attn.kq_scale, cap, args.norm);
}

// nullptr where the device does not have it
static ggml_tensor * llama_dge_build_fused(ggml_context * ctx, const llama_dge_score_args & args) {
    if (!args.k || (args.k_rows && !llama_dge_use_fused())) {
        return nullptr;
    }

    const char * env   = getenv("LLAMA_DGE_FUSED");
    const bool   apart = args.acc && env && strcmp(env, "apart") == 0;

    ggml_tensor * res = llama_dge_build_op(ctx, args, args.acc);
    if (!apart && llama_dge_supports(args.buf, res)) {
        return res;
    }

    // ggml-metal does not add in place
    if (args.acc) {
        res = llama_dge_build_op(ctx, args, nullptr);
        if (llama_dge_supports(args.buf, res)) {
            return ggml_add_inplace(ctx, args.acc, res);
        }
    }

    return nullptr;
}

//
// ordinary operations
//

struct llama_dge_score_blocks {
    int64_t n_head; // KV heads of a block
    int64_t n_q;    // queries of a block
};

static llama_dge_score_blocks llama_dge_get_blocks(
        int64_t n_embd, int64_t n_head_kv, int64_t n_group, int64_t n_kv, int64_t n_q) {
    // K in F32 and, per query, its logits
    const int64_t n_head = std::clamp<int64_t>(LLAMA_DGE_SCORE_BLOCK / (4 * n_kv * n_embd), 1, n_head_kv);

    return { n_head, std::clamp<int64_t>(LLAMA_DGE_SCORE_BLOCK / (4 * n_kv * n_head * n_group), 1, n_q) };
}

int64_t llama_dge_score_nodes(const llama_dge_kv_layer & layer, int64_t n_kv, int64_t n_q) {
    const auto blk =
            llama_dge_get_blocks(layer.n_embd_head_k, layer.n_head_kv, layer.n_head / layer.n_head_kv, n_kv, n_q);

    const int64_t n_head_blocks = (layer.n_head_kv + blk.n_head - 1) / blk.n_head;
    const int64_t n_q_blocks    = (n_q + blk.n_q - 1) / blk.n_q;

    return n_head_blocks * (LLAMA_DGE_HEAD_NODES + LLAMA_DGE_BLOCK_NODES * n_q_blocks);
}

// kq: K*Q, not scaled; h0: its first query head
static ggml_tensor * llama_dge_build_probs(
        ggml_context * ctx, const llama_dge_attn & attn, ggml_tensor * kq, ggml_tensor * mask, int64_t h0) {
    float scale = attn.kq_scale;

    if (attn.soft_cap > 0.0f) {
        const float pre = attn.flash_attn ? scale : 1.0f;

        kq    = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, pre / attn.soft_cap)), attn.soft_cap);
        scale = attn.flash_attn ? 1.0f : scale;
    }

    const int64_t n_head = kq->ne[2];

    kq = ggml_soft_max_ext(ctx, kq, mask, scale, 0.0f);

    if (attn.sinks) {
        ggml_soft_max_add_sinks(kq, ggml_view_1d(ctx, attn.sinks, n_head, h0 * ggml_element_size(attn.sinks)));
    }

    return kq;
}

static ggml_tensor * llama_dge_build_ordinary(ggml_context * ctx, ggml_cgraph * gf, const llama_dge_score_args & args) {
    const auto * q = args.q;

    const int64_t n_embd    = q->ne[0];
    const int64_t n_q       = q->ne[1];
    const int64_t n_kv      = args.k_rows->ne[0];
    const int64_t n_head_kv = args.k_all->ne[0] / n_embd;
    const int64_t n_group   = q->ne[2] / n_head_kv;

    auto blk = llama_dge_get_blocks(n_embd, n_head_kv, n_group, n_kv, n_q);

    if (args.max_blocks > 0) {
        // no more blocks than the graph has room for, be they larger
        const int64_t n_head_blocks = (n_head_kv + blk.n_head - 1) / blk.n_head;
        const int64_t n_q_blocks    = std::max<int64_t>(1, args.max_blocks / n_head_blocks);

        blk.n_q = std::max(blk.n_q, (n_q + n_q_blocks - 1) / n_q_blocks);
    }

    ggml_tensor * res = nullptr;

    for (int64_t h0 = 0; h0 < n_head_kv; h0 += blk.n_head) {
        const int64_t nh = std::min(blk.n_head, n_head_kv - h0);

        // F32 whatever the cache's type: scores of a quantized product would reorder close entries
        ggml_tensor * k = ggml_view_2d(ctx, args.k_all, n_embd * nh, args.k_all->ne[1], args.k_all->nb[1],
                ggml_row_size(args.k_all->type, n_embd * h0));
        k               = ggml_get_rows(ctx, k, args.k_rows);
        k               = ggml_view_3d(ctx, k, n_embd, n_kv, nh, k->nb[1], n_embd * sizeof(float), 0);

        ggml_tensor * sum = nullptr;

        for (int64_t q0 = 0; q0 < n_q; q0 += blk.n_q) {
            const int64_t nq = std::min(blk.n_q, n_q - q0);

            ggml_tensor * qb = ggml_view_3d(
                    ctx, args.q, n_embd, nq, nh * n_group, q->nb[1], q->nb[2], q0 * q->nb[1] + h0 * n_group * q->nb[2]);
            ggml_tensor * m = args.mask
                                      ? ggml_view_2d(ctx, args.mask, n_kv, nq, args.mask->nb[1], q0 * args.mask->nb[1])
                                      : nullptr;

            ggml_tensor * kq = ggml_mul_mat(ctx, k, qb); // [n_kv, nq, nh*n_group]
            ggml_prec_set_acc(kq, GGML_PREC_F32);

            kq = llama_dge_build_probs(ctx, args.attn, kq, m, h0 * n_group);

            if (args.weights) {
                kq = ggml_mul(
                        ctx, kq, ggml_view_2d(ctx, args.weights, 1, nq, args.weights->nb[0], q0 * args.weights->nb[0]));
            }

            // sum over queries and the heads of the group
            kq = ggml_reshape_3d(ctx, kq, n_kv, nq * n_group, nh);
            kq = ggml_pool_2d(ctx, kq, GGML_OP_POOL_AVG, 1, nq * n_group, 1, nq * n_group, 0, 0);
            kq = ggml_scale(ctx, ggml_reshape_2d(ctx, kq, n_kv, nh), args.norm * nq * n_group);

            sum = sum ? ggml_add(ctx, sum, kq) : kq;

            // one block after the other, or their memory adds up
            ggml_build_forward_expand(gf, sum);
        }

        if (args.acc) {
            ggml_tensor * acc = ggml_view_2d(ctx, args.acc, n_kv, nh, args.acc->nb[1], h0 * args.acc->nb[1]);

            res = ggml_cpy(ctx, ggml_add(ctx, acc, sum), acc);
        } else {
            res = res ? ggml_concat(ctx, res, sum, 1) : sum;
        }

        ggml_build_forward_expand(gf, res);
    }

    return res;
}

ggml_tensor * llama_dge_build_scores(ggml_context * ctx, ggml_cgraph * gf, const llama_dge_score_args & args) {
    ggml_tensor * res = llama_dge_build_fused(ctx, args);

    if (!res) {
        return llama_dge_build_ordinary(ctx, gf, args);
    }

    ggml_build_forward_expand(gf, res);

    return res;
}
