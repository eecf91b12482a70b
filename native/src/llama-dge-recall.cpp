#include "llama-dge-graph.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// Recall: the rows that stay in the cache are chosen again and again from all rows, which are parked in host memory.
// The CPU scores the parked keys where they are; only rows that the cache does not hold yet are copied into it.

// REFRESH_AUTO looks every so many tokens, and chooses after so many in any case
static constexpr int32_t LLAMA_DGE_AUTO_STEP   = 4;
static constexpr int32_t LLAMA_DGE_AUTO_MAX    = 64;
static constexpr size_t  LLAMA_DGE_AUTO_LAYERS = 4; // looked at, spread over the model

static constexpr int32_t LLAMA_DGE_KEYS_PAD = 16;

struct llama_dge_scorer {
    ggml_backend_ptr backend;
    ggml_gallocr_ptr galloc;

    std::vector<uint8_t> meta; // of the graph

    std::vector<float> q;
    std::vector<float> mask;
    std::vector<float> row;
};

void llama_dge_scorer_deleter::operator()(llama_dge_scorer * scorer) const {
    delete scorer;
}

static llama_dge_scorer_ptr llama_dge_new_scorer() {
    llama_dge_scorer_ptr res(new llama_dge_scorer);

    res->backend.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (!res->backend) {
        return nullptr;
    }

    res->galloc.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(res->backend.get())));
    res->meta.resize(16 * ggml_tensor_overhead() + ggml_graph_overhead());

    return res;
}

//
// when
//

int32_t llama_dge::due_rows(int32_t n_prompt) const {
    const int32_t n_draft = n_prompt + params.draft_tokens - 1;

    if (!recalls()) {
        return n_draft;
    }

    const int32_t budget = resolve_budget(n_prompt);

    return n_prompt > budget ? n_draft : std::max(n_draft, budget + refresh_step());
}

int32_t llama_dge::refresh_step() const {
    return params.refresh == LLAMA_DGE_REFRESH_AUTO ? LLAMA_DGE_AUTO_STEP : params.refresh;
}

//
// which
//

int32_t llama_dge::map_cut_cells(
        llama_seq_id seq_id, std::vector<uint32_t> & slots, std::vector<uint32_t> & tail) const {
    const auto & seq   = seqs[seq_id];
    const auto & cells = kv.v_cells[kv.seq_to_stream[seq_id]];

    const uint32_t none  = std::numeric_limits<uint32_t>::max();
    const int32_t  n_cap = seq.n_after - (seq.n_before - seq.pos_min);

    slots.assign(n_cap, none);
    tail.assign(std::max(0, cells.seq_pos_max(seq_id) + 1 - seq.pos_min), none);

    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (cells.is_empty(i) || !cells.seq_has(i, seq_id)) {
            continue;
        }
        if (cells.seq_count(i) > 1) {
            return LLAMA_DGE_ERR_SHARED;
        }

        const llama_pos pos = cells.pos_get(i);

        if (pos >= seq.pos_min) {
            tail[pos - seq.pos_min] = i;
        } else if (pos < n_cap) {
            slots[pos] = i;
        }
    }

    const auto is_none = [&](uint32_t cell) {
        return cell == none;
    };

    return std::any_of(slots.begin(), slots.end(), is_none) || std::any_of(tail.begin(), tail.end(), is_none)
                   ? LLAMA_DGE_ERR_SEQ
                   : LLAMA_DGE_OK;
}

int32_t llama_dge::park_append(llama_seq_id seq_id, const std::vector<uint32_t> & tail) {
    auto & seq = seqs[seq_id];

    // a copy of the sequence has the same store, and went its own way
    if (seq.parked.use_count() > 1) {
        auto own = seq.parked->clone();
        if (!own) {
            return LLAMA_DGE_ERR_MEMORY;
        }
        seq.parked = std::move(own);
    }

    auto & parked = *seq.parked;

    const int32_t n_rows = seq.pos_min + (int32_t) tail.size();

    if (n_rows <= parked.n_rows) {
        return LLAMA_DGE_OK;
    }

    if (params.park_limit > 0) {
        const int64_t n_new = (parked.n_bytes() / parked.n_rows) * (n_rows - parked.n_rows);

        if (parked_bytes() + n_new > params.park_limit) {
            return LLAMA_DGE_ERR_PARK;
        }
    }

    for (auto & layer : parked.layers) {
        if ((size_t) GGML_PAD(n_rows, LLAMA_DGE_KEYS_PAD) > layer.n_cap &&
                !parked.alloc(layer, n_rows + n_rows / 4 + LLAMA_DGE_PARK_SPARE, parked.n_rows)) {
            return LLAMA_DGE_ERR_MEMORY;
        }
    }

    const std::vector<uint32_t> cells(tail.begin() + (parked.n_rows - seq.pos_min), tail.end());

    for (size_t i = 0; i < layers.size(); ++i) {
        park_layer(parked.layers[i], parked.n_rows, i, seq_id, cells);
    }

    parked.n_rows = n_rows;

    return LLAMA_DGE_OK;
}

