#include "llama-dge-whole.h"

#include "llama-impl.h"

#include <algorithm>

// the host copy comes back for a new turn

int32_t llama_dge::restore(llama_seq_id seq_id, int32_t n_match) {
    const int64_t t0 = ggml_time_us();

    auto & seq = seqs[seq_id];

    const auto store = seq.store;

    const int32_t n = store ? std::min(n_match, seq.n_exact) : 0;

    if (n <= 0 || store->origin.mixed || store->origin.adapters != ctx.adapters() ||
            !ctx.others_fit(store->others, n, store->n_exact)) {
        return 0;
    }

    // a selection among entries that go is not worth its time
    seq.n_selected = kv.pos_max(seq_id) + 1;

    // copies of streams and shifts that wait for the next decode would meet other entries
    ctx.update();

    if (!seq.is_evicted()) {
        return LLAMA_DGE_ERR_LOST; // with all sequences, by what the update did for another one
    }

    std::vector<uint32_t> cells;

    const auto moved = llama_dge_put_back(place(), seq_id, *store, n, cells);

    rebuild = true;

    const int32_t status = settle(seq_id, moved);
    if (status != LLAMA_DGE_OK) {
        if (status == LLAMA_DGE_ERR_PARK) {
            seq.store = nullptr; // damaged
        }
        return status;
    }

    on(seq_id, LLAMA_DGE_EVENT_RESTORE);
    ring->drop(seq_id, n);

    // the sums are exact for all that was summed and for nothing less
    const bool summed = n >= store->n_summed && store->n_summed > 0;

    for (size_t i = 0; summed && i < kv.n_layer() && !sums->empty() && !store->sums.empty(); ++i) {
        sums->write(i, seq_id, cells, store->sums[i], store->n_exact);
    }
    sums->set_count(seq_id, n >= store->n_summed ? store->n_summed : -1);

    seq.origin   = store->origin;
    seq.restored = { n, ggml_time_us() - t0 };

    LLAMA_LOG_DEBUG(
            "%s: seq %d: %d entries are back after %.1f ms\n", __func__, seq_id, n, seq.restored.t_restore_us / 1e3);

    return n;
}
