#include "llama-dge-gather.h"
#include "llama-dge-impl.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <exception>

static bool llama_dge_is_host(const ggml_tensor * t) {
    return ggml_backend_buffer_is_host(t->view_src ? t->view_src->buffer : t->buffer);
}

// the data of a cache tensor on the host: in place where the buffer is host memory, else a copy
static const uint8_t * llama_dge_host_data(const ggml_tensor * t, std::vector<uint8_t> & copy) {
    if (llama_dge_is_host(t)) {
        return (const uint8_t *) t->data;
    }

    copy.resize(ggml_nbytes(t));
    ggml_backend_tensor_get(t, copy.data(), 0, copy.size());

    return copy.data();
}

llama_dge_moves::llama_dge_moves(const std::vector<uint32_t> & cells, const llama_dge_kept & kept, size_t n_past) :
    cells(cells), kept(kept), n_past(n_past), n_cap(0), dst(cells) {
    for (const auto & heads : kept) {
        for (const auto & rows : heads) {
            n_cap = std::max(n_cap, rows.size());
        }
    }

    std::sort(dst.begin(), dst.end());
    dst.resize(n_cap + cells.size() - n_past); // behind the past: window, draft and what came after

    for (size_t i = 0; i < dst.size(); ++i) {
        if (i == 0 || dst[i] != dst[i - 1] + 1) {
            runs.push_back({ i, 0 });
        }
        runs.back().second++;
    }
}

int64_t llama_dge_moves::src(const llama_dge_rows & rows, size_t r) const {
    if (r >= n_cap) {
        return cells[n_past + (r - n_cap)];
    }
    return r < rows.size() ? (int64_t) cells[rows[r]] : -1;
}

