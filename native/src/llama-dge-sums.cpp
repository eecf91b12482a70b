#include "llama-dge-graph.h"

#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>

// H2O: the attention that every row gets from all rows, summed while they are evaluated. Causal attention makes this
// exact ubatch by ubatch. Where a device does not have the fused operation, query rows and KV heads are taken in blocks,
// so that the attention matrix never exists.

struct llama_dge_sums_blocks {
    int64_t n_head; // KV heads of a block
    int64_t n_q;    // query rows of a block
};

static llama_dge_sums_blocks llama_dge_get_sums_blocks(
        const llama_hparams & hparams, int il, int64_t n_kv, int64_t n_q, int64_t n_stream) {
    const int64_t n_head_kv = hparams.n_head_kv(il);
    const int64_t n_group   = hparams.n_head(il) / n_head_kv;
    const int64_t n_embd    = hparams.n_embd_head_k(il);

    // K in F32 and, per row, its logits
    const int64_t n_head = std::clamp<int64_t>(LLAMA_DGE_SUMS_BLOCK / (4 * n_kv * n_stream * n_embd), 1, n_head_kv);

    return { n_head, std::clamp<int64_t>(LLAMA_DGE_SUMS_BLOCK / (4 * n_kv * n_stream * n_head * n_group), 1, n_q) };
}

uint32_t llama_dge_graph_max_nodes(const llama_context & lctx, uint32_t n_tokens) {
    const auto * kv  = llama_dge::get_kv(lctx);
    const auto * dge = kv ? kv->dge.get() : nullptr;

    return dge ? dge->max_nodes(n_tokens) : 0;
}

uint32_t llama_dge::max_nodes(uint32_t n_tokens) const {
    // capture and bias
    uint32_t res = 12 * layers.size();

    if (sums_bufs.empty()) {
        return res;
    }

    for (const auto & layer : layers) {
        const auto blk = llama_dge_get_sums_blocks(kv.hparams, layer.il, n_cells_max, n_tokens, kv.n_stream);

        const int64_t n_head_blocks = (kv.hparams.n_head_kv(layer.il) + blk.n_head - 1) / blk.n_head;
        const int64_t n_q_blocks    = (n_tokens + blk.n_q - 1) / blk.n_q;

        res += n_head_blocks * (16 + 20 * n_q_blocks);
    }

    return res;
}

// one operation per stream; false: the device does not have it
static bool llama_dge_build_sums_fused(llama_dge & dge, const llama_dge_layer & layer, llm_graph_result & res,
        llm_graph_input_dge & inp, const llama_ubatch & ubatch, ggml_tensor * q_cur, ggml_tensor * k,
        ggml_tensor * kq_mask) {
    auto * ctx = res.get_ctx();

    const int64_t n_head_kv = k->ne[1];
    const int64_t n_kv      = k->ne[2];
    const int64_t n_stream  = k->ne[3];
    const int64_t n_q       = q_cur->ne[2] / n_stream;

    for (int64_t s = 0; s < n_stream; ++s) {
        ggml_tensor * q = ggml_view_3d(
                ctx, q_cur, q_cur->ne[0], q_cur->ne[1], n_q, q_cur->nb[1], q_cur->nb[2], s * n_q * q_cur->nb[2]);
        ggml_tensor * kv = ggml_view_3d(ctx, k, k->ne[0], n_head_kv, n_kv, k->nb[1], k->nb[2], s * k->nb[3]);
        ggml_tensor * m  = ggml_view_2d(ctx, kq_mask, n_kv, n_q, kq_mask->nb[1], s * kq_mask->nb[3]);
        ggml_tensor * w  = ggml_view_1d(ctx, inp.weights, n_q, s * n_q * inp.weights->nb[0]);

        q  = ggml_permute(ctx, q, 0, 2, 1, 3);
        kv = ggml_permute(ctx, kv, 0, 2, 1, 3);

        ggml_tensor * acc  = ggml_view_2d(ctx, layer.sums, n_kv, n_head_kv, layer.sums->nb[1],
                (dge.stream_begin(ubatch) + s) * layer.sums->nb[2]);
        ggml_tensor * keep = ggml_view_1d(ctx, inp.keep, n_kv, s * inp.keep->nb[2]);

        acc = ggml_cpy(ctx, ggml_mul(ctx, acc, keep), acc);

        ggml_tensor * sum = llama_dge_build_fused(
                ctx, dge.hparams(), layer, kq_mask->type == GGML_TYPE_F16, layer.sums->buffer, q, kv, m, w, acc, 1.0f);
        if (!sum) {
            return false;
        }

        ggml_build_forward_expand(res.get_gf(), sum);
    }

    return true;
}

