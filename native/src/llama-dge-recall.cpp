#include "llama-dge-whole.h"

#include "llama-impl.h"

#include <algorithm>
#include <cstring>

// Recall: the kept set is selected again and again from all entries, which the host copy holds. The CPU scores keys where
// they are; only entries that the cache does not hold yet are copied into it.

// RECALL_AUTO selects after so many tokens in any case: in a long answer, what is needed next does not always show in the
// attention of the token before it
static constexpr int32_t LLAMA_DGE_AUTO_MAX = 8;

int32_t llama_dge::park_tail(llama_seq_id seq_id, const std::vector<uint32_t> & tail) {
    auto & seq = seqs[seq_id];

    const int32_t n_rows = seq.pos_min + (int32_t) tail.size();
    const int32_t n_have = seq.store->n_rows;

    if (n_rows <= n_have) {
        return LLAMA_DGE_OK;
    }

    // a copy of the sequence has the same host copy, and went its own way
    const bool is_shared = seq.store.use_count() > 1;

    const int64_t n_bytes = seq.store->n_bytes_rows(n_rows - n_have) + (is_shared ? seq.store->n_bytes() : 0);

    if (settings.park_limit > 0 && parked_bytes() + n_bytes > settings.park_limit) {
        return LLAMA_DGE_ERR_PARK;
    }

    if (is_shared) {
        auto own = seq.store->clone();
        if (!own) {
            return LLAMA_DGE_ERR_MEMORY;
        }
        seq.store = std::move(own);
    }

    return llama_dge_park_more(kv, seq_id, *seq.store, { tail.begin() + (n_have - seq.pos_min), tail.end() });
}

llama_dge_selection_ptr llama_dge::new_selection(llama_seq_id seq_id, int32_t n_rows) {
    const auto & seq = seqs[seq_id];

    llama_dge_selection_ptr res(new llama_dge_selection(kv, seq.store));

    res->n_rows = n_rows;
    res->n_q    = settings.window;

    select_input(n_rows, settings.resolve_budget(seq.n_prompt), res->input);

    if (!llama_dge_needs_attention(settings.sel)) {
        return res;
    }

    // the ring is new, or the sequence a copy: some more tokens will fill it
    if (!ring->has(seq_id, n_rows - settings.window, n_rows)) {
        res->status = LLAMA_DGE_NOTHING_TO_EVICT;
        return res;
    }

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        const auto & attn   = layers[i].attn;
        const auto & shape  = kv.layer(i);
        const size_t n_embd = shape.n_embd_head_k;

        if (!layers[i].seen || layers[i].has_bias) {
            res->status = LLAMA_DGE_ERR_UNSUPPORTED;
            return res;
        }

        std::vector<float> q(shape.n_embd_q() * res->n_q);
        std::vector<float> row(shape.n_embd_q());

        for (int32_t j = 0; j < res->n_q; ++j) {
            ring->read(i, seq_id, n_rows - res->n_q + j, row.data());

            for (int64_t h = 0; h < shape.n_head; ++h) {
                memcpy(q.data() + (h * res->n_q + j) * n_embd, row.data() + h * n_embd, n_embd * sizeof(float));
            }
        }

        std::vector<float> sinks;

        if (attn.sinks) {
            sinks.resize(ggml_nelements(attn.sinks));
            ggml_backend_tensor_get(attn.sinks, sinks.data(), 0, ggml_nbytes(attn.sinks));
        }

        res->add_layer(attn, std::move(q), std::move(sinks));
    }

    if (!scorers.empty()) {
        res->scorer = std::move(scorers.back());
        scorers.pop_back();
    } else {
        res->scorer = llama_dge_cpu_scorer::create();
    }

    if (!res->scorer) {
        res->status = LLAMA_DGE_ERR_MEMORY;
        return res;
    }

    // the user's callback is not called from a thread that the user does not know of
    if (settings.recall_async) {
        res->scorer->configure(
                ctx.n_threads(), [](void * data) { return ((std::atomic<bool> *) data)->load(); }, &res->cancel);
    } else {
        res->scorer->configure(ctx.n_threads(), ctx.abort_callback(), ctx.abort_data());
    }

    return res;
}

void llama_dge::end_selection(llama_dge_selection_ptr selection) {
    if (selection && selection->scorer) {
        selection->wait();
        scorers.push_back(std::move(selection->scorer));
    }
}

