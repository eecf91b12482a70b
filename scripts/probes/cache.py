"""``llama_kv_cache``: members that the adapter ``llama_dge_kv`` uses as a friend, and what the cache does with them."""

from __future__ import annotations

from .probe import Order, Probe

_KV = ("src/llama-dge-kv.h", "src/llama-dge-kv.cpp")
_RESIZE = ("src/llama-dge-kv-resize.cpp", "src/llama-dge-elastic.cpp")

PROBES = (
    Probe(
        name="cache-layers",
        file="src/llama-kv-cache.h",
        what="`llama_kv_cache::layers`: `il`, `k`, `v` (null without a V cache), `k_stream`, `v_stream`",
        why="finding, scoring and moving entries",
        ours=(*_KV, "src/llama-dge-kv-entries.cpp"),
        code="""
#include "llama-kv-cache.h"
HAS(llama_kv_cache::layers, std::vector<llama_kv_cache::kv_layer>);
HAS(llama_kv_cache::kv_layer::il, uint32_t);
HAS(llama_kv_cache::kv_layer::k, ggml_tensor *);
HAS(llama_kv_cache::kv_layer::v, ggml_tensor *);
HAS(llama_kv_cache::kv_layer::k_stream, std::vector<ggml_tensor *>);
HAS(llama_kv_cache::kv_layer::v_stream, std::vector<ggml_tensor *>);
""",
        broken=("std::vector<kv_layer> layers;", "std::vector<kv_layer> stages;"),
    ),
    Probe(
        name="cache-shape",
        file="src/llama-kv-cache.h",
        what="`v_trans`, `n_stream`, `n_seq_max`, `hparams`, `model` and its `tensors_by_name`",
        why="layout of a layer; fingerprint of the model in states",
        ours=_KV,
        code="""
#include "llama-kv-cache.h"
#include "llama-model.h"
HAS(llama_kv_cache::v_trans, bool);
HAS(llama_kv_cache::n_stream, const uint32_t);
HAS(llama_kv_cache::n_seq_max, const uint32_t);
HAS(llama_kv_cache::hparams, const llama_hparams &);
HAS(llama_kv_cache::model, const llama_model &);
HAS(llama_model::tensors_by_name, std::vector<std::pair<std::string, ggml_tensor *>>);
""",
        broken=("bool v_trans = true;", "int v_trans = 1;"),
    ),
    Probe(
        name="cache-cells",
        file="src/llama-kv-cache.h",
        what="`v_cells` (one `llama_kv_cells` per stream), `v_heads`, `seq_to_stream`",
        why="freeing and numbering cells; where the search for free cells begins",
        ours=_KV,
        code="""
#include "llama-kv-cache.h"
HAS(llama_kv_cache::v_cells, std::vector<llama_kv_cells> &);
HAS(llama_kv_cache::v_heads, std::vector<uint32_t>);
HAS(llama_kv_cache::seq_to_stream, std::vector<uint32_t>);
""",
        broken=("llama_kv_cells_vec & v_cells;", "llama_kv_cells_vec * v_cells;"),
    ),
    Probe(
        name="cache-sharing",
        file="src/llama-kv-cache.h",
        what="`other`, `v_cells_impl` and `map_layer_ids` show a cache, or a layer, that is shared",
        why="what is refused; an elastic cache must not move tensors that another context uses",
        ours=_KV,
        code="""
#include "llama-kv-cache.h"
HAS(llama_kv_cache::other, llama_kv_cache *);
HAS(llama_kv_cache::v_cells_impl, std::shared_ptr<llama_kv_cells_vec>);
HAS(llama_kv_cache::map_layer_ids, std::unordered_map<int32_t, int32_t>);
""",
        broken=("llama_kv_cache * other;", "llama_memory_i * other;"),
    ),
    Probe(
        name="cache-buffers",
        file="src/llama-kv-cache.h",
        what="`ctxs_bufs` owns the buffers; only the constructor, `clear` and `memory_breakdown` look at it",
        why="elastic caches put new buffers there",
        ours=_RESIZE,
        code="""
#include "llama-kv-cache.h"
HAS(llama_kv_cache::ctxs_bufs, std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>>);
""",
        broken=(
            "std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs;",
            "std::vector<ggml_backend_buffer_ptr> ctxs_bufs;",
        ),
        texts=(
            Order(
                "src/llama-kv-cache.cpp",
                (
                    "ctxs_bufs.emplace_back(",
                    "void llama_kv_cache::clear(bool data) {",
                    "for (auto & [_, buf] : ctxs_bufs) {",
                ),
            ),
        ),
    ),
    Probe(
        name="cache-size",
        file="src/llama-kv-cache.cpp",
        what="the constructor allocates for `kv_size` cells, which only the arrays of cells remember; views take their "
        "strides from `get_size()`",
        why="elastic caches: cells and tensors change their size together",
        ours=_RESIZE,
        texts=(
            Order(
                "src/llama-kv-cache.cpp",
                (
                    "GGML_ASSERT(kv_size % n_pad == 0);",
                    "v_cells[s].resize(kv_size);",
                    "ggml_new_tensor_3d(ctx, type_k, n_embd_k_gqa, kv_size, n_stream)",
                    "uint32_t llama_kv_cache::get_size() const { const auto & cells = v_cells[seq_to_stream[0]]; "
                    "return cells.size(); }",
                    "ggml_tensor * llama_kv_cache::get_k(",
                    "const uint64_t kv_size = get_size();",
                    "ggml_tensor * llama_kv_cache::get_v(",
                    "const uint64_t kv_size = get_size();",
                ),
            ),
        ),
    ),
    Probe(
        name="cache-interface",
        file="src/llama-kv-cache.h",
        what="`get_size`, `get_n_kv`, `get_has_shift`, `slot_info`",
        why="cells that attention reads; shifts that wait",
        ours=_KV,
        code="""
#include "llama-kv-cache.h"
HAS(&llama_kv_cache::get_size, uint32_t (llama_kv_cache::*)() const);
HAS(&llama_kv_cache::get_n_kv, uint32_t (llama_kv_cache::*)(const llama_kv_cache::slot_info &) const);
HAS(&llama_kv_cache::get_has_shift, bool (llama_kv_cache::*)() const);
HAS(llama_kv_cache::slot_info::strm, std::vector<llama_seq_id>);
""",
        broken=("bool get_has_shift() const;", "bool has_shift() const;"),
    ),
    Probe(
        name="cells",
        file="src/llama-kv-cells.h",
        what="cells are set and removed one by one (`pos_set`, `ext_set`, `seq_add`, `seq_rm`, `rm`, `resize`, "
        "`pos_add`) and tell `pos_get`, `seq_has`, `seq_count`, `get_shift`, `used_min`, `used_max_p1`; "
        "`llama_kv_cell_ext` is plain data",
        why="freeing and numbering cells; cells of a host copy",
        ours=(*_KV, "src/llama-dge-kv-resize.cpp"),
        code="""
#include "llama-kv-cells.h"
void probe(llama_kv_cells & cells, llama_kv_cell_ext ext) {
    cells.resize(1);
    cells.pos_set(0u, llama_pos(0));
    cells.ext_set(0u, ext);
    cells.seq_add(0u, llama_seq_id(0));
    bool moved = cells.pos_add(0u, llama_pos(1));
    bool empty = cells.seq_rm(0u, llama_seq_id(0));
    cells.rm(0u);
    (void) moved;
    (void) empty;
}
HAS(&llama_kv_cells::is_empty, bool (llama_kv_cells::*)(uint32_t) const);
HAS(&llama_kv_cells::pos_get, llama_pos (llama_kv_cells::*)(uint32_t) const);
HAS(&llama_kv_cells::seq_has, bool (llama_kv_cells::*)(uint32_t, llama_seq_id) const);
HAS(&llama_kv_cells::seq_count, int (llama_kv_cells::*)(uint32_t) const);
HAS(&llama_kv_cells::seq_pos_max, llama_pos (llama_kv_cells::*)(llama_seq_id) const);
HAS(&llama_kv_cells::get_shift, llama_pos (llama_kv_cells::*)(uint32_t) const);
HAS(&llama_kv_cells::ext_get, const llama_kv_cell_ext & (llama_kv_cells::*)(uint32_t) const);
HAS(&llama_kv_cells::get_used, uint32_t (llama_kv_cells::*)() const);
HAS(&llama_kv_cells::used_min, uint32_t (llama_kv_cells::*)() const);
HAS(&llama_kv_cells::used_max_p1, uint32_t (llama_kv_cells::*)() const);
static_assert(std::is_trivially_copyable_v<llama_kv_cell_ext>);
""",
        broken=("llama_pos pos_get(uint32_t i) const", "int64_t pos_get(uint32_t i) const"),
    ),
    Probe(
        name="cache-update",
        file="src/llama-kv-cache.cpp",
        what="shifts and stream copies run in `llama_kv_cache::update`, which `apply` calls for a context without "
        "ubatches",
        why="the moment of an eviction: after what waited, before the batch",
        ours=("src/llama-dge-memory.cpp",),
        texts=(
            Order(
                "src/llama-kv-cache.cpp",
                (
                    "bool llama_kv_cache_context::apply() {",
                    "if (ubatches.empty()) {",
                    "kv->update(lctx, do_shift, sc_info);",
                    "kv->apply_ubatch(sinfos[i_cur], ubatches[i_cur]);",
                ),
            ),
        ),
    ),
    Probe(
        name="cache-state",
        file="src/llama-kv-cache.cpp",
        what="`state_write` starts with the number of streams and `state_read` reads it first; a state of one sequence "
        "leaves out cells outside the sliding window",
        why="the section of an evicted sequence in a state; states of layers that are not evicted",
        ours=("src/llama-dge-state.cpp", "src/llama-dge-ctx.cpp"),
        texts=(
            Order(
                "src/llama-kv-cache.cpp",
                (
                    "void llama_kv_cache::state_write(",
                    "io.write(&n_stream, sizeof(n_stream));",
                    "if (add_cell && seq_id != -1) { const bool is_masked = llama_hparams::is_masked_swa(",
                    "io.write(&cell_count, sizeof(cell_count));",
                    "void llama_kv_cache::state_read_sinfo(",
                    "uint32_t n_stream_cur; io.read(&n_stream_cur, sizeof(n_stream_cur));",
                    "io.read(&cell_count, sizeof(cell_count));",
                    "state_read_meta(io, strm, cell_count, sinfo, seq_id,",
                ),
            ),
        ),
    ),
)
