"""``llama_context``: members that the adapter ``llama_dge_ctx`` uses as a friend, and the order of a decode."""

from __future__ import annotations

from .probe import Count, Order, Probe

_CTX = ("src/llama-dge-ctx.h", "src/llama-dge-ctx.cpp")
_MEMORY = ("src/llama-dge-memory.cpp",)

PROBES = (
    Probe(
        name="context-members",
        file="src/llama-context.h",
        what="`loras` (adapter to scale), `abort_callback`, `abort_callback_data`",
        why="adapters that entries were made with; an abort inside a selection",
        ours=_CTX,
        code="""
#include "llama-context.h"
HAS(llama_context::loras, std::unique_ptr<std::unordered_map<llama_adapter_lora *, float>>);
HAS(llama_context::abort_callback, ggml_abort_callback);
HAS(llama_context::abort_callback_data, void *);
""",
        broken=("llama_adapter_loras_ptr loras;", "llama_adapter_loras loras;"),
    ),
    Probe(
        name="context-reserve",
        file="src/llama-context.h",
        what="`sched_need_reserve` makes the next decode set up the scheduler; `backend_ptrs` and "
        "`backend_buf_exp_size` hold what the context expects of its buffers",
        why="room for our nodes and memory in the scheduler, and no warning about it",
        ours=_CTX,
        code="""
#include "llama-context.h"
HAS(llama_context::sched_need_reserve, bool);
HAS(llama_context::backend_ptrs, std::vector<ggml_backend_t>);
HAS(llama_context::backend_buf_exp_size, std::vector<size_t>);
""",
        broken=("bool sched_need_reserve = true;", "bool sched_reserved = false;"),
        texts=(
            Order(
                "src/llama-context.cpp",
                (
                    "void llama_context::sched_reserve() { if (!sched_need_reserve) { return; }",
                    "const size_t max_nodes = this->graph_max_nodes(n_tokens);",
                ),
            ),
        ),
    ),
    Probe(
        name="context-interface",
        file="src/llama-context.h",
        what="`get_sched`, `get_gf_res_reserve`, `graph_compute`, `graph_max_nodes`, `sched_reserve`, `memory_update`, "
        "`synchronize`, `get_model`, `get_cparams`, `get_memory`, `state_seq_*`, `memory_breakdown`",
        why="graphs of our own in the context's scheduler; states of layers that are not evicted",
        ours=_CTX,
        code="""
#include "llama-context.h"
#include "llama-model.h"
HAS(&llama_context::get_sched, ggml_backend_sched_t (llama_context::*)() const);
HAS(&llama_context::get_gf_res_reserve, llm_graph_result * (llama_context::*)() const);
HAS(&llama_context::graph_compute, ggml_status (llama_context::*)(ggml_cgraph *, bool));
HAS(&llama_context::graph_max_nodes, uint32_t (llama_context::*)(uint32_t) const);
HAS(&llama_context::sched_reserve, void (llama_context::*)());
HAS(&llama_context::memory_update, bool (llama_context::*)(bool));
HAS(&llama_context::synchronize, void (llama_context::*)());
HAS(&llama_context::n_threads, uint32_t (llama_context::*)() const);
HAS(&llama_context::get_model, const llama_model & (llama_context::*)() const);
HAS(&llama_context::get_cparams, const llama_cparams & (llama_context::*)() const);
HAS(&llama_context::get_memory, llama_memory_i * (llama_context::*)() const);
HAS(&llama_context::state_seq_get_size, size_t (llama_context::*)(llama_seq_id, llama_state_seq_flags));
HAS(&llama_context::state_seq_get_data,
    size_t (llama_context::*)(llama_seq_id, uint8_t *, size_t, llama_state_seq_flags));
HAS(&llama_context::state_seq_set_data,
    size_t (llama_context::*)(llama_seq_id, const uint8_t *, size_t, llama_state_seq_flags));
size_t probe(const llama_context & lctx) {
    size_t n = 0;
    for (const auto & [buft, data] : lctx.memory_breakdown()) {
        n += data.context + data.compute;
    }
    return n;
}
""",
        broken=(
            "ggml_status graph_compute(ggml_cgraph * gf, bool batched);",
            "ggml_status graph_compute(ggml_cgraph * gf);",
        ),
    ),
    Probe(
        name="context-settings",
        file="src/llama-cparams.h",
        what="`llama_cparams`: `causal_attn`, `embeddings`, `flash_attn`, `n_ubatch`; `llama_model`: `arch`, "
        "`hparams`, `split_mode`",
        why="what is refused; how attention is computed",
        ours=_CTX,
        code="""
#include "llama-cparams.h"
#include "llama-model.h"
HAS(llama_cparams::causal_attn, bool);
HAS(llama_cparams::embeddings, bool);
HAS(llama_cparams::flash_attn, bool);
HAS(llama_cparams::n_ubatch, uint32_t);
HAS(llama_model::arch, llm_arch);
HAS(llama_model::hparams, llama_hparams);
HAS(&llama_model::split_mode, llama_split_mode (llama_model::*)() const);
static_assert(LLM_ARCH_GROK != LLM_ARCH_UNKNOWN && LLAMA_SPLIT_MODE_TENSOR != LLAMA_SPLIT_MODE_LAYER);
""",
        broken=("bool flash_attn;", "llama_flash_attn_type flash_attn;"),
    ),
    Probe(
        name="hparams",
        file="src/llama-hparams.h",
        what="`n_head`, `n_head_kv`, `n_embd_head_k/v`, `n_embd_k/v_gqa`, `is_swa`, `n_swa`, `is_mla`, "
        "`n_pos_per_embd`, `f_max_alibi_bias`, `attn_soft_cap`, `f_attn_logit_softcapping`, `causal_attn`, "
        "`indexer_head_size`, `ple_n_heads`, `no_alloc`",
        why="shapes, and what is refused",
        ours=(*_CTX, "src/llama-dge-kv.cpp"),
        code="""
#include "llama-hparams.h"
HAS(&llama_hparams::n_head, uint32_t (llama_hparams::*)(uint32_t) const);
HAS(&llama_hparams::n_head_kv, uint32_t (llama_hparams::*)(uint32_t) const);
HAS(&llama_hparams::n_embd_head_k, uint32_t (llama_hparams::*)(uint32_t) const);
HAS(&llama_hparams::n_embd_head_v, uint32_t (llama_hparams::*)(uint32_t) const);
HAS(&llama_hparams::n_embd_k_gqa, uint32_t (llama_hparams::*)(uint32_t) const);
HAS(&llama_hparams::n_embd_v_gqa, uint32_t (llama_hparams::*)(uint32_t) const);
HAS(&llama_hparams::is_swa, bool (llama_hparams::*)(uint32_t) const);
HAS(&llama_hparams::is_mla, bool (llama_hparams::*)() const);
HAS(&llama_hparams::n_pos_per_embd, uint32_t (llama_hparams::*)() const);
HAS(llama_hparams::n_swa, uint32_t);
HAS(llama_hparams::f_max_alibi_bias, float);
HAS(llama_hparams::attn_soft_cap, bool);
HAS(llama_hparams::f_attn_logit_softcapping, float);
HAS(llama_hparams::causal_attn, bool);
HAS(llama_hparams::indexer_head_size, uint32_t);
HAS(llama_hparams::ple_n_heads, uint32_t);
HAS(llama_hparams::no_alloc, bool);
""",
        broken=("uint32_t n_head_kv(uint32_t il = 0) const;", "uint32_t n_kv_head(uint32_t il = 0) const;"),
    ),
    Probe(
        name="decode-order",
        file="src/llama-context.cpp",
        what="`decode` runs `sched_reserve`, `memory_update`, `init_batch`; a null context makes it return -2, "
        "one that failed to prepare makes it return 1, after one more update",
        why="the moment of an eviction; growth before a batch; refusal of batches that continue a lost sequence",
        ours=(*_MEMORY, "src/llama-dge-whole.cpp"),
        texts=(
            Order(
                "src/llama-context.cpp",
                (
                    "int llama_context::decode(const llama_batch_ext & batch_inp) {",
                    "if (!balloc->init(batch_inp, vocab, output_all)) {",
                    "sched_reserve();",
                    "memory_update(false);",
                    "mctx = memory->init_batch(*balloc, cparams.n_ubatch, output_all); if (!mctx) { return -2; }",
                    "case LLAMA_MEMORY_STATUS_FAILED_PREPARE:",
                    "if (memory_update(true)) {",
                    "return 1;",
                    "const auto & ubatch = mctx->get_ubatch();",
                    "process_ubatch(ubatch,",
                    "memory->seq_rm(s, pos_min[s], -1);",
                ),
            ),
        ),
    ),
    Probe(
        name="decode-update",
        file="src/llama-context.cpp",
        what="`memory_update` asks `init_update` for a status, resets graphs, applies, and reserves with `init_full`",
        why="an eviction is a memory update; graphs are built again after it",
        ours=_MEMORY,
        texts=(
            Order(
                "src/llama-context.cpp",
                (
                    "bool llama_context::memory_update(bool optimize) {",
                    "const auto mctx = memory->init_update(this, optimize); switch (mctx->get_status()) {",
                    "case LLAMA_MEMORY_STATUS_NO_UPDATE: { // no updates need to be performed return false; }",
                    "res->reset();",
                    "if (!mctx->apply()) {",
                    "const auto mctx = memory->init_full();",
                ),
            ),
        ),
    ),
    Probe(
        name="decode-ubatch",
        file="src/llama-context.cpp",
        what="`process_ubatch` applies the memory context first, then builds the graph or uses the last one again",
        why="what a graph captures fits the cells of its ubatch",
        ours=("src/llama-dge-graph.cpp",),
        texts=(
            Order(
                "src/llama-context.cpp",
                (
                    "llm_graph_result * llama_context::process_ubatch(",
                    "if (mctx && !mctx->apply()) {",
                    "res->can_reuse(gparams)",
                    "model.build_graph(gparams)",
                ),
            ),
        ),
    ),
    Probe(
        name="decode-nodes",
        file="src/llama-context.cpp",
        what="`graph_max_nodes` ends with a factor for training; only `sched_reserve` asks it",
        why="nodes that capture, sums and bias add to a graph",
        ours=("src/llama-dge-graph.cpp",),
        texts=(
            Order(
                "src/llama-context.cpp",
                (
                    "uint32_t llama_context::graph_max_nodes(uint32_t n_tokens) const {",
                    "if (cparams.training) { res *= 4; }",
                    "return res;",
                ),
            ),
            Count("src/*.cpp", "graph_max_nodes(", 2),
        ),
    ),
    Probe(
        name="state-tensors",
        file="src/llama-context.cpp",
        what="tensors of a state are copied when its reader is destroyed, unless it was told to discard them",
        why="a cache may grow while a state is read",
        ours=("src/llama-dge-state.cpp",),
        texts=(
            Order(
                "src/llama-context.cpp",
                (
                    "class llama_io_read_host : public llama_io_read_i {",
                    "~llama_io_read_host() {",
                    "ggml_backend_tensor_set(rinfo.tensor, rinfo.ptr, rinfo.offset, rinfo.size);",
                    "void discard() override { rinfos.clear(); }",
                ),
            ),
        ),
    ),
    Probe(
        name="state-files",
        file="src/llama-context.cpp",
        what="a reader of files does not check how much is left (0030 adds that)",
        why="states that are truncated; 0030 goes when upstream checks",
        ours=("../patches/0030-states-refuse-files-that-are-cut-off.patch",),
        texts=(
            Order(
                "src/llama-context.cpp",
                (
                    "class llama_io_read_file : public llama_io_read_i {",
                    "void read(void * dst, size_t size) override { file->read_raw(dst, size);",
                ),
            ),
        ),
    ),
)
