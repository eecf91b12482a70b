#include "llama-dge-policy.h"
#include "llama-dge-settings.h"

#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

// settings: what they are by default, what is out of range or does not go together; names of return codes

int32_t llama_dge_abi_version(void) {
    return LLAMA_DGE_ABI_VERSION;
}

struct llama_dge_params llama_dge_default_params(void) {
    struct llama_dge_params res = {};

    res.policy        = "snapkv";
    res.scores        = LLAMA_DGE_SCORES_AUTO;
    res.pooling       = LLAMA_DGE_POOLING_MAX;
    res.kernel_size   = 7;
    res.budget        = 1024;
    res.draft_tokens  = 8;
    res.window        = 8;
    res.sinks         = 4;
    res.layer_budgets = LLAMA_DGE_LAYER_BUDGETS_EXACT;
    res.head_budgets  = LLAMA_DGE_HEAD_BUDGETS_UNIFORM;
    res.park          = LLAMA_DGE_PARK_RAM;
    res.recall        = 0;
    res.recall_mass   = 0.9f;
    res.recall_async  = false;

    return res;
}

const char * llama_dge_status_str(int32_t status) {
    switch (status) {
        case LLAMA_DGE_OK:               return "success";
        case LLAMA_DGE_NOTHING_TO_EVICT: return "the prompt is not longer than the budget";
        case LLAMA_DGE_ERR_PARAMS:       return "a parameter is out of range";
        case LLAMA_DGE_ERR_UNSUPPORTED:  return "eviction is not supported for this model or context";
        case LLAMA_DGE_ERR_DISABLED:     return "eviction is not enabled";
        case LLAMA_DGE_ERR_SEQ:          return "the sequence does not hold the positions 0 to n_prompt - 1";
        case LLAMA_DGE_ERR_QUERIES:      return "queries of the end of the prompt were not captured";
        case LLAMA_DGE_ERR_SHARED:       return "another sequence shares entries of this one";
        case LLAMA_DGE_ERR_EVICTED:      return "the sequence was evicted already";
        case LLAMA_DGE_ERR_MEMORY:       return "out of memory";
        case LLAMA_DGE_ERR_COMPUTE:      return "the scores could not be computed";
        case LLAMA_DGE_ERR_ABORTED:      return "aborted by the callback";
        case LLAMA_DGE_ERR_CALLBACK:     return "the policy's callback failed or returned entries that cannot be kept";
        case LLAMA_DGE_ERR_PARK:         return "the host copy could not be made, or it is damaged";
        case LLAMA_DGE_ERR_LOST:         return "a device failed, the sequence was cleared: evaluate its prompt again";
        default:                         return "unknown status";
    }
}

//
// ranges
//

// far above any use, far below an overflow of their sums
static constexpr int32_t LLAMA_DGE_MAX_ROWS = 1 << 24;

// a number of llama_dge_params
struct llama_dge_field {
    llama_dge_field_info info;

    size_t offset;
    bool   is_float;

    const char * choices; // names of an enum's values, from 0 on, separated by spaces; nullptr: a number

    double get(const llama_dge_params & p) const {
        const char * data = (const char *) &p + offset;

        return is_float ? (double) *(const float *) data : (double) *(const int32_t *) data;
    }
};

#define LLAMA_DGE_FIELD(name, least, most) { { #name, least, most }, offsetof(llama_dge_params, name), false, nullptr }
#define LLAMA_DGE_FIELD_F(name, least, most) { { #name, least, most }, offsetof(llama_dge_params, name), true, nullptr }
#define LLAMA_DGE_FIELD_E(name, most, choices) { { #name, 0, most }, offsetof(llama_dge_params, name), false, choices }

