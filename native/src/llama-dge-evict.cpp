#include "llama-dge-whole.h"

#include "llama-impl.h"

#include <algorithm>

// the eviction: arm when the prompt is complete, then score, select and compact once the draft is

int32_t llama_dge::arm(llama_seq_id seq_id, int32_t n_prompt) {
    int32_t status = seqs[seq_id].allows(LLAMA_DGE_EVENT_ARM);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    // of an earlier arm() nothing is left, whatever comes of this one
    on(seq_id, LLAMA_DGE_EVENT_KEEP_FULL);

    std::vector<uint32_t> cells;

    status = kv.map_rows(seq_id, cells);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int32_t n_rows = cells.size();
    if (n_prompt < 1 || n_prompt > n_rows) {
        return LLAMA_DGE_ERR_SEQ;
    }
    // with recall, the answer may become long enough
    if (n_prompt <= settings.resolve_budget(n_prompt) && !settings.recalls()) {
        return LLAMA_DGE_NOTHING_TO_EVICT;
    }

    const auto needed = settings.needed_queries(n_prompt, n_rows);

    if (!ring->has(seq_id, needed.p0, needed.p1) || !sums->has(seq_id, std::min(n_rows, n_prompt))) {
        return LLAMA_DGE_ERR_QUERIES;
    }

    on(seq_id, LLAMA_DGE_EVENT_ARM);
    seqs[seq_id].n_prompt = n_prompt;

    return LLAMA_DGE_OK;
}

int32_t llama_dge::evict_now(llama_seq_id seq_id) {
    auto & seq = seqs[seq_id];

    const bool was_armed = seq.phase() == LLAMA_DGE_PHASE_ARMED;

    // an attempt that fails leaves the sequence as it is; one that was armed stays so
    const int32_t n_prompt = seq.n_prompt;

    if (!was_armed) {
        const int32_t status = arm(seq_id, kv.pos_max(seq_id) + 1);

        if (status != LLAMA_DGE_OK) {
            if (status != LLAMA_DGE_ERR_EVICTED) {
                seq.stats.error = status;
            }
            return status;
        }
    }

    seq.force = true;

    try {
        ctx.update();
    } catch (const std::exception & err) {
        // the eviction itself is done or not by now; what failed is the reservation of the next graph
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
    }

    seq.force = false;

    if (seq.is_evicted()) {
        return seq.stats.error;
    }

    const int32_t status = seq.stats.error == LLAMA_DGE_OK ? (int32_t) LLAMA_DGE_ERR_COMPUTE : seq.stats.error;

    if (status != LLAMA_DGE_ERR_LOST && was_armed && seq.phase() == LLAMA_DGE_PHASE_FULL) {
        on(seq_id, LLAMA_DGE_EVENT_ARM);
        seq.n_prompt = n_prompt;
    }
    if (status != LLAMA_DGE_ERR_LOST && !was_armed) {
        on(seq_id, LLAMA_DGE_EVENT_KEEP_FULL);
    }

    seq.stats.error = status;

    return status;
}

int32_t llama_dge::reuse(llama_seq_id seq_id, int32_t n_prompt, int32_t n_match) const {
    // entries that were evaluated with other LoRA adapters
    if (n_match > 0 && !seqs[seq_id].origin.is(ctx.adapters())) {
        return 0;
    }

    if (n_prompt <= settings.resolve_budget(n_prompt) && !settings.recalls()) {
        return ctx.window_reaches(seq_id, n_match) ? n_match : 0;
    }

    // entries that will be removed would have to be taken out of the sums
    if (!sums->has(seq_id, n_match) || (sums->has(seq_id, n_match + 1) && !sums->empty())) {
        return 0;
    }

    // queries at n_match and above are captured when their tokens are evaluated
    const auto needed = settings.needed_queries(n_prompt, n_prompt);

    const int32_t n =
            ring->has(seq_id, needed.p0, std::min(needed.p1, n_match)) ? n_match : std::min(needed.p0, n_match);

    return ctx.window_reaches(seq_id, n) ? n : 0;
}

