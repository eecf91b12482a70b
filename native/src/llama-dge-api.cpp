#include "llama-dge-impl.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <new>

// far above any context, and sums of such numbers do not overflow
static constexpr int32_t LLAMA_DGE_MAX_PROMPT = 1 << 30;

static llama_dge * llama_dge_get(const struct llama_context * ctx) {
    auto * kv = llama_dge::get_kv(*ctx);

    // an elastic cache has one before eviction is enabled
    return kv && kv->dge && kv->dge->active ? kv->dge.get() : nullptr;
}

// a cut that is due is made by this call, and not by a batch
static void llama_dge_update_memory(struct llama_context * ctx) {
    auto & dge = *llama_dge::get_kv(*ctx)->dge;

    dge.batch = nullptr;
    dge.n_new.clear();

    ctx->sched_reserve();
    ctx->memory_update(false);
}

// the status of a call that needs an enabled context and one of its sequences
static int32_t llama_dge_check_seq(const struct llama_context * ctx, llama_seq_id seq_id) {
    const auto * dge = llama_dge_get(ctx);

    if (!dge) {
        return LLAMA_DGE_ERR_DISABLED;
    }

    return seq_id >= 0 && (uint32_t) seq_id < dge->n_seq ? LLAMA_DGE_OK : LLAMA_DGE_ERR_SEQ;
}

bool llama_dge::table_fits(const llama_context & lctx, const llama_dge_settings & settings) {
    size_t n_heads = 0;
    for (const auto & layer : get_kv(lctx)->layers) {
        n_heads += lctx.get_model().hparams.n_head_kv(layer.il);
    }

    return settings.head_rows.empty() || settings.head_rows.size() == n_heads;
}

int32_t llama_dge_supported(const struct llama_context * ctx, char * reason, size_t n) {
    const char * why = llama_dge::unsupported(*ctx);

    if (reason && n > 0) {
        snprintf(reason, n, "%s", why ? why : "");
    }

    return why ? LLAMA_DGE_ERR_UNSUPPORTED : LLAMA_DGE_OK;
}

int32_t llama_dge_enable(struct llama_context * ctx, const struct llama_dge_params * params) {
    char reason[512] = "no parameters";

    if (!params || llama_dge_check_params(params, reason, sizeof(reason)) != LLAMA_DGE_OK) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, reason);
        return LLAMA_DGE_ERR_PARAMS;
    }

    if (const char * why = llama_dge::unsupported(*ctx)) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, why);
        return LLAMA_DGE_ERR_UNSUPPORTED;
    }

    auto & kv = *llama_dge::get_kv(*ctx);

    const llama_dge_settings settings(*params);

    if (!llama_dge::table_fits(*ctx, settings)) {
        LLAMA_LOG_ERROR("%s: head_budgets: %d entries do not fit the layers and KV heads of the model\n", __func__,
                params->n_table);
        return LLAMA_DGE_ERR_PARAMS;
    }

    try {
        ctx->synchronize();

        // queries that a running graph still writes to would be freed
        llama_dge_ptr created(kv.dge ? nullptr : new llama_dge(kv, kv.get_n_seq_max()));

        auto & dge = created ? *created : *kv.dge;

        if (!dge.set_params(settings)) {
            return LLAMA_DGE_ERR_MEMORY;
        }

        dge.active  = true;
        dge.rebuild = true;

        if (created) {
            kv.dge = std::move(created);
        }

        // graphs may need more nodes now
        dge.request_reserve(*ctx);

        llama_dge_update_memory(ctx);
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        return LLAMA_DGE_ERR_MEMORY;
    }

    return LLAMA_DGE_OK;
}

int32_t llama_dge_disable(struct llama_context * ctx) {
    auto * dge = llama_dge_get(ctx);

    if (!dge) {
        return LLAMA_DGE_OK;
    }
    if (dge->any_cut()) {
        return LLAMA_DGE_ERR_EVICTED;
    }
    if (dge->lost.any()) {
        return LLAMA_DGE_ERR_LOST;
    }

    try {
        ctx->synchronize();

        // graphs that refer to dge go first
        llama_dge_on_clear(dge);

        dge->active  = false;
        dge->rebuild = true;

        llama_dge_update_memory(ctx);

        auto & owner = llama_dge::get_kv(*ctx)->dge;

        if (owner->elastic) {
            owner->set_off();
        } else {
            owner.reset();
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        return LLAMA_DGE_ERR_MEMORY;
    }

    return LLAMA_DGE_OK;
}

int32_t llama_dge_seq_arm(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);

    return status == LLAMA_DGE_OK ? llama_dge_get(ctx)->arm(seq_id, n_prompt) : status;
}

