#pragma once

#include "llama-dge-select.h"
#include "llama-dge.h"

#include <string>
#include <vector>

// slots of the ring of queries for tokens that are removed again, with recall
static constexpr int32_t LLAMA_DGE_RING_SPARE = 16;

// queries at the positions [p0, p1)
struct llama_dge_query_range {
    llama_pos p0;
    llama_pos p1;
};

// llama_dge_params with copies of what it points to, and what follows from it
struct llama_dge_settings : llama_dge_params {
    llama_dge_settings() : llama_dge_settings(llama_dge_default_params()) {}
    explicit llama_dge_settings(const llama_dge_params & params); // params: checked

    bool recalls() const { return recall != 0; }

    // tokens after the latest selection at which the next one is due, or the check whether it pays
    int32_t recall_step() const;

    // queries to keep per sequence
    uint32_t n_ring() const;

    // entries of a prompt that the policy keeps whatever the scores, window included
    int32_t n_fixed() const;

    // entries of a prompt that are kept per layer and head; a prompt that is not longer is not evicted
    int32_t resolve_budget(int32_t n_prompt) const;

    // what is reported: with a table the mean over layers and heads
    int32_t mean_budget(int32_t n_prompt) const;

    // tokens at which a prompt is evicted
    int32_t due_rows(int32_t n_prompt) const;

    // queries that an eviction of a prompt needs in a sequence of n_rows
    llama_dge_query_range needed_queries(int32_t n_prompt, int32_t n_rows) const;

    std::vector<int32_t> head_rows; // copy of `table`
    std::string          park_path; // copy of `park_dir`

    llama_dge_select_params sel;
};
