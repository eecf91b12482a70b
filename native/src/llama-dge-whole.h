#pragma once

#include "llama-dge-attn.h"
#include "llama-dge-bias.h"
#include "llama-dge-elastic.h"
#include "llama-dge-move.h"
#include "llama-dge-ring.h"
#include "llama-dge-selector.h"
#include "llama-dge-seq.h"
#include "llama-dge-settings.h"
#include "llama-dge-sums.h"

#include <memory>
#include <string>
#include <vector>

struct llama_batch;

// Eviction of one context: there as long as the context, idle while it is off. The method is told by enable(), arm(),
// update() and restore(); the rest is what llama.cpp asks and reports in between.
struct llama_dge {
    llama_dge(llama_context & lctx, llama_memory_i & memory, llama_kv_cache & cache);
    ~llama_dge();

    //
    // the method; statuses of llama-dge.h
    //

    int32_t enable(const llama_dge_settings & settings_new);
    int32_t disable();

    // the prompt is complete
    int32_t arm(llama_seq_id seq_id, int32_t n_prompt);

    // evict at the next update, without waiting for the draft
    int32_t evict_now(llama_seq_id seq_id);

    // is there anything to do before the next batch: an eviction, a selection, more cells?
    bool is_due() const;

    // do it
    void update();

    // entries that are back, or a status
    int32_t restore(llama_seq_id seq_id, int32_t n_match);

    // how many of the first n_match entries a prompt may reuse
    int32_t reuse(llama_seq_id seq_id, int32_t n_prompt, int32_t n_match) const;

    //
    // batches
    //

    // false: the batch continues a sequence that was lost. An elastic cache learns how many cells it needs
    bool may_add(const llama_batch & batch);

    // there are cells for it, and its graphs follow
    void will_add(const llama_batch & batch);

    //
    // sequences. Each may_ answers without a change; the other one is told when llama.cpp has done it
    //

    // what happens to a sequence when [p0, p1) is removed; -1: nothing. Ask before the removal
    int32_t removal(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;

    bool may_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;
    bool may_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) const;
    bool may_shift(llama_seq_id seq_id) const;

    void removed(llama_seq_id seq_id, int32_t event, llama_pos p0);
    void copied(llama_seq_id src, llama_seq_id dst);
    void kept_only(llama_seq_id seq_id);
    void shifted(llama_seq_id seq_id);

    // a state of n_cells will be read into the stream (of seq_id, if it is not negative)
    void state_cells(uint32_t strm, llama_seq_id seq_id, uint32_t n_cells);

    // a state was read into the sequence, which was emptied before: nullptr where nothing was evicted
    void loaded(llama_seq_id seq_id, llama_dge_seq * seq);

    // another context is going to use the tensors of the cache: they must not move. throws
    void share();

    // OK, or why the event is refused; then nothing changed
    int32_t on(llama_seq_id seq_id, llama_dge_event event);

    bool any(llama_dge_phase phase) const;
    bool any_evicted() const;

    // may the sequence be evicted? may the cache hold it?
    bool knows(llama_seq_id seq_id) const { return seq_id >= 0 && (uint32_t) seq_id < kv.n_seq(); }
    bool holds(llama_seq_id seq_id) const { return seq_id >= 0 && (size_t) seq_id < seqs.size(); }

    //
    // graphs
    //

    // are the query and the attention of a token recorded?
    bool captures(llama_seq_id seq_id, llama_pos pos) const;

    uint32_t max_nodes(uint32_t n_tokens) const;

    //
    // captured queries and sums outside of the context, see llama_dge_seq_get_queries(), _set_queries()
    //

    size_t  queries_get(llama_seq_id seq_id, uint8_t * dst, size_t size) const;
    int32_t queries_set(llama_seq_id seq_id, const uint8_t * src, size_t size);

    //
    // reports
    //

    void info(llama_seq_id seq_id, llama_dge_seq_info & info) const;

    int64_t parked_bytes() const; // of all sequences, each host copy once
    int64_t own_bytes() const;

    //
    // parts
    //

    llama_dge_kv      kv;
    llama_dge_ctx     ctx;
    llama_dge_elastic elastic;

    std::unique_ptr<llama_dge_ring> ring; // never null
    std::unique_ptr<llama_dge_sums> sums; // never null
    llama_dge_bias                  bias;

    llama_dge_settings settings;

    // attention of a layer, as its graph was built
    struct layer {
        llama_dge_attn attn;

        bool seen     = false; // a graph passed here
        bool has_bias = false; // a bias is added to KQ: scores would be wrong
    };

    std::vector<layer> layers;

    std::vector<llama_dge_seq> seqs; // of all ids that the cache can hold

    bool active  = false; // eviction is on
    bool rebuild = false; // graphs hold old tensors: the next update has something to do

    int64_t n_evictions = 0;

private:
    bool is_due(llama_seq_id seq_id) const;

    llama_dge_place place() { return { kv, ctx, elastic }; }

    // a device failed while entries moved: the sequence is emptied, or all are (-1)
    void lose(llama_seq_id seq_id);

    // status of a move, after what it lost is gone
    int32_t settle(llama_seq_id seq_id, const llama_dge_moved & moved);

    // what the scores of a selection among n_prompt entries start from
    void select_input(int32_t n_prompt, int32_t budget, llama_dge_select_input & input) const;

    bool call_select(int32_t il, int32_t n_past, int32_t n, const llama_dge_ranks & ranks,
            std::vector<llama_dge_rows> & rows) const;

    // all or nothing
    int32_t evict(llama_seq_id seq_id);

    // the scores of an eviction. A status
    int32_t score(llama_seq_id seq_id, const std::vector<uint32_t> & cells, llama_dge_select_input & input);

    // recall: one selection; NOTHING_TO_EVICT where none was needed
    int32_t recall(llama_seq_id seq_id);

    int32_t park_tail(llama_seq_id seq_id, const std::vector<uint32_t> & tail);

    llama_dge_selection_ptr new_selection(llama_seq_id seq_id, int32_t n_rows);

    void end_selection(llama_dge_selection_ptr selection); // its memory serves the next one

    // the selection takes effect. A status
    int32_t apply(llama_dge_selection & selection, llama_seq_id seq_id, const std::vector<uint32_t> & slots,
            const std::vector<uint32_t> & tail);

    llama_memory_i & memory;

    std::vector<llama_dge_selection_ptr>               selections; // of threads, by sequence
    std::vector<std::unique_ptr<llama_dge_cpu_scorer>> scorers;    // not in use
};