static const llama_dge_field llama_dge_fields[] = {
    LLAMA_DGE_FIELD_E(scores, LLAMA_DGE_SCORES_BOTH, "auto draft policy both"),
    LLAMA_DGE_FIELD_E(pooling, LLAMA_DGE_POOLING_AVG, "none max avg"),
    LLAMA_DGE_FIELD(kernel_size, 1, LLAMA_DGE_MAX_ROWS),
    LLAMA_DGE_FIELD(budget, 1, LLAMA_DGE_MAX_ROWS),
    LLAMA_DGE_FIELD_F(budget_share, 0.0, 1.0),
    LLAMA_DGE_FIELD(draft_tokens, 1, LLAMA_DGE_MAX_ROWS),
    LLAMA_DGE_FIELD(window, 1, LLAMA_DGE_MAX_ROWS),
    LLAMA_DGE_FIELD(sinks, 0, LLAMA_DGE_MAX_ROWS),
    LLAMA_DGE_FIELD_E(layer_budgets, LLAMA_DGE_LAYER_BUDGETS_REFERENCE, "exact reference"),
    LLAMA_DGE_FIELD_E(head_budgets, LLAMA_DGE_HEAD_BUDGETS_TABLE, "uniform adaptive table"),
    LLAMA_DGE_FIELD_E(park, LLAMA_DGE_PARK_DISK, "off ram disk"),
    LLAMA_DGE_FIELD(recall, LLAMA_DGE_RECALL_AUTO, LLAMA_DGE_MAX_ROWS),
    LLAMA_DGE_FIELD_F(recall_mass, 0.0, 1.0),
};

bool llama_dge_get_field(int32_t index, struct llama_dge_field_info * info) {
    const int32_t n = sizeof(llama_dge_fields) / sizeof(llama_dge_fields[0]);

    if (index < 0 || index >= n) {
        return false;
    }

    *info = llama_dge_fields[index].info;

    return true;
}

bool llama_dge_get_policy(int32_t index, struct llama_dge_policy_info * info) {
    const auto & policies = llama_dge_policies();

    if (index < 0 || index >= (int32_t) policies.size()) {
        return false;
    }

    const auto & policy = *policies[index];

    *info = { policy.name, policy.summary, policy.paper, policy.scorer, policy.auto_scores };

    return true;
}

static std::string llama_dge_choice(const char * choices, int32_t value) {
    std::string names = choices;

    for (; value > 0; --value) {
        names.erase(0, names.find(' ') + 1);
    }

    return "\"" + names.substr(0, names.find(' ')) + "\"";
}

static std::string llama_dge_format(const char * format, ...) {
    char text[512];

    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);

    return text;
}

static std::string llama_dge_check_ranges(const llama_dge_params & p) {
    for (const auto & field : llama_dge_fields) {
        const double x = field.get(p);

        const bool ignored = strcmp(field.info.name, "budget") == 0 &&
                             (p.budget_share > 0.0f || p.head_budgets == LLAMA_DGE_HEAD_BUDGETS_TABLE);

        // a NaN is in no range
        if (ignored || (x >= field.info.least && x <= field.info.most)) {
            continue;
        }

        std::string text =
                llama_dge_format(field.is_float ? "%s=%g: must be " : "%s=%.0f: must be ", field.info.name, x);

        for (int32_t i = 0; field.choices && i <= field.info.most; ++i) {
            text += llama_dge_choice(field.choices, i) + (i < field.info.most ? ", " : "");
        }
        if (!field.choices) {
            text += llama_dge_format("in %.0f .. %.0f", field.info.least, field.info.most);
        }

        return text;
    }

    if (p.kernel_size % 2 == 0) {
        return llama_dge_format("kernel_size=%d: must be odd", p.kernel_size);
    }
    if (p.recall_mass <= 0.0f) {
        return llama_dge_format("recall_mass=%g: must be a fraction in (0, 1]", p.recall_mass);
    }
    if (p.park_limit < 0) {
        return llama_dge_format(
                "park_limit=%lld: must be a number of bytes, or 0 for no limit", (long long) p.park_limit);
    }

    return "";
}

static std::string llama_dge_check_policy(const llama_dge_params & p) {
    if (p.select) {
        return p.policy ? llama_dge_format("policy=\"%s\": must be NULL with a select callback", p.policy) : "";
    }
    if (llama_dge_find_policy(p.policy)) {
        return "";
    }

    std::string text = llama_dge_format("policy=\"%s\": must be one of ", p.policy ? p.policy : "");

    for (const auto * policy : llama_dge_policies()) {
        text += llama_dge_format(policy == llama_dge_policies()[0] ? "\"%s\"" : ", \"%s\"", policy->name);
    }

    return text;
}

