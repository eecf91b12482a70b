#pragma once

#include "llama-dge-rows.h"

#include "llama-kv-cache.h"

#include "ggml-cpp.h"

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// The adapter to llama_kv_cache: the only friend of that class. What it knows of the cache's members stands in
// patches/README.md. A cell holds one position in all layers; streams are caches side by side.

using llama_dge_bufs = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>>;

// what a layer of the cache looks like
struct llama_dge_kv_layer {
    int32_t il; // layer of the model

    int64_t n_head;
    int64_t n_head_kv;
    int64_t n_embd_head_k;
    int64_t n_embd_head_v;

    ggml_type type_k;
    ggml_type type_v;

    size_t size_k; // bytes of the K of one position, all heads
    size_t size_v;

    int64_t n_embd_q() const { return n_embd_head_k * n_head; }
};

// K and V of one layer in a buffer of their own
struct llama_dge_layer_mem {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

    ggml_tensor * k = nullptr;
    ggml_tensor * v = nullptr;

    std::vector<ggml_tensor *> k_stream;
    std::vector<ggml_tensor *> v_stream;
};

// Entries of one layer in host memory, in the cache's own type. Rows of K follow each other, and so do rows of V, unless
// the cache's V is transposed: then it has one line per element, with room for n_cap rows.
struct llama_dge_entries {
    uint8_t * k = nullptr;
    uint8_t * v = nullptr;

    size_t n_cap = 0;
};

// A cache tensor as lanes of equal cells: cell c of a lane lies at offset + c*stride. A row-major tensor has one lane per
// head, a transposed one has a lane per element. Nothing but lanes knows which of the two a tensor is.
struct llama_dge_lane {
    size_t offset;
    size_t stride;
    size_t size;
};

// what an eviction moves where: past rows of each head, then the rows behind the past
struct llama_dge_moves {
    llama_dge_moves(const std::vector<uint32_t> & cells, const llama_dge_kept & kept, size_t n_past);

    // cell that row r of a head's result comes from, -1: none
    int64_t src(const llama_dge_rows & rows, size_t r) const;

    const std::vector<uint32_t> & cells; // by position
    const llama_dge_kept &        kept;

    size_t n_past;
    size_t n_cap;

    std::vector<uint32_t> dst; // cells that the result takes, ascending
    llama_dge_runs        runs;
};

class llama_dge_kv {
public:
    explicit llama_dge_kv(llama_kv_cache & cache);

    //
    // shape
    //

    size_t                     n_layer() const { return shapes.size(); }
    const llama_dge_kv_layer & layer(size_t i) const { return shapes[i]; }

    // index of a layer of the model, -1: none
    int32_t find(int32_t il) const;

    const llama_hparams & hparams() const;

    uint32_t n_seq() const;
    uint32_t n_seq_all() const; // ids that the cache can hold
    uint32_t n_stream() const;
    uint32_t stream(llama_seq_id seq_id) const;
    uint32_t size() const; // cells of a stream, as they are now
    uint32_t size_max() const;
    bool     is_trans() const;

    // first stream of the ubatch
    uint32_t stream_begin(const llama_ubatch & ubatch) const;

    ggml_tensor *         k(size_t i, uint32_t strm) const;
    ggml_tensor *         v(size_t i, uint32_t strm) const;
    ggml_backend_buffer_t buffer(size_t i) const;

    int64_t row_bytes() const;  // K and V of one position, all layers
    int64_t cell_bytes() const; // ... of one cell, all streams
    int64_t total_bytes() const;
    int64_t kept_bytes(const llama_dge_kept & kept, int32_t n_tail) const; // entries that are attended

    // of the model and the layout of its cache; reads some of the weights
    uint64_t fingerprint() const;

    // nullptr, or why the cache cannot be evicted
    const char * unsupported() const;

    // F32 tensors beside the K of each layer, zeroed; a shape of no elements gives none. false: out of memory
    using shapes_t = std::vector<std::array<int64_t, 3>>;

    bool alloc_beside(
            const char * name, const shapes_t & ne, std::vector<ggml_tensor *> & res, llama_dge_bufs & bufs) const;

    // bytes that these take
    int64_t beside_bytes(const shapes_t & ne) const;

    //
    // cells
    //

    llama_pos pos_max(llama_seq_id seq_id) const;
    bool      has_shift() const;

    // cell of each position of a sequence that holds exactly 0 .. n-1; else a status
    int32_t map_rows(llama_seq_id seq_id, std::vector<uint32_t> & cells) const;

    // cells of a sequence that was evicted: those of past rows by slot, the others by position from pos_min on
    int32_t map_evicted(llama_seq_id seq_id, size_t n_cap, llama_pos pos_min, std::vector<uint32_t> & slots,
            std::vector<uint32_t> & tail) const;

    // cells of a sequence below a position: { cell, position }
    std::vector<std::pair<uint32_t, llama_pos>> cells_below(llama_seq_id seq_id, llama_pos pos) const;

    uint32_t n_cells(llama_seq_id seq_id) const; // that the sequence holds
    uint32_t n_kv(llama_seq_id seq_id) const;    // that attention reads
    uint32_t n_used(uint32_t strm) const;

