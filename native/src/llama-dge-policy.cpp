#include "llama-dge-policy.h"

#include <algorithm>
#include <cstring>

static std::vector<const llama_dge_policy *> & llama_dge_listing() {
    static std::vector<const llama_dge_policy *> listing; // made by the first policy that registers

    return listing;
}

bool llama_dge_register_policy(const llama_dge_policy & policy) {
    auto & listing = llama_dge_listing();

    const auto is_less = [](const llama_dge_policy * a, const llama_dge_policy * b) {
        return strcmp(a->name, b->name) < 0;
    };

    listing.insert(std::upper_bound(listing.begin(), listing.end(), &policy, is_less), &policy);

    return true;
}

const std::vector<const llama_dge_policy *> & llama_dge_policies() {
    return llama_dge_listing();
}

const llama_dge_policy * llama_dge_find_policy(const char * name) {
    for (const auto * policy : llama_dge_listing()) {
        if (name && strcmp(policy->name, name) == 0) {
            return policy;
        }
    }

    return nullptr;
}
