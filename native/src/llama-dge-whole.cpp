#include "llama-dge-whole.h"

#include "llama-batch.h"
#include "llama-impl.h"

#include <algorithm>
#include <new>
#include <set>

llama_dge::llama_dge(llama_context & lctx, llama_memory_i & memory, llama_kv_cache & cache) :
    kv(cache), ctx(lctx, memory), elastic(kv), ring(new llama_dge_ring(kv)), sums(new llama_dge_sums(kv)), bias(kv),
    layers(kv.n_layer()), seqs(kv.n_seq_all()), memory(memory), selections(kv.n_seq_all()) {}

llama_dge::~llama_dge() = default;

//
// on and off
//

int32_t llama_dge::enable(const llama_dge_settings & settings_new) {
    ctx.synchronize(); // a graph that runs may still write to the buffers

    auto ring_new = std::make_unique<llama_dge_ring>(kv);
    auto sums_new = std::make_unique<llama_dge_sums>(kv);

    if (!ring_new->reserve(settings_new.n_ring()) || !sums_new->reserve(llama_dge_needs_sums(settings_new.sel))) {
        return LLAMA_DGE_ERR_MEMORY;
    }

    for (size_t s = 0; s < seqs.size(); ++s) {
        on(s, LLAMA_DGE_EVENT_SETTINGS);
    }

    settings = settings_new;
    ring     = std::move(ring_new);
    sums     = std::move(sums_new);

    active  = true;
    rebuild = true;

    // graphs may need more nodes
    ctx.request_reserve();
    ctx.update();

    return LLAMA_DGE_OK;
}

int32_t llama_dge::disable() {
    if (any_evicted()) {
        return LLAMA_DGE_ERR_EVICTED;
    }
    if (any(LLAMA_DGE_PHASE_LOST)) {
        return LLAMA_DGE_ERR_LOST;
    }

    ctx.synchronize();

    for (size_t s = 0; s < seqs.size(); ++s) {
        on(s, LLAMA_DGE_EVENT_SETTINGS);
    }

    // graphs that refer to the buffers go first
    active  = false;
    rebuild = true;

    ctx.update();

    ring = std::make_unique<llama_dge_ring>(kv);
    sums = std::make_unique<llama_dge_sums>(kv);
    bias.clear();
    scorers.clear();
    layers.assign(kv.n_layer(), {});

    n_evictions = 0;

    return LLAMA_DGE_OK;
}

//
// update: at the start of llama_decode(), or by a call of the API
//

bool llama_dge::is_due(llama_seq_id seq_id) const {
    const auto & seq = seqs[seq_id];

    if (seq.phase() == LLAMA_DGE_PHASE_ARMED) {
        return seq.force || kv.pos_max(seq_id) + 1 >= settings.due_rows(seq.n_prompt);
    }

    // a file, of settings of before, is not selected from
    return seq.is_evicted() && settings.recalls() && seq.store && !seq.store->on_disk() &&
           kv.pos_max(seq_id) + 1 >= seq.n_selected + settings.recall_step();
}

bool llama_dge::is_due() const {
    bool res = rebuild || elastic.wanted() > 0;

    for (size_t s = 0; s < seqs.size() && !res; ++s) {
        res = is_due(s);
    }

    return res;
}