void llama_dge_build_sums(llama_dge & dge, const llama_dge_layer & layer, llm_graph_result & res,
        llm_graph_input_dge & inp, const llama_ubatch & ubatch, ggml_tensor * q_cur, ggml_tensor * k,
        ggml_tensor * kq_mask) {
    if (llama_dge_build_sums_fused(dge, layer, res, inp, ubatch, q_cur, k, kq_mask)) {
        return;
    }

    auto * ctx = res.get_ctx();
    auto * gf  = res.get_gf();

    const auto & hparams = dge.hparams();

    const bool flash_attn = kq_mask->type == GGML_TYPE_F16;

    const int64_t n_embd    = k->ne[0];
    const int64_t n_head_kv = k->ne[1];
    const int64_t n_kv      = k->ne[2];
    const int64_t n_stream  = k->ne[3];
    const int64_t n_group   = q_cur->ne[1] / n_head_kv;
    const int64_t n_q       = q_cur->ne[2] / n_stream;

    const auto blk = llama_dge_get_sums_blocks(hparams, layer.il, n_kv, n_q, n_stream);

    // mask rows of one stream follow each other, those of several do not
    const int64_t n_q_blk = n_stream == 1 ? blk.n_q : n_q;

    ggml_tensor * weights = ggml_reshape_4d(ctx, inp.weights, 1, n_q, 1, n_stream);

    for (int64_t h0 = 0; h0 < n_head_kv; h0 += blk.n_head) {
        const int64_t nh = std::min(blk.n_head, n_head_kv - h0);

        // F32 whatever the cache's type, as for the other scores
        ggml_tensor * kh = ggml_view_3d(ctx, k, n_embd * nh, n_kv, n_stream, k->nb[2], k->nb[3], h0 * k->nb[1]);
        kh               = ggml_get_rows(ctx, kh, ggml_reshape_2d(ctx, inp.cells, n_kv, n_stream));
        kh = ggml_view_4d(ctx, kh, n_embd, n_kv, nh, n_stream, kh->nb[1], n_embd * sizeof(float), kh->nb[2], 0);

        ggml_tensor * sum = nullptr;

        for (int64_t q0 = 0; q0 < n_q; q0 += n_q_blk) {
            const int64_t nq = std::min(n_q_blk, n_q - q0);

            ggml_tensor * q = ggml_view_4d(ctx, q_cur, n_embd, nh * n_group, nq, n_stream, q_cur->nb[1], q_cur->nb[2],
                    q_cur->nb[2] * n_q, q0 * q_cur->nb[2] + h0 * n_group * q_cur->nb[1]);
            q               = ggml_permute(ctx, q, 0, 2, 1, 3); // [n_embd, nq, nh*n_group, n_stream]

            ggml_tensor * m = ggml_view_4d(ctx, kq_mask, n_kv, nq, 1, n_stream, kq_mask->nb[1], kq_mask->nb[2],
                    kq_mask->nb[3], q0 * kq_mask->nb[1]);

            ggml_tensor * kq = ggml_mul_mat(ctx, kh, q);
            ggml_prec_set_acc(kq, GGML_PREC_F32);

            kq = llama_dge_build_probs(ctx, hparams, layer, flash_attn, kq, m, h0 * n_group);

            // sum over query rows and the heads of the group: a product with the weights of the rows
            ggml_tensor * w = ggml_view_4d(ctx, weights, 1, nq, 1, n_stream, weights->nb[1], weights->nb[2],
                    weights->nb[3], q0 * weights->nb[1]);
            w               = ggml_repeat_4d(ctx, w, 1, nq, nh * n_group, n_stream);
            w               = ggml_reshape_4d(ctx, w, 1, nq * n_group, nh, n_stream);

            kq = ggml_reshape_4d(ctx, kq, n_kv, nq * n_group, nh, n_stream);
            kq = ggml_out_prod(ctx, kq, w); // [n_kv, 1, nh, n_stream]

            sum = sum ? ggml_add(ctx, sum, kq) : kq;

            // one block after the other, or their memory adds up
            ggml_build_forward_expand(gf, sum);
        }

        sum = ggml_reshape_3d(ctx, sum, n_kv, nh, n_stream);

        ggml_tensor * acc = ggml_view_3d(ctx, layer.sums, n_kv, nh, n_stream, layer.sums->nb[1], layer.sums->nb[2],
                dge.stream_begin(ubatch) * layer.sums->nb[2] + h0 * layer.sums->nb[1]);

        sum = ggml_add(ctx, ggml_mul(ctx, acc, inp.keep), sum);

        ggml_build_forward_expand(gf, ggml_cpy(ctx, sum, acc));
    }
}

