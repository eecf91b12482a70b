#pragma once

#include "llama-dge-kv.h"

#include <functional>
#include <vector>

// Captured queries: the last n_ring of each sequence, per layer, beside the cache. The query of position p of a sequence
// lies in row seq_id*n_ring + p % n_ring.

// a row of a ubatch whose query is stored
struct llama_dge_capture {
    int32_t   src; // row of the ubatch
    int64_t   dst; // row of the ring
    llama_pos pos;
};

class llama_dge_ring {
public:
    explicit llama_dge_ring(const llama_dge_kv & kv) : kv(kv) {}

    static llama_dge_kv::shapes_t shapes(const llama_dge_kv & kv, uint32_t n_ring);

    // false: out of memory, nothing changed; else the ring is empty
    bool reserve(uint32_t n_ring);

    bool    empty() const { return n_ring == 0; }
    int64_t n_bytes() const;

    ggml_tensor * layer(size_t i) const { return i < tensors.size() ? tensors[i] : nullptr; }

    // most rows of a ubatch that can be stored
    size_t most(const llama_ubatch & ubatch) const;

    using filter_t = std::function<bool(llama_seq_id seq_id, llama_pos pos)>;

    std::vector<llama_dge_capture> plan(const llama_ubatch & ubatch, const filter_t & captures) const;

    // the graph that stores them is about to run
    void begin(const std::vector<llama_dge_capture> & rows);

    bool has(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;

    // forget positions from p0 on
    void drop(llama_seq_id seq_id, llama_pos p0);

    // rows of the positions [p0, p1)
    std::vector<int32_t> rows(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;

    // ascending
    std::vector<llama_pos> positions(llama_seq_id seq_id) const;

    // the query of a position, F32 [n_embd_q]
    void read(size_t i, llama_seq_id seq_id, llama_pos pos, float * dst) const;

    // queries at these positions, those of a sequence of n_rows and as many as fit; src: for each layer [pos.size()][n_embd_q]
    void set(llama_seq_id seq_id, const std::vector<int32_t> & pos, int32_t n_rows, const uint8_t * src);

private:
    const llama_dge_kv & kv;

    uint32_t n_ring = 0;

    std::vector<ggml_tensor *> tensors; // F32 [n_embd_q, n_ring*n_seq], of each layer
    std::vector<llama_pos>     stored;  // [n_seq*n_ring] position in a row, -1: none

    llama_dge_bufs bufs;
};

int64_t llama_dge_bufs_bytes(const llama_dge_bufs & bufs);