bool llama_dge::call_select(int32_t il, int32_t n_past, int32_t n, const llama_dge_ranks & ranks,
        std::vector<llama_dge_rows> & rows) const {
    std::vector<float> scores;
    for (const auto & rank : ranks) {
        scores.insert(scores.end(), rank.begin(), rank.end());
    }

    std::vector<int32_t> all(scores.size());
    std::vector<int32_t> n_rows(ranks.size(), 0);

    if (settings.select(settings.select_user_data, il, ranks.size(), n_past, n, scores.data(), all.data(),
                n_rows.data()) != 0) {
        return false;
    }

    for (size_t ih = 0; ih < ranks.size(); ++ih) {
        if (n_rows[ih] < 0 || n_rows[ih] > n_past) {
            return false;
        }

        const auto begin = all.begin() + ih * n_past;
        rows[ih].assign(begin, begin + n_rows[ih]);
    }

    return true;
}

void llama_dge::select_input(int32_t n_prompt, int32_t budget, llama_dge_select_input & input) const {
    input.params   = settings.sel;
    input.n_prompt = n_prompt;
    input.n_past   = n_prompt - settings.window;
    input.n_cap    = budget - settings.window;

    auto rows = settings.head_rows.begin();

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        const int32_t n_head_kv = kv.layer(i).n_head_kv;

        input.layers.emplace_back().n_head_kv = n_head_kv;

        for (int32_t ih = 0; ih < n_head_kv && !settings.head_rows.empty(); ++ih) {
            input.table.resize(i + 1);
            input.table[i].push_back(*rows++ - settings.window);
        }
    }

    if (settings.select) {
        const int32_t n_past = input.n_past;

        input.custom = [this, n_past](
                               size_t i, int32_t n, const llama_dge_ranks & ranks, std::vector<llama_dge_rows> & rows) {
            return call_select(kv.layer(i).il, n_past, n, ranks, rows);
        };
    }
}

int32_t llama_dge::score(llama_seq_id seq_id, const std::vector<uint32_t> & cells, llama_dge_select_input & input) {
    const int32_t n_rows   = cells.size();
    const int32_t n_prompt = seqs[seq_id].n_prompt;

    // with recall the last queries rank
    auto range = settings.needed_queries(n_prompt, n_rows);
    if (settings.recalls()) {
        range = { std::max(0, n_rows - settings.window), n_rows };
    }

    if (!ring->has(seq_id, range.p0, range.p1) ||
            !sums->has(seq_id, std::min(n_rows, n_prompt + settings.draft_tokens - 1))) {
        return LLAMA_DGE_ERR_QUERIES;
    }

    const bool own   = llama_dge_needs_own_queries(input.params);
    const bool draft = llama_dge_needs_draft_queries(input.params);

    const llama_pos p0_own   = n_prompt - llama_dge_n_own_queries(input.params, settings.window);
    const llama_pos p0_draft = settings.recalls() ? range.p0 : n_prompt - 1;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        auto & scores = input.layers[i];

        if (!layers[i].seen || layers[i].has_bias) {
            return LLAMA_DGE_ERR_UNSUPPORTED;
        }

        const auto score_range = [&](llama_pos p0, llama_pos p1, std::vector<float> & res) {
            return llama_dge_score_cells(ctx, kv, i, kv.stream(seq_id), layers[i].attn, cells, ring->layer(i),
                    ring->rows(seq_id, p0, p1), p0, input.n_past, res);
        };

        int32_t status = LLAMA_DGE_OK;

        if (llama_dge_needs_sums(input.params)) {
            sums->read(i, seq_id, cells, input.n_past, scores.own);

            // the mean over the heads of a group, as of the other scores
            const float n_group = (float) kv.layer(i).n_head / kv.layer(i).n_head_kv;

            for (float & score : scores.own) {
                score /= n_group;
            }
        }
        if (own) {
            status = score_range(p0_own, n_prompt, scores.own);
        }
        if (status == LLAMA_DGE_OK && draft) {
            status = score_range(p0_draft, range.p1, scores.draft);
        }
        if (status != LLAMA_DGE_OK) {
            return status;
        }
    }

    return LLAMA_DGE_OK;
}

