#include "llama-dge-seq.h"

#include "llama-dge.h"

llama_dge_transition llama_dge_seq::on(llama_dge_event event) {
    const auto res = llama_dge_next(cur, event);

    if (res.status != LLAMA_DGE_OK) {
        return res;
    }

    if (res.reset != LLAMA_DGE_RESET_NONE) {
        const auto before = std::move(*this);

        *this = {};

        if (res.reset != LLAMA_DGE_RESET_ALL) {
            origin   = before.origin;
            restored = before.restored;
        }
    }

    cur = res.phase;

    return res;
}

void llama_dge_seq::copy(const llama_dge_seq & src) {
    const auto phase = on(LLAMA_DGE_EVENT_COPY_EVICTED).phase;

    *this = src;
    cur   = phase;
}
