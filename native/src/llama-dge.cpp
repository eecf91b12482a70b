#include "llama-dge-choice.h"
#include "llama-dge-impl.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <limits>

llama_dge::llama_dge(llama_kv_cache & kv, uint32_t n_seq) :
    kv(kv), n_seq(n_seq), n_cells_max(kv.get_size()), layers(kv.layers.size()), seqs(n_seq) {
    choices.resize(n_seq);

    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].il = kv.layers[i].il;
    }
}

void llama_dge::reset_seq(llama_seq_id seq_id) {
    // a thread that chooses reads what is parked
    end_choice(std::move(choices[seq_id]));

    const auto before = std::move(seqs[seq_id]);

    seqs[seq_id] = {};

    seqs[seq_id].n_summed     = before.n_summed;
    seqs[seq_id].uneven       = before.uneven;
    seqs[seq_id].n_restored   = before.n_restored;
    seqs[seq_id].t_restore_us = before.t_restore_us;
    seqs[seq_id].origin       = before.origin;

    bias_changed(seq_id);
}

bool llama_dge::summed(llama_seq_id seq_id, int32_t n_rows) const {
    return !llama_dge_needs_sums(params.sel) || seqs[seq_id].n_summed >= n_rows;
}

bool llama_dge::call_select(int32_t il, int32_t n_past, int32_t n, const llama_dge_ranks & ranks,
        std::vector<llama_dge_rows> & rows) const {
    std::vector<float> scores;
    for (const auto & rank : ranks) {
        scores.insert(scores.end(), rank.begin(), rank.end());
    }

    std::vector<int32_t> all(scores.size());
    std::vector<int32_t> n_rows(ranks.size(), 0);

    if (params.select(params.select_user_data, il, ranks.size(), n_past, n, scores.data(), all.data(), n_rows.data()) !=
            0) {
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

int32_t llama_dge::map_cells(llama_seq_id seq_id, std::vector<uint32_t> & cells) const {
    const auto & kv_cells = kv.v_cells[kv.seq_to_stream[seq_id]];

    const int32_t n = kv_cells.seq_pos_max(seq_id) + 1;
    // positions far apart must not take memory
    if (n <= 0 || (uint32_t) n > kv_cells.get_used()) {
        return LLAMA_DGE_ERR_SEQ;
    }

    cells.assign(n, std::numeric_limits<uint32_t>::max());

    int32_t n_found = 0;

    for (uint32_t i = 0; i < kv_cells.size(); ++i) {
        if (kv_cells.is_empty(i) || !kv_cells.seq_has(i, seq_id)) {
            continue;
        }
        if (kv_cells.seq_count(i) > 1) {
            return LLAMA_DGE_ERR_SHARED;
        }
        if (kv_cells.get_shift(i) != 0) {
            return LLAMA_DGE_ERR_SEQ;
        }

        auto & cell = cells[kv_cells.pos_get(i)];
        n_found += cell == std::numeric_limits<uint32_t>::max();
        cell = i;
    }

    return n_found == n ? LLAMA_DGE_OK : LLAMA_DGE_ERR_SEQ;
}

bool llama_dge::is_due(llama_seq_id seq_id) const {
    const auto & seq = seqs[seq_id];

    const int32_t n_rows = kv.v_cells[kv.seq_to_stream[seq_id]].seq_pos_max(seq_id) + 1;

    switch (seq.state) {
        case LLAMA_DGE_STATE_ARMED: return seq.force || n_rows >= params.due_rows(seq.n_prompt);
        case LLAMA_DGE_STATE_EVICTED:
            // rows that were parked in a file, by settings of before, are not chosen from
            return recalls() && seq.parked && seq.parked->path.empty() && n_rows >= seq.n_checked + params.recall_step();
        default: return false;
    }
}

bool llama_dge::any_cut() const {
    const auto is_cut = [](const auto & seq) {
        return seq.state == LLAMA_DGE_STATE_EVICTED;
    };

    return std::any_of(seqs.begin(), seqs.end(), is_cut);
}

int32_t llama_dge::arm(llama_seq_id seq_id, int32_t n_prompt) {
    auto & seq = seqs[seq_id];

    if (seq.state == LLAMA_DGE_STATE_EVICTED) {
        return LLAMA_DGE_ERR_EVICTED;
    }

    reset_seq(seq_id);

    std::vector<uint32_t> cells;

    const int32_t status = map_cells(seq_id, cells);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int32_t n_rows = cells.size();
    if (n_prompt < 1 || n_prompt > n_rows) {
        return LLAMA_DGE_ERR_SEQ;
    }
    // with recall, the answer may become long enough
    if (n_prompt <= params.resolve_budget(n_prompt) && !recalls()) {
        return LLAMA_DGE_NOTHING_TO_EVICT;
    }

    const auto [p0, p1] = params.needed_queries(n_prompt, n_rows);

    if (!captured(seq_id, p0, p1) || !summed(seq_id, std::min(n_rows, n_prompt))) {
        return LLAMA_DGE_ERR_QUERIES;
    }

    seq.state    = LLAMA_DGE_STATE_ARMED;
    seq.n_prompt = n_prompt;

    return LLAMA_DGE_OK;
}

void llama_dge::select_input(int32_t n_prompt, int32_t budget, llama_dge_select_input & input) const {
    input.params   = params.sel;
    input.n_prompt = n_prompt;
    input.n_past   = n_prompt - params.window;
    input.n_cap    = budget - params.window;
    input.layers.resize(layers.size());

    for (size_t i = 0; i < layers.size(); ++i) {
        input.layers[i].n_head_kv = n_head_kv(i);
    }

    if (params.head_budgets == LLAMA_DGE_HEAD_BUDGETS_TABLE) {
        auto it = params.head_rows.begin();
        for (size_t i = 0; i < layers.size(); ++i) {
            input.table.emplace_back();
            for (uint32_t ih = 0; ih < n_head_kv(i); ++ih) {
                input.table[i].push_back(*it++ - params.window);
            }
        }
    }

    if (params.select) {
        const int32_t n_past = input.n_past;

        input.custom = [this, n_past](
                               size_t i, int32_t n, const llama_dge_ranks & ranks, std::vector<llama_dge_rows> & rows) {
            return call_select(layers[i].il, n_past, n, ranks, rows);
        };
    }
}

int32_t llama_dge::cut(llama_context & lctx, llama_seq_id seq_id) {
    auto & seq = seqs[seq_id];

    std::vector<uint32_t> cells;

    int32_t status = map_cells(seq_id, cells);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int32_t n_rows = cells.size();
    if (seq.n_prompt > n_rows) {
        return LLAMA_DGE_ERR_SEQ;
    }

    // with recall, rows of the answer compete as those of the prompt do
    const int32_t n_prompt = recalls() ? n_rows : seq.n_prompt;

    const int32_t budget = params.resolve_budget(seq.n_prompt);
    if (n_prompt <= budget) {
        return LLAMA_DGE_NOTHING_TO_EVICT;
    }

    llama_dge_select_input input;

    select_input(n_prompt, budget, input);

    auto [p0, p1] = params.needed_queries(seq.n_prompt, n_rows);

    if (recalls()) {
        p0 = std::max(0, n_rows - params.window);
        p1 = llama_dge_needs_attention(params.sel) ? n_rows : p0;
    }

    if (!captured(seq_id, p0, p1) || !summed(seq_id, std::min(n_rows, seq.n_prompt + params.draft_tokens - 1))) {
        return LLAMA_DGE_ERR_QUERIES;
    }

    // the last decode may still run
    ggml_backend_sched_synchronize(lctx.get_sched());

    const int64_t t0 = ggml_time_us();

    for (size_t i = 0; i < layers.size(); ++i) {
        auto & scores = input.layers[i];

        if (!llama_dge_needs_attention(params.sel)) {
            continue;
        }
        if (!layers[i].seen || layers[i].has_bias) {
            return LLAMA_DGE_ERR_UNSUPPORTED;
        }

        if (llama_dge_needs_sums(input.params)) {
            read_sums(i, seq_id, cells, input.n_past, scores.own);

            // the mean over the heads of a group, as of the other scores
            const float n_group = (float) kv.hparams.n_head(layers[i].il) / n_head_kv(i);

            for (float & score : scores.own) {
                score /= n_group;
            }
        }

        if (llama_dge_needs_own_queries(input.params)) {
            const llama_pos first = seq.n_prompt - llama_dge_n_own_queries(input.params, params.window);

            status = score_layer(lctx, i, seq_id, cells, first, seq.n_prompt, input.n_past, scores.own);
        }
        if (status == LLAMA_DGE_OK && llama_dge_needs_draft_queries(input.params)) {
            const llama_pos first = recalls() ? p0 : seq.n_prompt - 1;

            status = score_layer(lctx, i, seq_id, cells, first, p1, input.n_past, scores.draft);
        }
        if (status != LLAMA_DGE_OK) {
            return status;
        }
    }

    const int64_t t1 = ggml_time_us();

    llama_dge_kept kept;

    if (!llama_dge_select(input, kept)) {
        return LLAMA_DGE_ERR_CALLBACK;
    }

    size_t n_cap = 0;
    for (const auto & heads : kept) {
        for (const auto & rows : heads) {
            n_cap = std::max(n_cap, rows.size());
        }
    }

    status = bias_reserve(kept);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int64_t t2 = ggml_time_us();

    status = compact(lctx, seq_id, cells, kept, input.n_past);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const int64_t t3 = ggml_time_us();

    seq.state        = LLAMA_DGE_STATE_EVICTED;
    seq.n_draft      = n_rows - seq.n_prompt;
    seq.budget       = params.mean_budget(seq.n_prompt);
    seq.n_before     = n_rows;
    seq.n_after      = n_rows - input.n_past + n_cap;
    seq.boundary     = n_prompt - 1;
    seq.n_checked    = n_rows;
    seq.pos_min      = input.n_past;
    seq.bytes_kept   = kept_bytes(kept, n_rows - input.n_past);
    seq.kept         = std::move(kept);
    seq.bytes_before = row_bytes() * seq.n_before;
    seq.bytes_after  = row_bytes() * seq.n_after;
    seq.t_score_us   = t1 - t0;
    seq.t_select_us  = t2 - t1;
    seq.t_compact_us = t3 - t2;

    n_evictions++;

    bias_changed(seq_id);

    LLAMA_LOG_DEBUG("%s: seq %d: %d -> %d rows, score %.1f ms, select %.1f ms, compact %.1f ms\n", __func__, seq_id,
            seq.n_before, seq.n_after, seq.t_score_us / 1e3, seq.t_select_us / 1e3, seq.t_compact_us / 1e3);

    return LLAMA_DGE_OK;
}

void llama_dge::request_reserve(llama_context & lctx) const {
    lctx.sched_need_reserve = true;
}

void llama_dge::expect_buffers(llama_context & lctx) const {
    for (size_t i = 0; i < lctx.backend_ptrs.size() && i < lctx.backend_buf_exp_size.size(); ++i) {
        auto & size = lctx.backend_buf_exp_size[i];

        size = ggml_backend_sched_get_buffer_size(lctx.get_sched(), lctx.backend_ptrs[i]);
    }
}

void llama_dge::info(llama_seq_id seq_id, llama_dge_seq_info & info) const {
    const auto & seq   = seqs[seq_id];
    const auto & cells = kv.v_cells[kv.seq_to_stream[seq_id]];

    info = {};

    info.state         = seq.state;
    info.error         = seq.error;
    info.n_prompt      = seq.n_prompt;
    info.n_draft       = seq.n_draft;
    info.budget        = seq.budget;
    info.n_rows_before = seq.n_before;
    info.n_rows_after  = seq.n_after;
    info.n_layer       = seq.state == LLAMA_DGE_STATE_EVICTED ? layers.size() : 0;
    info.boundary      = seq.boundary;
    info.pos_min       = seq.pos_min;
    info.bytes_before  = seq.bytes_before;
    info.bytes_after   = seq.bytes_after;
    info.bytes_kept    = seq.bytes_kept;
    info.t_score_us    = seq.t_score_us;
    info.t_select_us   = seq.t_select_us;
    info.t_compact_us  = seq.t_compact_us;
    info.n_evictions        = n_evictions;
    info.n_parked      = seq.parked ? seq.n_exact : 0;
    info.bytes_parked  = seq.parked ? seq.parked->n_bytes() : 0;
    info.n_restored    = seq.n_restored;
    info.t_park_us     = seq.t_park_us;
    info.t_restore_us  = seq.t_restore_us;
    info.n_recalls     = seq.n_recalls;
    info.n_checks      = seq.n_checks;
    info.n_moved       = seq.n_moved;
    info.t_recall_us  = seq.t_recall_us;

    for (uint32_t i = 0; i < cells.size(); ++i) {
        info.n_rows += !cells.is_empty(i) && cells.seq_has(i, seq_id);
    }

    if (lost.test(seq_id)) {
        info.state = LLAMA_DGE_STATE_LOST;
    } else if (info.n_rows == 0) {
        info.state = LLAMA_DGE_STATE_EMPTY;
    }

    llama_kv_cache::slot_info sinfo;
    sinfo.resize(1);
    sinfo.strm[0] = kv.seq_to_stream[seq_id];

    info.n_kv = kv.get_n_kv(sinfo);
}
