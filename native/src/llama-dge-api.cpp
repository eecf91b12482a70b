#include "llama-dge-memory.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <new>

// far above any context, and sums of such numbers do not overflow
static constexpr int32_t LLAMA_DGE_MAX_PROMPT = 1 << 30;

// nullptr while eviction is off
static llama_dge * llama_dge_get(const struct llama_context * ctx) {
    auto * memory = llama_dge_memory_of(*ctx);

    return memory && memory->dge.active ? &memory->dge : nullptr;
}

// the status of a call that needs an enabled context and one of its sequences
static int32_t llama_dge_check_seq(const struct llama_context * ctx, llama_seq_id seq_id) {
    const auto * dge = llama_dge_get(ctx);

    if (!dge) {
        return LLAMA_DGE_ERR_DISABLED;
    }

    return dge->knows(seq_id) ? LLAMA_DGE_OK : LLAMA_DGE_ERR_SEQ;
}

int32_t llama_dge_supported(const struct llama_context * ctx, char * reason, size_t n) {
    const char * why = llama_dge_unsupported(*ctx);

    if (reason && n > 0) {
        snprintf(reason, n, "%s", why ? why : "");
    }

    return why ? LLAMA_DGE_ERR_UNSUPPORTED : LLAMA_DGE_OK;
}

//
// on and off
//

// does the table of budgets have the layers and heads of the model?
static bool llama_dge_table_fits(const llama_dge_kv & kv, const llama_dge_settings & settings) {
    size_t n_heads = 0;
    for (size_t i = 0; i < kv.n_layer(); ++i) {
        n_heads += kv.layer(i).n_head_kv;
    }

    return settings.head_rows.empty() || settings.head_rows.size() == n_heads;
}

int32_t llama_dge_enable(struct llama_context * ctx, const struct llama_dge_params * params) {
    char reason[512] = "no parameters";

    if (!params || llama_dge_check_params(params, reason, sizeof(reason)) != LLAMA_DGE_OK) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, reason);
        return LLAMA_DGE_ERR_PARAMS;
    }

    if (const char * why = llama_dge_unsupported(*ctx)) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, why);
        return LLAMA_DGE_ERR_UNSUPPORTED;
    }

    auto & dge = llama_dge_memory_of(*ctx)->dge;

    const llama_dge_settings settings(*params);

    if (!llama_dge_table_fits(dge.kv, settings)) {
        LLAMA_LOG_ERROR("%s: n_table=%d: `table` needs one number per layer and KV head of the model\n", __func__,
                params->n_table);
        return LLAMA_DGE_ERR_PARAMS;
    }

    try {
        return dge.enable(settings);
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        return LLAMA_DGE_ERR_MEMORY;
    }
}

int32_t llama_dge_disable(struct llama_context * ctx) {
    auto * dge = llama_dge_get(ctx);

    if (!dge) {
        return LLAMA_DGE_OK;
    }

    try {
        return dge->disable();
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        return LLAMA_DGE_ERR_MEMORY;
    }
}

//
// sequences
//

int32_t llama_dge_seq_arm(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);

    return status == LLAMA_DGE_OK ? llama_dge_get(ctx)->arm(seq_id, n_prompt) : status;
}

int32_t llama_dge_seq_disarm(struct llama_context * ctx, llama_seq_id seq_id) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);

    return status == LLAMA_DGE_OK ? llama_dge_get(ctx)->on(seq_id, LLAMA_DGE_EVENT_KEEP_FULL) : status;
}

int32_t llama_dge_seq_evict(struct llama_context * ctx, llama_seq_id seq_id) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);

    return status == LLAMA_DGE_OK ? llama_dge_get(ctx)->evict_now(seq_id) : status;
}

int32_t llama_dge_seq_reuse(const struct llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt, int32_t n_match) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);

    if (status != LLAMA_DGE_OK) {
        return status;
    }
    if (n_prompt < 1 || n_prompt > LLAMA_DGE_MAX_PROMPT || n_match < 0 || n_match > n_prompt) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    return llama_dge_get(ctx)->reuse(seq_id, n_prompt, n_match);
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

    dge.ctx.synchronize();

    try {
        res = dge.restore(seq_id, n_match);
    } catch (const std::bad_alloc &) {
        // what is large is allocated before the first entry moves
        res = LLAMA_DGE_ERR_MEMORY;
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        res = LLAMA_DGE_ERR_MEMORY;
    }

    if (dge.rebuild) {
        try {
            dge.ctx.update();
        } catch (const std::exception & err) {
            // tried again by the next decode
            LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        }
    }

    return res;
}