int32_t llama_dge_seq_disarm(struct llama_context * ctx, llama_seq_id seq_id) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);

    if (status == LLAMA_DGE_OK) {
        const auto & seq = llama_dge_get(ctx)->seqs[seq_id];

        if (seq.state == LLAMA_DGE_STATE_ARMED) {
            llama_dge_get(ctx)->reset_seq(seq_id);
        }
    }

    return status;
}

int32_t llama_dge_seq_evict(struct llama_context * ctx, llama_seq_id seq_id) {
    int32_t status = llama_dge_check_seq(ctx, seq_id);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    auto & dge = *llama_dge_get(ctx);
    auto & seq = dge.seqs[seq_id];

    const llama_dge_seq before = seq;

    if (seq.state != LLAMA_DGE_STATE_ARMED) {
        status = dge.arm(seq_id, dge.kv.seq_pos_max(seq_id) + 1);
        if (status != LLAMA_DGE_OK) {
            if (status == LLAMA_DGE_ERR_EVICTED) {
                return status;
            }
            seq       = before;
            seq.error = status;
            return status;
        }
    }

    try {
        seq.force = true;

        llama_dge_update_memory(ctx);
    } catch (const std::exception & err) {
        // the cut itself is done or not by now; what failed is the reservation of the next graph
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
    }

    if (seq.state != LLAMA_DGE_STATE_EVICTED) {
        status = seq.error == LLAMA_DGE_OK ? (int32_t) LLAMA_DGE_ERR_COMPUTE : seq.error;

        // a lost one is empty
        if (status != LLAMA_DGE_ERR_LOST) {
            seq = before;
        }
        seq.error = status;
    }

    return seq.error;
}

int32_t llama_dge_seq_reuse(const struct llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt, int32_t n_match) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);
    if (status != LLAMA_DGE_OK) {
        return status;
    }
    if (n_prompt < 1 || n_prompt > LLAMA_DGE_MAX_PROMPT || n_match < 0 || n_match > n_prompt) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    const auto & dge = *llama_dge_get(ctx);

    // rows that were evaluated with other LoRA adapters
    if (n_match > 0 && !dge.seqs[seq_id].origin.is(llama_dge::get_adapters(*ctx))) {
        return 0;
    }

    if (n_prompt <= dge.params.resolve_budget(n_prompt) && !dge.recalls()) {
        return dge.window_reaches(*ctx, seq_id, n_match) ? n_match : 0;
    }

    const auto [p0, p1] = dge.params.needed_queries(n_prompt, n_prompt);

    // rows that will be removed would have to be taken out of the sums
    if (!dge.summed(seq_id, n_match) || (dge.summed(seq_id, n_match + 1) && !dge.sums_bufs.empty())) {
        return 0;
    }

    // queries at n_match and above are captured when their rows are evaluated
    const int32_t n = dge.captured(seq_id, p0, std::min(p1, n_match)) ? n_match : std::min(p0, n_match);

    return dge.window_reaches(*ctx, seq_id, n) ? n : 0;
}

int32_t llama_dge_get_seq_info(
        const struct llama_context * ctx, llama_seq_id seq_id, struct llama_dge_seq_info * info) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);

    if (status == LLAMA_DGE_OK) {
        llama_dge_get(ctx)->info(seq_id, *info);
    }

    return status;
}

int32_t llama_dge_get_layers(const struct llama_context * ctx, int32_t * layers, int32_t n) {
    if (llama_dge::unsupported(*ctx)) {
        return 0;
    }

    const auto ids = llama_dge::get_kv(*ctx)->get_layer_ids();

    for (int32_t i = 0; i < n && i < (int32_t) ids.size(); ++i) {
        layers[i] = ids[i];
    }

    return ids.size();
}

int32_t llama_dge_get_n_head_kv(const struct llama_context * ctx, int32_t il) {
    if (!llama_dge::unsupported(*ctx)) {
        for (const uint32_t id : llama_dge::get_kv(*ctx)->get_layer_ids()) {
            if ((int32_t) id == il) {
                return ctx->get_model().hparams.n_head_kv(il);
            }
        }
    }

    return LLAMA_DGE_ERR_PARAMS;
}

