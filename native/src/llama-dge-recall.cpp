#include "llama-dge-choice.h"
#include "llama-dge-graph.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <limits>

// Recall: the rows that stay in the cache are chosen again and again from all rows, which are parked in host memory.
// The CPU scores the parked keys where they are; only rows that the cache does not hold yet are copied into it.

// RECALL_AUTO looks every so many tokens, and chooses after so many in any case: in a long answer, what is needed next
// does not always show in the attention of the token before it
static constexpr int32_t LLAMA_DGE_AUTO_MAX    = 8;
static constexpr size_t  LLAMA_DGE_AUTO_LAYERS = 4; // looked at, spread over the model

void llama_dge_choice_deleter::operator()(llama_dge_choice * choice) const {
    delete choice;
}

llama_dge::~llama_dge() = default; // here, where a choice is known

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

llama_dge_choice_ptr llama_dge::new_choice(llama_context & lctx, llama_seq_id seq_id, int32_t n_rows) {
    const auto & seq     = seqs[seq_id];
    const auto & hparams = kv.hparams;

    llama_dge_choice_ptr res(new llama_dge_choice(hparams));

    res->parked     = seq.parked;
    res->n_rows     = n_rows;
    res->n_q        = params.window;
    res->flash_attn = lctx.get_cparams().flash_attn;

    select_input(n_rows, params.resolve_budget(seq.n_prompt), res->input);

    if (!llama_dge_needs_attention(params.sel)) {
        return res;
    }

    // the ring is new, or the sequence a copy: some more tokens will fill it
    if (!captured(seq_id, n_rows - params.window, n_rows)) {
        res->status = LLAMA_DGE_NOTHING_TO_EVICT;
        return res;
    }

    for (size_t i = 0; i < layers.size(); ++i) {
        if (!layers[i].seen || layers[i].has_bias) {
            res->status = LLAMA_DGE_ERR_UNSUPPORTED;
            return res;
        }

        auto & layer = res->layers.emplace_back();

        layer.il          = layers[i].il;
        layer.n_embd_head = hparams.n_embd_head_k(layer.il);
        layer.n_head      = hparams.n_head(layer.il);
        layer.n_head_kv   = hparams.n_head_kv(layer.il);
        layer.type_k      = kv.layers[i].k->type;
        layer.kq_scale    = layers[i].kq_scale;

        layer.q.resize(layer.n_head * res->n_q * layer.n_embd_head);

        std::vector<float> row(layer.n_head * layer.n_embd_head);

        for (int64_t j = 0; j < res->n_q; ++j) {
            const llama_pos pos = n_rows - res->n_q + j;

            ggml_backend_tensor_get(layers[i].ring, row.data(),
                    ((size_t) seq_id * n_ring + pos % n_ring) * layers[i].ring->nb[1], row.size() * sizeof(float));

            for (int64_t h = 0; h < layer.n_head; ++h) {
                memcpy(layer.q.data() + (h * res->n_q + j) * layer.n_embd_head, row.data() + h * layer.n_embd_head,
                        layer.n_embd_head * sizeof(float));
            }
        }

        if (layers[i].sinks) {
            layer.sinks.resize(ggml_nelements(layers[i].sinks));
            ggml_backend_tensor_get(layers[i].sinks, layer.sinks.data(), 0, ggml_nbytes(layers[i].sinks));
        }
    }

    if (!scorers.empty()) {
        res->scorer = std::move(scorers.back());
        scorers.pop_back();
    } else {
        res->scorer = llama_dge_new_scratch();
    }

    if (!res->scorer) {
        res->status = LLAMA_DGE_ERR_MEMORY;
        return res;
    }

    auto * backend = res->scorer->backend.get();
    auto * reg     = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));

    const auto set_n_threads =
            (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    const auto set_abort = (ggml_backend_set_abort_callback_t) ggml_backend_reg_get_proc_address(
            reg, "ggml_backend_set_abort_callback");

    if (set_n_threads) {
        set_n_threads(backend, lctx.n_threads());
    }
    if (set_abort) {
        // the user's callback is not called from a thread that the user does not know of
        if (params.recall_async) {
            set_abort(backend, [](void * data) { return ((std::atomic<bool> *) data)->load(); }, &res->cancel);
        } else {
            set_abort(backend, lctx.abort_callback, lctx.abort_callback_data);
        }
    }

    return res;
}

void llama_dge::end_choice(llama_dge_choice_ptr choice) {
    if (choice && choice->scorer) {
        choice->wait();
        scorers.push_back(std::move(choice->scorer));
    }
}

