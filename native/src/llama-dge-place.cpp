#include "llama-dge-impl.h"

#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <exception>

// Rows that a choice adds take the slots of those that it drops, so that only what changes is copied.

int32_t llama_dge::place(llama_seq_id seq_id, std::vector<uint32_t> & slots, const std::vector<uint32_t> & tail,
        const llama_dge_kept & chosen, int32_t n_past) {
    auto & seq = seqs[seq_id];

    const uint32_t strm     = kv.seq_to_stream[seq_id];
    auto &         kv_cells = kv.v_cells[strm];

    size_t n_cap = 0;
    for (const auto & heads : chosen) {
        for (const auto & rows : heads) {
            n_cap = std::max(n_cap, rows.size());
        }
    }

    // rows that leave the tail give their cells to more slots, then free cells do
    const size_t n_leave = n_past - seq.pos_min;

    std::vector<uint32_t> spare(tail.begin(), tail.begin() + n_leave);
    std::reverse(spare.begin(), spare.end());

    const size_t n_more = n_cap > slots.size() ? n_cap - slots.size() : 0;

    for (uint32_t i = 0; i < kv_cells.size() && spare.size() < n_more; ++i) {
        if (kv_cells.is_empty(i)) {
            spare.insert(spare.begin(), i);
        }
    }
    if (spare.size() < n_more) {
        const uint32_t n_have = kv_cells.size();
        const uint32_t n_want = n_have + (n_more - spare.size());

        if (!elastic || !grow(n_want) || kv_cells.size() < n_want) {
            return LLAMA_DGE_ERR_MEMORY;
        }
        for (uint32_t i = n_have; spare.size() < n_more; ++i) {
            spare.insert(spare.begin(), i);
        }
    }

    // from here on only a device can fail: the new slots first, then the rows, then the cells
    const size_t n_slots_old = slots.size();

    while (slots.size() < n_cap) {
        slots.push_back(spare.back());
        spare.pop_back();
    }

    const auto move_layer = [&](size_t ikv) {
        llama_dge_check_move();

        const auto &  rows = seq.parked->layers[ikv];
        const int32_t il   = layers[ikv].il;

        ggml_tensor * k = kv.layers[ikv].k_stream[strm];
        ggml_tensor * v = kv.layers[ikv].v_stream[strm];

        const size_t size_k = ggml_row_size(k->type, kv.hparams.n_embd_head_k(il));
        const size_t n_v    = kv.hparams.n_embd_head_v(il);
        const size_t size_v = kv.v_trans ? rows.size_v : ggml_row_size(v->type, n_v);

        const auto copy = [](ggml_tensor * t, const uint8_t * data, size_t offset, size_t size) {
            if (ggml_backend_buffer_is_host(t->view_src ? t->view_src->buffer : t->buffer)) {
                memcpy((uint8_t *) t->data + offset, data, size);
            } else {
                ggml_backend_tensor_set(t, data, offset, size);
            }
        };

        for (size_t ih = 0; ih < chosen[ikv].size(); ++ih) {
            auto &       held = seq.kept[ikv][ih];
            const auto & want = chosen[ikv][ih];

            // rows that stay keep their slots
            std::vector<bool> stays(want.size(), false);
            std::vector<bool> taken(want.size(), false);

            for (size_t s = 0; s < held.size() && s < want.size(); ++s) {
                const auto it = std::lower_bound(want.begin(), want.end(), held[s]);

                if (it != want.end() && *it == held[s]) {
                    stays[it - want.begin()] = true;
                    taken[s]                 = true;
                }
            }

            held.resize(want.size());

            size_t s = 0;

            for (size_t w = 0; w < want.size(); ++w) {
                if (stays[w]) {
                    continue;
                }
                while (taken[s]) {
                    ++s;
                }

                const size_t row  = want[w];
                const size_t cell = slots[s];

                copy(k, rows.k.get() + row * rows.size_k + ih * size_k, cell * k->nb[1] + ih * size_k, size_k);

                if (!kv.v_trans) {
                    copy(v, rows.v.get() + row * rows.size_v + ih * size_v, cell * v->nb[1] + ih * size_v, size_v);
                } else {
                    for (size_t j = ih * n_v; j < (ih + 1) * n_v; ++j) {
                        copy(v, rows.v.get() + (j * rows.n_cap + row) * size_v, (j * v->ne[1] + cell) * size_v, size_v);
                    }
                }

                held[s]  = row;
                taken[s] = true;
                seq.n_moved++;
            }
        }
    };

    try {
        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            move_layer(ikv);
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        lose(lctx, seq_id);
        return LLAMA_DGE_ERR_LOST;
    }

    for (size_t i = 0; i < n_leave; ++i) {
        kv_cells.rm(tail[i]);
    }
    for (size_t s = n_cap; s < n_slots_old; ++s) {
        kv_cells.rm(slots[s]);
    }
    for (size_t s = n_slots_old; s < n_cap; ++s) {
        kv_cells.pos_set(slots[s], (llama_pos) s);
        kv_cells.ext_set(slots[s], {});
        kv_cells.seq_add(slots[s], seq_id);
    }

    // the next rows go into the first gap
    kv.v_heads[strm] = 0;

    const int32_t n_rows = seq.pos_min + (int32_t) tail.size();

    seq.n_before   = n_rows;
    seq.n_after    = n_cap + (n_rows - n_past);
    seq.n_draft    = n_rows - seq.n_prompt;
    seq.pos_min    = n_past;
    seq.boundary   = n_rows - 1;
    seq.bytes_kept = kept_bytes(seq.kept, n_rows - n_past);

    return LLAMA_DGE_OK;
}