static std::string llama_dge_check_budgets(const llama_dge_params & p) {
    const bool    is_table = p.head_budgets == LLAMA_DGE_HEAD_BUDGETS_TABLE;
    const int32_t n_least  = llama_dge_least_budget(&p);

    if (is_table && p.select) {
        return "head_budgets=\"table\": a policy of your own decides the entries of each head itself";
    }
    if (is_table != (p.n_table > 0) || (is_table && !p.table)) {
        return llama_dge_format(
                "n_table=%d: must be the entries in `table` with head_budgets=\"table\", else 0", p.n_table);
    }
    for (int32_t i = 0; i < p.n_table; ++i) {
        if (p.table[i] < n_least || p.table[i] > LLAMA_DGE_MAX_ROWS) {
            return llama_dge_format(
                    "head_budgets: %d entries of a head must be in %d .. %d: they include the window (and the sinks)",
                    p.table[i], n_least, LLAMA_DGE_MAX_ROWS);
        }
    }

    if (p.head_budgets == LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE &&
            (p.select || llama_dge_find_policy(p.policy)->scorer == LLAMA_DGE_SCORER_NONE)) {
        return llama_dge_format(
                "head_budgets=\"adaptive\": needs a policy that ranks by attention, which policy=\"%s\" does not",
                p.policy ? p.policy : "custom");
    }

    if (!is_table && !(p.budget_share > 0.0f) && p.budget < n_least) {
        return llama_dge_format("budget=%d: must be at least %d: it includes window=%d and what the policy always "
                                "keeps (sinks=%d with \"streamingllm\")",
                p.budget, n_least, p.window, p.sinks);
    }

    return "";
}

static std::string llama_dge_check_park(const llama_dge_params & p) {
    const std::string park   = llama_dge_choice("off ram disk", p.park);
    const std::string recall = p.recall == LLAMA_DGE_RECALL_AUTO ? "\"auto\"" : std::to_string(p.recall);

    if (p.park == LLAMA_DGE_PARK_DISK && (!p.park_dir || !*p.park_dir)) {
        return "park_dir=\"\": park=\"disk\" needs an existing folder";
    }
    if (p.recall_async && p.select) {
        return "recall_async=true: a policy of your own cannot be called from the thread that selects";
    }
    if (p.recall == 0) {
        return "";
    }
    if (p.park != LLAMA_DGE_PARK_RAM) {
        return llama_dge_format("recall=%s: needs park=\"ram\", not %s: each selection reads the host copy",
                recall.c_str(), park.c_str());
    }
    if (p.scores != LLAMA_DGE_SCORES_AUTO && p.scores != LLAMA_DGE_SCORES_DRAFT) {
        return llama_dge_format(
                "scores=%s: must be \"auto\" or \"draft\" with recall=%s: the last queries rank the entries",
                llama_dge_choice("auto draft policy both", p.scores).c_str(), recall.c_str());
    }
    return "";
}

int32_t llama_dge_least_budget(const struct llama_dge_params * params) {
    const auto * policy = llama_dge_find_policy(params->policy);

    llama_dge_select_params sel = {};

    sel.sinks = params->sinks;

    return params->window + (policy && policy->n_fixed ? policy->n_fixed(sel) : 0);
}

int32_t llama_dge_check_params(const struct llama_dge_params * params, char * reason, size_t n) {
    std::string text;

    for (const auto check :
            { llama_dge_check_ranges, llama_dge_check_policy, llama_dge_check_budgets, llama_dge_check_park }) {
        text = check(*params);
        if (!text.empty()) {
            break;
        }
    }

    if (reason && n > 0) {
        snprintf(reason, n, "%s", text.c_str());
    }

    return text.empty() ? LLAMA_DGE_OK : LLAMA_DGE_ERR_PARAMS;
}
