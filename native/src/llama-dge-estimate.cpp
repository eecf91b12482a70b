#include "llama-dge-memory.h"

#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-hparams.h"

#include <algorithm>

// What a prompt will need, by the functions that evict. Where heads share a budget by scores, the most.

// the past of a prompt, with the budgets of its layers and heads
static llama_dge_select_input llama_dge_estimate_input(
        const llama_dge_kv & kv, const llama_dge_settings & settings, int32_t n_prompt) {
    llama_dge_select_input res;

    res.params   = settings.sel;
    res.n_prompt = n_prompt;
    res.n_past   = std::max(0, n_prompt - settings.window);
    res.n_cap    = settings.resolve_budget(n_prompt) - settings.window;

    auto rows = settings.head_rows.begin();

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        const int32_t n_head_kv = kv.layer(i).n_head_kv;

        res.layers.emplace_back().n_head_kv = n_head_kv;

        if (!settings.head_rows.empty()) {
            auto & heads = res.table.emplace_back(rows, rows + n_head_kv);
            for (int32_t & n : heads) {
                n -= settings.window;
            }
            rows += n_head_kv;
        }
    }

    return res;
}

static int32_t llama_dge_sum_heads(const llama_dge_kv & kv) {
    int32_t res = 0;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        res += kv.layer(i).n_head_kv;
    }

    return res;
}

// what an eviction adds
static void llama_dge_estimate_eviction(
        const llama_dge & dge, const llama_dge_settings & settings, int32_t n_prompt, llama_dge_estimate & res) {
    const auto & kv = dge.kv;

    llama_dge_kept kept;

    for (const auto & heads : llama_dge_most_rows(llama_dge_estimate_input(kv, settings, n_prompt))) {
        auto & layer = kept.emplace_back();
        for (const int32_t n : heads) {
            layer.emplace_back(n);
        }
        res.at_most |= settings.head_budgets == LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE && heads.size() > 1;
    }

    // with recall, entries of the answer compete with the prompt's
    res.n_rows_after =
            llama_dge_capacity(kept) + settings.window + (settings.recalls() ? 0 : settings.draft_tokens - 1);

    llama_dge_kv::shapes_t bias;

    for (size_t i = 0; i < kept.size(); ++i) {
        const int64_t n_head = kv.layer(i).n_head;
        const bool    most   = res.at_most && kept[i].size() > 1;

        bias.push_back({ kv.size_max(), most ? n_head : llama_dge_bias_rows(kept, i, n_head), kv.n_stream() });
    }
    res.dge += kv.beside_bytes(bias);

    if (settings.park == LLAMA_DGE_PARK_OFF) {
        return;
    }

    const int64_t sums = llama_dge_needs_sums(settings.sel) ? llama_dge_sum_heads(kv) * (int64_t) sizeof(float) : 0;

    int64_t context;
    int64_t compute;
    dge.ctx.memory_bytes(context, compute);

    res.parked =
            res.n_rows * (kv.row_bytes() + (int64_t) sizeof(llama_kv_cell_ext) + sums) + context - kv.total_bytes();
}

static void llama_dge_estimate_all(const llama_dge & dge, const llama_dge_settings & settings, int32_t n_prompt,
        bool elastic, llama_dge_estimate & res) {
    const auto & kv = dge.kv;

    const uint32_t n_max = kv.size_max();

    res.n_rows = res.n_rows_after = n_prompt + settings.draft_tokens - 1;

    res.dge = kv.beside_bytes(llama_dge_ring::shapes(kv, settings.n_ring()));

    if (llama_dge_needs_sums(settings.sel)) {
        res.dge += kv.beside_bytes(llama_dge_sums::shapes(kv));
    }

    if (n_prompt > settings.resolve_budget(n_prompt)) {
        llama_dge_estimate_eviction(dge, settings, n_prompt, res);
    } else {
        res.status = LLAMA_DGE_NOTHING_TO_EVICT;
    }

    res.n_cells       = elastic ? llama_dge_elastic_cells(res.n_rows, n_max) : n_max;
    res.n_cells_after = res.n_cells;
    if (elastic && res.n_rows_after < res.n_rows) {
        res.n_cells_after = std::min((int32_t) llama_dge_shrunk_cells(res.n_rows_after), res.n_cells);
    }

    res.kv       = kv.cell_bytes() * res.n_cells;
    res.kv_after = kv.cell_bytes() * res.n_cells_after;
    res.kv_max   = kv.cell_bytes() * n_max;

    if (llama_dge_needs_sums(settings.sel)) {
        const int64_t n_tokens = std::min(dge.ctx.cparams().n_ubatch, n_max);

        res.compute = std::min<int64_t>(4ll * res.n_cells * n_tokens * kv.layer(0).n_head, LLAMA_DGE_SCORE_BLOCK);
    }
}

int32_t llama_dge_get_estimate(const struct llama_context * ctx, const struct llama_dge_params * params,
        int32_t n_prompt, bool elastic, struct llama_dge_estimate * res) {
    *res = {};

    if (n_prompt < 1 || llama_dge_check_params(params, nullptr, 0) != LLAMA_DGE_OK) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    if (llama_dge_unsupported(*ctx)) {
        llama_dge_memory_info memory;
        llama_dge_get_memory(ctx, &memory);

        res->status = LLAMA_DGE_ERR_UNSUPPORTED;
        res->n_rows = res->n_rows_after = n_prompt;
        res->n_cells = res->n_cells_after = memory.n_cells;
        res->kv = res->kv_after = res->kv_max = memory.kv;

        return LLAMA_DGE_OK;
    }

    const auto & dge = llama_dge_memory_of(*ctx)->dge;

    const llama_dge_settings settings(*params);

    if (!settings.head_rows.empty() && (int32_t) settings.head_rows.size() != llama_dge_sum_heads(dge.kv)) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    llama_dge_estimate_all(dge, settings, n_prompt, elastic, *res);

    return LLAMA_DGE_OK;
}
