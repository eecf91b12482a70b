#pragma once

#include "llama-dge-impl.h"

// what DGE needs to know of a ubatch when its graph runs; one input per graph
class llm_graph_input_dge : public llm_graph_input_i {
public:
    llm_graph_input_dge(llama_dge * dge, const llama_ubatch & ubatch);
    virtual ~llm_graph_input_dge() = default;

    void set_input(const llama_ubatch * ubatch) override;

    bool can_reuse(const llm_graph_params & params) override;

    llama_dge * dge;

    // the graph is built for these
    size_t   n_rows = 0;     // queries to capture
    bool     sums   = false; // sums to add to
    bool     bias   = false; // sequences with unlike numbers of rows
    uint64_t bias_version;

    ggml_tensor * src     = nullptr; // I32 [n_rows]              rows of Q
    ggml_tensor * dst     = nullptr; // I64 [n_rows]              slots of the ring
    ggml_tensor * weights = nullptr; // F32 [n_tokens]            of each row in the sums
    ggml_tensor * cells   = nullptr; // I32 [n_kv, 1, n_stream]   to read K from
    ggml_tensor * keep    = nullptr; // F32 [n_kv, 1, n_stream]   0: the cell is new or free, its old sum does not count
};

// attention of queries to keys, as the layer's own attention computes it
// kq: K*Q, not scaled; mask: [n_kv, n_q, 1, n_stream]; h0: first query head of kq
ggml_tensor * llama_dge_build_probs(ggml_context * ctx, const llama_hparams & hparams, const llama_dge_layer & layer,
        bool flash_attn, ggml_tensor * kq, ggml_tensor * mask, int64_t h0);

// false where the environment has LLAMA_DGE_FUSED=0: graphs of other operations are used
bool llama_dge_use_fused();

// the same attention, summed by the fused operation: weights and norm as in ggml_attn_score()
ggml_tensor * llama_dge_build_op(ggml_context * ctx, const llama_hparams & hparams, const llama_dge_layer & layer,
        bool flash_attn, ggml_tensor * q, ggml_tensor * k, ggml_tensor * mask, ggml_tensor * weights, ggml_tensor * acc,
        float norm);

// nullptr if it is not used, or the device of `buf`, which holds K and acc, does not have it. Where the device does not add to
// acc in place, and everywhere with LLAMA_DGE_FUSED=apart, another operation adds
ggml_tensor * llama_dge_build_fused(ggml_context * ctx, const llama_hparams & hparams, const llama_dge_layer & layer,
        bool flash_attn, ggml_backend_buffer_t buf, ggml_tensor * q, ggml_tensor * k, ggml_tensor * mask,
        ggml_tensor * weights, ggml_tensor * acc, float norm);

void llama_dge_build_sums(llama_dge & dge, const llama_dge_layer & layer, llm_graph_result & res,
        llm_graph_input_dge & inp, const llama_ubatch & ubatch, ggml_tensor * q_cur, ggml_tensor * k,
        ggml_tensor * kq_mask);

void llama_dge_build_bias(llama_dge & dge, const llama_dge_layer & layer, llm_graph_result & res,
        const llama_ubatch & ubatch, ggml_tensor *& kq_mask, ggml_tensor *& kq_b);
