#pragma once

#include "llama-dge-attn.h"
#include "llama-dge-select.h"
#include "llama-dge-store.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

// A selection among all entries of the host copy, by the attention of a sequence's last queries. It has copies of all that
// changes while decoding goes on, and reads host copy entries that nobody changes before it has ended: so a thread can make
// it.
class llama_dge_selection {
public:
    llama_dge_selection(const llama_dge_kv & kv, std::shared_ptr<llama_dge_store> store) :
        kv(kv), store(std::move(store)) {}
    ~llama_dge_selection();

    llama_dge_selection(const llama_dge_selection &)             = delete;
    llama_dge_selection & operator=(const llama_dge_selection &) = delete;

    // what the attention of the next layer needs; q: [n_head][n_q][n_embd_head], sinks: [n_head] or empty
    void add_layer(const llama_dge_attn & attn, std::vector<float> q, std::vector<float> sinks);

    // the selection itself: status and chosen
    void run();

    // the same in a thread; wait() before anything else is done with it
    void start();
    void wait();

    // Share of the last query's attention that a kept set and the entries from pos_min on hold, estimated in a few layers.
    // A status
    int32_t held_mass(const llama_dge_kept & kept, llama_pos pos_min, float & mass);

    int32_t n_rows = 0; // entries to choose from, window included
    int32_t n_q    = 0; // last queries

    llama_dge_select_input input;
    llama_dge_kept         chosen;
    int32_t                status = 0;

    std::unique_ptr<llama_dge_cpu_scorer> scorer; // nullptr: attention is not needed

    std::atomic<bool> cancel { false };

private:
    struct layer {
        llama_dge_attn attn;

        std::vector<float> q;
        std::vector<float> sinks;
    };

    int32_t score(size_t i, int32_t n, std::vector<float> & scores);

    const llama_dge_kv & kv;

    std::shared_ptr<llama_dge_store> store;
    std::vector<layer>               layers;

    std::thread thread;
};

using llama_dge_selection_ptr = std::unique_ptr<llama_dge_selection>;
