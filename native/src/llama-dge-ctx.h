#pragma once

#include "llama.h"

#include "ggml-backend.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// The adapter to llama_context and to the kinds of memory it may have: the only friend of that class.

struct llama_cparams;
struct llama_hparams;
struct llama_memory_i;
struct llama_model;
class llama_kv_cache;
class llm_graph_result;

// LoRA adapters and their scales
using llama_dge_adapters = std::vector<std::pair<const void *, float>>;

// adapters that the entries of a sequence were made with
struct llama_dge_origin {
    bool known = false; // no: a state brought the entries
    bool mixed = false;

    llama_dge_adapters adapters;

    bool is(const llama_dge_adapters & others) const { return !mixed && (!known || adapters == others); }

    // of entries of both
    llama_dge_origin with(const llama_dge_origin & other) const {
        llama_dge_origin res = known ? *this : other;

        res.mixed = mixed || other.mixed || (known && other.known && adapters != other.adapters);

        return res;
    }

    // entries made with these join; first: there were none
    void join(const llama_dge_adapters & others, bool first) {
        if (!known || first) {
            *this = { true, false, others };
        } else {
            mixed |= adapters != others;
        }
    }
};

class llama_dge_ctx {
public:
    // memory: the context's, as llama.cpp made it
    llama_dge_ctx(llama_context & lctx, llama_memory_i & memory) : lctx(lctx), memory(memory) {}

    // the cache of global attention layers in a memory, nullptr where there is none
    static llama_kv_cache * find_kv(llama_memory_i & memory);

    // nullptr, or why nothing can be evicted with this model or context
    static const char * unsupported(const llama_context & lctx);

    const llama_model &   model() const;
    const llama_cparams & cparams() const;

    llama_dge_adapters adapters() const;

    //
    // layers that are not evicted
    //

    // a cache of sliding windows beside the one that can be evicted, nullptr if there is none
    llama_kv_cache * swa() const;

    bool has_recurrent() const;

    // does a state with these flags leave the cache that can be evicted out?
    bool is_partial(llama_state_seq_flags flags) const;

    // may entries from position n on be removed? a cache of sliding windows needs the n_swa entries before them
    bool window_reaches(llama_seq_id seq_id, int32_t n) const;

    // state of these layers: { bytes, first position of sliding windows in it }; throws
    struct others {
        std::vector<uint8_t> data;
        llama_pos            pos_min = 0;
    };

    bool others_get(llama_seq_id seq_id, others & res) const;

    // can they be put back to position n of a state that was taken at n_all?
    bool others_fit(const others & state, int32_t n, int32_t n_all) const;

    // false: the state could not be read
    bool others_set(llama_seq_id seq_id, const others & state, int32_t n, int32_t n_all);

    //
    // graphs of our own
    //

    ggml_backend_sched_t sched() const;
    llm_graph_result *   graph() const; // its tensors and nodes are free for use between two batches
    uint32_t             graph_max_nodes() const;

    // a status
    int32_t compute(ggml_cgraph * gf);

    void synchronize();
    void wait(); // for the scheduler alone, in the middle of a decode

    int32_t             n_threads() const;
    ggml_abort_callback abort_callback() const;
    void *              abort_data() const;

    // run what is due now, without a batch; throws
    void update();

    // the scheduler is set up again before the next graph
    void request_reserve();

    // what our graphs needed is no fault that the context should warn of
    void expect_buffers();

    // bytes of all memory, and of the graphs
    void memory_bytes(int64_t & context, int64_t & compute) const;

private:
    llama_context &  lctx;
    llama_memory_i & memory;
};
