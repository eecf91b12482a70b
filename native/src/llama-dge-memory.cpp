#include "llama-dge-impl.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#ifdef __GLIBC__
#include <malloc.h>
#endif

// An elastic cache really has as many cells as it says: the arrays of cells and the tensors change together, and the
// rest of llama.cpp sees an ordinary cache of that size. Sizes come from a ladder, so that they do not depend on how a
// prompt was split, and every step is worth its copy.

static constexpr uint32_t LLAMA_DGE_CELLS_PAD   = 256; // as attention pads n_kv
static constexpr uint32_t LLAMA_DGE_CELLS_START = 512;
static constexpr uint32_t LLAMA_DGE_CELLS_SPARE = 128; // room for an answer behind the rows that a cut left

static thread_local bool llama_dge_elastic = false;

static std::atomic<int32_t> llama_dge_fail_in { 0 };
static std::atomic<int32_t> llama_dge_move_fail_in { 0 };

bool llama_dge_alloc_fails() {
    return llama_dge_fail_in > 0 && --llama_dge_fail_in == 0;
}

bool llama_dge_move_fails() {
    return llama_dge_move_fail_in > 0 && --llama_dge_move_fail_in == 0;
}

void llama_dge_check_move() {
    if (llama_dge_move_fails()) {
        throw std::runtime_error("a failure that a test asked for");
    }
}

static uint32_t llama_dge_ladder(uint32_t n_rows, uint32_t n_max) {
    uint64_t n = LLAMA_DGE_CELLS_START;

    while (n < n_rows) {
        n = GGML_PAD(n + n / 2, LLAMA_DGE_CELLS_PAD);
    }

    return std::min<uint64_t>(n, n_max);
}

// memory that was freed goes back to the system; the C library keeps blocks of some MiB for itself otherwise
static void llama_dge_trim() {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

int32_t llama_dge_elastic_cells(int32_t n_rows, int32_t n_max) {
    return llama_dge_ladder(n_rows, n_max);
}

uint32_t llama_dge_shrunk_cells(uint32_t n_rows) {
    return GGML_PAD(n_rows + LLAMA_DGE_CELLS_SPARE, LLAMA_DGE_CELLS_PAD);
}

//
// API
//

void llama_dge_set_elastic(bool elastic) {
    llama_dge_elastic = elastic;
}

bool llama_dge_is_elastic(const struct llama_context * ctx) {
    const auto * kv = llama_dge::get_kv(*ctx);

    return kv && kv->dge && kv->dge->elastic;
}

void llama_dge_debug_fail_alloc(int32_t n) {
    llama_dge_fail_in = n;
}

void llama_dge_debug_fail_move(int32_t n) {
    llama_dge_move_fail_in = n;
}

//
// hooks
//

uint32_t llama_dge_start_size(const llama_hparams & hparams, uint32_t kv_size) {
    // caches with a second one beside them that mirrors their cells stay as they are
    if (!llama_dge_elastic || hparams.no_alloc || hparams.is_mla() || hparams.indexer_head_size > 0) {
        return kv_size;
    }

    return llama_dge_ladder(0, kv_size);
}

llama_dge_ptr llama_dge_new_elastic(llama_kv_cache & kv, uint32_t kv_size_max) {
    if (kv.get_size() == kv_size_max) {
        return nullptr;
    }

    llama_dge_ptr res(new llama_dge(kv, kv.get_n_seq_max()));

    res->active      = false;
    res->elastic     = true;
    res->n_cells_max = kv_size_max;

    return res;
}

void llama_dge_on_share(llama_kv_cache * kv) {
    auto * dge = kv ? kv->dge.get() : nullptr;

    if (dge && dge->elastic) {
        if (!dge->resize(dge->n_cells_max)) {
            throw std::runtime_error("the cache that is to be shared could not grow to its full size");
        }

        dge->elastic = false;
        dge->rebuild = true;
    }
}

void llama_dge_on_decode(llama_context & lctx, const llama_batch & batch) {
    auto * kv  = llama_dge::get_kv(lctx);
    auto * dge = kv ? kv->dge.get() : nullptr;

    if (!dge) {
        return;
    }

    dge->lctx  = &lctx;
    dge->batch = &batch;

    dge->note_adapters(lctx, batch);

    if (dge->lost.any()) {
        dge->refuse(lctx);
    }

    if (!dge->elastic) {
        return;
    }

    dge->n_new.assign(kv->get_n_stream(), 0);

    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        dge->n_new[kv->get_n_stream() == 1 ? 0 : kv->get_stream(batch.seq_id[i][0])]++;
    }
}

void llama_dge_on_state_cells(llama_dge * dge, uint32_t strm, llama_seq_id seq_id, uint32_t n_cells) {
    // what was read of a stream is written when all is read, into the tensors that were there: nothing grows after it
    if (dge && dge->elastic && !dge->state_sized) {
        dge->state_sized = n_cells > 0;

        // what was read of other streams is written when all is read, and then their tensors must be the same
        const bool all = seq_id < 0 && dge->kv.get_n_stream() > 1;

        dge->batch = nullptr;

        // a failure shows as a state that does not fit
        dge->grow(all ? dge->n_cells_max : dge->cells_used(strm, seq_id) + n_cells);
    }
}

//
// llama_dge
//

void llama_dge::note_adapters(const llama_context & lctx, const llama_batch & batch) {
    const auto adapters = get_adapters(lctx);

    std::vector<bool> noted(n_seq, false);

    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        for (int32_t j = 0; j < batch.n_seq_id[i]; ++j) {
            const llama_seq_id s = batch.seq_id[i][j];

            if (s < 0 || (uint32_t) s >= n_seq || noted[s]) {
                continue;
            }
            noted[s] = true;

            auto & origin = seqs[s].origin;

            if (!origin.known || kv.seq_pos_max(s) < 0) {
                origin = { true, false, adapters };
            } else {
                origin.mixed |= origin.adapters != adapters;
            }
        }
    }
}

