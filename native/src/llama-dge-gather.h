#pragma once

#include "llama-dge-kv.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <utility>
#include <vector>

// one layer's cache of one stream
struct llama_dge_gather_layer {
    ggml_tensor * k;
    ggml_tensor * v;

    int64_t n_head; // KV heads
    size_t  size_k; // bytes of a row of one head
    size_t  size_v;
    bool    v_trans;
};

// Compacts layers that lie on a device by graphs of ggml's operations, without a copy on the host. The layers are added in
// the order of moves.kept; what a device cannot do is left to the host.
class llama_dge_gather {
public:
    llama_dge_gather(ggml_backend_sched_t sched, const llama_dge_moves & moves);

    void add(const llama_dge_gather_layer & layer);

    // everything that can fail; no entry has moved
    void prepare();

    bool takes(size_t i) const { return items[i].slot >= 0; }

    size_t n_taken() const;

    // false: the device failed, and what it has done is not known
    bool move(size_t i);

private:
    struct item {
        llama_dge_gather_layer layer;

        int slot; // index of its device, -1: the host moves its rows
    };

    // temporary memory of one device, enough for any of its layers
    struct device {
        ggml_backend_t             backend;
        ggml_backend_buffer_type_t buft;
        ggml_backend_buffer_ptr    buf;

        size_t size = 0;
    };

    int find_device(const llama_dge_gather_layer & layer);

    // rehearsal: rows of the first cells are gathered and put where they were
    ggml_cgraph * build(size_t i, bool rehearsal);

    void build_rows(ggml_cgraph * gf, ggml_tensor * t, size_t i, size_t size, bool trans, bool rehearsal);

    bool compute(size_t i, bool rehearsal);

    const ggml_backend_sched_t sched;
    const llama_dge_moves &    moves;

    std::vector<item>   items;
    std::vector<device> devices;

    int64_t n_cells = 0; // cells up to the last one that is read
    int64_t n_zero  = 0; // words that are zero: rows of a head that keeps fewer

    ggml_context_ptr ctx; // of one graph at a time

    ggml_tensor * zero = nullptr;
    ggml_tensor * rows = nullptr; // cells to read, by row and head

    std::vector<int32_t> data; // of `rows`
};
