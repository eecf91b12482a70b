#pragma once

#include "llama-dge-hooks.h"
#include "llama-dge-select.h"
#include "llama-dge.h"
#include "llama-kv-cache.h"

#include "ggml-cpp.h"

#include <string>
#include <vector>

// what DGE knows of one sequence
struct llama_dge_seq {
    int32_t state = LLAMA_DGE_STATE_FULL;
    int32_t error = LLAMA_DGE_OK;

    bool force  = false; // cut at the next update even if the draft is not complete
    bool warned = false; // one warning per armed prompt

    int32_t n_prompt = 0;

    // set by the cut
    int32_t n_draft  = 0;
    int32_t budget   = 0;
    int32_t n_before = 0;
    int32_t n_after  = 0;

    llama_pos boundary = -1;
    llama_pos pos_min  = -1;

    llama_dge_kept kept; // past rows per layer of the cache and head

    int64_t bytes_before = 0;
    int64_t bytes_after  = 0;

    int64_t t_score_us   = 0;
    int64_t t_select_us  = 0;
    int64_t t_compact_us = 0;
};

// what a layer's attention needs besides Q and K; recorded when the graph is built
struct llama_dge_layer {
    int32_t il = -1;

    ggml_tensor * ring = nullptr; // F32 [n_embd_head_k*n_head, n_ring*n_seq], last queries of each sequence

    ggml_tensor * sinks    = nullptr;
    float         kq_scale = 0.0f;
    bool          seen     = false; // the graph passed here
    bool          has_bias = false; // a bias is added to KQ: scores would be wrong
};

struct llama_dge {
    llama_dge(llama_kv_cache & kv, uint32_t n_seq);

    // nullptr if eviction can work on this context, else the reason
    static const char * unsupported(const llama_context & lctx);

    // the cache that can be cut, nullptr if there is none
    static llama_kv_cache * get_kv(const llama_context & lctx);

    // false: out of memory, nothing changed
    bool set_params(const llama_dge_params & params);

    //
    // capture
    //

    // rows of the ubatch whose queries are stored: [i] -> ring slot; counted without a vector when out is null
    struct capture_row {
        int32_t   src;
        int64_t   dst;
        llama_pos pos;
    };

    std::vector<capture_row> capture_plan(const llama_ubatch & ubatch) const;

    // the graph is about to run
    void capture_begin(const std::vector<capture_row> & rows);

    bool captured(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;

    void capture_drop(llama_seq_id seq_id, llama_pos p0);

    //
    // cut
    //

    int32_t resolve_budget(int32_t n_prompt) const;

    // positions of the queries that the scores of a prompt of n_prompt rows need, [p0, p1)
    void needed_queries(int32_t n_prompt, int32_t n_rows, llama_pos & p0, llama_pos & p1) const;

    bool is_due(llama_seq_id seq_id) const;

    int32_t arm(llama_seq_id seq_id, int32_t n_prompt);

    // all or nothing
    int32_t cut(llama_context & lctx, llama_seq_id seq_id);

    // cells[i]: cell of position i; empty if the sequence does not hold exactly the positions 0 .. n-1
    int32_t map_cells(llama_seq_id seq_id, std::vector<uint32_t> & cells) const;

    // attention that rows [0, n_past) receive from the queries at [p0, p1), softmax over all rows up to the query
    int32_t score_layer(
            llama_context & lctx, size_t ikv, llama_seq_id seq_id, const std::vector<uint32_t> & cells,
            llama_pos p0, llama_pos p1, int32_t n_past, std::vector<float> & scores) const;

    void compact(llama_seq_id seq_id, const std::vector<uint32_t> & cells, const llama_dge_kept & kept, int32_t n_past);

    // KV heads of a layer of the cache
    uint32_t n_head_kv(size_t ikv) const;

    // bytes of K and V per row, all layers of the cache
    int64_t row_bytes() const;

    void info(llama_seq_id seq_id, llama_dge_seq_info & info) const;

    void poison(uint16_t pattern, int32_t & n_cells);

    llama_kv_cache & kv;

    const uint32_t n_seq;

    llama_dge_params params = {};

    uint32_t n_ring = 0; // query rows per sequence

    std::vector<llama_dge_layer> layers; // by index of the cache's layers
    std::vector<llama_pos>       ring_pos; // [n_seq*n_ring] position stored in a slot, -1: none

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ring_bufs;

    std::vector<llama_dge_seq> seqs; // [n_seq]

    bool active  = true;  // false: being switched off, capture nothing
    bool rebuild = false; // graphs must be built again: report an update without doing one

    int64_t n_cuts = 0;

    // sequences of a state that is being read; they take effect when the cells are there
    std::vector<std::pair<llama_seq_id, llama_dge_seq>> pending;
};
