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

bool llama_dge::set_params(const llama_dge_settings & params_new) {

    const uint32_t n_ring_new = params_new.n_ring();

    shapes_t shapes_ring;
    shapes_t shapes_sums;

    for (size_t i = 0; i < layers.size(); ++i) {
        const int64_t n_embd = (int64_t) kv.hparams.n_embd_head_k(layers[i].il) * kv.hparams.n_head(layers[i].il);

        shapes_ring.push_back({ n_embd, (int64_t) n_ring_new * n_seq, 1 });
        shapes_sums.push_back({ llama_dge_needs_sums(params_new.sel) ? n_cells_max : 0, n_head_kv(i), kv.n_stream });
    }

    std::vector<ggml_tensor *> ring;
    std::vector<ggml_tensor *> sums;
    bufs_t                     ring_bufs_new;
    bufs_t                     sums_bufs_new;

    if (!alloc_tensors("dge_q", shapes_ring, ring, ring_bufs_new) ||
            !alloc_tensors("dge_sums", shapes_sums, sums, sums_bufs_new)) {
        return false;
    }

    params = params_new;

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
