#include "llama-dge-impl.h"

#include "llama-context.h"
#include "llama-hparams.h"

#include <algorithm>

// What a prompt will need, computed from the functions that evict. Where heads share a budget by scores, the most.

void llama_dge::estimate(const llama_context & lctx, const llama_dge_settings & settings, int32_t n_prompt, bool elastic,
        llama_dge_estimate & res) {
    const auto & kv = *get_kv(lctx);

    const int32_t n_max    = kv.dge ? kv.dge->n_cells_max : kv.get_size();
    const int64_t n_stream = kv.n_stream;

    const size_t align = 32; // of a tensor in a buffer

    res.n_rows = res.n_rows_after = n_prompt + settings.draft_tokens - 1;

    llama_dge_select_input input;

    input.params   = settings.sel;
    input.n_prompt = n_prompt;
    input.n_past   = std::max(0, n_prompt - settings.window);
    input.n_cap    = settings.resolve_budget(n_prompt) - settings.window;

    auto rows = settings.head_rows.begin();

    int64_t cell_bytes = 0;
    int64_t row_bytes  = 0;
    int64_t sums_bytes = 0; // per row of the host copy

    for (const auto & layer : kv.layers) {
        const int64_t n_head_kv = kv.hparams.n_head_kv(layer.il);
        const int64_t n_embd    = (int64_t) kv.hparams.n_embd_head_k(layer.il) * kv.hparams.n_head(layer.il);

        input.layers.emplace_back().n_head_kv = n_head_kv;
        if (!settings.head_rows.empty()) {
            auto & heads = input.table.emplace_back(rows, rows + n_head_kv);
            for (int32_t & n : heads) {
                n -= settings.window;
            }
            rows += n_head_kv;
        }

        cell_bytes += (layer.k->nb[1] + layer.v->nb[1]) * n_stream;
        row_bytes += layer.k->nb[1] + layer.v->nb[1];

        res.dge += GGML_PAD(n_embd * settings.n_ring() * kv.get_n_seq_max() * (int64_t) sizeof(float), align);

        if (llama_dge_needs_sums(settings.sel)) {
            res.dge += GGML_PAD(n_max * n_head_kv * n_stream * (int64_t) sizeof(float), align);
            sums_bytes += n_head_kv * sizeof(float);
        }
    }

    const bool evicts = n_prompt > settings.resolve_budget(n_prompt);

    if (evicts) {
        const auto most = llama_dge_most_rows(input);

        llama_dge_kept kept;
        for (const auto & heads : most) {
            auto & layer = kept.emplace_back();
            for (const int32_t n : heads) {
                layer.emplace_back(n);
            }
            res.at_most |= settings.head_budgets == LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE && heads.size() > 1;
        }

        res.n_rows_after = llama_dge_capacity(kept) + settings.window;
        if (!settings.recalls()) {
            res.n_rows_after += settings.draft_tokens - 1; // with recall the answer's entries compete with the prompt's
        }

        for (size_t i = 0; i < kept.size(); ++i) {
            const int64_t n_bias = res.at_most && kept[i].size() > 1
                                           ? kv.hparams.n_head(kv.layers[i].il)
                                           : llama_dge_bias_rows(kept, i, kv.hparams.n_head(kv.layers[i].il));

            res.dge += GGML_PAD(n_max * n_bias * n_stream * (int64_t) sizeof(float), align);
        }

        if (settings.park != LLAMA_DGE_PARK_OFF) {
            res.parked = res.n_rows * (row_bytes + (int64_t) sizeof(llama_kv_cell_ext) + sums_bytes);
            for (const auto & [buft, data] : lctx.memory_breakdown()) {
                res.parked += data.context;
            }
            for (const auto & [buft, size] : kv.memory_breakdown()) {
                res.parked -= size;
            }
        }
    } else {
        res.status = LLAMA_DGE_NOTHING_TO_EVICT;
    }

    res.n_cells = res.n_cells_after = n_max;
    if (elastic) {
        res.n_cells       = llama_dge_elastic_cells(res.n_rows, n_max);
        res.n_cells_after = std::min((int32_t) llama_dge_shrunk_cells(res.n_rows_after), res.n_cells);
        if (!evicts) {
            res.n_cells_after = res.n_cells;
        }
    }

    res.kv       = cell_bytes * res.n_cells;
    res.kv_after = cell_bytes * res.n_cells_after;
    res.kv_max   = cell_bytes * n_max;

    if (llama_dge_needs_sums(settings.sel)) {
        const auto & cparams = lctx.get_cparams();

        const int64_t n_tokens = std::min(cparams.n_ubatch, (uint32_t) n_max);

        res.compute = std::min(4 * res.n_cells * n_tokens * kv.hparams.n_head(kv.layers[0].il), LLAMA_DGE_SUMS_BLOCK);
    }
}

int32_t llama_dge_get_estimate(const struct llama_context * ctx, const struct llama_dge_params * params,
        int32_t n_prompt, bool elastic, struct llama_dge_estimate * res) {
    *res = {};

    if (n_prompt < 1 || llama_dge_check_params(params, nullptr, 0) != LLAMA_DGE_OK) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    if (llama_dge::unsupported(*ctx)) {
        llama_dge_memory_info memory;
        llama_dge_get_memory(ctx, &memory);

        res->status = LLAMA_DGE_ERR_UNSUPPORTED;
        res->n_rows = res->n_rows_after = n_prompt;
        res->n_cells = res->n_cells_after = memory.n_cells;
        res->kv = res->kv_after = res->kv_max = memory.kv;

        return LLAMA_DGE_OK;
    }

    const llama_dge_settings settings(*params);

    if (!llama_dge::table_fits(*ctx, settings)) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    llama_dge::estimate(*ctx, settings, n_prompt, elastic, *res);

    return LLAMA_DGE_OK;
}