int32_t llama_dge::score_parked(
        llama_context & lctx, size_t ikv, llama_seq_id seq_id, int32_t n_q, std::vector<float> & scores) {
    const auto & layer   = layers[ikv];
    const auto & hparams = kv.hparams;
    const auto & cparams = lctx.get_cparams();
    const auto & parked  = *seqs[seq_id].parked;
    const auto & rows    = parked.layers[ikv];

    const int64_t n_embd_head = hparams.n_embd_head_k(layer.il);
    const int64_t n_head      = hparams.n_head(layer.il);
    const int64_t n_head_kv   = hparams.n_head_kv(layer.il);
    const int64_t n_group     = n_head / n_head_kv;
    const int64_t n_rows      = parked.n_rows;

    // the fast product of the CPU takes multiples of 16 keys: zeroes fill up, and the mask hides them
    const int64_t n_keys = GGML_PAD(n_rows, LLAMA_DGE_KEYS_PAD);

    GGML_ASSERT((size_t) n_keys <= rows.n_cap);
    memset(rows.k.get() + n_rows * rows.size_k, 0, (n_keys - n_rows) * rows.size_k);

    // queries of a group next to each other, so that a key is read once for all; sinks belong to single heads
    const int64_t n_col   = layer.sinks ? n_q : n_q * n_group;
    const int64_t n_outer = layer.sinks ? n_head : n_head_kv;

    scorer->q.resize(n_embd_head * n_head * n_q);
    scorer->row.resize(n_embd_head * n_head);

    for (int64_t i = 0; i < n_q; ++i) {
        const llama_pos pos = parked.n_rows - n_q + i;

        ggml_backend_tensor_get(layer.ring, scorer->row.data(),
                ((size_t) seq_id * n_ring + pos % n_ring) * layer.ring->nb[1], scorer->row.size() * sizeof(float));

        for (int64_t h = 0; h < n_head; ++h) {
            memcpy(scorer->q.data() + (h * n_q + i) * n_embd_head, scorer->row.data() + h * n_embd_head,
                    n_embd_head * sizeof(float));
        }
    }

    scorer->mask.assign(n_keys * n_col, 0.0f);

    for (int64_t i = 0; i < n_col; ++i) {
        float * end = scorer->mask.data() + (i + 1) * n_keys;
        std::fill(end - (n_keys - n_rows) - (n_q - 1 - i % n_q), end, -INFINITY);
    }

    ggml_context_ptr ctx(ggml_init({ scorer->meta.size(), scorer->meta.data(), true }));

    const size_t size_head = ggml_row_size(kv.layers[ikv].k->type, n_embd_head);

    ggml_tensor * k_all = ggml_new_tensor_2d(ctx.get(), kv.layers[ikv].k->type, n_embd_head * n_head_kv, n_keys);
    ggml_tensor * q     = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n_embd_head, n_col, n_outer);
    ggml_tensor * mask  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_keys, n_col);

    // memory that is there already
    k_all->data = rows.k.get();
    q->data     = scorer->q.data();
    mask->data  = scorer->mask.data();

    ggml_tensor * k = ggml_view_3d(ctx.get(), k_all, n_embd_head, n_keys, n_head_kv, k_all->nb[1], size_head, 0);

    ggml_tensor * kq = ggml_mul_mat(ctx.get(), k, q); // [n_keys, n_col, n_outer]
    ggml_prec_set_acc(kq, GGML_PREC_F32);

    llama_dge_layer    on_host = layer;
    std::vector<float> sinks;
    if (layer.sinks) {
        sinks.resize(ggml_nelements(layer.sinks));
        ggml_backend_tensor_get(layer.sinks, sinks.data(), 0, ggml_nbytes(layer.sinks));

        on_host.sinks       = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, sinks.size());
        on_host.sinks->data = sinks.data();
    }

    kq = llama_dge_build_probs(ctx.get(), hparams, on_host, cparams.flash_attn, kq, mask, 0);

    ggml_set_output(kq);

    auto * gf = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, kq);

    if (llama_dge_alloc_fails() || !ggml_gallocr_alloc_graph(scorer->galloc.get(), gf)) {
        return LLAMA_DGE_ERR_MEMORY;
    }

    const auto status = ggml_backend_graph_compute(scorer->backend.get(), gf);
    if (status != GGML_STATUS_SUCCESS) {
        return status == GGML_STATUS_ABORTED ? LLAMA_DGE_ERR_ABORTED : LLAMA_DGE_ERR_COMPUTE;
    }

    scores.assign((size_t) n_head_kv * n_rows, 0.0f);

    const float   weight = 1.0f / (n_q * n_group);
    const int64_t n_cols = n_q * n_group;

    for (int64_t h = 0; h < n_head_kv; ++h) {
        float *       sum   = scores.data() + h * n_rows;
        const float * probs = (const float *) kq->data + h * n_cols * n_keys;

        for (int64_t i = 0; i < n_cols; ++i) {
            for (int64_t j = 0; j < n_rows; ++j) {
                sum[j] += probs[i * n_keys + j];
            }
        }
        for (int64_t j = 0; j < n_rows; ++j) {
            sum[j] *= weight;
        }
    }

    return LLAMA_DGE_OK;
}

