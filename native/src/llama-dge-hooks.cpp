#include "llama-dge-impl.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <limits>
#include <new>

void llama_dge_deleter::operator()(llama_dge * dge) const {
    delete dge;
}

static bool llama_dge_has(const llama_dge * dge, llama_seq_id seq_id) {
    return dge && seq_id >= 0 && (uint32_t) seq_id < dge->n_seq;
}

static bool llama_dge_is_cut(const llama_dge * dge, llama_seq_id seq_id) {
    return llama_dge_has(dge, seq_id) && dge->seqs[seq_id].state == LLAMA_DGE_STATE_EVICTED;
}

// the sequence is empty now
static void llama_dge_forget(llama_dge * dge, llama_seq_id seq_id) {
    dge->reset_seq(seq_id);
    dge->capture_drop(seq_id, 0);
    dge->lost.reset(seq_id);

    dge->seqs[seq_id].origin       = {};
    dge->seqs[seq_id].n_summed     = 0;
    dge->seqs[seq_id].n_restored   = 0;
    dge->seqs[seq_id].t_restore_us = 0;
}

void llama_dge_on_clear(llama_dge * dge) {
    for (uint32_t s = 0; dge && s < dge->n_seq; ++s) {
        llama_dge_forget(dge, s);
    }
    if (dge) {
        dge->lost.reset();
    }
}

bool llama_dge_may_seq_rm(const llama_dge * dge, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (!dge) {
        return true;
    }

    p0 = p0 < 0 ? 0 : p0;
    p1 = p1 < 0 ? std::numeric_limits<llama_pos>::max() : p1;

    const llama_seq_id s0 = seq_id < 0 ? 0 : seq_id;
    const llama_seq_id s1 = seq_id < 0 ? (llama_seq_id) dge->n_seq : seq_id + 1;

    for (llama_seq_id s = s0; s < s1; ++s) {
        // an empty range removes nothing, so there is nothing to refuse
        const bool whole = p0 == 0 && p1 > dge->kv.seq_pos_max(s);

        if (llama_dge_is_cut(dge, s) && p0 < p1 && p0 <= dge->seqs[s].boundary && !whole) {
            LLAMA_LOG_DEBUG("%s: seq %d was cut, rows up to position %d cannot be removed in part\n", __func__, s,
                    dge->seqs[s].boundary);
            return false;
        }
    }

    return true;
}

bool llama_dge_on_seq_rm(llama_dge * dge, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (!llama_dge_may_seq_rm(dge, seq_id, p0, p1)) {
        return false;
    }

    const llama_seq_id s0 = seq_id < 0 ? 0 : seq_id;
    const llama_seq_id s1 = !dge || seq_id >= 0 ? seq_id + 1 : (llama_seq_id) dge->n_seq;

    for (llama_seq_id s = s0; s < s1; ++s) {
        if (!llama_dge_has(dge, s)) {
            continue;
        }
        if (p0 <= 0 && p1 > dge->kv.seq_pos_max(s)) {
            llama_dge_forget(dge, s);
            continue;
        }
        if (p0 < p1) {
            dge->capture_drop(s, p0);
            dge->park_truncate(s, p0);

            const auto & seq = dge->seqs[s];
            if (seq.state == LLAMA_DGE_STATE_ARMED && p0 < seq.n_prompt) {
                dge->reset_seq(s);
            }
        }
    }

    return true;
}

bool llama_dge_may_seq_cp(
        const llama_dge * dge, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    if (!dge || seq_id_src == seq_id_dst) {
        return true;
    }

    const auto & kv = dge->kv;

    // rows of another sequence between those of one that was cut would take over its positions
    if (llama_dge_is_cut(dge, seq_id_dst) && kv.get_stream(seq_id_src) == kv.get_stream(seq_id_dst)) {
        LLAMA_LOG_ERROR("%s: seq %d was cut, nothing can be copied into it\n", __func__, seq_id_dst);
        return false;
    }

    if (!llama_dge_is_cut(dge, seq_id_src)) {
        return true;
    }

    if (p0 > 0 || (p1 >= 0 && p1 <= kv.seq_pos_max(seq_id_src))) {
        LLAMA_LOG_ERROR("%s: seq %d was cut, it can be copied as a whole only\n", __func__, seq_id_src);
        return false;
    }

    if (!llama_dge_has(dge, seq_id_dst) || kv.seq_pos_max(seq_id_dst) >= 0) {
        LLAMA_LOG_ERROR("%s: seq %d was cut, it can be copied into an empty sequence below %u only\n", __func__,
                seq_id_src, dge->n_seq);
        return false;
    }

    return true;
}

