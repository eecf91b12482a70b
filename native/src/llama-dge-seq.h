#pragma once

#include "llama-dge-ctx.h"
#include "llama-dge-phase.h"
#include "llama-dge-rows.h"

#include <cstdint>
#include <memory>

class llama_dge_store;

// what is reported of a sequence: forgotten with its prompt
struct llama_dge_seq_stats {
    int32_t error = 0; // of the last attempt to evict

    int32_t n_draft  = 0;
    int32_t budget   = 0;
    int32_t n_before = 0;
    int32_t n_after  = 0;

    int64_t bytes_before = 0;
    int64_t bytes_after  = 0;
    int64_t bytes_kept   = 0;

    int64_t t_score_us   = 0;
    int64_t t_select_us  = 0;
    int64_t t_compact_us = 0;
    int64_t t_park_us    = 0;

    int64_t n_recalls   = 0;
    int64_t n_checks    = 0;
    int64_t n_moved     = 0;
    int64_t t_recall_us = 0;
};

// what a restore reported: it outlives the eviction that follows
struct llama_dge_restore_stats {
    int32_t n_restored   = 0;
    int64_t t_restore_us = 0;
};

// What is known of one sequence. The phase changes in on(), and where it becomes a copy of another one.
class llama_dge_seq {
public:
    llama_dge_phase phase() const { return cur; }

    bool is_evicted() const { return cur == LLAMA_DGE_PHASE_EVICTED || cur == LLAMA_DGE_PHASE_SELECTING; }

    // OK, or why the event is refused
    int32_t allows(llama_dge_event event) const { return llama_dge_next(cur, event).status; }

    // The event happens. A refusal changes nothing. A thread that selects must have been ended where SELECTING is left
    llama_dge_transition on(llama_dge_event event);

    // becomes a copy of an evicted sequence, whose host copy both share; allowed by COPY_EVICTED
    void copy(const llama_dge_seq & src);

    //
    // ARMED and later
    //

    int32_t n_prompt = 0;
    bool    force    = false; // evict at the next update even if the draft is not complete
    bool    warned   = false; // one warning per evicted prompt

    //
    // EVICTED and later
    //

    llama_dge_kept kept; // past rows per layer of the cache and head, by slot

    llama_pos boundary = -1; // last position of the prompt, or of the last selection
    llama_pos pos_min  = -1; // first position from which on no entry is missing

    int32_t n_selected = 0;     // tokens at the last selection or check
    float   mass       = -1.0f; // RECALL_AUTO: attention that the kept set held when it was selected, -1: unknown

    std::shared_ptr<llama_dge_store> store; // the host copy; copies of the sequence share it

    int32_t n_exact = 0; // its entries of before the eviction: fewer where draft tokens were removed since

    llama_dge_seq_stats stats;

    //
    // of the entries, whatever the phase
    //

    llama_dge_origin        origin;
    llama_dge_restore_stats restored;

private:
    llama_dge_phase cur = LLAMA_DGE_PHASE_EMPTY;
};