// Moves the kept rows of every layer and head into the first cells of the sequence and frees the others, on the device of
// the layer or by way of the host. Blocks of quantized types are moved as they are. A head with fewer rows than the most
// leaves its last past cells empty (zero). An elastic cache moves into smaller buffers on the way, each layer as soon as it
// is done, and what is parked in host memory is taken just before: so there is never more than one layer twice.
int32_t llama_dge::compact(llama_context & lctx, llama_seq_id seq_id, const std::vector<uint32_t> & cells,
        const llama_dge_kept & kept, int32_t n_past) {
    const uint32_t strm    = kv.seq_to_stream[seq_id];
    const auto &   hparams = kv.hparams;

    const llama_dge_moves moves(cells, kept, n_past);

    const auto & dst    = moves.dst;
    const auto & runs   = moves.runs;
    const size_t n_cap  = moves.n_cap;
    const size_t n_keep = dst.size();

    // one head of the result
    const auto gather_head = [&](uint8_t * out, const uint8_t * data, const llama_dge_rows & rows, size_t size_dst,
                                     size_t size_src, size_t size) {
        for (size_t r = 0; r < n_keep; ++r) {
            const int64_t cell = moves.src(rows, r);

            if (cell >= 0) {
                memcpy(out + r * size_dst, data + cell * size_src, size);
            } else {
                memset(out + r * size_dst, 0, size);
            }
        }
    };

    // a layer is gathered into `out` before any of it is written, so order and overlap of cells do not matter
    std::vector<uint8_t> out;
    std::vector<uint8_t> copy_k;
    std::vector<uint8_t> copy_v;

    const auto move_rows = [&](ggml_tensor * t, const uint8_t * data, const std::vector<llama_dge_rows> & heads,
                                   size_t size_head) {
        const size_t size_row = t->nb[1];

        out.resize(n_keep * size_row);

        for (size_t ih = 0; ih < heads.size(); ++ih) {
            gather_head(out.data() + ih * size_head, data + ih * size_head, heads[ih], size_row, size_row, size_head);
        }

        for (const auto & [i, n] : runs) {
            ggml_backend_tensor_set(t, out.data() + i * size_row, dst[i] * size_row, n * size_row);
        }
    };

    // one row of the transposed cache holds one element of all cells
    const auto move_elements = [&](ggml_tensor * t, const uint8_t * data, const std::vector<llama_dge_rows> & heads,
                                       size_t n_embd) {
        const size_t size_el  = ggml_type_size(t->type);
        const size_t size_row = size_el * t->ne[1];

        out.resize(n_keep * size_el);

        for (size_t j = 0; j < n_embd * heads.size(); ++j) {
            gather_head(out.data(), data + j * size_row, heads[j / n_embd], size_el, size_el, size_el);

            for (const auto & [i, n] : runs) {
                ggml_backend_tensor_set(t, out.data() + i * size_el, j * size_row + dst[i] * size_el, n * size_el);
            }
        }
    };

    // memory runs out here or not at all: once a row has moved there is no way back. A device may still fail then, and the
    // sequence is lost
    llama_dge_gather device(lctx.get_sched(), moves);

    for (const auto & layer : kv.layers) {
        ggml_tensor * k = layer.k_stream[strm];
        ggml_tensor * v = layer.v_stream[strm];

        device.add({ k, v, hparams.n_head_kv(layer.il), ggml_row_size(k->type, hparams.n_embd_head_k(layer.il)),
                ggml_row_size(v->type, hparams.n_embd_head_v(layer.il)), kv.v_trans });
    }
    device.prepare();

    // a device is read for what its layer parks here and for what it cannot gather
    const auto reads = [&](size_t ikv) {
        return !device.takes(ikv) || params.park == LLAMA_DGE_PARK_RAM;
    };

    for (size_t ikv = 0; ikv < kv.layers.size(); ++ikv) {
        const auto & layer = kv.layers[ikv];

        for (const ggml_tensor * t : { layer.k_stream[strm], layer.v_stream[strm] }) {
            if (!device.takes(ikv)) {
                out.reserve(std::max(out.capacity(), n_keep * t->nb[1]));
            }
            if (!llama_dge_is_host(t) && reads(ikv)) {
                auto & copy = t == layer.k_stream[strm] ? copy_k : copy_v;
                copy.reserve(std::max(copy.capacity(), ggml_nbytes(t)));
            }
        }
    }

    auto & kv_cells = kv.v_cells[strm];

    std::vector<llama_kv_cell_ext> ext(n_keep);
    for (size_t r = n_cap; r < n_keep; ++r) {
        ext[r] = kv_cells.ext_get(cells[n_past + (r - n_cap)]);
    }

    std::shared_ptr<llama_dge_parked> parked;

    int64_t t_park_us = 0;

    if (params.park != LLAMA_DGE_PARK_OFF) {
        const int64_t t0 = ggml_time_us();

        int32_t status = LLAMA_DGE_OK;

        parked = park_begin(lctx, seq_id, cells, status);
        if (!parked) {
            return status;
        }

        t_park_us += ggml_time_us() - t0;
    }

    const uint32_t n_cells = shrunk_size(cells_top(seq_id, dst.empty() ? 0 : dst.back() + 1));

    std::vector<llama_dge_layer_mem> smaller(n_cells < kv.get_size() ? kv.layers.size() : 0);

    for (size_t ikv = 0; ikv < smaller.size(); ++ikv) {
        if (!alloc_layer(ikv, n_cells, smaller[ikv])) {
            LLAMA_LOG_WARN("%s: no memory for smaller buffers, the cut is made in the old ones\n", __func__);
            smaller.clear();
        }
    }
    if (!smaller.empty()) {
        resize_begin();
    }

    const auto move_layer = [&](size_t ikv) {
        const int32_t il = kv.layers[ikv].il;

        ggml_tensor * k = kv.layers[ikv].k_stream[strm];
        ggml_tensor * v = kv.layers[ikv].v_stream[strm];

        // a device is read once, for the rows that are parked and for those that stay
        const uint8_t * data_k = reads(ikv) ? llama_dge_host_data(k, copy_k) : nullptr;
        const uint8_t * data_v = reads(ikv) ? llama_dge_host_data(v, copy_v) : nullptr;

        if (parked && parked->path.empty()) {
            const int64_t t0 = ggml_time_us();

            park_layer(parked->layers[ikv], 0, ikv, seq_id, cells, data_k, data_v);

            t_park_us += ggml_time_us() - t0;
        }

        if (device.takes(ikv)) {
            return device.move(ikv);
        }

        move_rows(k, data_k, kept[ikv], ggml_row_size(k->type, hparams.n_embd_head_k(il)));

        llama_dge_check_move();

        if (kv.v_trans) {
            move_elements(v, data_v, kept[ikv], hparams.n_embd_head_v(il));
        } else {
            move_rows(v, data_v, kept[ikv], ggml_row_size(v->type, hparams.n_embd_head_v(il)));
        }

        return true;
    };

    bool ok       = true;
    bool ok_other = true; // rows of other sequences

    for (size_t ikv = 0; ikv < kv.layers.size(); ++ikv) {
        try {
            ok = ok && move_layer(ikv);
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: layer %u: %s\n", __func__, kv.layers[ikv].il, err.what());
            ok = false;
        }

        if (smaller.empty()) {
            continue;
        }

        // also when the sequence is lost: all layers have cells of one number, and others have rows in them
        try {
            copy_cells(smaller[ikv], ikv, n_cells);
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: layer %u: %s\n", __func__, kv.layers[ikv].il, err.what());
            ok = ok_other = false;
        }
        swap_layer(ikv, smaller[ikv]);
    }

    if (ok) {
        // past rows get ascending positions of their own (heads differ in what they hold), the others keep theirs
        for (const uint32_t cell : cells) {
            kv_cells.rm(cell);
        }

        for (size_t r = 0; r < n_keep; ++r) {
            kv_cells.pos_set(dst[r], (llama_pos) (r < n_cap ? r : n_past + (r - n_cap)));
            kv_cells.ext_set(dst[r], ext[r]);
            kv_cells.seq_add(dst[r], seq_id);
        }

        // the search for free cells starts behind the rows that were moved, in the gap that the cut left
        kv.v_heads[strm] = dst.empty() ? 0 : dst.back() + 1;
    } else {
        lose(&lctx, ok_other ? seq_id : -1);
    }

    if (!smaller.empty()) {
        resize_end(n_cells);

        // the graphs' buffers shrink with the cache
        request_reserve(lctx);
    }

    if (!ok) {
        return LLAMA_DGE_ERR_LOST;
    }

    LLAMA_LOG_DEBUG("%s: rows of %zu of %zu layers gathered on a device\n", __func__, device.n_taken(), kept.size());

    seqs[seq_id].n_exact   = parked ? parked->n_exact : 0;
    seqs[seq_id].parked    = std::move(parked);
    seqs[seq_id].t_park_us = t_park_us;

    return LLAMA_DGE_OK;
}

