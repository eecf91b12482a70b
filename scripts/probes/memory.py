"""The interface of a memory, which our decorator implements, and where llama.cpp creates and unwraps memories."""

from __future__ import annotations

from .probe import Count, Order, Probe

_MEMORY = ("src/llama-dge-memory.cpp",)

PROBES = (
    Probe(
        name="memory-interface",
        file="src/llama-memory.h",
        what="`llama_memory_i`: these virtual functions and no other",
        why="our memory forwards each of them; one that it does not know would act on nothing",
        ours=_MEMORY,
        code="""
#include "llama-memory.h"
struct probe : llama_memory_i {
    llama_memory_context_ptr init_batch(llama_batch_allocr &, uint32_t, bool) override;
    llama_memory_context_ptr init_full() override;
    llama_memory_context_ptr init_update(llama_context *, bool) override;
    bool get_can_shift() const override;
    void clear(bool) override;
    bool seq_rm(llama_seq_id, llama_pos, llama_pos) override;
    void seq_cp(llama_seq_id, llama_seq_id, llama_pos, llama_pos) override;
    void seq_keep(llama_seq_id) override;
    void seq_add(llama_seq_id, llama_pos, llama_pos, llama_pos) override;
    void seq_div(llama_seq_id, llama_pos, llama_pos, int) override;
    llama_pos seq_pos_min(llama_seq_id) const override;
    llama_pos seq_pos_max(llama_seq_id) const override;
    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;
    void state_write(llama_io_write_i &, llama_seq_id, llama_state_seq_flags) const override;
    void state_read(llama_io_read_i &, llama_seq_id, llama_state_seq_flags) override;
};
static_assert(!std::is_abstract_v<probe>);
HAS(llama_memory_ptr().get(), llama_memory_i *);
""",
        broken=("virtual bool get_can_shift() const = 0;", "virtual bool can_shift() const = 0;"),
        texts=(Count("src/llama-memory.h", "virtual ", 21),),
    ),
    Probe(
        name="memory-context",
        file="src/llama-memory.h",
        what="`llama_memory_context_i`: `next`, `apply`, `get_ubatch`, `get_status`; four values of "
        "`llama_memory_status`",
        why="the context of an update, which evicts; a refused batch",
        ours=_MEMORY,
        code="""
#include "llama-memory.h"
struct probe : llama_memory_context_i {
    bool next() override;
    bool apply() override;
    const llama_ubatch & get_ubatch() const override;
    llama_memory_status get_status() const override;
};
static_assert(!std::is_abstract_v<probe>);
static_assert(LLAMA_MEMORY_STATUS_SUCCESS == 0 && LLAMA_MEMORY_STATUS_NO_UPDATE == 1 &&
              LLAMA_MEMORY_STATUS_FAILED_PREPARE == 2 && LLAMA_MEMORY_STATUS_FAILED_COMPUTE == 3);
""",
        broken=("virtual bool apply() = 0;", "virtual bool apply(bool last) = 0;"),
    ),
    Probe(
        name="memory-io",
        file="src/llama-io.h",
        what="`llama_io_write_i` and `llama_io_read_i`: these virtual functions and no other",
        why="the section of an evicted sequence in a state; a state that is read twice",
        ours=("src/llama-dge-state.cpp",),
        code="""
#include "llama-io.h"
struct writer : llama_io_write_i {
    void write(const void *, size_t) override;
    void write_tensor(ggml_tensor *, size_t, size_t) override;
    size_t n_bytes() override;
};
struct reader : llama_io_read_i {
    void read(void *, size_t) override;
    void read_tensor(ggml_tensor *, size_t, size_t) override;
    void discard() override;
    size_t n_bytes() override;
};
static_assert(!std::is_abstract_v<writer> && !std::is_abstract_v<reader>);
""",
        broken=("virtual void discard() {}", "virtual void cancel() {}"),
        texts=(Count("src/llama-io.h", "virtual ", 9),),
    ),
    Probe(
        name="memory-factory",
        file="src/llama-model.h",
        what="`create_memory` makes every memory, and one line of `llama_context`'s constructor calls it",
        why="the one place where ours is put around it",
        ours=_MEMORY,
        code="""
#include "llama-model.h"
HAS(&llama_model::create_memory,
    llama_memory_i * (llama_model::*)(const llama_memory_params &, const llama_cparams &) const);
HAS(llama_memory_params::mem_other, llama_memory_i *);
""",
        broken=(
            "llama_memory_i * create_memory(const llama_memory_params & params,",
            "llama_memory_ptr create_memory(const llama_memory_params & params,",
        ),
        texts=(
            Order("src/llama-context.cpp", ("memory.reset(model.create_memory(params_mem, cparams));",)),
            Count("src/*.cpp", "create_memory(", 2),
            Count("src/*.cpp", "memory.reset(", 1),
        ),
    ),
    Probe(
        name="memory-other",
        file="src/llama-kv-cache.cpp",
        what="a memory that is shared with another context comes from `llama_get_memory(cparams.ctx_other)`, "
        "twice, and is cast to its class without a check",
        why="both must get the memory that ours is around",
        ours=_MEMORY,
        texts=(
            Count("src/*.cpp", "llama_get_memory(cparams.ctx_other)", 2),
            Count("src/*.cpp", "*>(mem_other)", 3),
            Order("src/llama-kv-cache.cpp", ("other(static_cast<llama_kv_cache *>(mem_other))",)),
        ),
    ),
    Probe(
        name="memory-contexts",
        file="src/llama-graph.cpp",
        what="graphs cast the context of a memory to its class without a check",
        why="`init_batch` and `init_full` of ours must return the contexts of the memory that it is around",
        ours=_MEMORY,
        texts=(
            Order(
                "src/llama-graph.cpp",
                (
                    "llm_graph_input_attn_kv * llm_graph_context::build_attn_inp_kv() const { const auto * mctx_cur = "
                    "static_cast<const llama_kv_cache_context *>(mctx);",
                    "static_cast<const llama_kv_cache_iswa_context *>(mctx);",
                    "static_cast<const llama_memory_hybrid_context *>(mctx);",
                ),
            ),
        ),
    ),
    Probe(
        name="memory-kinds",
        file="src/llama-memory-hybrid.h",
        what="ten kinds of memory; the cache of global layers is `get_base()`, `get_mem_attn()` or the memory "
        "itself, that of sliding windows `get_swa()`. A new kind must be refused by `llama_dge_supported()` until "
        "it is handled",
        why="sliding-window and hybrid models",
        ours=("src/llama-dge-ctx.cpp",),
        code="""
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
HAS(&llama_kv_cache_iswa::get_base, llama_kv_cache * (llama_kv_cache_iswa::*)() const);
HAS(&llama_kv_cache_iswa::get_swa, llama_kv_cache * (llama_kv_cache_iswa::*)() const);
HAS(&llama_memory_hybrid::get_mem_attn, llama_kv_cache * (llama_memory_hybrid::*)() const);
HAS(&llama_memory_hybrid_iswa::get_mem_attn, llama_kv_cache_iswa * (llama_memory_hybrid_iswa::*)() const);
static_assert(std::is_base_of_v<llama_memory_i, llama_kv_cache_iswa> &&
              std::is_base_of_v<llama_memory_i, llama_memory_hybrid> &&
              std::is_base_of_v<llama_memory_i, llama_memory_hybrid_iswa>);
""",
        broken=("llama_kv_cache * get_mem_attn() const;", "llama_memory_i * get_mem_attn() const;"),
        texts=(Count("src/*.h", "public llama_memory_i {", 9), Count("src/*.h", "public llama_memory_hybrid {", 1)),
    ),
    Probe(
        name="memory-partial",
        file="src/llama-kv-cache-iswa.cpp",
        what="a state starts with the cache of global layers; with `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY` it holds "
        "sliding-window and recurrent layers alone",
        why="the section of an evicted sequence in a state; host copies of layers that are not evicted",
        ours=("src/llama-dge-ctx.cpp", "src/llama-dge-memory.cpp"),
        texts=(
            Order(
                "src/llama-kv-cache-iswa.cpp",
                (
                    "if ((flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == 0) { kv_base->state_write(io, seq_id, "
                    "flags); }",
                    "kv_swa->state_write(io, seq_id, flags);",
                    "kv_base->state_read(io, seq_id, flags); }",
                    "kv_swa->state_read(io, seq_id, flags);",
                ),
            ),
            Order(
                "src/llama-memory-hybrid.cpp",
                (
                    "if ((flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == 0) { mem_attn->state_write(io, seq_id, "
                    "flags); }",
                    "mem_recr->state_write(io, seq_id, flags);",
                    "if (read_attn) { mem_attn->state_read(io, seq_id, flags); }",
                    "mem_recr->state_read(io, seq_id, flags);",
                ),
            ),
        ),
    ),
    Probe(
        name="memory-calls",
        file="src/llama-context.cpp",
        what="the public `llama_memory_*` functions, states and the batch go through the virtual functions of the "
        "context's memory",
        why="the rules for an evicted sequence are checked in ours",
        ours=_MEMORY,
        texts=(
            Order(
                "src/llama-context.cpp",
                (
                    "memory->state_write(io);",
                    "memory->state_read(io);",
                    "memory->state_write(io, seq_id, flags);",
                    "memory->state_read(io, seq_id, flags);",
                    "mem->clear(data);",
                    "return mem->seq_rm(seq_id, p0, p1);",
                    "mem->seq_cp(seq_id_src, seq_id_dst, p0, p1);",
                    "mem->seq_keep(seq_id);",
                    "mem->seq_add(seq_id, p0, p1, delta);",
                    "mem->seq_div(seq_id, p0, p1, d);",
                    "return mem->seq_pos_min(seq_id);",
                    "return mem->seq_pos_max(seq_id);",
                    "return mem->get_can_shift();",
                ),
            ),
            Count("src/llama-batch.cpp", "mem->seq_pos_max(s)", 2),
        ),
    ),
)
