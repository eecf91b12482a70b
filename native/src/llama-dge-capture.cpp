#include "llama-dge-impl.h"

#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>

//
// graph input: which rows of Q go to which ring slots
//

class llm_graph_input_dge : public llm_graph_input_i {
public:
    llm_graph_input_dge(llama_dge * dge, size_t n_rows) : dge(dge), n_rows(n_rows) {}
    virtual ~llm_graph_input_dge() = default;

    void set_input(const llama_ubatch * ubatch) override {
        if (n_rows == 0) {
            return;
        }

        const auto rows = dge->capture_plan(*ubatch);
        GGML_ASSERT(rows.size() == n_rows);

        std::vector<int32_t> src_data(n_rows);
        std::vector<int64_t> dst_data(n_rows);

        for (size_t i = 0; i < n_rows; ++i) {
            src_data[i] = rows[i].src;
            dst_data[i] = rows[i].dst;
        }

        // a graph that attends nowhere (all layers filtered) leaves the inputs unallocated
        if (src->buffer && dst->buffer) {
            ggml_backend_tensor_set(src, src_data.data(), 0, ggml_nbytes(src));
            ggml_backend_tensor_set(dst, dst_data.data(), 0, ggml_nbytes(dst));

            dge->capture_begin(rows);
        }
    }

    bool can_reuse(const llm_graph_params & params) override {
        return dge->capture_plan(params.ubatch).size() == n_rows;
    }

    llama_dge * dge;

    const size_t n_rows;

    ggml_tensor * src = nullptr; // I32 [n_rows]
    ggml_tensor * dst = nullptr; // I64 [n_rows]
};

// one input per graph, made by the first layer that asks
static llm_graph_input_dge * llama_dge_get_input(llama_dge * dge, llm_graph_result * res, const llama_ubatch & ubatch) {
    for (const auto & input : res->inputs) {
        if (auto * inp = dynamic_cast<llm_graph_input_dge *>(input.get())) {
            return inp;
        }
    }

    // a graph that only reserves memory has no sequences: take the most that a batch can need
    const bool   is_reserve = ubatch.seq_id == nullptr || ubatch.seq_id[0] == nullptr;
    const size_t n_rows     = is_reserve ?
            std::min<size_t>(ubatch.n_tokens, (size_t) dge->n_ring*ubatch.n_seqs_unq) :
            dge->capture_plan(ubatch).size();

    auto inp = std::make_unique<llm_graph_input_dge>(dge, n_rows);

    if (n_rows > 0) {
        inp->src = ggml_new_tensor_1d(res->get_ctx(), GGML_TYPE_I32, n_rows);
        inp->dst = ggml_new_tensor_1d(res->get_ctx(), GGML_TYPE_I64, n_rows);

        ggml_set_input(inp->src);
        ggml_set_input(inp->dst);

        ggml_set_name(inp->src, "dge_inp_src");
        ggml_set_name(inp->dst, "dge_inp_dst");
    }

    return (llm_graph_input_dge *) res->add_input(std::move(inp));
}

void llama_dge_build_capture(
              llama_dge * dge,
       llm_graph_result * res,
     const llama_ubatch & ubatch,
            ggml_tensor * q_cur,
            ggml_tensor * kq_b,
            ggml_tensor * sinks,
                  float   kq_scale,
                    int   il) {
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
    const auto * inp = llama_dge_get_input(dge, res, ubatch);
    if (inp->n_rows == 0 || !layer.ring) {
        return;
    }

    auto * ctx = res->get_ctx();

    if (!ggml_is_contiguous(q_cur)) {
        q_cur = ggml_cont(ctx, q_cur);
    }

    ggml_tensor * cur = ggml_reshape_2d(ctx, q_cur, q_cur->ne[0]*q_cur->ne[1], q_cur->ne[2]);

    GGML_ASSERT(cur->ne[0] == layer.ring->ne[0]);

    cur = ggml_get_rows(ctx, cur, inp->src);
    cur = ggml_set_rows(ctx, layer.ring, cur, inp->dst);

    ggml_build_forward_expand(res->get_gf(), cur);
}

//
// bookkeeping on the host
//

std::vector<llama_dge::capture_row> llama_dge::capture_plan(const llama_ubatch & ubatch) const {
    std::vector<capture_row> rows;

    if (!active || n_ring == 0) {
        return rows;
    }

    // where the capture of a sequence ends; rows above are of no use to its cut and would overwrite those that are
    const auto captures = [&](llama_seq_id seq_id, llama_pos pos) {
        if (seq_id < 0 || (uint32_t) seq_id >= n_seq) {
            return false;
        }

        const auto & seq = seqs[seq_id];

        switch (seq.state) {
            case LLAMA_DGE_STATE_FULL:  return true;
            case LLAMA_DGE_STATE_ARMED: return pos < seq.n_prompt + params.draft_tokens - 1;
            default:                    return false;
        }
    };

    std::vector<llama_pos> pos_max(n_seq, -1);

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        if (captures(seq_id, ubatch.pos[i])) {
            pos_max[seq_id] = std::max(pos_max[seq_id], ubatch.pos[i]);
        }
    }

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];
        const llama_pos    pos    = ubatch.pos[i];

        // an earlier row of the same slot would be written by the same node in no certain order
        if (captures(seq_id, pos) && pos + (llama_pos) n_ring > pos_max[seq_id]) {
            rows.push_back({ (int32_t) i, (int64_t) seq_id*n_ring + pos % n_ring, pos });
        }
    }

    return rows;
}

void llama_dge::capture_begin(const std::vector<capture_row> & rows) {
    for (const auto & row : rows) {
        ring_pos[row.dst] = row.pos;
    }
}

bool llama_dge::captured(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    for (llama_pos p = p0; p < p1; ++p) {
        if (n_ring == 0 || ring_pos[(size_t) seq_id*n_ring + p % n_ring] != p) {
            return false;
        }
    }

    return true;
}

void llama_dge::capture_drop(llama_seq_id seq_id, llama_pos p0) {
    for (uint32_t i = 0; i < n_ring; ++i) {
        auto & pos = ring_pos[(size_t) seq_id*n_ring + i];

        if (pos >= p0) {
            pos = -1;
        }
    }
}
