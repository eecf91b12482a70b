"""Graphs: where attention is built, and the inputs that ours adds."""

from __future__ import annotations

from .probe import Count, Order, Probe

_GRAPH = ("src/llama-dge-graph.cpp", "src/llama-dge-hooks.h")

_ATTENTION = "ggml_tensor * cur = build_attn_mha(q, k, v, kq_b, kq_mask, sinks, v_mla, 0, kq_scale, il);"

PROBES = (
    Probe(
        name="graph-attention",
        file="src/llama-graph.cpp",
        what="`build_attn` of `llm_graph_input_attn_kv` and `..._kv_iswa` has the final `q_cur` (RoPE and "
        "rotation applied), the stored K, `kq_mask`, `kq_b`, `sinks`, `kq_scale` before `build_attn_mha`. A new "
        "overload must be hooked or refused",
        why="capture of queries, sums of H2O, bias of uneven budgets",
        ours=_GRAPH,
        texts=(
            Order(
                "src/llama-graph.cpp",
                (
                    "ggml_tensor * llm_graph_context::build_attn( llm_graph_input_attn_kv * inp,",
                    "q_cur = llama_mul_mat_hadamard(ctx0, q_cur, inp->self_k_rot);",
                    "mctx_cur->cpy_k(ctx0, k_cur, k_idxs, il)",
                    "k = mctx_cur->get_k(ctx0, il);",
                    "ggml_tensor * kq_mask = inp->get_kq_mask();",
                    _ATTENTION,
                    "ggml_tensor * llm_graph_context::build_attn( llm_graph_input_attn_kv_iswa * inp,",
                    "q_cur = llama_mul_mat_hadamard(ctx0, q_cur, k_rot);",
                    "is_swa ? mctx_iswa->get_swa() : mctx_iswa->get_base();",
                    "const auto & kq_mask = is_swa ? inp->get_kq_mask_swa() : inp->get_kq_mask();",
                    _ATTENTION,
                ),
            ),
            Count("src/llama-graph.h", "ggml_tensor * build_attn(", 7),
        ),
    ),
    Probe(
        name="graph-bias",
        file="src/llama-graph.cpp",
        what="a `kq_b` makes attention use soft-max instead of flash attention and is added to the logits; the "
        "mask is f16 with flash attention and f32 without",
        why="bias of uneven budgets; masks of our own graphs",
        ours=("src/llama-dge-bias.cpp", "src/llama-dge-attn.cpp"),
        texts=(
            Order(
                "src/llama-graph.cpp",
                (
                    "const auto type = cparams.flash_attn ? GGML_TYPE_F16 : GGML_TYPE_F32;",
                    "const bool use_flash_attn = cparams.flash_attn && kq_b == nullptr;",
                    "hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f",
                    "if (kq_b) { kq = ggml_add(ctx0, kq, kq_b);",
                    "kq = ggml_soft_max_ext(ctx0, kq, kq_mask, kq_scale, hparams.f_max_alibi_bias);",
                ),
            ),
        ),
    ),
    Probe(
        name="graph-inputs",
        file="src/llama-graph.h",
        what="a graph owns inputs of type `llm_graph_input_i`: `set_input` before each ubatch, `can_reuse` "
        "decides whether the last graph fits",
        why="which queries are captured, weights of the sums, the bias",
        ours=_GRAPH,
        code="""
#include "llama-graph.h"
struct probe : llm_graph_input_i {
    void set_input(const llama_ubatch *) override;
    bool can_reuse(const llm_graph_params &) override;
};
static_assert(!std::is_abstract_v<probe>);
HAS(llm_graph_params::ubatch, llama_ubatch);
HAS(llm_graph_result::inputs, std::vector<std::unique_ptr<llm_graph_input_i>>);
HAS(&llm_graph_result::add_input, llm_graph_input_i * (llm_graph_result::*)(llm_graph_input_ptr));
HAS(&llm_graph_result::get_gf, ggml_cgraph * (llm_graph_result::*)() const);
HAS(&llm_graph_result::get_ctx, ggml_context * (llm_graph_result::*)() const);
HAS(&llm_graph_result::reset, void (llm_graph_result::*)());
""",
        broken=(
            "virtual bool can_reuse(const llm_graph_params & params) {",
            "virtual bool fits(const llm_graph_params & params) {",
        ),
    ),
    Probe(
        name="graph-ubatch",
        file="src/llama-batch.h",
        what="`llama_ubatch`: `n_tokens`, `n_seqs_unq`, `pos`, `n_seq_id`, `seq_id`, `seq_id_unq`; without "
        "sequences where a graph only reserves memory",
        why="positions and sequences of the queries that are captured",
        ours=_GRAPH,
        code="""
#include "llama-batch.h"
HAS(llama_ubatch::n_tokens, uint32_t);
HAS(llama_ubatch::n_seqs_unq, uint32_t);
HAS(llama_ubatch::pos, llama_pos *);
HAS(llama_ubatch::n_seq_id, int32_t *);
HAS(llama_ubatch::seq_id, llama_seq_id **);
HAS(llama_ubatch::seq_id_unq, llama_seq_id *);
""",
        broken=("llama_seq_id * seq_id_unq;", "std::vector<llama_seq_id> seq_id_unq;"),
    ),
    Probe(
        name="graph-batch",
        file="src/llama-batch.h",
        what="`llama_batch_allocr` can be asked for its batch in `init_batch`",
        why="cells that an elastic cache needs; batches that continue a lost sequence",
        ours=("src/llama-dge-memory.cpp",),
        code="""
#include "llama-batch.h"
HAS(&llama_batch_allocr::get_batch, const llama_batch & (llama_batch_allocr::*)() const);
""",
        broken=("const llama_batch & get_batch() const;", "const llama_batch_ext & get_batch() const;"),
    ),
)
