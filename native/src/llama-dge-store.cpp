#include "llama-dge-store.h"

#include "llama-dge-fault.h"

#include <algorithm>
#include <new>

bool llama_dge_store::alloc(size_t i, size_t n_cap, size_t n_keep) {
    if (llama_dge_alloc_fails()) {
        return false;
    }

    memory mem;

    // not zeroed: pages that were not written to take no memory
    mem.k.reset(new (std::nothrow) uint8_t[kv.entries_bytes_k(i, n_cap)]);
    mem.v.reset(new (std::nothrow) uint8_t[kv.entries_bytes_v(i, n_cap)]);
    mem.n_cap = n_cap;

    if (!mem.k || !mem.v) {
        return false;
    }

    if (n_keep > 0) {
        kv.copy(i, { mem.k.get(), mem.v.get(), n_cap }, entries(i), n_keep);
    }

    layers[i] = std::move(mem);

    return true;
}

bool llama_dge_store::grow(size_t n) {
    for (size_t i = 0; i < layers.size(); ++i) {
        if (n > layers[i].n_cap && !alloc(i, n + n / 4 + LLAMA_DGE_STORE_SPARE, n_rows)) {
            return false;
        }
    }

    return true;
}

std::shared_ptr<llama_dge_store> llama_dge_store::clone() const {
    auto res = std::make_shared<llama_dge_store>(kv);

    res->n_rows   = n_rows;
    res->n_exact  = n_exact;
    res->n_summed = n_summed;
    res->sums     = sums;
    res->exts     = exts;
    res->others   = others;
    res->origin   = origin;

    for (size_t i = 0; i < layers.size(); ++i) {
        if (!res->alloc(i, layers[i].n_cap)) {
            return nullptr;
        }
        // another sequence may have removed entries since that this one can still restore
        kv.copy(i, res->entries(i), entries(i), std::max(n_rows, n_exact));
    }

    return res;
}

llama_dge_entries llama_dge_store::memory_of(size_t i) const {
    return { layers[i].k.get(), layers[i].v.get(), layers[i].n_cap };
}

llama_dge_entries llama_dge_store::entries(size_t i) const {
    return on_disk() ? llama_dge_entries { buffer.k.get(), buffer.v.get(), buffer.n_cap } : memory_of(i);
}

int64_t llama_dge_store::n_bytes_rows(int32_t n) const {
    return kv.row_bytes() * n;
}

int64_t llama_dge_store::n_bytes() const {
    int64_t res = n_bytes_rows(n_rows) + others.data.size() + exts.size() * sizeof(exts[0]);

    for (const auto & data : sums) {
        res += data.size() * sizeof(float);
    }

    return res;
}
