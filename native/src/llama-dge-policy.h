#pragma once

#include "llama-dge-select.h"

// One policy, one file in policies/: how it ranks the past entries of a prompt, and how it shares the budget out. It
// registers itself; Python, the command line and the tests read the listing.
struct llama_dge_policy {
    const char * name;
    const char * summary; // one sentence
    const char * paper;   // arXiv number

    int32_t scorer;      // enum llama_dge_scorer: the attention that its own score is made of
    int32_t auto_scores; // enum llama_dge_scores: what SCORES_AUTO stands for
    bool    pools;       // its own score is pooled over neighbouring entries

    // its own score, from the attention of a layer's heads (zeros with SCORER_NONE); null: that attention
    void (*rank)(const llama_dge_select_input & input, llama_dge_ranks & ranks);

    // entries per head of each layer; null: n_cap in every layer
    std::vector<int32_t> (*caps)(const llama_dge_select_input & input);

    // entries that it keeps besides the window, whatever the scores; null: none
    int32_t (*n_fixed)(const llama_dge_select_params & params);
};

// true, so that a static variable can call it
bool llama_dge_register_policy(const llama_dge_policy & policy);

// by name, ascending
const std::vector<const llama_dge_policy *> & llama_dge_policies();

// nullptr for an unknown name
const llama_dge_policy * llama_dge_find_policy(const char * name);

#define LLAMA_DGE_REGISTER(policy) static const bool llama_dge_registered = llama_dge_register_policy(policy)
