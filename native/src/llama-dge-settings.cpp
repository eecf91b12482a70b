#include "llama-dge-choice.h"
#include "llama-dge-impl.h"

#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

// what follows from the settings: memory for queries and sums, budgets, which queries are needed

bool llama_dge::alloc_tensors(
        const char * name, const shapes_t & shapes, std::vector<ggml_tensor *> & res, bufs_t & bufs) const {
    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs;

    res.assign(shapes.size(), nullptr);

    for (size_t i = 0; i < shapes.size(); ++i) {
        const auto & ne = shapes[i];
        if (ne[0] * ne[1] * ne[2] == 0) {
            continue;
        }

        auto & ctx = ctxs[ggml_backend_buffer_get_type(kv.layers[i].k->buffer)];
        if (!ctx) {
            ctx.reset(ggml_init({ shapes.size() * ggml_tensor_overhead(), nullptr, true }));
        }

        if (!ctx) {
            return false;
        }

        res[i] = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, ne[0], ne[1], ne[2]);
        ggml_format_name(res[i], "%s_l%d", name, layers[i].il);
    }

    for (auto & [buft, ctx] : ctxs) {
        ggml_backend_buffer_ptr buf(
                llama_dge_alloc_fails() ? nullptr : ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        if (!buf) {
            return false;
        }

        ggml_backend_buffer_clear(buf.get(), 0);
        bufs.emplace_back(std::move(ctx), std::move(buf));
    }

    return true;
}

llama_dge_select_params llama_dge::select_params(const llama_dge_params & p) {
    // with recall the last queries, pooled, take the place of the draft's
    const bool recalls = p.refresh != 0;
    const bool pools   = p.draft_pooling != LLAMA_DGE_POOLING_NONE;

    return {
        p.policy,
        recalls ? (int32_t) LLAMA_DGE_SCORES_DRAFT : p.scores,
        p.pooling,
        recalls && !pools ? p.pooling : p.draft_pooling,
        p.kernel_size,
        p.sinks,
        p.layer_budgets,
        p.head_budgets,
    };
}

bool llama_dge::set_params(const llama_dge_params & params_new) {
    const auto sel = select_params(params_new);

    const bool window = llama_dge_needs_window_scores(sel);
    const bool draft  = llama_dge_needs_draft_scores(sel);

    // tokens that a draft model proposes in vain take slots, too; the last queries must be there for the next choice
    const uint32_t n_spare = params_new.refresh != 0 ? LLAMA_DGE_RING_SPARE : 0;

    const uint32_t n_ring_new = window || draft ? params_new.window + params_new.draft_tokens - 1 + n_spare : 0;

    shapes_t shapes_ring;
    shapes_t shapes_sums;

    for (size_t i = 0; i < layers.size(); ++i) {
        const int64_t n_embd = (int64_t) kv.hparams.n_embd_head_k(layers[i].il) * kv.hparams.n_head(layers[i].il);

        shapes_ring.push_back({ n_embd, (int64_t) n_ring_new * n_seq, 1 });
        shapes_sums.push_back({ llama_dge_needs_sums(sel) ? n_cells_max : 0, n_head_kv(i), kv.n_stream });
    }

    std::vector<ggml_tensor *> ring;
    std::vector<ggml_tensor *> sums;
    bufs_t                     ring_bufs_new;
    bufs_t                     sums_bufs_new;

    if (!alloc_tensors("dge_q", shapes_ring, ring, ring_bufs_new) ||
            !alloc_tensors("dge_sums", shapes_sums, sums, sums_bufs_new)) {
        return false;
    }

    table.assign(params_new.table, params_new.table + params_new.n_table);

    park_dir = params_new.park_dir ? params_new.park_dir : "";

    params          = params_new;
    params.table    = table.data();
    params.park_dir = park_dir.c_str();

    n_ring    = n_ring_new;
    ring_bufs = std::move(ring_bufs_new);
    sums_bufs = std::move(sums_bufs_new);
    ring_pos.assign((size_t) n_ring * n_seq, -1);

    for (auto & choice : choices) {
        end_choice(std::move(choice));
    }

    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].ring = ring[i];
        layers[i].sums = sums[i];
    }

    for (uint32_t s = 0; s < n_seq; ++s) {
        auto & seq = seqs[s];

        if (seq.state == LLAMA_DGE_STATE_ARMED) {
            const auto origin = seq.origin;

            seq        = {};
            seq.origin = origin;
        }

        // rows that are there already are missing in the sums
        seq.n_summed = kv.seq_pos_max(s) < 0 ? 0 : -1;
    }

    return true;
}

void llama_dge::set_off() {
    for (auto & choice : choices) {
        end_choice(std::move(choice));
    }
    scorers.clear();

    ring_bufs.clear();
    sums_bufs.clear();
    bias_bufs.clear();
    ring_pos.clear();

    n_ring = 0;

    for (auto & layer : layers) {
        const int32_t il = layer.il;

        layer    = {};
        layer.il = il;
    }
}

int64_t llama_dge::own_bytes() const {
    int64_t res = 0;

    for (const auto * bufs : { &ring_bufs, &sums_bufs, &bias_bufs }) {
        for (const auto & [ctx, buf] : *bufs) {
            res += ggml_backend_buffer_get_size(buf.get());
        }
    }

    return res;
}

int32_t llama_dge::resolve_budget(int32_t n_prompt) const {
    if (params.head_budgets == LLAMA_DGE_HEAD_BUDGETS_TABLE) {
        // a prompt that the smallest head can hold is not cut
        return *std::min_element(table.begin(), table.end());
    }

    if (params.budget_share > 0.0f) {
        // a small share of a short prompt must leave more than the window
        const int32_t n_min =
                params.window + (params.policy == LLAMA_DGE_POLICY_STREAMINGLLM ? std::max(params.sinks, 1) : 1);

        return std::max((int32_t) std::lround((double) params.budget_share * n_prompt), n_min);
    }

    return params.budget;
}

int32_t llama_dge::mean_budget(int32_t budget) const {
    if (params.head_budgets != LLAMA_DGE_HEAD_BUDGETS_TABLE) {
        return budget;
    }

    return (int32_t) std::lround(std::accumulate(table.begin(), table.end(), 0.0) / table.size());
}

void llama_dge::needed_queries(int32_t n_prompt, int32_t n_rows, llama_pos & p0, llama_pos & p1) const {
    const auto sel = select_params(params);

    const bool window = llama_dge_needs_window_scores(sel);
    const bool draft  = llama_dge_needs_draft_scores(sel);

    if (recalls() && draft) {
        const int32_t n_due = due_rows(n_prompt);

        p0 = std::max(0, n_due - params.window);
        p1 = std::min(n_due, n_rows);
        return;
    }

    p0 = window ? n_prompt - params.window : n_prompt - 1;
    p1 = draft ? std::min(n_prompt + params.draft_tokens - 1, n_rows) : n_prompt;

    if (!window && !draft) {
        p0 = p1 = 0;
    }
}