int32_t llama_dge::recall(llama_seq_id seq_id) {
    auto & seq = seqs[seq_id];

    const int64_t t0 = ggml_time_us();

    ctx.wait();

    std::vector<uint32_t> slots;
    std::vector<uint32_t> tail;

    const auto map = [&] {
        return kv.map_evicted(seq_id, llama_dge_capacity(seq.kept), seq.pos_min, slots, tail);
    };

    int32_t status = map();
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    // a thread may have selected since
    if (auto selection = std::move(selections[seq_id])) {
        selection->wait();

        on(seq_id, LLAMA_DGE_EVENT_SELECTED);

        status = selection->status;
        if (status == LLAMA_DGE_OK) {
            status = apply(*selection, seq_id, slots, tail);
        }

        end_selection(std::move(selection));

        if (status == LLAMA_DGE_OK) {
            status = map();
        }
        if (status != LLAMA_DGE_OK) {
            return status;
        }
    }

    status = park_tail(seq_id, tail);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int32_t n_rows = seq.store->n_rows;
    const int32_t n_past = n_rows - settings.window;

    if (n_past < seq.pos_min || n_rows <= settings.resolve_budget(seq.n_prompt)) {
        seq.n_selected = n_rows;
        return LLAMA_DGE_NOTHING_TO_EVICT;
    }

    auto selection = new_selection(seq_id, n_rows);

    status = selection->status;

    if (status == LLAMA_DGE_OK && selection->scorer && settings.recall == LLAMA_DGE_RECALL_AUTO &&
            n_rows < seq.stats.n_before + LLAMA_DGE_AUTO_MAX) {
        float mass = 0.0f;

        status = selection->held_mass(seq.kept, seq.pos_min, mass);

        seq.stats.n_checks += status == LLAMA_DGE_OK;

        // how much a budget can hold differs from model to model and text to text, so a fall counts and not a level
        if (status == LLAMA_DGE_OK && seq.mass >= 0.0f && mass >= settings.recall_mass * seq.mass) {
            status = LLAMA_DGE_NOTHING_TO_EVICT;
        }
    }

    if (status == LLAMA_DGE_OK && settings.recall_async) {
        seq.n_selected = n_rows;
        seq.stats.t_recall_us += ggml_time_us() - t0;

        on(seq_id, LLAMA_DGE_EVENT_SELECT);

        selection->start();
        selections[seq_id] = std::move(selection);

        return LLAMA_DGE_NOTHING_TO_EVICT;
    }

    if (status == LLAMA_DGE_OK) {
        selection->run();
        status = selection->status;
    }
    if (status == LLAMA_DGE_OK) {
        status = apply(*selection, seq_id, slots, tail);
    }

    end_selection(std::move(selection));

    if (status >= 0) {
        seq.n_selected = n_rows;
        seq.stats.t_recall_us += ggml_time_us() - t0;
    }

    return status;
}

int32_t llama_dge::apply(llama_dge_selection & selection, llama_seq_id seq_id, const std::vector<uint32_t> & slots,
        const std::vector<uint32_t> & tail) {
    auto & seq = seqs[seq_id];

    int32_t status = bias.reserve(selection.chosen);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int32_t n_past = selection.input.n_past;

    const auto moved = llama_dge_replace(
            place(), seq_id, slots, tail, seq.pos_min, seq.kept, selection.chosen, n_past, *seq.store);

    status = settle(seq_id, moved);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int32_t n_rows = seq.pos_min + (int32_t) tail.size();

    seq.pos_min  = n_past;
    seq.boundary = n_rows - 1;

    auto & stats = seq.stats;

    stats.n_before   = n_rows;
    stats.n_after    = llama_dge_capacity(seq.kept) + (n_rows - n_past);
    stats.n_draft    = n_rows - seq.n_prompt;
    stats.bytes_kept = kv.kept_bytes(seq.kept, n_rows - n_past);
    stats.n_moved += moved.n_rows;
    stats.n_recalls++;

    bias.set(seq_id, &seq.kept, seq.pos_min);

    // an estimate that fails (out of memory) makes the next check select
    seq.mass = -1.0f;

    if (selection.scorer && settings.recall == LLAMA_DGE_RECALL_AUTO &&
            selection.held_mass(seq.kept, seq.pos_min, seq.mass) != LLAMA_DGE_OK) {
        seq.mass = -1.0f;
    }

    return LLAMA_DGE_OK;
}
