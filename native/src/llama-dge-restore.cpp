#include "llama-dge-impl.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <set>

//
// park
//

// runs of neighbouring cells: { first index into cells, length }
static std::vector<std::pair<size_t, size_t>> llama_dge_cell_runs(const std::vector<uint32_t> & cells) {
    std::vector<std::pair<size_t, size_t>> runs;

    for (size_t i = 0; i < cells.size(); ++i) {
        if (i == 0 || cells[i] != cells[i - 1] + 1) {
            runs.push_back({ i, 0 });
        }
        runs.back().second++;
    }

    return runs;
}

static bool llama_dge_on_host(const ggml_tensor * t) {
    return ggml_backend_buffer_is_host(t->view_src ? t->view_src->buffer : t->buffer);
}

void llama_dge::park_layer(llama_dge_park_layer & rows, size_t row0, size_t ikv, llama_seq_id seq_id,
        const std::vector<uint32_t> & cells, const uint8_t * data_k, const uint8_t * data_v) const {
    const uint32_t strm = kv.seq_to_stream[seq_id];
    const auto     runs = llama_dge_cell_runs(cells);

    // n_outer: 1, or the elements of a transposed V
    // they go behind the first `row0` rows
    const auto gather = [&](uint8_t * out, const ggml_tensor * t, const uint8_t * data, size_t size, size_t n_outer) {
        std::vector<uint8_t> copy;

        // from a device, only what is wanted, unless that takes many small copies
        if (!data && !llama_dge_on_host(t) && n_outer == 1 && runs.size() <= 16) {
            for (const auto & [i, n] : runs) {
                ggml_backend_tensor_get(t, out + (row0 + i) * size, cells[i] * size, n * size);
            }
            return;
        }
        if (!data && !llama_dge_on_host(t)) {
            copy.resize(ggml_nbytes(t));
            ggml_backend_tensor_get(t, copy.data(), 0, copy.size());
            data = copy.data();
        }
        if (!data) {
            data = (const uint8_t *) t->data;
        }

        for (size_t j = 0; j < n_outer; ++j) {
            for (const auto & [i, n] : runs) {
                memcpy(out + (j * rows.n_cap + row0 + i) * size, data + (j * t->ne[1] + cells[i]) * size, n * size);
            }
        }
    };

    gather(rows.k.get(), kv.layers[ikv].k_stream[strm], data_k, rows.size_k, 1);
    gather(rows.v.get(), kv.layers[ikv].v_stream[strm], data_v, rows.size_v, rows.n_v);
}

void llama_dge::unpark_layer(
        const llama_dge_park_layer & rows, size_t ikv, llama_seq_id seq_id, const std::vector<uint32_t> & cells) const {
    const uint32_t strm = kv.seq_to_stream[seq_id];
    const auto     runs = llama_dge_cell_runs(cells);

    const auto scatter = [&](ggml_tensor * t, const uint8_t * data, size_t size, size_t n_outer) {
        for (size_t j = 0; j < n_outer; ++j) {
            for (const auto & [i, n] : runs) {
                ggml_backend_tensor_set(
                        t, data + (j * rows.n_cap + i) * size, (j * t->ne[1] + cells[i]) * size, n * size);
            }
        }
    };

    scatter(kv.layers[ikv].k_stream[strm], rows.k.get(), rows.size_k, 1);
    scatter(kv.layers[ikv].v_stream[strm], rows.v.get(), rows.size_v, rows.n_v);
}

int64_t llama_dge::parked_bytes() const {
    std::set<const llama_dge_parked *> stores;

    for (const auto & seq : seqs) {
        if (seq.parked) {
            stores.insert(seq.parked.get());
        }
    }

    int64_t res = 0;
    for (const auto * parked : stores) {
        res += parked->n_bytes();
    }

    return res;
}