bool llama_dge_on_seq_cp(
        llama_dge * dge, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    if (!llama_dge_may_seq_cp(dge, seq_id_src, seq_id_dst, p0, p1)) {
        return false;
    }

    if (dge && seq_id_src != seq_id_dst && llama_dge_has(dge, seq_id_dst)) {
        // the queries of the source are not copied: the rows are shared, so there will be no cut
        const bool replaced =
                dge->kv.get_stream(seq_id_src) != dge->kv.get_stream(seq_id_dst) || dge->kv.seq_pos_max(seq_id_dst) < 0;

        auto origin = dge->seqs[seq_id_dst].origin;

        if (llama_dge_has(dge, seq_id_src) && dge->kv.seq_pos_max(seq_id_src) >= 0) {
            origin = replaced ? dge->seqs[seq_id_src].origin : origin.with(dge->seqs[seq_id_src].origin);
        }

        llama_dge_forget(dge, seq_id_dst);

        dge->seqs[seq_id_dst].origin   = origin;
        dge->seqs[seq_id_dst].n_summed = -1;

        if (llama_dge_is_cut(dge, seq_id_src)) {
            dge->seqs[seq_id_dst] = dge->seqs[seq_id_src];
            dge->bias_changed(seq_id_dst);
        }
    }

    return true;
}

void llama_dge_on_seq_keep(llama_dge * dge, llama_seq_id seq_id) {
    for (uint32_t s = 0; dge && s < dge->n_seq; ++s) {
        // sequences of other streams are left alone
        if ((llama_seq_id) s != seq_id && dge->kv.get_stream(s) == dge->kv.get_stream(seq_id)) {
            llama_dge_forget(dge, s);
        }
    }
}

bool llama_dge_may_seq_shift(const llama_dge * dge, llama_seq_id seq_id) {
    if (llama_dge_is_cut(dge, seq_id)) {
        LLAMA_LOG_ERROR("%s: seq %d was cut, its positions cannot be shifted\n", __func__, seq_id);
        return false;
    }

    return true;
}

bool llama_dge_on_seq_shift(llama_dge * dge, llama_seq_id seq_id) {
    if (!llama_dge_may_seq_shift(dge, seq_id)) {
        return false;
    }

    if (llama_dge_has(dge, seq_id)) {
        const auto origin = dge->seqs[seq_id].origin;

        llama_dge_forget(dge, seq_id);

        // the rows are still there
        dge->seqs[seq_id].origin   = origin;
        dge->seqs[seq_id].n_summed = -1;
    }

    return true;
}

llama_pos llama_dge_seq_pos_min(const llama_dge * dge, llama_seq_id seq_id, llama_pos pos_min) {
    return llama_dge_is_cut(dge, seq_id) ? std::max(pos_min, dge->seqs[seq_id].pos_min) : pos_min;
}

bool llama_dge_any_cut(const llama_dge * dge) {
    // a shift that waits is one of other sequences; the update that makes it asks again, and would not take no
    return dge && !dge->kv.get_has_shift() && dge->any_cut();
}

//
// hooks: update
//

bool llama_dge_is_due(const llama_dge * dge) {
    if (!dge) {
        return false;
    }

    bool res = dge->rebuild || dge->cells_wanted() > 0;

    for (uint32_t s = 0; s < dge->n_seq; ++s) {
        res |= dge->is_due(s);
    }

    return res;
}

bool llama_dge_update(llama_dge * dge, llama_context * lctx) {
    if (!dge) {
        return false;
    }

    bool updated = dge->rebuild;

    for (uint32_t s = 0; s < dge->n_seq; ++s) {
        if (!dge->is_due(s)) {
            continue;
        }

        auto & seq = dge->seqs[s];

        int32_t status;

        const bool recall = seq.state == LLAMA_DGE_STATE_EVICTED;

        try {
            status = recall ? dge->refresh(*lctx, s) : dge->cut(*lctx, s);
        } catch (const std::bad_alloc &) {
            status = LLAMA_DGE_ERR_MEMORY;
        } catch (const std::exception & err) {
            // of a backend whose device failed before a row moved
            LLAMA_LOG_ERROR("%s: seq %d: %s\n", __func__, s, err.what());
            status = LLAMA_DGE_ERR_COMPUTE;
        }

        dge->expect_buffers(*lctx);

        seq.force = false;
        seq.error = status;

        updated |= status == LLAMA_DGE_OK;

        if (status == LLAMA_DGE_OK || status == LLAMA_DGE_ERR_ABORTED || status == LLAMA_DGE_ERR_LOST) {
            continue;
        }

        if (recall) {
            // the rows at hand go on; the next choice may succeed
            seq.n_checked = dge->kv.seq_pos_max(s) + 1;

            if (status < 0 && !seq.warned) {
                seq.warned = true;
                LLAMA_LOG_WARN("%s: seq %d goes on with the rows of its last choice: %s\n", __func__, s,
                        llama_dge_status_str(status));
            }
            continue;
        }

        // the full cache goes on
        dge->reset_seq(s);
        seq.error = status;

        if (status < 0) {
            LLAMA_LOG_WARN("%s: seq %d goes on with its full cache: %s\n", __func__, s, llama_dge_status_str(status));
        }
    }

    if (dge->cells_wanted() > 0) {
        ggml_backend_sched_synchronize(lctx->get_sched());

        try {
            // a failure has been told; the batch will find no cells
            dge->grow(dge->cells_wanted());
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        }
    }

    updated |= dge->rebuild;

    dge->rebuild = false;
    dge->n_new.clear();

    return updated;
}