int32_t llama_dge::held_mass(llama_context & lctx, llama_seq_id seq_id, float & mass) {
    const auto & seq = seqs[seq_id];

    const size_t n_step = std::max<size_t>(1, layers.size() / LLAMA_DGE_AUTO_LAYERS);

    double held  = 0.0;
    size_t n_all = 0;

    std::vector<float> scores;

    // the last layers of equal parts of the model
    for (size_t i = n_step - 1; i < layers.size(); i += n_step) {
        const int32_t status = score_parked(lctx, i, seq_id, 1, scores);
        if (status != LLAMA_DGE_OK) {
            return status;
        }

        const size_t n_keys = seq.parked->n_rows;

        for (size_t ih = 0; ih < seq.kept[i].size(); ++ih) {
            const float * row = scores.data() + ih * n_keys;

            for (const int32_t r : seq.kept[i][ih]) {
                held += row[r];
            }
            for (size_t r = seq.pos_min; r < n_keys; ++r) {
                held += row[r];
            }
            n_all++;
        }
    }

    mass = (float) (held / n_all);

    return LLAMA_DGE_OK;
}

//
// move
//

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

    // from here on nothing can fail: the new slots first, then the rows, then the cells
    const size_t n_slots_old = slots.size();

    while (slots.size() < n_cap) {
        slots.push_back(spare.back());
        spare.pop_back();
    }

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
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

int32_t llama_dge::refresh(llama_context & lctx, llama_seq_id seq_id) {
    auto & seq = seqs[seq_id];

    const int64_t t0 = ggml_time_us();

    ggml_backend_sched_synchronize(lctx.get_sched());

    std::vector<uint32_t> slots;
    std::vector<uint32_t> tail;

    int32_t status = map_cut_cells(seq_id, slots, tail);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    status = park_append(seq_id, tail);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int32_t n_rows = seq.parked->n_rows;
    const int32_t n_past = n_rows - params.window;
    const int32_t budget = resolve_budget(seq.n_prompt);

    if (n_past < seq.pos_min || n_rows <= budget) {
        seq.n_checked = n_rows;
        return LLAMA_DGE_NOTHING_TO_CUT;
    }

    const bool scores = llama_dge_get_policy(params.policy)->needs_scores;

    if (scores && !captured(seq_id, n_past, n_rows)) {
        return LLAMA_DGE_ERR_QUERIES;
    }

    if (scores) {
        if (!scorer) {
            scorer = llama_dge_new_scorer();
        }
        if (!scorer) {
            return LLAMA_DGE_ERR_MEMORY;
        }

        scorer_begin(lctx);
    }

    if (scores && params.refresh == LLAMA_DGE_REFRESH_AUTO && n_rows < seq.n_before + LLAMA_DGE_AUTO_MAX) {
        float mass = 0.0f;

        status = held_mass(lctx, seq_id, mass);
        if (status != LLAMA_DGE_OK) {
            return status;
        }

        seq.n_checks++;

        if (mass >= params.refresh_mass) {
            seq.n_checked = n_rows;
            seq.t_refresh_us += ggml_time_us() - t0;
            return LLAMA_DGE_NOTHING_TO_CUT;
        }
    }

    llama_dge_select_input input;

    select_input(n_rows, budget, input);

    for (size_t i = 0; scores && status == LLAMA_DGE_OK && i < layers.size(); ++i) {
        if (!layers[i].seen || layers[i].has_bias) {
            return LLAMA_DGE_ERR_UNSUPPORTED;
        }

        std::vector<float> all;

        status = score_parked(lctx, i, seq_id, params.window, all);

        for (uint32_t ih = 0; status == LLAMA_DGE_OK && ih < n_head_kv(i); ++ih) {
            const auto begin = all.begin() + (size_t) ih * n_rows;
            input.layers[i].draft.insert(input.layers[i].draft.end(), begin, begin + n_past);
        }
    }
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    llama_dge_kept chosen;

    if (!llama_dge_select(input, chosen)) {
        return LLAMA_DGE_ERR_CALLBACK;
    }

    status = bias_reserve(chosen);
    if (status == LLAMA_DGE_OK) {
        status = place(seq_id, slots, tail, chosen, n_past);
    }
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    seq.n_checked = n_rows;
    seq.n_refresh++;
    seq.t_refresh_us += ggml_time_us() - t0;

    bias_changed(seq_id);

    return LLAMA_DGE_OK;
}

void llama_dge::scorer_begin(const llama_context & lctx) {
    auto * reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(scorer->backend.get()));

    const auto set_n_threads =
            (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set_n_threads) {
        set_n_threads(scorer->backend.get(), lctx.n_threads());
    }

    const auto set_abort = (ggml_backend_set_abort_callback_t) ggml_backend_reg_get_proc_address(
            reg, "ggml_backend_set_abort_callback");
    if (set_abort) {
        set_abort(scorer->backend.get(), lctx.abort_callback, lctx.abort_callback_data);
    }
}