int32_t llama_dge::evict(llama_seq_id seq_id) {
    auto & seq = seqs[seq_id];

    std::vector<uint32_t> cells;

    int32_t status = kv.map_rows(seq_id, cells);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int32_t n_rows = cells.size();
    if (seq.n_prompt > n_rows) {
        return LLAMA_DGE_ERR_SEQ;
    }

    // with recall, entries of the answer compete as those of the prompt do
    const int32_t n_prompt = settings.recalls() ? n_rows : seq.n_prompt;

    const int32_t budget = settings.resolve_budget(seq.n_prompt);
    if (n_prompt <= budget) {
        return LLAMA_DGE_NOTHING_TO_EVICT;
    }

    llama_dge_select_input input;

    select_input(n_prompt, budget, input);

    // the last decode may still run
    ctx.wait();

    const int64_t t0 = ggml_time_us();

    if (llama_dge_needs_attention(input.params)) {
        status = score(seq_id, cells, input);
        if (status != LLAMA_DGE_OK) {
            return status;
        }
    }

    const int64_t t1 = ggml_time_us();

    llama_dge_kept kept;

    if (!llama_dge_select(input, kept)) {
        return LLAMA_DGE_ERR_CALLBACK;
    }

    status = bias.reserve(kept);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int64_t t2 = ggml_time_us();

    std::shared_ptr<llama_dge_store> store;

    if (settings.park != LLAMA_DGE_PARK_OFF) {
        const llama_dge_park_args args = { settings.park, settings.park_path, parked_bytes(), settings.park_limit,
            settings.recalls() ? LLAMA_DGE_STORE_SPARE : 0 };

        store = llama_dge_park(place(), *sums, seq_id, cells, seq.origin, args, status);
        if (!store) {
            return status;
        }
    }

    const int64_t t3 = ggml_time_us();

    const auto moved = llama_dge_compact(place(), seq_id, cells, kept, input.n_past, store.get());

    status = settle(seq_id, moved);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int64_t t4 = ggml_time_us();

    on(seq_id, LLAMA_DGE_EVENT_EVICT);

    seq.boundary   = n_prompt - 1;
    seq.pos_min    = input.n_past;
    seq.n_selected = n_rows;
    seq.store      = std::move(store);
    seq.n_exact    = seq.store ? seq.store->n_exact : 0;

    auto & stats = seq.stats;

    stats.n_draft      = n_rows - seq.n_prompt;
    stats.budget       = settings.mean_budget(seq.n_prompt);
    stats.n_before     = n_rows;
    stats.n_after      = n_rows - input.n_past + llama_dge_capacity(kept);
    stats.bytes_before = kv.row_bytes() * stats.n_before;
    stats.bytes_after  = kv.row_bytes() * stats.n_after;
    stats.bytes_kept   = kv.kept_bytes(kept, n_rows - input.n_past);
    stats.t_score_us   = t1 - t0;
    stats.t_select_us  = t2 - t1;
    stats.t_compact_us = t4 - t2;
    stats.t_park_us    = t3 - t2 + moved.t_park_us;

    seq.kept = std::move(kept);

    bias.set(seq_id, &seq.kept, seq.pos_min);

    n_evictions++;

    LLAMA_LOG_DEBUG("%s: seq %d: %d -> %d entries, score %.1f ms, select %.1f ms, compact %.1f ms\n", __func__, seq_id,
            stats.n_before, stats.n_after, stats.t_score_us / 1e3, stats.t_select_us / 1e3, stats.t_compact_us / 1e3);

    return LLAMA_DGE_OK;
}
