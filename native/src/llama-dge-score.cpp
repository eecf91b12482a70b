#include "llama-dge-graph.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>

// transient memory of one graph, where there is no fused operation, is kept near this: KV heads, then query rows, are taken
// in blocks
static constexpr int64_t LLAMA_DGE_SCORE_BLOCK = 32ll * 1024 * 1024;

// tensors of a block, at most
static constexpr int64_t LLAMA_DGE_SCORE_NODES = 16;

// one block of the score: KV heads [h0, h0 + n_head), query rows [q0, q0 + n_q)
struct llama_dge_score_block {
    int64_t h0;
    int64_t n_head;
    int64_t q0;
    int64_t n_q;

    ggml_tensor * out; // F32 [n_keys, 1, n_head]
};

// keys among cells that are not asked for, as long as these do not outnumber them
struct llama_dge_cell_range {
    int64_t begin;
    int64_t size;

    bool dense(int64_t n_keys) const { return size <= 2 * n_keys; }
};

static llama_dge_cell_range llama_dge_get_range(const std::vector<uint32_t> & cells, int64_t n_keys) {
    const auto range = std::minmax_element(cells.begin(), cells.begin() + n_keys);

    return { *range.first, (int64_t) *range.second - *range.first + 1 };
}

int32_t llama_dge::score_layer(llama_context & lctx, size_t ikv, llama_seq_id seq_id,
        const std::vector<uint32_t> & cells, llama_pos p0, llama_pos p1, int32_t n_past,
        std::vector<float> & scores) const {
    const auto & layer   = layers[ikv];
    const auto & hparams = kv.hparams;
    const auto & cparams = lctx.get_cparams();

    const int64_t n_embd_head = hparams.n_embd_head_k(layer.il);
    const int64_t n_head      = hparams.n_head(layer.il);
    const int64_t n_head_kv   = hparams.n_head_kv(layer.il);
    const int64_t n_group     = n_head / n_head_kv;
    const int64_t n_keys      = p1;
    const int64_t n_q         = p1 - p0;

    ggml_tensor * k_cache = kv.layers[ikv].k_stream[kv.seq_to_stream[seq_id]];

    auto * sched = lctx.get_sched();
    auto * res   = lctx.get_gf_res_reserve();

    ggml_backend_sched_reset(sched);
    res->reset();

    auto * ctx = res->get_ctx();
    auto * gf  = res->get_gf();

    ggml_tensor * q_rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_q);
    ggml_set_input(q_rows);

    ggml_tensor * q_all = ggml_get_rows(ctx, layer.ring, q_rows); // [n_embd_head*n_head, n_q]

    // the operation takes K where it lies, and the mask hides the cells of others
    const auto range = llama_dge_get_range(cells, n_keys);

    ggml_tensor * mask  = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, range.size, n_q);
    ggml_tensor * fused = nullptr;

    if (range.dense(n_keys)) {
        ggml_tensor * k = ggml_view_3d(ctx, k_cache, n_embd_head, range.size, n_head_kv, k_cache->nb[1],
                ggml_row_size(k_cache->type, n_embd_head), range.begin * k_cache->nb[1]);
        ggml_tensor * q =
                ggml_view_3d(ctx, q_all, n_embd_head, n_q, n_head, q_all->nb[1], n_embd_head * sizeof(float), 0);

        fused = llama_dge_build_fused(ctx, hparams, layer, cparams.flash_attn, k_cache->buffer, q, k, mask, nullptr,
                nullptr, 1.0f / (n_q * n_group)); // [range.size, n_head_kv]
    }

    // the graph reads rows of the sequence alone, in the order of their positions
    ggml_tensor * k_rows = nullptr;

    if (fused) {
        ggml_set_output(fused);
        ggml_build_forward_expand(gf, fused);
    } else {
        k_rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_keys);
        mask   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_keys, n_q);

        ggml_set_input(k_rows);
    }
    ggml_set_input(mask);

    const int64_t n_head_blk =
            std::clamp<int64_t>(LLAMA_DGE_SCORE_BLOCK / (4 * n_keys * (n_embd_head + 2 * n_q * n_group)), 1, n_head_kv);
    int64_t n_q_blk =
            n_head_blk > 1
                    ? n_q
                    : std::clamp<int64_t>((LLAMA_DGE_SCORE_BLOCK / (4 * n_keys) - n_embd_head) / (2 * n_group), 1, n_q);

    // no more blocks than the graph has room for, be they larger
    const int64_t n_h_blks = (n_head_kv + n_head_blk - 1) / n_head_blk;
    const int64_t n_q_blks = std::max<int64_t>(1, lctx.graph_max_nodes(1) / (LLAMA_DGE_SCORE_NODES * n_h_blks));

    n_q_blk = std::max(n_q_blk, (n_q + n_q_blks - 1) / n_q_blks);

    std::vector<llama_dge_score_block> blocks;

    for (int64_t h0 = 0; h0 < n_head_kv && !fused; h0 += n_head_blk) {
        const int64_t nh = std::min(n_head_blk, n_head_kv - h0);

        // F32 whatever the cache's type: scores of a quantized product would reorder close rows
        ggml_tensor * k = ggml_view_2d(ctx, k_cache, n_embd_head * nh, k_cache->ne[1], k_cache->nb[1],
                ggml_row_size(k_cache->type, n_embd_head * h0));
        k               = ggml_get_rows(ctx, k, k_rows);
        k               = ggml_view_3d(ctx, k, n_embd_head, n_keys, nh, k->nb[1], n_embd_head * sizeof(float), 0);

        for (int64_t q0 = 0; q0 < n_q; q0 += n_q_blk) {
            const int64_t nq = std::min(n_q_blk, n_q - q0);

            ggml_tensor * q = ggml_view_3d(ctx, q_all, n_embd_head, nq, nh * n_group, q_all->nb[1],
                    n_embd_head * sizeof(float), q0 * q_all->nb[1] + h0 * n_group * n_embd_head * sizeof(float));
            ggml_tensor * m = ggml_view_2d(ctx, mask, n_keys, nq, mask->nb[1], q0 * mask->nb[1]);

            ggml_tensor * kq = ggml_mul_mat(ctx, k, q); // [n_keys, nq, nh*n_group]
            ggml_prec_set_acc(kq, GGML_PREC_F32);

            kq = llama_dge_build_probs(ctx, hparams, layer, cparams.flash_attn, kq, m, h0 * n_group);

            // mean over the query rows and the heads of the group
            kq = ggml_reshape_3d(ctx, kq, n_keys, nq * n_group, nh);
            kq = ggml_pool_2d(ctx, kq, GGML_OP_POOL_AVG, 1, nq * n_group, 1, nq * n_group, 0, 0);

            ggml_set_output(kq);
            ggml_build_forward_expand(gf, kq);

            blocks.push_back({ h0, nh, q0, nq, kq });
        }
    }

    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        LLAMA_LOG_ERROR("%s: failed to allocate the graph of layer %d\n", __func__, layer.il);
        return LLAMA_DGE_ERR_MEMORY;
    }

    if (!fused) {
        std::vector<int32_t> data(cells.begin(), cells.begin() + n_keys);
        ggml_backend_tensor_set(k_rows, data.data(), 0, ggml_nbytes(k_rows));
    }
    {
        std::vector<int32_t> data(n_q);
        for (int64_t i = 0; i < n_q; ++i) {
            data[i] = (int32_t) ((int64_t) seq_id * n_ring + (p0 + i) % n_ring);
        }
        ggml_backend_tensor_set(q_rows, data.data(), 0, ggml_nbytes(q_rows));
    }
    if (fused) {
        const ggml_fp16_t seen = ggml_fp32_to_fp16(0.0f);

        std::vector<ggml_fp16_t> data(range.size * n_q, ggml_fp32_to_fp16(-INFINITY));
        for (int64_t i = 0; i < n_q; ++i) {
            for (int64_t j = 0; j <= p0 + i; ++j) {
                data[i * range.size + cells[j] - range.begin] = seen;
            }
        }
        ggml_backend_tensor_set(mask, data.data(), 0, ggml_nbytes(mask));
    } else {
        std::vector<float> data(n_keys * n_q);
        for (int64_t i = 0; i < n_q; ++i) {
            for (int64_t j = 0; j < n_keys; ++j) {
                data[i * n_keys + j] = j <= p0 + i ? 0.0f : -INFINITY;
            }
        }
        ggml_backend_tensor_set(mask, data.data(), 0, ggml_nbytes(mask));
    }

    const auto status = lctx.graph_compute(gf, true);

    ggml_backend_sched_synchronize(sched);

    if (status != GGML_STATUS_SUCCESS) {
        return status == GGML_STATUS_ABORTED ? LLAMA_DGE_ERR_ABORTED : LLAMA_DGE_ERR_COMPUTE;
    }

    scores.assign((size_t) n_head_kv * n_past, 0.0f);

    std::vector<float> data;

    if (fused) {
        data.resize(ggml_nelements(fused));
        ggml_backend_tensor_get(fused, data.data(), 0, ggml_nbytes(fused));

        for (int64_t ih = 0; ih < n_head_kv; ++ih) {
            for (int64_t j = 0; j < n_past; ++j) {
                scores[ih * n_past + j] = data[ih * range.size + cells[j] - range.begin];
            }
        }
    }

    for (const auto & block : blocks) {
        data.resize(ggml_nelements(block.out));
        ggml_backend_tensor_get(block.out, data.data(), 0, ggml_nbytes(block.out));

        const float weight = (float) block.n_q / n_q;

        for (int64_t ih = 0; ih < block.n_head; ++ih) {
            for (int64_t j = 0; j < n_past; ++j) {
                scores[(block.h0 + ih) * n_past + j] += weight * data[ih * n_keys + j];
            }
        }
    }

    return LLAMA_DGE_OK;
}