std::shared_ptr<llama_dge_parked> llama_dge::park_begin(
        llama_context & lctx, llama_seq_id seq_id, const std::vector<uint32_t> & cells, int32_t & status) const {
    const uint32_t strm = kv.seq_to_stream[seq_id];

    auto parked = std::make_shared<llama_dge_parked>();

    parked->n_rows   = cells.size();
    parked->n_exact  = cells.size();
    parked->n_summed = seqs[seq_id].n_summed;
    parked->adapters = seqs[seq_id].origin.adapters;
    parked->mixed    = seqs[seq_id].origin.mixed;

    for (const uint32_t cell : cells) {
        parked->exts.push_back(kv.v_cells[strm].ext_get(cell));
    }

    const bool sums = llama_dge_needs_sums(params.sel);

    for (size_t i = 0; i < kv.layers.size(); ++i) {
        auto & layer = parked->layers.emplace_back();

        const auto n_embd_v = kv.hparams.n_embd_v_gqa(kv.layers[i].il);

        layer.size_k = ggml_row_size(kv.layers[i].k->type, kv.hparams.n_embd_k_gqa(kv.layers[i].il));
        layer.size_v =
                kv.v_trans ? ggml_type_size(kv.layers[i].v->type) : ggml_row_size(kv.layers[i].v->type, n_embd_v);
        layer.n_v = kv.v_trans ? n_embd_v : 1;

        if (sums) {
            read_sums(i, seq_id, cells, cells.size(), layer.sums);
        }
    }

    if (const auto * swa = get_swa(lctx)) {
        parked->others_pos_min = swa->seq_pos_min(seq_id);
    }
    if (get_swa(lctx) || has_recurrent(lctx)) {
        // a state has no rows that are out of the window of its last position, but a shorter prompt sees them
        const llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | LLAMA_DGE_STATE_FLAG_ALL_ROWS;

        parked->others.resize(lctx.state_seq_get_size(seq_id, flags));

        if (lctx.state_seq_get_data(seq_id, parked->others.data(), parked->others.size(), flags) == 0) {
            status = LLAMA_DGE_ERR_PARK;
            return nullptr;
        }
    }

    const int64_t n_bytes = parked_bytes() + parked->n_bytes();

    if (params.park_limit > 0 && n_bytes > params.park_limit) {
        LLAMA_LOG_WARN("%s: %.1f MiB would be parked, which is above the limit of %.1f MiB\n", __func__,
                n_bytes / 1024.0 / 1024.0, params.park_limit / 1024.0 / 1024.0);
        status = LLAMA_DGE_ERR_PARK;
        return nullptr;
    }

    if (params.park == LLAMA_DGE_PARK_RAM) {
        // rows that are decoded after the cut are added where they may be chosen
        const size_t n_cap = cells.size() + (params.recall != 0 ? LLAMA_DGE_PARK_SPARE : 0);

        // filled layer by layer while the cut frees the layers' old buffers
        for (auto & layer : parked->layers) {
            if (!parked->alloc(layer, n_cap)) {
                status = LLAMA_DGE_ERR_MEMORY;
                return nullptr;
            }
        }
        return parked;
    }

    std::string error;
    bool        ok = parked->file_begin(params.park_path, error);

    for (size_t i = 0; ok && i < parked->layers.size(); ++i) {
        auto & layer = parked->layers[i];

        if (!parked->alloc(layer, cells.size())) {
            status = LLAMA_DGE_ERR_MEMORY;
            return nullptr;
        }

        park_layer(layer, 0, i, seq_id, cells);

        ok = parked->file_write(layer, error);

        layer.k.reset();
        layer.v.reset();
    }

    if (!ok || !parked->file_end(error)) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, error.c_str());
        status = LLAMA_DGE_ERR_PARK;
        return nullptr;
    }

    return parked;
}

//
// restore
//

bool llama_dge::others_fit(const llama_context & lctx, const llama_dge_parked & parked, int32_t n) const {
    if (n == parked.n_exact) {
        return true;
    }
    // a recurrent state is that of one position
    if (has_recurrent(lctx)) {
        return false;
    }

    return !get_swa(lctx) || parked.others_pos_min <= std::max(0, n - (int32_t) kv.hparams.n_swa);
}

