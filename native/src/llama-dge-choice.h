#pragma once

#include "llama-dge-park.h"
#include "llama-dge-select.h"

#include "ggml-cpp.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

struct llama_hparams;
struct llama_dge_layer;

// memory that choices use one after the other
struct llama_dge_scratch {
    ggml_backend_ptr backend; // the CPU's: the parked keys are host memory
    ggml_gallocr_ptr galloc;

    std::vector<uint8_t> meta; // of the graph
    std::vector<float>   mask;
};

using llama_dge_scratch_ptr = std::unique_ptr<llama_dge_scratch>;

// nullptr: out of memory
llama_dge_scratch_ptr llama_dge_new_scratch();

// what a choice needs to know of a layer
struct llama_dge_choice_layer {
    int32_t il;

    int64_t n_embd_head;
    int64_t n_head;
    int64_t n_head_kv;

    ggml_type type_k;
    float     kq_scale;

    std::vector<float> q;     // [n_head][n_q][n_embd_head], the last queries
    std::vector<float> sinks; // [n_head], may be empty
};

// A choice among all rows of a sequence, by the attention of its last queries. It has copies of all that changes while
// decoding goes on, and reads the parked rows, which nobody changes before it has ended: so a thread can make it.
struct llama_dge_choice {
    explicit llama_dge_choice(const llama_hparams & hparams);
    ~llama_dge_choice();

    llama_dge_choice(const llama_dge_choice &)             = delete;
    llama_dge_choice & operator=(const llama_dge_choice &) = delete;

    // attention of the last n queries to the rows of layer i, mean over these and the group: [n_head_kv][n_rows]
    int32_t score(size_t i, int32_t n, std::vector<float> & scores);

    // the whole choice: status and chosen
    void run();

    // the same in a thread; wait() before anything else is done with it
    void start();
    void wait();

    const llama_hparams & hparams;

    const bool
            fused; // by the fused operation, which reads K as F32; else by a graph that multiplies it in its own type

    std::shared_ptr<llama_dge_parked> parked;

    int32_t n_rows     = 0;
    int32_t n_q        = 0;
    bool    flash_attn = false;

    std::vector<llama_dge_choice_layer> layers;

    llama_dge_select_input input;
    llama_dge_kept         chosen;
    int32_t                status = 0;

    llama_dge_scratch_ptr scorer;

    std::atomic<bool> cancel { false };
    std::thread       thread;

private:
    int32_t score_fused(size_t i, int32_t n, std::vector<float> & scores);
    int32_t score_graph(size_t i, int32_t n, std::vector<float> & scores);

    int32_t compute(ggml_context * ctx, ggml_tensor * out);
};
