#include "llama-dge-settings.h"

#include "llama-dge-policy.h"

#include <algorithm>
#include <cmath>
#include <numeric>

llama_dge_settings::llama_dge_settings(const llama_dge_params & params) :
    llama_dge_params(params), head_rows(params.table, params.table + params.n_table),
    park_path(params.park_dir ? params.park_dir : "") {
    table    = nullptr;
    park_dir = nullptr;

    const auto * impl = llama_dge_find_policy(policy);

    if (recalls()) {
        scores = LLAMA_DGE_SCORES_DRAFT; // the last queries take the place of the draft's
    } else if (scores == LLAMA_DGE_SCORES_AUTO) {
        scores = impl ? impl->auto_scores : (int32_t) LLAMA_DGE_SCORES_DRAFT;
    }

    sel = { impl, scores, pooling, kernel_size, sinks, layer_budgets, head_budgets };
}

// RECALL_AUTO estimates the attention mass after so many tokens
static constexpr int32_t LLAMA_DGE_AUTO_STEP = 1;

int32_t llama_dge_settings::recall_step() const {
    return recall == LLAMA_DGE_RECALL_AUTO ? LLAMA_DGE_AUTO_STEP : recall;
}

uint32_t llama_dge_settings::n_ring() const {
    if (!llama_dge_needs_own_queries(sel) && !llama_dge_needs_draft_queries(sel)) {
        return 0;
    }

    // tokens that a draft model proposes in vain take slots as well
    return window + draft_tokens - 1 + (recalls() ? LLAMA_DGE_RING_SPARE : 0);
}

int32_t llama_dge_settings::n_fixed() const {
    return window + (sel.policy && sel.policy->n_fixed ? sel.policy->n_fixed(sel) : 0);
}

int32_t llama_dge_settings::resolve_budget(int32_t n_prompt) const {
    if (head_budgets == LLAMA_DGE_HEAD_BUDGETS_TABLE) {
        // a prompt that the smallest head can hold is not evicted
        return *std::min_element(head_rows.begin(), head_rows.end());
    }

    if (budget_share > 0.0f) {
        // a small share of a short prompt must leave more than the window
        return std::max((int32_t) std::lround((double) budget_share * n_prompt), std::max(n_fixed(), window + 1));
    }

    return budget;
}

int32_t llama_dge_settings::mean_budget(int32_t n_prompt) const {
    if (head_budgets != LLAMA_DGE_HEAD_BUDGETS_TABLE) {
        return resolve_budget(n_prompt);
    }

    return (int32_t) std::lround(std::accumulate(head_rows.begin(), head_rows.end(), 0.0) / head_rows.size());
}

int32_t llama_dge_settings::due_rows(int32_t n_prompt) const {
    const int32_t n_draft = n_prompt + draft_tokens - 1;

    if (!recalls()) {
        return n_draft;
    }

    // with recall, the answer may make a short prompt long enough
    const int32_t n_budget = resolve_budget(n_prompt);

    return n_prompt > n_budget ? n_draft : std::max(n_draft, n_budget + recall_step());
}

llama_dge_query_range llama_dge_settings::needed_queries(int32_t n_prompt, int32_t n_rows) const {
    const bool own   = llama_dge_needs_own_queries(sel);
    const bool draft = llama_dge_needs_draft_queries(sel);

    if (!own && !draft) {
        return { 0, 0 };
    }

    if (recalls()) {
        const int32_t n_due = due_rows(n_prompt);

        return { std::max(0, n_due - window), std::min(n_due, n_rows) };
    }

    return {
        own ? n_prompt - llama_dge_n_own_queries(sel, window) : n_prompt - 1,
        draft ? std::min(n_prompt + draft_tokens - 1, n_rows) : n_prompt,
    };
}