uint32_t llama_dge::cells_top(llama_seq_id seq_id, uint32_t n_own) const {
    uint32_t res = n_own;

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        const auto & cells = kv.v_cells[s];

        for (uint32_t i = cells.used_max_p1(); i > res; --i) {
            if (!cells.is_empty(i - 1) && (s != kv.seq_to_stream[seq_id] || !cells.seq_has(i - 1, seq_id))) {
                res = i;
            }
        }
    }

    return res;
}

uint32_t llama_dge::n_head_kv(size_t ikv) const {
    return kv.hparams.n_head_kv(kv.layers[ikv].il);
}

int64_t llama_dge::row_bytes() const {
    int64_t res = 0;

    for (const auto & layer : kv.layers) {
        res += ggml_row_size(layer.k->type, kv.hparams.n_embd_k_gqa(layer.il));
        res += ggml_row_size(layer.v->type, kv.hparams.n_embd_v_gqa(layer.il));
    }

    return res;
}

int64_t llama_dge::kept_bytes(const llama_dge_kept & kept, int32_t n_tail) const {
    int64_t res = 0;

    for (size_t i = 0; i < kv.layers.size(); ++i) {
        const auto & layer = kv.layers[i];

        const int64_t size_head = ggml_row_size(layer.k->type, kv.hparams.n_embd_head_k(layer.il)) +
                                  ggml_row_size(layer.v->type, kv.hparams.n_embd_head_v(layer.il));

        for (const auto & rows : kept[i]) {
            res += size_head * (rows.size() + n_tail);
        }
    }

    return res;
}

void llama_dge::poison(uint16_t pattern, int32_t & n_cells) {
    n_cells = 0;

    for (uint32_t strm = 0; strm < kv.n_stream; ++strm) {
        const auto & cells = kv.v_cells[strm];

        for (uint32_t i = 0; i < cells.size(); ++i) {
            if (!cells.is_empty(i)) {
                continue;
            }
            n_cells++;

            for (const auto & layer : kv.layers) {
                ggml_tensor * k = layer.k_stream[strm];
                ggml_tensor * v = layer.v_stream[strm];

                const auto fill = [&](ggml_tensor * t, size_t offset, size_t size) {
                    std::vector<uint16_t> data((size + 1) / 2, pattern);
                    ggml_backend_tensor_set(t, data.data(), offset, size);
                };

                fill(k, i * k->nb[1], k->nb[1]);

                if (!kv.v_trans) {
                    fill(v, i * v->nb[1], v->nb[1]);
                } else {
                    const size_t size_el = ggml_type_size(v->type);
                    for (int64_t j = 0; j < v->ne[0]; ++j) {
                        fill(v, (j * v->ne[1] + i) * size_el, size_el);
                    }
                }
            }
        }
    }
}