size_t llama_dge_seq_get_queries(const struct llama_context * ctx, llama_seq_id seq_id, uint8_t * dst, size_t size) {
    if (llama_dge_check_seq(ctx, seq_id) != LLAMA_DGE_OK) {
        return 0;
    }

    // the graph that stores them may still run
    llama_dge_get(ctx)->ctx.synchronize();

    return llama_dge_get(ctx)->queries_get(seq_id, dst, size);
}

int32_t llama_dge_seq_set_queries(struct llama_context * ctx, llama_seq_id seq_id, const uint8_t * src, size_t size) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    llama_dge_get(ctx)->ctx.synchronize();

    return llama_dge_get(ctx)->queries_set(seq_id, src, size);
}

//
// reports
//

int32_t llama_dge_get_seq_info(
        const struct llama_context * ctx, llama_seq_id seq_id, struct llama_dge_seq_info * info) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);

    if (status == LLAMA_DGE_OK) {
        llama_dge_get(ctx)->info(seq_id, *info);
    }

    return status;
}

int32_t llama_dge_get_layers(const struct llama_context * ctx, int32_t * layers, int32_t n) {
    if (llama_dge_unsupported(*ctx)) {
        return 0;
    }

    const auto & kv = llama_dge_memory_of(*ctx)->dge.kv;

    for (int32_t i = 0; i < n && i < (int32_t) kv.n_layer(); ++i) {
        layers[i] = kv.layer(i).il;
    }

    return kv.n_layer();
}

int32_t llama_dge_get_n_head_kv(const struct llama_context * ctx, int32_t il) {
    if (llama_dge_unsupported(*ctx)) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    const auto &  kv = llama_dge_memory_of(*ctx)->dge.kv;
    const int32_t i  = kv.find(il);

    return i < 0 ? (int32_t) LLAMA_DGE_ERR_PARAMS : (int32_t) kv.layer(i).n_head_kv;
}

int32_t llama_dge_get_kept(
        const struct llama_context * ctx, llama_seq_id seq_id, int32_t il, int32_t ih, llama_pos * pos, int32_t n) {
    const int32_t status = llama_dge_check_seq(ctx, seq_id);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const auto & dge = *llama_dge_get(ctx);
    const auto & seq = dge.seqs[seq_id];

    if (!seq.is_evicted()) {
        return LLAMA_DGE_ERR_SEQ;
    }

    const int32_t i = dge.kv.find(il);

    if (i < 0 || ih < 0 || (size_t) ih >= seq.kept[i].size()) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    std::vector<llama_pos> all(seq.kept[i][ih].begin(), seq.kept[i][ih].end());
    for (llama_pos p = seq.pos_min; p < seq.stats.n_before; ++p) {
        all.push_back(p);
    }

    // by slot until here
    std::sort(all.begin(), all.end());

    for (size_t j = 0; j < all.size() && (int32_t) j < n; ++j) {
        pos[j] = all[j];
    }

    return all.size();
}

uint64_t llama_dge_fingerprint(const struct llama_context * ctx) {
    return llama_dge_unsupported(*ctx) ? 0 : llama_dge_memory_of(*ctx)->dge.kv.fingerprint();
}

bool llama_dge_is_elastic(const struct llama_context * ctx) {
    const auto * memory = llama_dge_memory_of(*ctx);

    return memory && memory->dge.elastic.is_on();
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

    const auto * memory = llama_dge_memory_of(*ctx);
    if (!memory) {
        return;
    }

    const auto & dge = memory->dge;

    info->kv = dge.kv.total_bytes();
    info->other -= info->kv;
    info->n_cells     = dge.kv.size();
    info->n_cells_max = dge.elastic.is_on() ? dge.kv.size_max() : dge.kv.size();
    info->parked      = dge.parked_bytes();
    info->dge         = dge.own_bytes();

    // a growth that failed may have left larger buffers than the cells need
    info->kv_max = dge.elastic.is_on() ? dge.kv.cell_bytes() * dge.kv.size_max() : info->kv;
}

//
// for tests
//

bool llama_dge_debug_seq_rm(struct llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    auto * memory = llama_dge_memory_of(*ctx);

    const auto remove = [&] {
        memory->dge.kv.seq_rm(seq_id, p0, p1);
        return true;
    };

    return memory && memory->rm(seq_id, p0, p1, remove);
}

int32_t llama_dge_debug_poison(struct llama_context * ctx, uint16_t pattern) {
    auto * dge = llama_dge_get(ctx);
    if (!dge) {
        return LLAMA_DGE_ERR_DISABLED;
    }

    dge->ctx.synchronize();

    return dge->kv.poison(pattern);
}