uint32_t llama_dge::cells_used(uint32_t strm, llama_seq_id seq_id) const {
    const auto & cells = kv.v_cells[strm];

    if (seq_id < 0) {
        return 0; // all of them are replaced
    }

    uint32_t n = cells.get_used();

    for (uint32_t i = 0; i < cells.size(); ++i) {
        n -= !cells.is_empty(i) && cells.seq_has(i, seq_id) && cells.seq_count(i) == 1;
    }

    return n;
}

uint32_t llama_dge::cells_wanted() const {
    uint32_t n_rows = 0;

    for (size_t s = 0; s < n_new.size(); ++s) {
        if (n_new[s] > 0) {
            n_rows = std::max(n_rows, kv.v_cells[s].get_used() + n_new[s]);
        }
    }

    return n_rows > kv.get_size() && kv.get_size() < n_cells_max ? n_rows : 0;
}

bool llama_dge::can_resize() const {
    for (uint32_t s = 0; s < kv.n_stream && kv.get_has_shift(); ++s) {
        const auto & cells = kv.v_cells[s];

        for (uint32_t i = 0; i < cells.size(); ++i) {
            // a division that waits: the position before it cannot be told from the shift
            if (!cells.is_empty(i) && cells.pos_get(i) < cells.get_shift(i)) {
                return false;
            }
        }
    }

    return true;
}

void llama_dge::resize_cells(uint32_t n_cells) {
    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        const auto old = kv.v_cells[s];

        auto & cells = kv.v_cells[s];

        cells.resize(n_cells);

        for (uint32_t i = 0; i < std::min(old.size(), n_cells); ++i) {
            if (old.is_empty(i)) {
                continue;
            }

            const llama_pos shift = old.get_shift(i);

            cells.pos_set(i, old.pos_get(i) - shift);
            cells.ext_set(i, old.ext_get(i));

            // in a unified cache there may be sequences that eviction does not know
            for (int32_t t = 0, n = old.seq_count(i); n > 0 && t < LLAMA_MAX_SEQ; ++t) {
                if (old.seq_has(i, t)) {
                    cells.seq_add(i, t);
                    n--;
                }
            }

            if (shift != 0) {
                cells.pos_add(i, shift);
            }
        }

        if (kv.v_heads[s] > n_cells) {
            kv.v_heads[s] = 0;
        }
    }
}

void llama_dge::resize_begin() {
    if (!own_bufs) {
        staged.resize(kv.layers.size());
    }
}

void llama_dge::resize_end(uint32_t n_cells) {
    if (!own_bufs) {
        kv.ctxs_bufs.clear();
        for (auto & slot : staged) {
            kv.ctxs_bufs.push_back(std::move(slot));
        }
        staged.clear();

        own_bufs = true;
    }

    resize_cells(n_cells);

    // graphs hold the old tensors
    rebuild = true;

    llama_dge_trim();
}

bool llama_dge::resize(uint32_t n_cells) {
    const uint32_t n_old  = kv.get_size();
    const uint32_t n_copy = std::min(n_old, n_cells);

    if (n_cells == n_old || !can_resize()) {
        return n_cells == n_old;
    }

    const auto layers_old = kv.layers;

    // what a way back needs is there before the first step
    std::vector<uint8_t> spare;
    for (const auto & layer : kv.layers) {
        spare.reserve(std::max(spare.capacity(), ggml_nbytes(layer.k) + (layer.v ? ggml_nbytes(layer.v) : 0)));
    }

    resize_begin();

    size_t n_done = 0;
    bool   copied = true;

    for (; n_done < kv.layers.size(); ++n_done) {
        llama_dge_layer_mem mem;

        if (!alloc_layer(n_done, n_cells, mem)) {
            break;
        }

        try {
            copy_cells(mem, n_done, n_copy);
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: layer %u: %s\n", __func__, kv.layers[n_done].il, err.what());
            copied = false;
            break;
        }
        swap_layer(n_done, mem);
    }

    if (n_done == kv.layers.size()) {
        resize_end(n_cells);
        return true;
    }

    bool back = true;

    if (own_bufs) {
        // layers that have grown go back to the old size inside their new buffers: that takes no memory
        for (size_t i = 0; i < n_done; ++i) {
            back = shrink_in_place(i, n_old, spare) && back;
        }
    } else {
        kv.layers = layers_old;
        staged.clear();
    }

    rebuild = true;

    if (!back) {
        lose(lctx, -1);
    }
    if (!copied) {
        return false;
    }

    const double missing = (double) cell_bytes() * (n_cells - n_copy) / 1024 / 1024;

    LLAMA_LOG_ERROR("%s: no memory for %u instead of %u cells: %.1f MiB are missing\n", __func__, n_cells, n_old,
            missing * (kv.layers.size() - n_done) / kv.layers.size());

    return false;
}

bool llama_dge::grow(uint32_t n_rows) {
    const uint32_t n_cells = llama_dge_ladder(n_rows, n_cells_max);

    return n_cells <= kv.get_size() || resize(n_cells);
}

uint32_t llama_dge::shrunk_size(uint32_t n_top) const {
    const uint32_t n_cells = llama_dge_shrunk_cells(n_top);

    return elastic && n_cells < kv.get_size() && !kv.get_has_shift() ? n_cells : kv.get_size();
}

int64_t llama_dge::cell_bytes() const {
    int64_t res = 0;

    for (const auto & layer : kv.layers) {
        res += layer.k->nb[1] * kv.n_stream;
        res += layer.v ? layer.v->nb[1] * kv.n_stream : 0;
    }

    return res;
}
