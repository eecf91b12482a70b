#pragma once

#include "llama-dge-kv.h"

#include <vector>

// Cells are shared by all layers and heads, so the head with the most entries sets their number. Where another has fewer,
// a bias of -inf hides the cells that it does not use. Past entries hold their slot as position, which says which these
// are. Layers that never needed a bias have none and pay nothing.

// rows of bias that layer i needs for a kept set: 0, 1 or n_head
int64_t llama_dge_bias_rows(const llama_dge_kept & kept, size_t i, int64_t n_head);

class llama_dge_bias {
public:
    explicit llama_dge_bias(const llama_dge_kv & kv) : kv(kv), seqs(kv.n_seq_all()) {}

    // room for a kept set. ERR_MEMORY, or ERR_UNSUPPORTED where a layer's attention cannot take such a bias
    int32_t reserve(const llama_dge_kept & kept);

    void clear();

    int64_t n_bytes() const;

    // the kept set of a sequence changed; nullptr: it has none. Entries from pos_min on are seen by all heads
    void set(llama_seq_id seq_id, const llama_dge_kept * kept, llama_pos pos_min);

    // does a sequence of the ubatch need it?
    bool plan(const llama_ubatch & ubatch) const;

    // graphs that were built for another version are built again
    uint64_t get_version() const { return version; }

    // bring the tensors up to date before a graph runs
    void sync();

    ggml_tensor * layer(size_t i) const { return i < tensors.size() ? tensors[i] : nullptr; }

    // kq_mask, kq_b: replaced so that attention of the layer skips what it must not see
    void build(size_t i, ggml_context * ctx, const llama_ubatch & ubatch, ggml_tensor *& kq_mask,
            ggml_tensor *& kq_b) const;

private:
    // what a sequence with unlike numbers of entries keeps: per layer and head their number; empty for others
    struct uneven {
        std::vector<std::vector<int32_t>> n_rows;

        llama_pos pos_min = 0;
    };

    const llama_dge_kv & kv;

    std::vector<uneven>        seqs;    // [n_seq_all]
    std::vector<ggml_tensor *> tensors; // F32 [n_cells_max, 1 or n_head, n_stream], of each layer

    llama_dge_bufs bufs;

    bool     dirty   = false;
    uint64_t version = 0;
};
