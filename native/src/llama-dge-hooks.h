#pragma once

#include "llama.h"

#include <cstdint>
#include <memory>

// Call sites of DGE in llama.cpp's own files. Every function accepts a null `dge` and then does what stock does.

struct llama_dge;
struct llama_hparams;
struct llama_ubatch;
class llama_batch_allocr;
class llama_kv_cache;
class llm_graph_result;
class llama_io_read_i;
class llama_io_write_i;

struct llama_dge_deleter {
    void operator()(llama_dge * dge) const;
};

using llama_dge_ptr = std::unique_ptr<llama_dge, llama_dge_deleter>;

//
// elastic memory
//

// cells that a new cache begins with; kv_size where it is not elastic
uint32_t llama_dge_start_size(const llama_hparams & hparams, uint32_t kv_size);

// nullptr where the cache has all its cells already
llama_dge_ptr llama_dge_new_elastic(llama_kv_cache & kv, uint32_t kv_size_max);

// another context is going to use the tensors of this cache: they must not move any more. throws std::runtime_error
void llama_dge_on_share(llama_kv_cache * kv);

// the batch will need cells; they are made by the memory update that follows
void llama_dge_on_decode(llama_context & lctx, const llama_batch & batch);

// a state of n_cells cells will be read into the stream (of seq_id, if it is not negative)
void llama_dge_on_state_cells(llama_dge * dge, uint32_t strm, llama_seq_id seq_id, uint32_t n_cells);

//
// sequence life; p0 and p1 may be negative as in llama_memory_i
//

void llama_dge_on_clear(llama_dge * dge);

// false: refused, change nothing
bool llama_dge_on_seq_rm(llama_dge * dge, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
bool llama_dge_on_seq_cp(llama_dge * dge, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1);
bool llama_dge_on_seq_shift(llama_dge * dge, llama_seq_id seq_id);

void llama_dge_on_seq_keep(llama_dge * dge, llama_seq_id seq_id);

// the same questions without a change, for memories that consist of two
bool llama_dge_may_seq_rm(const llama_dge * dge, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
bool llama_dge_may_seq_cp(
        const llama_dge * dge, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1);
bool llama_dge_may_seq_shift(const llama_dge * dge, llama_seq_id seq_id);

// pos_min, or the first position from which on no row is missing
llama_pos llama_dge_seq_pos_min(const llama_dge * dge, llama_seq_id seq_id, llama_pos pos_min);

bool llama_dge_any_cut(const llama_dge * dge);

//
// the cut is a memory update: it runs at the start of llama_decode()
//

bool llama_dge_is_due(const llama_dge * dge);
bool llama_dge_update(llama_dge * dge, llama_context * lctx);

//
// attention of one layer, called behind the store of K and V and in front of the attention itself
//

// q_cur:   [n_embd_head, n_head, n_tokens] as attention uses it (RoPE and rotation applied)
// k:       the view of the cache that attention reads
// kq_mask, kq_b: replaced where rows of this layer must not be attended
void llama_dge_build_attn(llama_dge * dge, llm_graph_result * res, const llama_ubatch & ubatch, ggml_tensor * q_cur,
        ggml_tensor * k, ggml_tensor *& kq_mask, ggml_tensor *& kq_b, ggml_tensor * sinks, float kq_scale, int il);

// nodes that this adds to a graph of n_tokens at the most
uint32_t llama_dge_graph_max_nodes(const llama_context & lctx, uint32_t n_tokens);

//
// state: a section in front of the cache's own data, written only if it holds a sequence that was cut
//

// llama_state_seq_flags: rows that are out of the sliding window of the last position, too. Of states that stay inside.
static constexpr uint32_t LLAMA_DGE_STATE_FLAG_ALL_ROWS = 1u << 31;

void llama_dge_state_write(const llama_dge * dge, llama_io_write_i & io, llama_seq_id seq_id);

// `n_stream` is what the reader found in the place of the stream count; where it is the mark of a section, the section
// is read and n_stream replaced by the real count. throws std::runtime_error
void llama_dge_state_read(llama_dge * dge, llama_io_read_i & io, llama_seq_id seq_id, uint32_t & n_stream);
void llama_dge_state_read_end(llama_dge * dge);
