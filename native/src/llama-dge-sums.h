#pragma once

#include "llama-dge-attn.h"
#include "llama-dge-kv.h"

#include <functional>
#include <vector>

// H2O's own score: the attention that every entry gets from all tokens, summed while they are evaluated. Causal attention
// makes this exact ubatch by ubatch.

class llama_dge_sums {
public:
    explicit llama_dge_sums(const llama_dge_kv & kv) : kv(kv), counts(kv.n_seq_all(), 0) {}

    static llama_dge_kv::shapes_t shapes(const llama_dge_kv & kv);

    // false: out of memory, nothing changed; else no entry is summed
    bool reserve(bool on);

    bool    empty() const { return bufs.empty(); }
    int64_t n_bytes() const;

    ggml_tensor * layer(size_t i) const { return i < tensors.size() ? tensors[i] : nullptr; }

    //
    // which entries count: [0, n) of a sequence, each once and no other; -1 until it is empty again
    //

    int32_t count(llama_seq_id seq_id) const { return counts[seq_id]; }
    void    set_count(llama_seq_id seq_id, int32_t n) { counts[seq_id] = n; }
    void    spoil(llama_seq_id seq_id) { counts[seq_id] = -1; }

    // entries from p0 on are removed: what they added cannot be taken out again
    void drop(llama_seq_id seq_id, llama_pos p0);

    // are the entries [0, n_rows) summed, or no sums needed?
    bool has(llama_seq_id seq_id, int32_t n_rows) const { return empty() || counts[seq_id] >= n_rows; }

    //
    // capture
    //

    using filter_t = std::function<bool(llama_seq_id seq_id, llama_pos pos)>;

    // weight of each token of the ubatch, 0 or 1; empty where none counts
    std::vector<float> plan(const llama_ubatch & ubatch, const filter_t & captures) const;

    // the graph that adds them is about to run
    void begin(const llama_ubatch & ubatch, const std::vector<float> & weights);

    // inputs of the graph: F32 [n_tokens] weights, I32 [n_kv, 1, n_stream] cells to read K from, F32 [n_kv, 1, n_stream] 0
    // where a cell is new or free, so that its old sum does not count
    struct inputs {
        ggml_tensor * weights = nullptr;
        ggml_tensor * cells   = nullptr;
        ggml_tensor * keep    = nullptr;
    };

    void build(size_t i, ggml_context * ctx, ggml_cgraph * gf, const llama_dge_attn & attn, const inputs & inp,
            const llama_ubatch & ubatch, ggml_tensor * q_cur, ggml_tensor * k, ggml_tensor * kq_mask) const;

    void set_inputs(const inputs & inp, const llama_ubatch & ubatch, const std::vector<float> & weights) const;

    // nodes that this adds to a graph at most
    int64_t n_nodes(uint32_t n_tokens) const;

    //
    // sums over the heads of a group, in the order of cells: [n_head_kv][stride]
    //

    void read(size_t i, llama_seq_id seq_id, const std::vector<uint32_t> & cells, int32_t n,
            std::vector<float> & res) const;
    void write(size_t i, llama_seq_id seq_id, const std::vector<uint32_t> & cells, const std::vector<float> & data,
            int32_t stride);

private:
    const llama_dge_kv & kv;

    std::vector<ggml_tensor *> tensors; // F32 [n_cells_max, n_head_kv, n_stream], of each layer
    std::vector<int32_t>       counts;  // [n_seq_all]

    llama_dge_bufs bufs;
};