int32_t llama_dge::held_mass(llama_dge_choice & choice, llama_seq_id seq_id, float & mass) const {
    const auto & seq = seqs[seq_id];

    const size_t n_step = std::max<size_t>(1, layers.size() / LLAMA_DGE_AUTO_LAYERS);

    double held  = 0.0;
    size_t n_all = 0;

    std::vector<float> scores;

    // the last layers of equal parts of the model
    for (size_t i = n_step - 1; i < layers.size(); i += n_step) {
        const int32_t status = choice.score(i, 1, scores);
        if (status != LLAMA_DGE_OK) {
            return status;
        }

        const size_t n_keys = choice.n_rows;

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

    // a thread may have chosen since
    auto choice = std::move(choices[seq_id]);

    if (choice) {
        choice->wait();

        status = choice->status;
        if (status == LLAMA_DGE_OK) {
            status = take(*choice, seq_id, slots, tail);
        }

        end_choice(std::move(choice));

        if (status == LLAMA_DGE_OK) {
            status = map_cut_cells(seq_id, slots, tail);
        }
        if (status != LLAMA_DGE_OK) {
            return status;
        }
    }

    status = park_append(seq_id, tail);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int32_t n_rows = seq.parked->n_rows;
    const int32_t n_past = n_rows - params.window;

    if (n_past < seq.pos_min || n_rows <= params.resolve_budget(seq.n_prompt)) {
        seq.n_checked = n_rows;
        return LLAMA_DGE_NOTHING_TO_EVICT;
    }

    choice = new_choice(lctx, seq_id, n_rows);
    status = choice->status;

    if (status == LLAMA_DGE_OK && choice->scorer && params.recall == LLAMA_DGE_RECALL_AUTO &&
            n_rows < seq.n_before + LLAMA_DGE_AUTO_MAX) {
        float mass = 0.0f;

        status = held_mass(*choice, seq_id, mass);

        seq.n_checks += status == LLAMA_DGE_OK;

        // how much a budget can hold differs from model to model and text to text, so a fall counts and not a level
        if (status == LLAMA_DGE_OK && seq.mass >= 0.0f && mass >= params.recall_mass * seq.mass) {
            status = LLAMA_DGE_NOTHING_TO_EVICT;
        }
    }

    if (status == LLAMA_DGE_OK && params.recall_async) {
        seq.n_checked = n_rows;
        seq.t_recall_us += ggml_time_us() - t0;

        choice->start();
        choices[seq_id] = std::move(choice);

        return LLAMA_DGE_NOTHING_TO_EVICT;
    }

    if (status == LLAMA_DGE_OK) {
        choice->run();
        status = choice->status;
    }
    if (status == LLAMA_DGE_OK) {
        status = take(*choice, seq_id, slots, tail);
    }

    end_choice(std::move(choice));

    if (status >= 0) {
        seq.n_checked = n_rows;
        seq.t_recall_us += ggml_time_us() - t0;
    }

    return status;
}

int32_t llama_dge::take(llama_dge_choice & choice, llama_seq_id seq_id, std::vector<uint32_t> & slots,
        const std::vector<uint32_t> & tail) {
    auto & seq = seqs[seq_id];

    int32_t status = bias_reserve(choice.chosen);
    if (status == LLAMA_DGE_OK) {
        status = place(seq_id, slots, tail, choice.chosen, choice.input.n_past);
    }
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    seq.n_recalls++;

    bias_changed(seq_id);

    // an estimate that fails (out of memory) makes the next look choose
    seq.mass = -1.0f;

    if (choice.scorer && params.recall == LLAMA_DGE_RECALL_AUTO &&
            held_mass(choice, seq_id, seq.mass) != LLAMA_DGE_OK) {
        seq.mass = -1.0f;
    }

    return LLAMA_DGE_OK;
}

void llama_dge::park_truncate(llama_seq_id seq_id, llama_pos p0) {
    auto & seq = seqs[seq_id];

    if (!seq.parked) {
        return;
    }

    // rows of the draft that go do not come back
    seq.n_exact = std::min(seq.n_exact, p0);

    if (p0 >= seq.parked->n_rows || !seq.parked->path.empty()) {
        return;
    }

    // these rows are among the parked ones, and perhaps among those that a thread chooses from
    end_choice(std::move(choices[seq_id]));

    seq.parked->n_rows = p0;
    seq.n_checked      = std::min(seq.n_checked, p0);
}