void llama_dge::update() {
    for (size_t s = 0; s < seqs.size(); ++s) {
        if (!is_due(s)) {
            continue;
        }

        auto & seq = seqs[s];

        const bool recalls = seq.is_evicted();

        int32_t status;

        try {
            status = recalls ? recall(s) : evict(s);
        } catch (const std::bad_alloc &) {
            status = LLAMA_DGE_ERR_MEMORY;
        } catch (const std::exception & err) {
            // of a backend whose device failed before an entry moved
            LLAMA_LOG_ERROR("%s: seq %zu: %s\n", __func__, s, err.what());
            status = LLAMA_DGE_ERR_COMPUTE;
        }

        ctx.expect_buffers();

        seq.force       = false;
        seq.stats.error = recalls && status > 0 ? (int32_t) LLAMA_DGE_OK : status; // no selection is no error

        if (status == LLAMA_DGE_OK || status == LLAMA_DGE_ERR_ABORTED || status == LLAMA_DGE_ERR_LOST) {
            continue;
        }

        if (recalls) {
            // the kept set goes on; the next selection may succeed
            seq.n_selected = kv.pos_max(s) + 1;

            if (status < 0 && !seq.warned) {
                seq.warned = true;
                LLAMA_LOG_WARN("%s: seq %zu goes on with the kept set of its last selection: %s\n", __func__, s,
                        llama_dge_status_str(status));
            }
            continue;
        }

        on(s, LLAMA_DGE_EVENT_KEEP_FULL);
        seq.stats.error = status;

        if (status < 0) {
            LLAMA_LOG_WARN("%s: seq %zu goes on with its full cache: %s\n", __func__, s, llama_dge_status_str(status));
        }
    }

    if (const uint32_t n_rows = elastic.wanted(); n_rows > 0) {
        ctx.wait();

        try {
            // a failure was logged; the batch will find no cells
            if (elastic.grow(n_rows) == LLAMA_DGE_ERR_LOST) {
                lose(-1);
            }
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        }
    }

    elastic.set_batch({});
    rebuild = false;
}

void llama_dge::lose(llama_seq_id seq_id) {
    for (size_t s = 0; s < seqs.size(); ++s) {
        if ((seq_id >= 0 && (llama_seq_id) s != seq_id) || seqs[s].phase() == LLAMA_DGE_PHASE_EMPTY) {
            continue;
        }

        memory.seq_rm(s, -1, -1);

        on(s, LLAMA_DGE_EVENT_LOSE);
        seqs[s].stats.error = LLAMA_DGE_ERR_LOST;

        LLAMA_LOG_ERROR("%s: seq %zu is empty now: %s\n", __func__, s, llama_dge_status_str(LLAMA_DGE_ERR_LOST));
    }
}

int32_t llama_dge::settle(llama_seq_id seq_id, const llama_dge_moved & moved) {
    if (moved.status == LLAMA_DGE_ERR_LOST) {
        lose(moved.lost_all ? -1 : seq_id);
    }

    return moved.status;
}

//
// batches
//

// positions of a sequence ascend within a batch: calls f(sequence, first position) once for each of them
template <typename F>
static void llama_dge_each_seq(const llama_batch & batch, size_t n_seq, F f) {
    std::vector<bool> seen(n_seq, false);

    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        for (int32_t j = 0; j < batch.n_seq_id[i]; ++j) {
            const llama_seq_id s = batch.seq_id[i][j];

            if (s >= 0 && (size_t) s < n_seq && !seen[s]) {
                seen[s] = true;
                f(s, batch.pos[i]);
            }
        }
    }
}

static llama_dge_event llama_dge_event_of(llama_pos first) {
    return first == 0 ? LLAMA_DGE_EVENT_BEGIN : LLAMA_DGE_EVENT_APPEND;
}

bool llama_dge::may_add(const llama_batch & batch) {
    bool ok = true;

    llama_dge_each_seq(batch, seqs.size(), [&](llama_seq_id s, llama_pos first) {
        if (seqs[s].allows(llama_dge_event_of(first)) != LLAMA_DGE_OK) {
            LLAMA_LOG_ERROR("%s: seq %d was cleared: %s\n", __func__, s, llama_dge_status_str(LLAMA_DGE_ERR_LOST));
            ok = false;
        }
    });

    std::vector<uint32_t> n_new(ok ? kv.n_stream() : 0, 0);

    for (int32_t i = 0; ok && i < batch.n_tokens; ++i) {
        n_new[kv.n_stream() == 1 ? 0 : kv.stream(batch.seq_id[i][0])]++;
    }
    elastic.set_batch(std::move(n_new));

    return ok;
}

