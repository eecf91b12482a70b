#include "llama-dge-whole.h"

#include "llama-impl.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

// what llama.cpp may do to a sequence, and what becomes of what is known of it

int32_t llama_dge::on(llama_seq_id seq_id, llama_dge_event event) {
    auto & seq = seqs[seq_id];

    const auto next = llama_dge_next(seq.phase(), event);

    if (next.status != LLAMA_DGE_OK) {
        return next.status;
    }

    // a thread that selects reads the host copy; where it is still here, nobody wants its result
    if (seq.phase() == LLAMA_DGE_PHASE_SELECTING && next.phase != LLAMA_DGE_PHASE_SELECTING && selections[seq_id]) {
        selections[seq_id]->cancel = true;
        end_selection(std::move(selections[seq_id]));
    }

    seq.on(event);

    if (next.reset >= LLAMA_DGE_RESET_PROMPT) {
        bias.set(seq_id, nullptr, 0);
    }
    if (next.reset >= LLAMA_DGE_RESET_ENTRIES) {
        ring->drop(seq_id, 0);
        sums->spoil(seq_id);
    }
    if (next.phase == LLAMA_DGE_PHASE_EMPTY || next.phase == LLAMA_DGE_PHASE_LOST) {
        sums->set_count(seq_id, 0);
    }

    return LLAMA_DGE_OK;
}

bool llama_dge::any(llama_dge_phase phase) const {
    return std::any_of(seqs.begin(), seqs.end(), [&](const auto & seq) { return seq.phase() == phase; });
}

bool llama_dge::any_evicted() const {
    return any(LLAMA_DGE_PHASE_EVICTED) || any(LLAMA_DGE_PHASE_SELECTING);
}

//
// removal
//

int32_t llama_dge::removal(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    p0 = p0 < 0 ? 0 : p0;
    p1 = p1 < 0 ? std::numeric_limits<llama_pos>::max() : p1;

    const auto & seq = seqs[seq_id];

    if (p0 == 0 && p1 > kv.pos_max(seq_id)) {
        return LLAMA_DGE_EVENT_REMOVE_ALL;
    }
    if (p0 >= p1) {
        return -1; // an empty range removes nothing, so there is nothing to refuse
    }

    const llama_pos first = seq.is_evicted() ? seq.boundary + 1 : seq.n_prompt;

    return p0 >= first ? LLAMA_DGE_EVENT_REMOVE_TAIL : LLAMA_DGE_EVENT_REMOVE_PART;
}

bool llama_dge::may_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    for (size_t s = 0; s < seqs.size(); ++s) {
        if (seq_id >= 0 && (llama_seq_id) s != seq_id) {
            continue;
        }

        const int32_t event = removal(s, p0, p1);

        if (event >= 0 && seqs[s].allows((llama_dge_event) event) != LLAMA_DGE_OK) {
            LLAMA_LOG_DEBUG("%s: seq %zu was evicted, entries up to position %d can be removed as a whole only\n",
                    __func__, s, seqs[s].boundary);
            return false;
        }
    }

    return true;
}

void llama_dge::removed(llama_seq_id seq_id, int32_t event, llama_pos p0) {
    if (event < 0) {
        return;
    }

    on(seq_id, (llama_dge_event) event);

    if (event == LLAMA_DGE_EVENT_REMOVE_ALL) {
        return;
    }

    p0 = std::max(p0, 0);

    ring->drop(seq_id, p0);
    sums->drop(seq_id, p0);

    auto & seq = seqs[seq_id];

    if (!seq.store) {
        return;
    }

    // draft tokens that are removed do not come back with the host copy
    seq.n_exact = std::min(seq.n_exact, p0);

    if (p0 < seq.store->n_rows && !seq.store->on_disk()) {
        on(seq_id, LLAMA_DGE_EVENT_SELECTED);

        seq.store->n_rows = p0;
        seq.n_selected    = std::min(seq.n_selected, p0);
    }
}

void llama_dge::kept_only(llama_seq_id seq_id) {
    for (size_t s = 0; s < seqs.size(); ++s) {
        // sequences of other streams are left alone
        if ((llama_seq_id) s != seq_id && kv.stream(s) == kv.stream(seq_id)) {
            on(s, LLAMA_DGE_EVENT_REMOVE_ALL);
        }
    }
}

//
// copies and shifts
//