    // cells of a stream that other sequences than this one use; none for all sequences (-1)
    uint32_t n_used_by_others(uint32_t strm, llama_seq_id seq_id) const;

    // one above the highest cell in use when the sequence has only cells below n_own
    uint32_t top(llama_seq_id seq_id, uint32_t n_own) const;

    std::vector<uint32_t> free_cells(uint32_t strm, size_t n) const;

    // the lowest n cells that are free or the sequence's own
    std::vector<uint32_t> reusable_cells(llama_seq_id seq_id, size_t n) const;

    // for each of the first n cells of a stream: itself, or a cell in use where it is free (a free cell may hold NaN)
    void used_cells(uint32_t strm, int64_t n, int32_t * res) const;

    // for each of the first n cells of a stream: 1 where it is older than the ubatch, whose cells are in place already
    void older_cells(uint32_t strm, int64_t n, const llama_ubatch & ubatch, float * res) const;

    std::vector<llama_kv_cell_ext> exts(llama_seq_id seq_id, const std::vector<uint32_t> & cells) const;

    void free(uint32_t strm, const std::vector<uint32_t> & cells);
    void free_own(llama_seq_id seq_id);
    void set(llama_seq_id seq_id, uint32_t cell, llama_pos pos, const llama_kv_cell_ext & ext);

    // where the search for free cells begins
    void set_head(uint32_t strm, uint32_t cell);

    void seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    //
    // entries
    //

    // the data of a layer on the host: in place where the buffer is host memory, else a copy
    struct host_data {
        const uint8_t * k = nullptr;
        const uint8_t * v = nullptr;

        std::vector<uint8_t> copy_k;
        std::vector<uint8_t> copy_v;
    };

    bool is_host(size_t i) const;

    void host_reserve(size_t i, uint32_t strm, host_data & data) const;
    void host_read(size_t i, uint32_t strm, host_data & data) const;

    // sizes of a host copy of n_cap rows of a layer
    size_t entries_bytes_k(size_t i, size_t n_cap) const;
    size_t entries_bytes_v(size_t i, size_t n_cap) const;

    // rows of a layer, in the order of cells, from the cache behind the first row0 rows of `dst`; data: what the layer
    // holds, where it was read already
    void read(size_t i, uint32_t strm, const std::vector<uint32_t> & cells, const llama_dge_entries & dst, size_t row0,
            const host_data * data = nullptr) const;

    // ... and the first ones back
    void write(size_t i, uint32_t strm, const std::vector<uint32_t> & cells, const llama_dge_entries & src) const;

    // single rows of one head: { row, cell }
    void write_rows(size_t i, uint32_t strm, int64_t ih, const std::vector<std::pair<int32_t, uint32_t>> & rows,
            const llama_dge_entries & src) const;

    // rows between two sets of entries
    void copy(size_t i, const llama_dge_entries & dst, const llama_dge_entries & src, size_t n_rows) const;

    // an eviction inside the cache. A layer is gathered into `out` before any of it is written, so order and overlap of
    // cells do not matter; a head with fewer rows than the most leaves its last past cells zero
    void compact(size_t i, uint32_t strm, const llama_dge_moves & moves, const host_data & data,
            std::vector<uint8_t> & out) const;

    // fill free cells with a pattern
    int32_t poison(uint16_t pattern);

    //
    // size: layer by layer; resize_end() makes the number of cells fit what the tensors have
    //

    bool can_resize() const;

    // tensors of a layer for n_cells; without a `buf` one is allocated and zeroed. false: out of memory
    bool alloc_layer(size_t i, uint32_t n_cells, llama_dge_layer_mem & mem) const;

    // other tensors of the same layer get what the first n_copy cells hold; throws where a device cannot copy
    void copy_cells(const llama_dge_layer_mem & dst, size_t i, uint32_t n_copy) const;

    void resize_begin();
    void swap_layer(size_t i, llama_dge_layer_mem & mem);
    void resize_end(uint32_t n_cells);

    // give up what resize_begin() began: the first n_done layers hold more cells than n_cells. false: the device failed,
    // and what the cells hold is lost. spare: room for the largest layer
    bool resize_undo(size_t n_done, uint32_t n_cells, std::vector<uint8_t> & spare);

    size_t layer_bytes(size_t i) const;

private:
    llama_kv_cells & cells(uint32_t strm) const;

    std::vector<llama_dge_lane> lanes_k(size_t i, size_t n_cells) const;
    std::vector<llama_dge_lane> lanes_v(size_t i, size_t n_cells) const;
    std::vector<llama_dge_lane> head_lanes_k(size_t i, int64_t ih, size_t n_cells) const;
    std::vector<llama_dge_lane> head_lanes_v(size_t i, int64_t ih, size_t n_cells) const;

    bool shrink_in_place(size_t i, uint32_t n_cells, std::vector<uint8_t> & spare);

    void resize_cells(uint32_t n_cells); // shifts that wait are kept

    llama_kv_cache & cache;

    std::vector<llama_dge_kv_layer> shapes;

    bool own_bufs = false; // each layer has a buffer of its own

    // of a resize that is going on, while not own_bufs: new buffers, and the layers of before
    llama_dge_bufs                        staged;
    std::vector<llama_kv_cache::kv_layer> layers_old;
};
