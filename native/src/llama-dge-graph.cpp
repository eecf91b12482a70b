#include "llama-dge-graph.h"

#include "ggml-attn-score.h"

#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

// a graph that only reserves memory has no sequences
static bool llama_dge_is_reserve(const llama_ubatch & ubatch) {
    return ubatch.seq_id == nullptr || ubatch.seq_id[0] == nullptr;
}

llm_graph_input_dge::llm_graph_input_dge(llama_dge * dge, const llama_ubatch & ubatch) :
    dge(dge), bias_version(dge->bias_version) {
    if (llama_dge_is_reserve(ubatch)) {
        // the most that a batch can need
        n_rows = std::min<size_t>(ubatch.n_tokens, (size_t) dge->n_ring * ubatch.n_seqs_unq);
        sums   = !dge->sums_bufs.empty();
    } else {
        n_rows = dge->capture_plan(ubatch).size();
        sums   = !dge->sum_plan(ubatch).empty();
        bias   = dge->bias_plan(ubatch);
    }
}

void llm_graph_input_dge::set_input(const llama_ubatch * ubatch) {
    // a graph that attends nowhere leaves the inputs unallocated
    if (src && src->buffer) {
        const auto rows = dge->capture_plan(*ubatch);
        GGML_ASSERT(rows.size() == n_rows);

        std::vector<int32_t> src_data;
        std::vector<int64_t> dst_data;

        for (const auto & row : rows) {
            src_data.push_back(row.src);
            dst_data.push_back(row.dst);
        }

        ggml_backend_tensor_set(src, src_data.data(), 0, ggml_nbytes(src));
        ggml_backend_tensor_set(dst, dst_data.data(), 0, ggml_nbytes(dst));

        dge->capture_begin(rows);
    }

    if (weights && weights->buffer) {
        const auto data = dge->sum_plan(*ubatch);
        GGML_ASSERT((int64_t) data.size() == weights->ne[0]);

        ggml_backend_tensor_set(weights, data.data(), 0, ggml_nbytes(weights));

        // only the graph gathers
        if (cells->buffer) {
            const auto cells_data = dge->sum_cells(*ubatch, cells->ne[0], cells->ne[2]);
            ggml_backend_tensor_set(cells, cells_data.data(), 0, ggml_nbytes(cells));
        }

        const auto keep_data = dge->sum_keep(*ubatch, keep->ne[0], keep->ne[2]);
        ggml_backend_tensor_set(keep, keep_data.data(), 0, ggml_nbytes(keep));

        dge->sum_begin(*ubatch, data);
    }

    if (bias && dge->bias_dirty) {
        dge->bias_sync();
    }

    // buffers follow an elastic cache, which the context would take for a fault when it is freed
    if (dge->elastic && dge->lctx) {
        dge->expect_buffers(*dge->lctx);
    }
}

bool llm_graph_input_dge::can_reuse(const llm_graph_params & params) {
    return dge->capture_plan(params.ubatch).size() == n_rows && !dge->sum_plan(params.ubatch).empty() == sums &&
           dge->bias_plan(params.ubatch) == bias && (!bias || dge->bias_version == bias_version);
}

// made by the first layer that asks
static llm_graph_input_dge * llama_dge_get_input(llama_dge * dge, llm_graph_result * res, const llama_ubatch & ubatch) {
    for (const auto & input : res->inputs) {
        if (auto * inp = dynamic_cast<llm_graph_input_dge *>(input.get())) {
            return inp;
        }
    }

    return (llm_graph_input_dge *) res->add_input(std::make_unique<llm_graph_input_dge>(dge, ubatch));
}

static ggml_tensor * llama_dge_new_input(
        ggml_context * ctx, ggml_type type, const char * name, int64_t ne0, int64_t ne2 = 1) {
    ggml_tensor * res = ggml_new_tensor_3d(ctx, type, ne0, 1, ne2);

    ggml_set_input(res);
    ggml_set_name(res, name);

    return res;
}

// the last queries of each sequence go into the ring
static void llama_dge_build_capture(
        const llama_dge_layer & layer, llm_graph_result & res, llm_graph_input_dge & inp, ggml_tensor * q_cur) {
    auto * ctx = res.get_ctx();

    if (!inp.src) {
        inp.src = llama_dge_new_input(ctx, GGML_TYPE_I32, "dge_inp_src", inp.n_rows);
        inp.dst = llama_dge_new_input(ctx, GGML_TYPE_I64, "dge_inp_dst", inp.n_rows);
    }

    ggml_tensor * cur = ggml_reshape_2d(ctx, q_cur, q_cur->ne[0] * q_cur->ne[1], q_cur->ne[2]);

    GGML_ASSERT(cur->ne[0] == layer.ring->ne[0]);

    cur = ggml_get_rows(ctx, cur, inp.src);
    cur = ggml_set_rows(ctx, layer.ring, cur, inp.dst);

    ggml_build_forward_expand(res.get_gf(), cur);
}