bool llama_dge::may_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) const {
    // llama.cpp itself stops at an id that is out of range
    if (src == dst || !holds(src) || !holds(dst)) {
        return true;
    }

    const bool merges = kv.stream(src) == kv.stream(dst);

    // entries of another sequence between those of an evicted one would take over its positions
    if (merges && seqs[dst].allows(LLAMA_DGE_EVENT_MERGE) != LLAMA_DGE_OK) {
        LLAMA_LOG_ERROR("%s: seq %d was evicted, nothing can be copied into it\n", __func__, dst);
        return false;
    }
    if (!seqs[src].is_evicted()) {
        return true;
    }

    const bool part = p0 > 0 || (p1 >= 0 && p1 <= kv.pos_max(src));

    if (part && seqs[src].allows(LLAMA_DGE_EVENT_COPY_PART) != LLAMA_DGE_OK) {
        LLAMA_LOG_ERROR("%s: seq %d was evicted, it can be copied as a whole only\n", __func__, src);
        return false;
    }
    if (!knows(dst) || kv.pos_max(dst) >= 0 || seqs[dst].allows(LLAMA_DGE_EVENT_COPY_EVICTED) != LLAMA_DGE_OK) {
        LLAMA_LOG_ERROR("%s: seq %d was evicted, it can be copied into an empty sequence below %u only\n", __func__,
                src, kv.n_seq());
        return false;
    }

    return true;
}

void llama_dge::copied(llama_seq_id src, llama_seq_id dst) {
    if (src == dst) {
        return;
    }

    const auto & from = seqs[src];
    auto &       to   = seqs[dst];

    if (from.is_evicted()) {
        on(dst, LLAMA_DGE_EVENT_REMOVE_ALL);

        to.copy(from);
        sums->spoil(dst);
        bias.set(dst, &to.kept, to.pos_min);
        return;
    }

    if (kv.pos_max(dst) < 0) {
        on(dst, LLAMA_DGE_EVENT_REMOVE_ALL);
        return;
    }

    const bool merges = kv.stream(src) == kv.stream(dst);

    if (merges && kv.pos_max(src) < 0) {
        return; // nothing was copied
    }

    const bool was = to.phase() != LLAMA_DGE_PHASE_EMPTY && to.phase() != LLAMA_DGE_PHASE_LOST;

    const auto origin = kv.pos_max(src) < 0 ? to.origin : merges && was ? to.origin.with(from.origin) : from.origin;

    // the entries are shared, so there will be no eviction, and the queries are not copied
    on(dst, merges ? LLAMA_DGE_EVENT_MERGE : LLAMA_DGE_EVENT_REPLACE);

    to.origin = origin;
}

bool llama_dge::may_shift(llama_seq_id seq_id) const {
    if (holds(seq_id) && seqs[seq_id].allows(LLAMA_DGE_EVENT_SHIFT) != LLAMA_DGE_OK) {
        LLAMA_LOG_ERROR("%s: seq %d was evicted, its positions cannot be shifted\n", __func__, seq_id);
        return false;
    }

    return true;
}

void llama_dge::shifted(llama_seq_id seq_id) {
    on(seq_id, LLAMA_DGE_EVENT_SHIFT);
}

//
// states, other contexts
//

void llama_dge::state_cells(uint32_t strm, llama_seq_id seq_id, uint32_t n_cells) {
    const uint32_t n_before = kv.size();

    if (elastic.state_cells(strm, seq_id, n_cells) == LLAMA_DGE_ERR_LOST) {
        lose(-1);
    }

    rebuild = rebuild || kv.size() != n_before;
}

void llama_dge::share() {
    if (active) {
        throw std::runtime_error("eviction is on: another context cannot share the cache; create that context first");
    }

    ctx.wait(); // a graph that runs may still use the tensors

    const int32_t status = elastic.set_off();

    if (status == LLAMA_DGE_ERR_LOST) {
        lose(-1);
    }
    if (status != LLAMA_DGE_OK) {
        throw std::runtime_error("the cache that is to be shared could not grow to its full size");
    }

    rebuild = true;
}

void llama_dge::loaded(llama_seq_id seq_id, llama_dge_seq * seq) {
    if (kv.pos_max(seq_id) < 0) {
        if (seqs[seq_id].phase() != LLAMA_DGE_PHASE_LOST) {
            on(seq_id, LLAMA_DGE_EVENT_REMOVE_ALL);
        }
        return;
    }

    on(seq_id, seq ? LLAMA_DGE_EVENT_LOAD_EVICTED : LLAMA_DGE_EVENT_LOAD_FULL);

    if (!seq) {
        return;
    }

    auto & to = seqs[seq_id];

    to.n_prompt = seq->n_prompt;
    to.kept     = std::move(seq->kept);
    to.boundary = seq->boundary;
    to.pos_min  = seq->pos_min;
    to.stats    = seq->stats;

    bias.set(seq_id, &to.kept, to.pos_min);
}
