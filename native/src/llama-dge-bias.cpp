#include "llama-dge-bias.h"

#include "llama-dge-ring.h"
#include "llama-dge.h"

#include <algorithm>
#include <cmath>

int64_t llama_dge_bias_rows(const llama_dge_kept & kept, size_t i, int64_t n_head) {
    const size_t n_cap = llama_dge_capacity(kept);
    const auto & heads = kept[i];

    const auto is_full = [&](const llama_dge_rows & rows) {
        return rows.size() == n_cap;
    };
    const auto is_same = [&](const llama_dge_rows & rows) {
        return rows.size() == heads[0].size();
    };

    if (std::all_of(heads.begin(), heads.end(), is_full)) {
        return 0;
    }

    return std::all_of(heads.begin(), heads.end(), is_same) ? 1 : n_head;
}

int32_t llama_dge_bias::reserve(const llama_dge_kept & kept) {
    llama_dge_kv::shapes_t shapes;

    bool grows = false;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        const int64_t n_have = layer(i) ? layer(i)->ne[1] : 0;
        const int64_t n_need = llama_dge_bias_rows(kept, i, kv.layer(i).n_head);

        // a mask per head takes the soft-max path on devices, which cannot read a quantized V there
        if (n_need > 1 && !kv.is_host(i) && ggml_is_quantized(kv.layer(i).type_v)) {
            return LLAMA_DGE_ERR_UNSUPPORTED;
        }

        grows |= n_need > n_have;
        shapes.push_back({ kv.size_max(), std::max(n_have, n_need), kv.n_stream() });
    }

    if (!grows) {
        return LLAMA_DGE_OK;
    }

    std::vector<ggml_tensor *> tensors_new;
    llama_dge_bufs             bufs_new;

    if (!kv.alloc_beside("dge_bias", shapes, tensors_new, bufs_new)) {
        return LLAMA_DGE_ERR_MEMORY;
    }

    tensors = std::move(tensors_new);
    bufs    = std::move(bufs_new);
    dirty   = true;
    version++;

    return LLAMA_DGE_OK;
}

void llama_dge_bias::clear() {
    tensors.clear();
    bufs.clear();
    version++;
}

int64_t llama_dge_bias::n_bytes() const {
    return llama_dge_bufs_bytes(bufs);
}

void llama_dge_bias::set(llama_seq_id seq_id, const llama_dge_kept * kept, llama_pos pos_min) {
    auto & seq = seqs[seq_id];

    const bool before = !seq.n_rows.empty();
    const bool after  = kept && llama_dge_is_uneven(*kept);

    seq = {};

    for (size_t i = 0; after && i < kept->size(); ++i) {
        auto & n_rows = seq.n_rows.emplace_back();
        for (const auto & rows : (*kept)[i]) {
            n_rows.push_back(rows.size());
        }
        seq.pos_min = pos_min;
    }

    if (before || after) {
        dirty = true;
        version++;
    }
}

bool llama_dge_bias::plan(const llama_ubatch & ubatch) const {
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        if (seq_id >= 0 && (size_t) seq_id < seqs.size() && !seqs[seq_id].n_rows.empty()) {
            return true;
        }
    }

    return false;
}

void llama_dge_bias::sync() {
    if (!dirty) {
        return;
    }

    std::vector<float> data;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        auto * bias = layer(i);
        if (!bias) {
            continue;
        }

        const int64_t n_kv = bias->ne[0];
        const int64_t n    = bias->ne[1];

        data.assign(ggml_nelements(bias), 0.0f);

        for (size_t s = 0; s < seqs.size(); ++s) {
            if (seqs[s].n_rows.empty()) {
                continue;
            }

            const auto & heads = seqs[s].n_rows[i];

            for (const auto & [cell, pos] : kv.cells_below(s, seqs[s].pos_min)) {
                for (int64_t r = 0; r < n; ++r) {
                    if (pos >= heads[r * heads.size() / n]) {
                        data[(kv.stream(s) * n + r) * n_kv + cell] = -INFINITY;
                    }
                }
            }
        }

        ggml_backend_tensor_set(bias, data.data(), 0, ggml_nbytes(bias));
    }

    dirty = false;
}

void llama_dge_bias::build(
        size_t i, ggml_context * ctx, const llama_ubatch & ubatch, ggml_tensor *& kq_mask, ggml_tensor *& kq_b) const {
    auto * bias = tensors[i];

    const int64_t n_kv     = kq_mask->ne[0];
    const int64_t n_stream = kq_mask->ne[3];
    const int64_t n_rows   = bias->ne[1];

    ggml_tensor * cur = ggml_view_4d(ctx, bias, n_kv, 1, n_rows, n_stream, bias->nb[1], bias->nb[1], bias->nb[2],
            kv.stream_begin(ubatch) * bias->nb[2]);

    if (n_rows == 1) {
        kq_mask = ggml_add(ctx, kq_mask, cur);
    } else if (kv.is_host(i) && kq_mask->type == GGML_TYPE_F16) {
        // flash attention of the CPU takes a mask per head
        kq_mask = ggml_add(ctx, ggml_repeat_4d(ctx, kq_mask, n_kv, kq_mask->ne[1], n_rows, n_stream), cur);
    } else {
        // a bias on KQ makes the attention take its soft-max path
        kq_b = cur;
    }
}