std::vector<float> llama_dge::sum_plan(const llama_ubatch & ubatch) const {
    std::vector<float> weights;

    if (sums_bufs.empty()) {
        return weights;
    }

    bool any = false;

    // a row that does not follow those that were summed is none of a sum: its cells may be others', too
    std::vector<int32_t> next;
    for (const auto & seq : seqs) {
        next.push_back(seq.n_summed);
    }

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        const bool counts = captures(seq_id, ubatch.pos[i]) && next[seq_id] == ubatch.pos[i];

        if (counts) {
            next[seq_id]++;
        }

        weights.push_back(counts ? 1.0f : 0.0f);
        any |= counts;
    }

    if (!any) {
        weights.clear();
    }

    return weights;
}

std::vector<int32_t> llama_dge::sum_cells(const llama_ubatch & ubatch, int64_t n_kv, int64_t n_stream) const {
    std::vector<int32_t> res(n_kv * n_stream);

    const uint32_t s0 = stream_begin(ubatch);

    for (int64_t s = 0; s < n_stream; ++s) {
        const auto & cells = kv.v_cells[s0 + s];

        for (int64_t j = 0; j < n_kv; ++j) {
            res[s * n_kv + j] = cells.is_empty(j) ? cells.used_min() : j;
        }
    }

    return res;
}

std::vector<float> llama_dge::sum_keep(const llama_ubatch & ubatch, int64_t n_kv, int64_t n_stream) const {
    std::vector<float> keep(n_kv * n_stream, 0.0f);

    // the cells of the ubatch are in place already: they hold its positions, from the first on
    std::vector<llama_pos> pos_min(n_seq, std::numeric_limits<llama_pos>::max());

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        if (seq_id >= 0 && (uint32_t) seq_id < n_seq) {
            pos_min[seq_id] = std::min(pos_min[seq_id], ubatch.pos[i]);
        }
    }

    const uint32_t s0 = stream_begin(ubatch);

    for (int64_t s = 0; s < n_stream; ++s) {
        const auto & cells = kv.v_cells[s0 + s];

        for (int64_t j = 0; j < n_kv; ++j) {
            if (cells.is_empty(j)) {
                continue;
            }

            bool is_new = false;
            for (uint32_t t = 0; t < n_seq && !is_new; ++t) {
                is_new = cells.seq_has(j, t) && cells.pos_get(j) >= pos_min[t];
            }

            keep[s * n_kv + j] = is_new ? 0.0f : 1.0f;
        }
    }

    return keep;
}

void llama_dge::sum_begin(const llama_ubatch & ubatch, const std::vector<float> & weights) {
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        if (weights[i] == 0.0f) {
            continue;
        }

        seqs[ubatch.seq_id[i][0]].n_summed++;
    }
}

uint32_t llama_dge::stream_begin(const llama_ubatch & ubatch) const {
    uint32_t res = kv.n_stream - 1;

    for (uint32_t s = 0; s < ubatch.n_seqs_unq; ++s) {
        res = std::min(res, kv.seq_to_stream[ubatch.seq_id_unq[s]]);
    }

    return res;
}

const llama_hparams & llama_dge::hparams() const {
    return kv.hparams;
}

void llama_dge::read_sums(size_t ikv, llama_seq_id seq_id, const std::vector<uint32_t> & cells, int32_t n,
        std::vector<float> & res) const {
    const auto * sums = layers[ikv].sums;

    const int64_t n_kv      = sums->ne[0];
    const int64_t n_head_kv = sums->ne[1];

    std::vector<float> data(n_kv * n_head_kv);
    ggml_backend_tensor_get(sums, data.data(), kv.seq_to_stream[seq_id] * sums->nb[2], data.size() * sizeof(float));

    res.resize((size_t) n_head_kv * n);

    for (int64_t ih = 0; ih < n_head_kv; ++ih) {
        for (int64_t j = 0; j < n; ++j) {
            res[ih * n + j] = data[ih * n_kv + cells[j]];
        }
    }
}

void llama_dge::write_sums(size_t ikv, llama_seq_id seq_id, const std::vector<uint32_t> & cells,
        const std::vector<float> & data, int32_t stride) {
    auto * sums = layers[ikv].sums;

    const int64_t n_kv      = sums->ne[0];
    const int64_t n_head_kv = sums->ne[1];
    const size_t  offset    = kv.seq_to_stream[seq_id] * sums->nb[2];

    // cells of other sequences keep theirs
    std::vector<float> all(n_kv * n_head_kv);
    ggml_backend_tensor_get(sums, all.data(), offset, all.size() * sizeof(float));

    for (int64_t ih = 0; ih < n_head_kv; ++ih) {
        for (size_t j = 0; j < cells.size(); ++j) {
            all[ih * n_kv + cells[j]] = data[ih * stride + j];
        }
    }

    ggml_backend_tensor_set(sums, all.data(), offset, all.size() * sizeof(float));
}
