#include "llama-dge-graph.h"

#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>

// Cells are shared by all layers and heads, so the one with the most rows sets their number. Where another has fewer,
// a bias of -inf hides the cells that it does not use. Past rows hold their slot as position, which tells which these
// are. Layers that never needed a bias have none and pay nothing.

static bool llama_dge_is_uneven(const llama_dge_seq & seq) {
    if (seq.state != LLAMA_DGE_STATE_EVICTED) {
        return false;
    }

    const size_t n_cap = seq.n_after - (seq.n_before - seq.pos_min);

    for (const auto & heads : seq.kept) {
        for (const auto & rows : heads) {
            if (rows.size() != n_cap) {
                return true;
            }
        }
    }

    return false;
}

bool llama_dge::bias_plan(const llama_ubatch & ubatch) const {
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        if (seq_id >= 0 && (uint32_t) seq_id < n_seq && seqs[seq_id].uneven) {
            return true;
        }
    }

    return false;
}

void llama_dge::bias_changed(llama_seq_id seq_id) {
    auto & seq = seqs[seq_id];

    const bool before = seq.uneven;

    seq.uneven = llama_dge_is_uneven(seq);

    if (before || seq.uneven) {
        bias_dirty = true;
        bias_version++;
    }
}

int64_t llama_dge_bias_rows(const llama_dge_kept & kept, size_t i, int64_t n_head) {
    const size_t n_cap = llama_dge_capacity(kept);
    const auto & heads = kept[i];

    const auto is_full = [&](const llama_dge_rows & rows) { return rows.size() == n_cap; };
    const auto is_same = [&](const llama_dge_rows & rows) { return rows.size() == heads[0].size(); };

    if (std::all_of(heads.begin(), heads.end(), is_full)) {
        return 0;
    }

    return std::all_of(heads.begin(), heads.end(), is_same) ? 1 : n_head;
}

int32_t llama_dge::bias_reserve(const llama_dge_kept & kept) {
    shapes_t shapes;

    bool grows = false;

    for (size_t i = 0; i < layers.size(); ++i) {
        const int64_t n_have = layers[i].bias ? layers[i].bias->ne[1] : 0;
        const int64_t n_need = llama_dge_bias_rows(kept, i, kv.hparams.n_head(layers[i].il));

        // a mask per head takes the soft-max path on devices, which cannot read a quantized V there
        if (n_need > 1 && !ggml_backend_buffer_is_host(kv.layers[i].k->buffer) &&
                ggml_is_quantized(kv.layers[i].v->type)) {
            return LLAMA_DGE_ERR_UNSUPPORTED;
        }

        grows |= n_need > n_have;
        shapes.push_back({ (int64_t) n_cells_max, std::max(n_have, n_need), (int64_t) kv.n_stream });
    }

    if (!grows) {
        return LLAMA_DGE_OK;
    }

    std::vector<ggml_tensor *> tensors;
    bufs_t                     bufs;

    if (!alloc_tensors("dge_bias", shapes, tensors, bufs)) {
        return LLAMA_DGE_ERR_MEMORY;
    }

    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].bias = tensors[i];
    }

    bias_bufs  = std::move(bufs);
    bias_dirty = true;
    bias_version++;

    return LLAMA_DGE_OK;
}

void llama_dge::bias_sync() {
    std::vector<float> data;

    for (size_t i = 0; i < layers.size(); ++i) {
        auto * bias = layers[i].bias;
        if (!bias) {
            continue;
        }

        const int64_t n_kv   = bias->ne[0];
        const int64_t n_rows = bias->ne[1];

        data.assign(ggml_nelements(bias), 0.0f);

        for (uint32_t s = 0; s < n_seq; ++s) {
            const auto & seq = seqs[s];
            if (!seq.uneven) {
                continue;
            }

            const uint32_t strm  = kv.seq_to_stream[s];
            const auto &   cells = kv.v_cells[strm];
            const auto &   heads = seq.kept[i];

            for (int64_t j = 0; j < cells.size(); ++j) {
                if (cells.is_empty(j) || !cells.seq_has(j, s) || cells.pos_get(j) >= seq.pos_min) {
                    continue;
                }

                for (int64_t r = 0; r < n_rows; ++r) {
                    const auto & rows = heads[r * heads.size() / n_rows];

                    if (cells.pos_get(j) >= (llama_pos) rows.size()) {
                        data[(strm * n_rows + r) * n_kv + j] = -INFINITY;
                    }
                }
            }
        }

        ggml_backend_tensor_set(bias, data.data(), 0, ggml_nbytes(bias));
    }

    bias_dirty = false;
}

void llama_dge_build_bias(llama_dge & dge, const llama_dge_layer & layer, llm_graph_result & res,
        const llama_ubatch & ubatch, ggml_tensor *& kq_mask, ggml_tensor *& kq_b) {
    auto * ctx = res.get_ctx();

    auto * bias = layer.bias;

    const int64_t n_kv     = kq_mask->ne[0];
    const int64_t n_stream = kq_mask->ne[3];
    const int64_t n_rows   = bias->ne[1];

    ggml_tensor * cur = ggml_view_4d(ctx, bias, n_kv, 1, n_rows, n_stream, bias->nb[1], bias->nb[1], bias->nb[2],
            dge.stream_begin(ubatch) * bias->nb[2]);

    if (n_rows == 1) {
        kq_mask = ggml_add(ctx, kq_mask, cur);
    } else if (ggml_backend_buffer_is_host(bias->buffer) && kq_mask->type == GGML_TYPE_F16) {
        // flash attention of the CPU takes a mask per head
        kq_mask = ggml_add(ctx, ggml_repeat_4d(ctx, kq_mask, n_kv, kq_mask->ne[1], n_rows, n_stream), cur);
    } else {
        // a bias on KQ makes the attention take its soft-max path
        kq_b = cur;
    }
}
