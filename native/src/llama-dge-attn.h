#pragma once

#include "llama-dge-ctx.h"
#include "llama-dge-kv.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

// Attention that keys receive from queries, as the layer's own attention computes it: of an eviction (keys in the cache),
// of recall (keys of the host copy) and of H2O (keys in the cache, inside the model's graph).

// transient memory of one graph where a device does not have the fused operation is kept near this: KV heads, then
// queries, are taken in blocks
static constexpr int64_t LLAMA_DGE_SCORE_BLOCK = 24ll * 1024 * 1024;

// nodes of a block of ordinary operations, and of a block of heads beside its blocks of queries
static constexpr int64_t LLAMA_DGE_BLOCK_NODES = 20;
static constexpr int64_t LLAMA_DGE_HEAD_NODES  = 16;

// what the attention of a layer needs besides Q and K
struct llama_dge_attn {
    float kq_scale   = 0.0f;
    float soft_cap   = 0.0f; // 0: none
    bool  flash_attn = false;

    ggml_tensor * sinks = nullptr; // F32 [n_head], may be null
};

struct llama_dge_score_args {
    llama_dge_attn attn;

    ggml_tensor * q    = nullptr; // F32 [n_embd_head, n_q, n_head]
    ggml_tensor * k    = nullptr; // [n_embd_head, n_kv, n_head_kv] as it lies; null: only `k_all` can be used
    ggml_tensor * mask = nullptr; // [n_kv, n_q]; null: every query sees every key

    // The ordinary operations read these rows of all keys instead, since a free cell may hold NaN. null: the fused operation
    // computes in any case
    ggml_tensor * k_all  = nullptr; // [n_embd_head*n_head_kv, n_cells]
    ggml_tensor * k_rows = nullptr; // I32 [n_kv]

    ggml_tensor * weights = nullptr; // F32 [n_q], of each query; null: 1
    ggml_tensor * acc     = nullptr; // F32 [n_kv, n_head_kv], the result is added to it; null: a tensor of its own
    float         norm    = 1.0f;    // the sum over queries and the group is multiplied by it

    ggml_backend_buffer_t buf        = nullptr; // of K and acc: its device computes; null: the CPU
    int64_t               max_blocks = 0;       // of the ordinary operations; 0: no limit
};

// false where the environment has LLAMA_DGE_FUSED=0: ordinary operations are used
bool llama_dge_use_fused();

// F32 [n_kv, n_head_kv]: sum over queries and the heads of a group of softmax(q*k). By the fused operation, or where the
// device does not have it, by ordinary ones
ggml_tensor * llama_dge_build_scores(ggml_context * ctx, ggml_cgraph * gf, const llama_dge_score_args & args);

// nodes that this adds to a graph at most
int64_t llama_dge_score_nodes(const llama_dge_kv_layer & layer, int64_t n_kv, int64_t n_q);

// Attention that rows [0, n_past) of a sequence receive from the queries in rows q_rows of `q` (F32 [n_embd_q, ...]), which
// are those of the positions [p0, p0 + q_rows.size()), each with all rows up to its own. Mean over queries and the group,
// [n_head_kv][n_past]. cells: by position. A status
int32_t llama_dge_score_cells(llama_dge_ctx & lctx, const llama_dge_kv & kv, size_t i, uint32_t strm,
        const llama_dge_attn & attn, const std::vector<uint32_t> & cells, ggml_tensor * q,
        const std::vector<int32_t> & q_rows, llama_pos p0, int32_t n_past, std::vector<float> & scores);

// Scores keys in host memory on the CPU. Its memory serves one selection after the other.
class llama_dge_cpu_scorer {
public:
    // nullptr: out of memory
    static std::unique_ptr<llama_dge_cpu_scorer> create();

    void configure(int32_t n_threads, ggml_abort_callback abort, void * abort_data);

    // Attention of the last n of n_q queries, q: [n_head][n_q][n_embd_head], to n_rows rows of K; the last query sees all
    // of them. sinks: [n_head], or empty. Mean over queries and the group, [n_head_kv][n_rows]. A status
    int32_t score(const llama_dge_kv_layer & layer, const llama_dge_attn & attn, const std::vector<float> & sinks,
            const std::vector<float> & q, int32_t n_q, int32_t n, const uint8_t * k, int32_t n_rows,
            std::vector<float> & scores);

private:
    ggml_backend_ptr backend;
    ggml_gallocr_ptr galloc;

    std::vector<uint8_t> meta; // of the graph
    std::vector<float>   mask;
};