void llama_dge_build_attn(llama_dge * dge, llm_graph_result * res, const llama_ubatch & ubatch, ggml_tensor * q_cur,
        ggml_tensor * k, ggml_tensor *& kq_mask, ggml_tensor *& kq_b, ggml_tensor * sinks, float kq_scale, int il) {
    if (!dge || !dge->active) {
        return;
    }

    auto it = std::find_if(dge->layers.begin(), dge->layers.end(), [&](const auto & layer) { return layer.il == il; });
    if (it == dge->layers.end()) {
        return;
    }

    auto & layer = *it;

    layer.seen     = true;
    layer.has_bias = kq_b != nullptr;
    layer.sinks    = sinks;
    layer.kq_scale = kq_scale;

    // always there, so that a graph is built again when a capture begins or ends
    auto & inp = *llama_dge_get_input(dge, res, ubatch);

    const bool capture = inp.n_rows > 0 && layer.ring;
    const bool sums    = inp.sums && layer.sums;

    if ((capture || sums) && !ggml_is_contiguous(q_cur)) {
        q_cur = ggml_cont(res->get_ctx(), q_cur);
    }

    if (capture) {
        llama_dge_build_capture(layer, *res, inp, q_cur);
    }

    if (sums) {
        if (!inp.weights) {
            inp.weights = llama_dge_new_input(res->get_ctx(), GGML_TYPE_F32, "dge_inp_weights", ubatch.n_tokens);
            inp.cells   = llama_dge_new_input(res->get_ctx(), GGML_TYPE_I32, "dge_inp_cells", k->ne[2], k->ne[3]);
            inp.keep    = llama_dge_new_input(res->get_ctx(), GGML_TYPE_F32, "dge_inp_keep", k->ne[2], k->ne[3]);
        }

        llama_dge_build_sums(*dge, layer, *res, inp, ubatch, q_cur, k, kq_mask);
    }

    if (inp.bias && layer.bias) {
        llama_dge_build_bias(*dge, layer, *res, ubatch, kq_mask, kq_b);
    }
}

ggml_tensor * llama_dge_build_probs(ggml_context * ctx, const llama_hparams & hparams, const llama_dge_layer & layer,
        bool flash_attn, ggml_tensor * kq, ggml_tensor * mask, int64_t h0) {
    float scale = layer.kq_scale;

    if (hparams.attn_soft_cap) {
        // flash attention scales in front of the cap, the other path behind it
        const float cap = hparams.f_attn_logit_softcapping;
        const float pre = flash_attn ? scale : 1.0f;

        kq    = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, pre / cap)), cap);
        scale = flash_attn ? 1.0f : scale;
    }

    const int64_t n_head = kq->ne[2];

    kq = ggml_soft_max_ext(ctx, kq, mask, scale, 0.0f);

    if (layer.sinks) {
        ggml_soft_max_add_sinks(kq, ggml_view_1d(ctx, layer.sinks, n_head, h0 * ggml_element_size(layer.sinks)));
    }

    return kq;
}

static bool llama_dge_supports(ggml_backend_buffer_t buf, const ggml_tensor * op) {
    auto * dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buf));

    // plain host memory is of no device
    if (!dev && ggml_backend_buffer_is_host(buf)) {
        dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }

    // one that spreads tensors over others does not know how to spread this
    return dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_META && ggml_backend_dev_supports_op(dev, op);
}

bool llama_dge_use_fused() {
    const char * env = getenv("LLAMA_DGE_FUSED");

    return !env || strcmp(env, "0") != 0;
}

ggml_tensor * llama_dge_build_op(ggml_context * ctx, const llama_hparams & hparams, const llama_dge_layer & layer,
        bool flash_attn, ggml_tensor * q, ggml_tensor * k, ggml_tensor * mask, ggml_tensor * weights, ggml_tensor * acc,
        float norm) {
    float cap = 0.0f;

    if (hparams.attn_soft_cap) {
        // flash attention scales in front of the cap, the other path behind it
        cap = hparams.f_attn_logit_softcapping * (flash_attn ? 1.0f : layer.kq_scale);
    }

    return ggml_attn_score(ctx, q, k, mask, layer.sinks, weights, acc, layer.kq_scale, cap, norm);
}

ggml_tensor * llama_dge_build_fused(ggml_context * ctx, const llama_hparams & hparams, const llama_dge_layer & layer,
        bool flash_attn, ggml_backend_buffer_t buf, ggml_tensor * q, ggml_tensor * k, ggml_tensor * mask,
        ggml_tensor * weights, ggml_tensor * acc, float norm) {
    if (!llama_dge_use_fused()) {
        return nullptr;
    }

    const char * env   = getenv("LLAMA_DGE_FUSED");
    const bool   apart = acc && env && strcmp(env, "apart") == 0;

    ggml_tensor * res = llama_dge_build_op(ctx, hparams, layer, flash_attn, q, k, mask, weights, acc, norm);
    if (!apart && llama_dge_supports(buf, res)) {
        return res;
    }

    // ggml-metal does not add in place
    if (acc) {
        res = llama_dge_build_op(ctx, hparams, layer, flash_attn, q, k, mask, weights, nullptr, norm);
        if (llama_dge_supports(buf, res)) {
            return ggml_add_inplace(ctx, acc, res);
        }
    }

    return nullptr;
}
