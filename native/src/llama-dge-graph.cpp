#include "llama-dge-hooks.h"
#include "llama-dge-memory.h"

#include "llama-graph.h"
#include "llama-hparams.h"

// What is added to the model's graphs: last queries go into the ring, H2O's sums are added to, a bias hides what a layer or
// head did not keep.

// a graph that only reserves memory has no sequences
static bool llama_dge_is_reserve(const llama_ubatch & ubatch) {
    return ubatch.seq_id == nullptr || ubatch.seq_id[0] == nullptr;
}

// what has to be known of a ubatch when its graph runs; one input per graph
class llm_graph_input_dge : public llm_graph_input_i {
public:
    llm_graph_input_dge(llama_dge & dge, const llama_ubatch & ubatch) : dge(dge), bias_version(dge.bias.get_version()) {
        if (llama_dge_is_reserve(ubatch)) {
            // the most that a batch can need
            n_rows = dge.ring->most(ubatch);
            sums   = !dge.sums->empty();
        } else {
            n_rows = capture_plan(ubatch).size();
            sums   = !sums_plan(ubatch).empty();
            bias   = dge.bias.plan(ubatch);
        }
    }

    void set_input(const llama_ubatch * ubatch) override;

    bool can_reuse(const llm_graph_params & params) override {
        return capture_plan(params.ubatch).size() == n_rows && !sums_plan(params.ubatch).empty() == sums &&
               dge.bias.plan(params.ubatch) == bias && (!bias || dge.bias.get_version() == bias_version);
    }

    std::vector<llama_dge_capture> capture_plan(const llama_ubatch & ubatch) const {
        return dge.ring->plan(ubatch, [this](llama_seq_id s, llama_pos p) { return dge.captures(s, p); });
    }

    std::vector<float> sums_plan(const llama_ubatch & ubatch) const {
        return dge.sums->plan(ubatch, [this](llama_seq_id s, llama_pos p) { return dge.captures(s, p); });
    }

    llama_dge & dge;

    // the graph is built for these
    size_t   n_rows = 0;     // queries to capture
    bool     sums   = false; // sums to add to
    bool     bias   = false; // sequences that need a bias
    uint64_t bias_version;

    ggml_tensor * src = nullptr; // I32 [n_rows] rows of Q
    ggml_tensor * dst = nullptr; // I64 [n_rows] rows of the ring

    llama_dge_sums::inputs sums_inp;
};

void llm_graph_input_dge::set_input(const llama_ubatch * ubatch) {
    // a graph that attends nowhere leaves the inputs unallocated
    if (src && src->buffer) {
        const auto rows = capture_plan(*ubatch);
        GGML_ASSERT(rows.size() == n_rows);

        std::vector<int32_t> src_data;
        std::vector<int64_t> dst_data;

        for (const auto & row : rows) {
            src_data.push_back(row.src);
            dst_data.push_back(row.dst);
        }

        ggml_backend_tensor_set(src, src_data.data(), 0, ggml_nbytes(src));
        ggml_backend_tensor_set(dst, dst_data.data(), 0, ggml_nbytes(dst));

        dge.ring->begin(rows);
    }

    if (sums_inp.weights && sums_inp.weights->buffer) {
        const auto weights = sums_plan(*ubatch);
        GGML_ASSERT((int64_t) weights.size() == sums_inp.weights->ne[0]);

        dge.sums->set_inputs(sums_inp, *ubatch, weights);
        dge.sums->begin(*ubatch, weights);
    }

    if (bias) {
        dge.bias.sync();
    }

    // buffers follow an elastic cache, which the context would take for a fault when it is freed
    if (dge.elastic.is_on()) {
        dge.ctx.expect_buffers();
    }
}

// made by the first layer that asks
static llm_graph_input_dge & llama_dge_get_input(llama_dge & dge, llm_graph_result * res, const llama_ubatch & ubatch) {
    for (const auto & input : res->inputs) {
        if (auto * inp = dynamic_cast<llm_graph_input_dge *>(input.get())) {
            return *inp;
        }
    }

    return *(llm_graph_input_dge *) res->add_input(std::make_unique<llm_graph_input_dge>(dge, ubatch));
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
        ggml_tensor * ring, llm_graph_result & res, llm_graph_input_dge & inp, ggml_tensor * q_cur) {
    auto * ctx = res.get_ctx();

    if (!inp.src) {
        inp.src = llama_dge_new_input(ctx, GGML_TYPE_I32, "dge_inp_src", inp.n_rows);
        inp.dst = llama_dge_new_input(ctx, GGML_TYPE_I64, "dge_inp_dst", inp.n_rows);
    }

    ggml_tensor * cur = ggml_reshape_2d(ctx, q_cur, q_cur->ne[0] * q_cur->ne[1], q_cur->ne[2]);

    GGML_ASSERT(cur->ne[0] == ring->ne[0]);

    cur = ggml_get_rows(ctx, cur, inp.src);
    cur = ggml_set_rows(ctx, ring, cur, inp.dst);

    ggml_build_forward_expand(res.get_gf(), cur);
}

void llama_dge_build_attn(llama_dge * dge, llm_graph_result * res, const llama_ubatch & ubatch, ggml_tensor * q_cur,
        ggml_tensor * k, ggml_tensor *& kq_mask, ggml_tensor *& kq_b, ggml_tensor * sinks, float kq_scale, int il) {
    const int32_t i = dge && dge->active ? dge->kv.find(il) : -1;

    if (i < 0) {
        return;
    }

    const auto & hparams = dge->kv.hparams();

    auto & layer = dge->layers[i];

    layer.seen            = true;
    layer.has_bias        = kq_b != nullptr;
    layer.attn.kq_scale   = kq_scale;
    layer.attn.soft_cap   = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;
    layer.attn.flash_attn = kq_mask->type == GGML_TYPE_F16;
    layer.attn.sinks      = sinks;

    // always there, so that a graph is built again when a capture begins or ends
    auto & inp = llama_dge_get_input(*dge, res, ubatch);

    ggml_tensor * ring = dge->ring->layer(i);

    const bool capture = inp.n_rows > 0 && ring;
    const bool sums    = inp.sums && dge->sums->layer(i);

    auto * ctx = res->get_ctx();

    if ((capture || sums) && !ggml_is_contiguous(q_cur)) {
        q_cur = ggml_cont(ctx, q_cur);
    }

    if (capture) {
        llama_dge_build_capture(ring, *res, inp, q_cur);
    }

    if (sums) {
        if (!inp.sums_inp.weights) {
            inp.sums_inp.weights = llama_dge_new_input(ctx, GGML_TYPE_F32, "dge_inp_weights", ubatch.n_tokens);
            inp.sums_inp.cells   = llama_dge_new_input(ctx, GGML_TYPE_I32, "dge_inp_cells", k->ne[2], k->ne[3]);
            inp.sums_inp.keep    = llama_dge_new_input(ctx, GGML_TYPE_F32, "dge_inp_keep", k->ne[2], k->ne[3]);
        }

        dge->sums->build(i, ctx, res->get_gf(), layer.attn, inp.sums_inp, ubatch, q_cur, k, kq_mask);
    }

    if (inp.bias && dge->bias.layer(i)) {
        dge->bias.build(i, ctx, ubatch, kq_mask, kq_b);
    }
}

uint32_t llama_dge_graph_max_nodes(const llama_context & lctx, uint32_t n_tokens) {
    const auto * memory = llama_dge_memory_of(lctx);

    return memory ? memory->dge.max_nodes(n_tokens) : 0;
}
