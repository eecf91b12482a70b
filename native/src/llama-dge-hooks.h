#pragma once

#include "llama.h"

#include <cstdint>

// Call sites in llama.cpp's own files

struct llama_dge;
struct llama_hparams;
struct llama_memory_i;
struct llama_ubatch;
class llm_graph_result;

// the memory of a new context: one that evicts, around the memory that llama.cpp made, or that one itself
llama_memory_i * llama_dge_new_memory(llama_context & lctx, llama_memory_i * memory);

// the memory that llama.cpp made, for another context that uses its tensors: they do not move from now on; throws
llama_memory_i * llama_dge_share_memory(llama_memory_i * memory);

// cells that a new cache starts with; kv_size where it is not elastic
uint32_t llama_dge_start_size(const llama_hparams & hparams, uint32_t kv_size);

// a state of n_cells cells will be read into the stream (of seq_id, if it is not negative)
void llama_dge_on_state_cells(llama_dge * dge, uint32_t strm, llama_seq_id seq_id, uint32_t n_cells);

// llama_state_seq_flags: entries outside the sliding window of the last position as well; of states that stay inside
static constexpr uint32_t LLAMA_DGE_STATE_FLAG_ALL_ROWS = 1u << 31;

// attention of one layer, called behind the store of K and V and before the attention itself
//
// q_cur:   [n_embd_head, n_head, n_tokens] as attention uses it (RoPE and rotation applied)
// k:       the view of the cache that attention reads
// kq_mask, kq_b: replaced where entries of this layer must not be attended
void llama_dge_build_attn(llama_dge * dge, llm_graph_result * res, const llama_ubatch & ubatch, ggml_tensor * q_cur,
        ggml_tensor * k, ggml_tensor *& kq_mask, ggml_tensor *& kq_b, ggml_tensor * sinks, float kq_scale, int il);

// nodes that this adds to a graph of n_tokens at most
uint32_t llama_dge_graph_max_nodes(const llama_context & lctx, uint32_t n_tokens);