int32_t llama_dge_get_kept(
        const struct llama_context * ctx, llama_seq_id seq_id, int32_t il, int32_t ih, llama_pos * pos, int32_t n) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const auto & dge = *llama_dge_get(ctx);
    const auto & seq = dge.seqs[seq_id];

    if (seq.state != LLAMA_DGE_STATE_EVICTED) {
        return LLAMA_DGE_ERR_SEQ;
    }

    for (size_t i = 0; i < dge.layers.size(); ++i) {
        if (dge.layers[i].il != il) {
            continue;
        }
        if (ih < 0 || (size_t) ih >= seq.kept[i].size()) {
            break;
        }

        std::vector<llama_pos> all(seq.kept[i][ih].begin(), seq.kept[i][ih].end());
        for (llama_pos p = seq.pos_min; p < seq.n_before; ++p) {
            all.push_back(p);
        }

        // by slot until here
        std::sort(all.begin(), all.end());

        for (size_t j = 0; j < all.size() && (int32_t) j < n; ++j) {
            pos[j] = all[j];
        }

        return all.size();
    }

    return LLAMA_DGE_ERR_PARAMS;
}

size_t llama_dge_seq_get_queries(const struct llama_context * ctx, llama_seq_id seq_id, uint8_t * dst, size_t size) {
    if (llama_dge_check_seq(ctx, seq_id) != LLAMA_DGE_OK) {
        return 0;
    }

    // the graph that stores them may still run
    const_cast<llama_context *>(ctx)->synchronize();

    return llama_dge_get(ctx)->queries_get(seq_id, dst, size);
}

int32_t llama_dge_seq_set_queries(struct llama_context * ctx, llama_seq_id seq_id, const uint8_t * src, size_t size) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    ctx->synchronize();

    return llama_dge_get(ctx)->queries_set(seq_id, src, size);
}

int32_t llama_dge_seq_restore(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_match) {
    int32_t res = llama_dge_check_seq(ctx, seq_id);
    if (res != LLAMA_DGE_OK) {
        return res;
    }
    if (n_match < 0) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    auto & dge = *llama_dge_get(ctx);

    ctx->synchronize();

    try {
        res = dge.restore(*ctx, seq_id, n_match);
    } catch (const std::bad_alloc &) {
        // what is large is allocated before the first row moves
        res = LLAMA_DGE_ERR_MEMORY;
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        res = LLAMA_DGE_ERR_MEMORY;
    }

    if (dge.rebuild) {
        try {
            llama_dge_update_memory(ctx);
        } catch (const std::exception & err) {
            // tried again by the next decode
            LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        }
    }

    return res;
}

void llama_dge_get_memory(const struct llama_context * ctx, struct llama_dge_memory_info * info) {
    *info = {};

    for (const auto & [buft, data] : ctx->memory_breakdown()) {
        info->other += data.context;
        info->compute += data.compute;
    }

    // each once: the CPU keeps some a second time, in an order of its own, beside the file that is mapped
    for (const auto & [name, t] : ctx->get_model().tensors_by_name) {
        info->weights += ggml_nbytes(t);
    }

    const auto * kv = llama_dge::get_kv(*ctx);
    if (!kv) {
        return;
    }

    for (const auto & [buft, size] : kv->memory_breakdown()) {
        info->kv += size;
    }

    info->other -= info->kv;
    info->n_cells     = kv->get_size();
    info->n_cells_max = kv->dge ? kv->dge->n_cells_max : kv->get_size();
    info->kv_max      = info->kv;

    if (kv->dge) {
        // a growth that failed may have left larger buffers than the cells need
        info->kv_max = kv->dge->elastic ? kv->dge->cell_bytes() * kv->dge->n_cells_max : info->kv;
        info->parked = kv->dge->parked_bytes();
        info->dge    = kv->dge->own_bytes();
    }
}

bool llama_dge_debug_seq_rm(struct llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    auto * kv = llama_dge::get_kv(*ctx);

    return kv && kv->seq_rm(seq_id, p0, p1);
}

int32_t llama_dge_debug_poison(struct llama_context * ctx, uint16_t pattern) {
    auto * dge = llama_dge_get(ctx);
    if (!dge) {
        return LLAMA_DGE_ERR_DISABLED;
    }

    ctx->synchronize();

    int32_t n_cells = 0;
    dge->poison(pattern, n_cells);

    return n_cells;
}