void llama_dge::will_add(const llama_batch & batch) {
    const auto adapters = ctx.adapters();

    llama_dge_each_seq(batch, seqs.size(), [&](llama_seq_id s, llama_pos first) {
        on(s, llama_dge_event_of(first));

        seqs[s].origin.join(adapters, kv.pos_max(s) < 0);
    });
}

//
// graphs
//

bool llama_dge::captures(llama_seq_id seq_id, llama_pos pos) const {
    if (!active || !knows(seq_id)) {
        return false;
    }

    const auto & seq = seqs[seq_id];

    if (seq.phase() == LLAMA_DGE_PHASE_ARMED) {
        // queries above are not needed and would overwrite those that are
        return settings.recalls() || pos < seq.n_prompt + settings.draft_tokens - 1;
    }

    return !seq.is_evicted() || settings.recalls();
}

uint32_t llama_dge::max_nodes(uint32_t n_tokens) const {
    // capture and bias, then sums
    return active ? 12 * kv.n_layer() + sums->n_nodes(n_tokens) : 0;
}

//
// reports
//

int64_t llama_dge::parked_bytes() const {
    std::set<const llama_dge_store *> stores;

    for (const auto & seq : seqs) {
        if (seq.store) {
            stores.insert(seq.store.get());
        }
    }

    int64_t res = 0;
    for (const auto * store : stores) {
        res += store->n_bytes();
    }

    return res;
}

int64_t llama_dge::own_bytes() const {
    return ring->n_bytes() + sums->n_bytes() + bias.n_bytes();
}

static int32_t llama_dge_public_state(const llama_dge_seq & seq) {
    switch (seq.phase()) {
        case LLAMA_DGE_PHASE_EMPTY: return LLAMA_DGE_STATE_EMPTY;
        case LLAMA_DGE_PHASE_ARMED: return LLAMA_DGE_STATE_ARMED;
        case LLAMA_DGE_PHASE_LOST:  return LLAMA_DGE_STATE_LOST;
        default:                    return seq.is_evicted() ? LLAMA_DGE_STATE_EVICTED : LLAMA_DGE_STATE_FULL;
    }
}

void llama_dge::info(llama_seq_id seq_id, llama_dge_seq_info & info) const {
    const auto & seq   = seqs[seq_id];
    const auto & stats = seq.stats;

    info = {};

    info.state         = llama_dge_public_state(seq);
    info.error         = stats.error;
    info.n_prompt      = seq.n_prompt;
    info.n_draft       = stats.n_draft;
    info.budget        = stats.budget;
    info.n_rows_before = stats.n_before;
    info.n_rows_after  = stats.n_after;
    info.n_rows        = kv.n_cells(seq_id);
    info.n_kv          = kv.n_kv(seq_id);
    info.n_layer       = seq.is_evicted() ? kv.n_layer() : 0;
    info.boundary      = seq.boundary;
    info.pos_min       = seq.pos_min;
    info.bytes_before  = stats.bytes_before;
    info.bytes_after   = stats.bytes_after;
    info.bytes_kept    = stats.bytes_kept;
    info.t_score_us    = stats.t_score_us;
    info.t_select_us   = stats.t_select_us;
    info.t_compact_us  = stats.t_compact_us;
    info.n_evictions   = n_evictions;
    info.n_parked      = seq.store ? seq.n_exact : 0;
    info.n_restored    = seq.restored.n_restored;
    info.bytes_parked  = seq.store ? seq.store->n_bytes() : 0;
    info.t_park_us     = stats.t_park_us;
    info.t_restore_us  = seq.restored.t_restore_us;
    info.n_recalls     = stats.n_recalls;
    info.n_checks      = stats.n_checks;
    info.n_moved       = stats.n_moved;
    info.t_recall_us   = stats.t_recall_us;
}
