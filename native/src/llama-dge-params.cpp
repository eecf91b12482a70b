#include "llama-dge-impl.h"

#include <cmath>

// settings: what they are by default, which are out of range; names of return codes

int32_t llama_dge_abi_version(void) {
    return LLAMA_DGE_ABI_VERSION;
}

struct llama_dge_params llama_dge_default_params(void) {
    struct llama_dge_params res = {};

    res.policy        = LLAMA_DGE_POLICY_SNAPKV;
    res.scores        = LLAMA_DGE_SCORES_DRAFT;
    res.pooling       = LLAMA_DGE_POOLING_MAX;
    res.draft_pooling = LLAMA_DGE_POOLING_NONE;
    res.kernel_size   = 7;
    res.budget        = 1024;
    res.budget_share  = 0.0f;
    res.draft_tokens  = 2;
    res.window        = 8;
    res.sinks         = 4;
    res.layer_budgets = LLAMA_DGE_LAYER_BUDGETS_EXACT;
    res.head_budgets  = LLAMA_DGE_HEAD_BUDGETS_UNIFORM;
    res.park          = LLAMA_DGE_PARK_OFF;
    res.refresh       = 0;
    res.refresh_mass  = 0.9f;

    res.refresh_overlap = false;

    return res;
}

const char * llama_dge_status_str(int32_t status) {
    switch (status) {
        case LLAMA_DGE_OK:              return "success";
        case LLAMA_DGE_NOTHING_TO_CUT:  return "the prompt is not longer than the budget";
        case LLAMA_DGE_ERR_PARAMS:      return "a parameter is out of range";
        case LLAMA_DGE_ERR_UNSUPPORTED: return "eviction is not supported for this model or context";
        case LLAMA_DGE_ERR_DISABLED:    return "eviction is not enabled";
        case LLAMA_DGE_ERR_SEQ:         return "the sequence does not hold the positions 0 to n_prompt - 1";
        case LLAMA_DGE_ERR_QUERIES:     return "queries of the end of the prompt were not captured";
        case LLAMA_DGE_ERR_SHARED:      return "rows of the sequence belong to another sequence, too";
        case LLAMA_DGE_ERR_CUT:         return "the sequence was cut already";
        case LLAMA_DGE_ERR_MEMORY:      return "out of memory";
        case LLAMA_DGE_ERR_COMPUTE:     return "the scores could not be computed";
        case LLAMA_DGE_ERR_ABORTED:     return "aborted by the callback";
        case LLAMA_DGE_ERR_CALLBACK:    return "the policy's callback failed or returned rows that cannot be kept";
        case LLAMA_DGE_ERR_PARK:        return "rows could not be parked, or what was parked is damaged";
        case LLAMA_DGE_ERR_LOST:        return "a device failed, the sequence was cleared: evaluate its prompt again";
        default:                        return "unknown status";
    }
}

bool llama_dge_params_ok(const llama_dge_params & p) {
    const auto in = [](int32_t x, int32_t lo, int32_t hi) {
        return x >= lo && x <= hi;
    };

    // far above any use, far below an overflow of their sums
    const int32_t n_max = 1 << 24;

    const auto * policy = llama_dge_get_policy(p.policy);

    if (!policy || (p.policy == LLAMA_DGE_POLICY_CUSTOM) != (p.select != nullptr)) {
        return false;
    }

    // fewer rows than these leave no room for a choice
    const int32_t n_min = p.window + (p.policy == LLAMA_DGE_POLICY_STREAMINGLLM ? p.sinks : 0);

    const bool is_table = p.head_budgets == LLAMA_DGE_HEAD_BUDGETS_TABLE;

    if (is_table != (p.n_table > 0) || (is_table && (!p.table || p.policy == LLAMA_DGE_POLICY_CUSTOM))) {
        return false;
    }
    for (int32_t i = 0; i < p.n_table; ++i) {
        if (!in(p.table[i], n_min, n_max)) {
            return false;
        }
    }

    if (p.head_budgets == LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE && (!policy->needs_scores || !policy->select)) {
        return false;
    }

    if (!in(p.park, LLAMA_DGE_PARK_OFF, LLAMA_DGE_PARK_DISK) || p.park_limit < 0 ||
            (p.park == LLAMA_DGE_PARK_DISK && (!p.park_dir || !*p.park_dir))) {
        return false;
    }

    // a choice reads all parked keys
    if (!in(p.refresh, LLAMA_DGE_REFRESH_AUTO, n_max) || (p.refresh != 0 && p.park != LLAMA_DGE_PARK_RAM) ||
            (p.refresh_overlap && p.policy == LLAMA_DGE_POLICY_CUSTOM) ||
            (p.refresh == LLAMA_DGE_REFRESH_AUTO && !(p.refresh_mass > 0.0f && p.refresh_mass <= 1.0f))) {
        return false;
    }

    return in(p.scores, LLAMA_DGE_SCORES_DRAFT, LLAMA_DGE_SCORES_BOTH) &&
           in(p.pooling, LLAMA_DGE_POOLING_MAX, LLAMA_DGE_POOLING_AVG) &&
           in(p.draft_pooling, LLAMA_DGE_POOLING_NONE, LLAMA_DGE_POOLING_AVG) && in(p.kernel_size, 1, n_max) &&
           p.kernel_size % 2 == 1 && in(p.draft_tokens, 1, n_max) && in(p.window, 1, n_max) && in(p.sinks, 0, n_max) &&
           std::isfinite(p.budget_share) && p.budget_share >= 0.0f && p.budget_share <= 1.0f &&
           in(p.layer_budgets, LLAMA_DGE_LAYER_BUDGETS_EXACT, LLAMA_DGE_LAYER_BUDGETS_REFERENCE) &&
           in(p.head_budgets, LLAMA_DGE_HEAD_BUDGETS_UNIFORM, LLAMA_DGE_HEAD_BUDGETS_TABLE) &&
           (is_table || p.budget_share > 0.0f || in(p.budget, n_min, n_max));
}