int32_t llama_dge::restore(llama_context & lctx, llama_seq_id seq_id, int32_t n_match) {
    const int64_t t0 = ggml_time_us();

    const auto parked = seqs[seq_id].parked;

    const int32_t n = parked ? std::min(n_match, seqs[seq_id].n_exact) : 0;

    if (n <= 0 || parked->mixed || parked->adapters != get_adapters(lctx) || !others_fit(lctx, *parked, n)) {
        return 0;
    }

    const uint32_t strm = kv.seq_to_stream[seq_id];

    // copies of streams and shifts that wait for the next decode would meet other rows; a choice among rows that go is
    // not worth its time
    seqs[seq_id].n_checked = kv.seq_pos_max(seq_id) + 1;

    batch = nullptr;
    n_new.clear();

    lctx.sched_reserve();
    lctx.memory_update(false);

    // what can fail comes first

    std::string error;

    llama_dge_park_layer buf;

    if (!parked->path.empty()) {
        if (!parked->alloc_largest(buf)) {
            return LLAMA_DGE_ERR_MEMORY;
        }
        if (!parked->file_check(buf, error)) {
            LLAMA_LOG_ERROR("%s: %s\n", __func__, error.c_str());
            seqs[seq_id].parked = nullptr;
            return LLAMA_DGE_ERR_PARK;
        }
    }

    const uint32_t n_rows = cells_used(strm, seq_id) + n;

    if ((elastic && !grow(n_rows)) || n_rows > kv.get_size()) {
        return LLAMA_DGE_ERR_MEMORY;
    }

    auto & kv_cells = kv.v_cells[strm];

    // the lowest cells that are free or the sequence's own
    std::vector<uint32_t> own;
    std::vector<uint32_t> cells;

    for (uint32_t i = 0; i < kv_cells.size(); ++i) {
        const bool is_own = !kv_cells.is_empty(i) && kv_cells.seq_has(i, seq_id);

        if (is_own) {
            own.push_back(i);
        }
        if ((int32_t) cells.size() < n && (kv_cells.is_empty(i) || (is_own && kv_cells.seq_count(i) == 1))) {
            cells.push_back(i);
        }
    }

    bool ok = true;

    try {
        for (size_t i = 0; ok && i < parked->layers.size(); ++i) {
            if (parked->path.empty()) {
                unpark_layer(parked->layers[i], i, seq_id, cells);
            } else if ((ok = parked->file_read(i, buf, error))) {
                unpark_layer(buf, i, seq_id, cells);
            }

            llama_dge_check_move();
        }
    } catch (const std::exception & err) {
        error = err.what();
        ok    = false;
    }

    for (const uint32_t cell : own) {
        kv_cells.seq_rm(cell, seq_id);
    }
    for (int32_t i = 0; i < n; ++i) {
        kv_cells.pos_set(cells[i], i);
        kv_cells.ext_set(cells[i], parked->exts[i]);
        kv_cells.seq_add(cells[i], seq_id);
    }

    kv.v_heads[strm] = cells.back() + 1;

    if (ok && !parked->others.empty()) {
        ok = lctx.state_seq_set_data(
                     seq_id, parked->others.data(), parked->others.size(), LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) > 0;

        if (auto * swa = get_swa(lctx); ok && swa && n < parked->n_exact) {
            ok = swa->seq_rm(seq_id, n, -1);
        }
    }

    rebuild = true;

    reset_seq(seq_id);
    capture_drop(seq_id, n);

    if (!ok) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__,
                error.empty() ? "the state of the layers that are not cut could not be read" : error.c_str());
        lose(&lctx, seq_id);
        return LLAMA_DGE_ERR_LOST;
    }

    // the sums are exact for all that was summed and for nothing less
    auto & seq = seqs[seq_id];

    seq.origin   = { true, false, parked->adapters };
    seq.n_summed = n >= parked->n_summed ? parked->n_summed : -1;

    for (size_t i = 0; seq.n_summed > 0 && i < layers.size(); ++i) {
        if (layers[i].sums && !parked->layers[i].sums.empty()) {
            write_sums(i, seq_id, cells, parked->layers[i].sums, parked->n_exact);
        }
    }

    seq.n_restored   = n;
    seq.t_restore_us = ggml_time_us() - t0;

    LLAMA_LOG_DEBUG("%s: seq %d: %d rows are back after %.1f ms\n", __func__, seq_id, n, seq.t_restore_us / 1e3);

    return n;
}
