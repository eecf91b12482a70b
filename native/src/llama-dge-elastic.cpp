#include "llama-dge-elastic.h"

#include "llama-dge.h"

#include "llama-impl.h"

#include <algorithm>
#include <exception>

static constexpr uint32_t LLAMA_DGE_CELLS_PAD   = 256; // as attention pads n_kv
static constexpr uint32_t LLAMA_DGE_CELLS_START = 512;
static constexpr uint32_t LLAMA_DGE_CELLS_SPARE = 128; // room for an answer behind the kept entries

uint32_t llama_dge_elastic_cells(uint32_t n_rows, uint32_t n_max) {
    uint64_t n = LLAMA_DGE_CELLS_START;

    while (n < n_rows) {
        n = GGML_PAD(n + n / 2, LLAMA_DGE_CELLS_PAD);
    }

    return std::min<uint64_t>(n, n_max);
}

uint32_t llama_dge_shrunk_cells(uint32_t n_rows) {
    return GGML_PAD(n_rows + LLAMA_DGE_CELLS_SPARE, LLAMA_DGE_CELLS_PAD);
}

int32_t llama_dge_elastic::set_off() {
    const int32_t status = on ? grow(kv.size_max()) : (int32_t) LLAMA_DGE_OK;

    on = on && status != LLAMA_DGE_OK;

    return status;
}

uint32_t llama_dge_elastic::wanted() const {
    uint32_t n_rows = 0;

    for (size_t s = 0; s < n_new.size() && on; ++s) {
        if (n_new[s] > 0) {
            n_rows = std::max(n_rows, kv.n_used(s) + n_new[s]);
        }
    }

    return n_rows > kv.size() && kv.size() < kv.size_max() ? n_rows : 0;
}

int32_t llama_dge_elastic::grow(uint32_t n_rows) {
    const uint32_t n_cells = llama_dge_elastic_cells(n_rows, kv.size_max());

    return !on || n_cells <= kv.size() ? (int32_t) LLAMA_DGE_OK : resize(n_cells);
}

int32_t llama_dge_elastic::state_cells(uint32_t strm, llama_seq_id seq_id, uint32_t n_cells) {
    if (!on || state_sized) {
        return LLAMA_DGE_OK;
    }

    state_sized = n_cells > 0;

    // tensors of several streams must be the same for all of them
    const bool all = seq_id < 0 && kv.n_stream() > 1;

    // a failure shows as a state that does not fit
    return grow(all ? kv.size_max() : kv.n_used_by_others(strm, seq_id) + n_cells);
}

uint32_t llama_dge_elastic::shrunk(uint32_t n_top) const {
    const uint32_t n_cells = llama_dge_shrunk_cells(n_top);

    return on && n_cells < kv.size() && !kv.has_shift() ? n_cells : kv.size();
}

int32_t llama_dge_elastic::resize(uint32_t n_cells) {
    const uint32_t n_old  = kv.size();
    const uint32_t n_copy = std::min(n_old, n_cells);

    if (!kv.can_resize()) {
        return LLAMA_DGE_ERR_COMPUTE;
    }

    // what a way back needs is there before the first step
    std::vector<uint8_t> spare;
    for (size_t i = 0; i < kv.n_layer(); ++i) {
        spare.reserve(std::max(spare.capacity(), kv.layer_bytes(i)));
    }

    kv.resize_begin();

    size_t n_done = 0;
    bool   copied = true;

    for (; n_done < kv.n_layer(); ++n_done) {
        llama_dge_layer_mem mem;

        if (!kv.alloc_layer(n_done, n_cells, mem)) {
            break;
        }

        try {
            kv.copy_cells(mem, n_done, n_copy);
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: layer %d: %s\n", __func__, kv.layer(n_done).il, err.what());
            copied = false;
            break;
        }
        kv.swap_layer(n_done, mem);
    }

    if (n_done == kv.n_layer()) {
        kv.resize_end(n_cells);
        return LLAMA_DGE_OK;
    }

    if (!kv.resize_undo(n_done, n_old, spare)) {
        return LLAMA_DGE_ERR_LOST;
    }
    if (!copied) {
        return LLAMA_DGE_ERR_COMPUTE;
    }

    const double missing = (double) kv.cell_bytes() * (n_cells - n_copy) / 1024 / 1024;

    LLAMA_LOG_ERROR("%s: no memory for %u instead of %u cells: %.1f MiB are missing\n", __func__, n_cells, n_old,
            missing * (kv.n_layer() - n_done) / kv.n_layer());

    return LLAMA_DGE_ERR_MEMORY;
}
