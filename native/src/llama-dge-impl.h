#pragma once

#include "llama-dge-hooks.h"
#include "llama-dge-settings.h"
#include "llama-dge.h"
#include "llama-kv-cache.h"

#include "llama-dge-park.h"

#include "ggml-cpp.h"

#include <array>
#include <bitset>
#include <memory>
#include <string>
#include <vector>

// tells data that is damaged or another from that which is expected; not meant against anybody
uint64_t llama_dge_hash(uint64_t hash, const void * data, size_t size);

// fault injection, see llama_dge_debug_fail_alloc() and llama_dge_debug_fail_move()
bool llama_dge_alloc_fails();
bool llama_dge_move_fails();

// the same, as a backend tells that it cannot copy: throws std::runtime_error
void llama_dge_check_move();

// a choice among the parked rows, made here or by a thread
struct llama_dge_choice;

struct llama_dge_scratch;

struct llama_dge_queries_header;

// the fast product of the CPU takes keys in such multiples
static constexpr int32_t LLAMA_DGE_KEYS_PAD = 16;

struct llama_dge_choice_deleter {
    void operator()(llama_dge_choice * choice) const;
};

using llama_dge_choice_ptr = std::unique_ptr<llama_dge_choice, llama_dge_choice_deleter>;

// rows that the parked ones may grow by before they move to more memory
static constexpr size_t LLAMA_DGE_PARK_SPARE = 1024;

// transient memory of H2O's sums in a graph, where there is no fused operation
static constexpr int64_t LLAMA_DGE_SUMS_BLOCK = 24ll * 1024 * 1024;

// rows of bias that layer i needs for a kept set: 0, 1 or n_head
int64_t llama_dge_bias_rows(const llama_dge_kept & kept, size_t i, int64_t n_head);

// cells of an elastic cache of at most n_max that holds n_rows, and of one that shrinks to n_rows
int32_t llama_dge_elastic_cells(int32_t n_rows, int32_t n_max);
uint32_t llama_dge_shrunk_cells(uint32_t n_rows);

// what DGE knows of one sequence
struct llama_dge_seq {
    int32_t state = LLAMA_DGE_STATE_FULL;
    int32_t error = LLAMA_DGE_OK;

    bool force  = false; // cut at the next update even if the draft is not complete
    bool warned = false; // one warning per armed prompt

    int32_t n_prompt = 0;

    // set by the cut
    int32_t n_draft  = 0;
    int32_t budget   = 0;
    int32_t n_before = 0;
    int32_t n_after  = 0;

    llama_pos boundary = -1;
    llama_pos pos_min  = -1;

    llama_dge_kept kept; // past rows per layer of the cache and head, by slot

    int64_t bytes_before = 0;
    int64_t bytes_after  = 0;
    int64_t bytes_kept   = 0;

    // not of the cut: rows [0, n_summed) are in the sums of H2O, each once and no other; -1 until the sequence is cleared
    int32_t n_summed = 0;

    bool uneven = false; // layers or heads hold unlike numbers of rows

    int64_t t_score_us   = 0;
    int64_t t_select_us  = 0;
    int64_t t_compact_us = 0;
    int64_t t_park_us    = 0;

    // recall
    int32_t n_checked = 0;     // rows at the latest choice or look
    float   mass      = -1.0f; // RECALL_AUTO: attention that the rows held just after the latest choice, -1: unknown
    int64_t n_recalls = 0;
    int64_t n_checks  = 0;
    int64_t n_moved   = 0;
    int64_t t_recall_us = 0;

    // the rows of before the cut; shared with copies of the sequence
    std::shared_ptr<llama_dge_parked> parked;

    int32_t n_exact = 0; // parked rows that are those of before the cut: fewer where draft rows were removed since

    // not of the cut, either
    llama_dge_origin origin;

    int32_t n_restored   = 0;
    int64_t t_restore_us = 0;
};

// K and V of one layer in a buffer of their own
struct llama_dge_layer_mem {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

    ggml_tensor * k = nullptr;
    ggml_tensor * v = nullptr;

    std::vector<ggml_tensor *> k_stream;
    std::vector<ggml_tensor *> v_stream;
};

// what a layer's attention needs besides Q and K; recorded when the graph is built
struct llama_dge_layer {
    int32_t il = -1;

    ggml_tensor * ring = nullptr; // F32 [n_embd_head_k*n_head, n_ring*n_seq], last queries of each sequence
    ggml_tensor * sums = nullptr; // F32 [kv_size, n_head_kv, n_stream], attention that a cell got (H2O)
    ggml_tensor * bias =
            nullptr; // F32 [kv_size, 1 or n_head, n_stream], -inf: this layer (and head) has no row in the cell

    ggml_tensor * sinks    = nullptr;
    float         kq_scale = 0.0f;
    bool          seen     = false; // the graph passed here
    bool          has_bias = false; // a bias is added to KQ: scores would be wrong
};

struct llama_dge {
    using bufs_t = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>>;

    llama_dge(llama_kv_cache & kv, uint32_t n_seq);
    ~llama_dge();

    // sliding-window layers beside the cache that can be cut, nullptr if there are none
    static llama_kv_cache * get_swa(const llama_context & lctx);

    // may rows from n on be removed? a cache of sliding windows that forgets needs the n_swa rows in front of them
    bool window_reaches(const llama_context & lctx, llama_seq_id seq_id, int32_t n) const;

    // recurrent layers likewise
    static bool has_recurrent(const llama_context & lctx);

    // LoRA adapters in force and their scales
    static llama_dge_adapters get_adapters(const llama_context & lctx);

    // the context's own, also while a batch is refused
    static llama_memory_i * get_memory(const llama_context & lctx);

    static void set_memory(llama_context & lctx, llama_memory_ptr memory);

    // nullptr if eviction can work on this context, else the reason
    static const char * unsupported(const llama_context & lctx);

    // the cache that can be cut, nullptr if there is none
    static llama_kv_cache * get_kv(const llama_context & lctx);

    // does the table of budgets have the model's layers and heads?
    static bool table_fits(const llama_context & lctx, const llama_dge_settings & settings);

    static void estimate(const llama_context & lctx, const llama_dge_settings & settings, int32_t n_prompt, bool elastic,
            llama_dge_estimate & res);

    // false: out of memory, nothing changed
    bool set_params(const llama_dge_settings & params);

    // free all that eviction needs; the cache stays elastic
    void set_off();

    // bytes of queries, sums and biases
    int64_t own_bytes() const;

    //
    // capture
    //

    struct capture_row {
        int32_t   src; // row of the ubatch
        int64_t   dst; // slot of the ring
        llama_pos pos;
    };

    // does the row take part in the scores of a cut still to come?
    bool captures(llama_seq_id seq_id, llama_pos pos) const;

    // rows of the ubatch whose queries are stored
    std::vector<capture_row> capture_plan(const llama_ubatch & ubatch) const;

    // weight of each row of the ubatch in the sums, 0 or 1; empty where none counts
    std::vector<float> sum_plan(const llama_ubatch & ubatch) const;

    // does a sequence of the ubatch have layers or heads with unlike numbers of rows?
    bool bias_plan(const llama_ubatch & ubatch) const;

    // the graph is about to run
    void capture_begin(const std::vector<capture_row> & rows);
    void sum_begin(const llama_ubatch & ubatch, const std::vector<float> & weights);

    // [n_stream][n_kv] cells to read K from: those in use, and one of these in place of each free one, since what a free
    // cell holds may be no number
    std::vector<int32_t> sum_cells(const llama_ubatch & ubatch, int64_t n_kv, int64_t n_stream) const;

    // [n_stream][n_kv] 1: the cell is older than the ubatch, 0: it is new, or free
    std::vector<float> sum_keep(const llama_ubatch & ubatch, int64_t n_kv, int64_t n_stream) const;

    uint32_t max_nodes(uint32_t n_tokens) const;

    // first stream of the ubatch
    uint32_t stream_begin(const llama_ubatch & ubatch) const;

    bool captured(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;

    void capture_drop(llama_seq_id seq_id, llama_pos p0);

    // ascending
    std::vector<llama_pos> captured_pos(llama_seq_id seq_id) const;

    // see llama_dge_seq_get_queries(), _set_queries()
    size_t  queries_get(llama_seq_id seq_id, uint8_t * dst, size_t size) const;
    int32_t queries_set(llama_seq_id seq_id, const uint8_t * src, size_t size);

    // of this model, nothing captured
    llama_dge_queries_header queries_header() const;

    // queries at these positions into the ring, of a sequence of n_rows; src: for each layer [n_embd_q][pos.size()]
    void ring_set(llama_seq_id seq_id, const std::vector<int32_t> & pos, int32_t n_rows, const uint8_t * src);

    //
    // cut
    //

    bool is_due(llama_seq_id seq_id) const;

    int32_t arm(llama_seq_id seq_id, int32_t n_prompt);

    bool any_cut() const;

    // forget all but what was captured
    void reset_seq(llama_seq_id seq_id);

    // are rows [0, n_rows) in the sums, where sums are needed?
    bool summed(llama_seq_id seq_id, int32_t n_rows) const;

    bool call_select(int32_t il, int32_t n_past, int32_t n, const llama_dge_ranks & ranks,
            std::vector<llama_dge_rows> & rows) const;

    // all or nothing
    int32_t cut(llama_context & lctx, llama_seq_id seq_id);

    // cells[i]: cell of position i; empty if the sequence does not hold exactly the positions 0 .. n-1
    int32_t map_cells(llama_seq_id seq_id, std::vector<uint32_t> & cells) const;

    // attention that rows [0, n_past) receive from the queries at [p0, p1), softmax over all rows up to the query
    int32_t score_layer(llama_context & lctx, size_t ikv, llama_seq_id seq_id, const std::vector<uint32_t> & cells,
            llama_pos p0, llama_pos p1, int32_t n_past, std::vector<float> & scores) const;

    // sums of the first n rows of a layer over the heads of a group, [n_head_kv][n]
    void read_sums(size_t ikv, llama_seq_id seq_id, const std::vector<uint32_t> & cells, int32_t n,
            std::vector<float> & res) const;

    // ... and back; data: [n_head_kv][stride], of which the rows that `cells` has are taken
    void write_sums(size_t ikv, llama_seq_id seq_id, const std::vector<uint32_t> & cells,
            const std::vector<float> & data, int32_t stride);

    // ERR_MEMORY, ERR_PARK: nothing changed; ERR_LOST: the sequence was lost
    int32_t compact(llama_context & lctx, llama_seq_id seq_id, const std::vector<uint32_t> & cells,
            const llama_dge_kept & kept, int32_t n_past);

    // a device failed while rows moved: the sequence is emptied, or all are (-1), and no batch may go on with it
    void lose(llama_context * lctx, llama_seq_id seq_id);

    // the batch at hand fails if it goes on with a lost sequence; one that begins at position 0 is not lost any more
    void refuse(llama_context & lctx);

    //
    // elastic memory
    //

    // with which adapters the rows of a batch are made
    void note_adapters(const llama_context & lctx, const llama_batch & batch);

    // cells of a stream that other sequences than this one use; none for all sequences (-1)
    uint32_t cells_used(uint32_t strm, llama_seq_id seq_id) const;

    // cells that the next batch needs, 0 where they are there or cannot be made
    uint32_t cells_wanted() const;

    // tensors of a layer for caches of n_cells; without a `buf` one is allocated and zeroed. false: out of memory
    bool alloc_layer(size_t ikv, uint32_t n_cells, llama_dge_layer_mem & mem) const;

    // other tensors of the same layer get what the first n_copy cells hold; throws where a device cannot copy
    void copy_cells(const llama_dge_layer_mem & dst, size_t ikv, uint32_t n_copy) const;

    // layer by layer; resize_end() makes the number of cells fit what the tensors have
    void resize_begin();
    void swap_layer(size_t ikv, llama_dge_layer_mem & mem);
    void resize_cells(uint32_t n_cells); // shifts that wait are kept
    bool can_resize() const;
    void resize_end(uint32_t n_cells);

    // false: the device failed, and what the cells hold is lost
    bool shrink_in_place(size_t ikv, uint32_t n_cells, std::vector<uint8_t> & spare);

    // all layers get n_cells, one after the other; false: out of memory, or a device failed, and nothing changed
    bool resize(uint32_t n_cells);

    // more cells, if n_rows of them are needed in a stream
    bool grow(uint32_t n_rows);

    // one above the highest cell in use when the sequence has only cells below n_own
    uint32_t cells_top(llama_seq_id seq_id, uint32_t n_own) const;

    // cells that are enough then
    uint32_t shrunk_size(uint32_t n_top) const;

    int64_t cell_bytes() const;

    //
    // park and restore
    //

    // nullptr: status tells
    std::shared_ptr<llama_dge_parked> park_begin(
            llama_context & lctx, llama_seq_id seq_id, const std::vector<uint32_t> & cells, int32_t & status) const;

    // rows of a layer, in the order of cells, from the cache into `rows` (from its row row0 on) and back; data_k and
    // data_v: what the tensors of the cache hold, where it is on the host already
    void park_layer(llama_dge_park_layer & rows, size_t row0, size_t ikv, llama_seq_id seq_id,
            const std::vector<uint32_t> & cells, const uint8_t * data_k = nullptr,
            const uint8_t * data_v = nullptr) const;
    void unpark_layer(const llama_dge_park_layer & rows, size_t ikv, llama_seq_id seq_id,
            const std::vector<uint32_t> & cells) const;

    // of all sequences, each store once
    int64_t parked_bytes() const;

    // can the layers that are not cut be put back to position n?
    bool others_fit(const llama_context & lctx, const llama_dge_parked & parked, int32_t n) const;

    //
    // recall
    //

    bool recalls() const { return params.recalls(); }

    // cells of a sequence that was cut: those of past rows by slot, the others by position from pos_min on
    int32_t map_cut_cells(llama_seq_id seq_id, std::vector<uint32_t> & slots, std::vector<uint32_t> & tail) const;

    // rows that were decoded since the latest choice join the parked ones
    int32_t park_append(llama_seq_id seq_id, const std::vector<uint32_t> & tail);

    // a choice that begins with the last queries and all parked rows of the sequence
    llama_dge_choice_ptr new_choice(llama_context & lctx, llama_seq_id seq_id, int32_t n_rows);

    // its memory serves the next one
    void end_choice(llama_dge_choice_ptr choice);

    // share of the last query's attention that the rows in the cache hold, estimated in a few layers
    int32_t held_mass(llama_dge_choice & choice, llama_seq_id seq_id, float & mass) const;

    // what is put where; ERR_MEMORY: nothing changed, ERR_LOST: the sequence was lost
    int32_t place(llama_seq_id seq_id, std::vector<uint32_t> & slots, const std::vector<uint32_t> & tail,
            const llama_dge_kept & chosen, int32_t n_past);

    // what a choice among n_prompt rows starts from, scores to come
    void select_input(int32_t n_prompt, int32_t budget, llama_dge_select_input & input) const;

    // the choice takes effect
    int32_t take(llama_dge_choice & choice, llama_seq_id seq_id, std::vector<uint32_t> & slots,
            const std::vector<uint32_t> & tail);

    // rows from p0 on are removed from the sequence
    void park_truncate(llama_seq_id seq_id, llama_pos p0);

    // one choice; NOTHING_TO_EVICT where none was needed
    int32_t refresh(llama_context & lctx, llama_seq_id seq_id);

    // rows that are there afterwards, or a status
    int32_t restore(llama_context & lctx, llama_seq_id seq_id, int32_t n_match);

    // ERR_MEMORY, or ERR_UNSUPPORTED where a layer's attention cannot take such a bias
    int32_t bias_reserve(const llama_dge_kept & kept);

    // the rows of a sequence changed
    void bias_changed(llama_seq_id seq_id);

    // bring the bias on the devices up to date
    void bias_sync();

    // F32 tensors beside the K of each layer, zeroed; a shape of no elements gives none. false: out of memory
    using shapes_t = std::vector<std::array<int64_t, 3>>;

    bool alloc_tensors(
            const char * name, const shapes_t & shapes, std::vector<ggml_tensor *> & res, bufs_t & bufs) const;

    const llama_hparams & hparams() const;

    // of the model and the layout of its cache
    static uint64_t fingerprint(const llama_kv_cache & kv);

    // KV heads of a layer of the cache
    uint32_t n_head_kv(size_t ikv) const;

    // bytes of K and V per row, all layers of the cache
    int64_t row_bytes() const;

    // bytes of the rows that are attended: kept ones and n_tail more in each layer and head
    int64_t kept_bytes(const llama_dge_kept & kept, int32_t n_tail) const;

    // the scheduler is set up again before the next graph
    void request_reserve(llama_context & lctx) const;

    // the scores may have needed more compute memory than any graph of the model, which the context would warn of
    void expect_buffers(llama_context & lctx) const;

    void info(llama_seq_id seq_id, llama_dge_seq_info & info) const;

    void poison(uint16_t pattern, int32_t & n_cells);

    llama_kv_cache & kv;

    const uint32_t n_seq;

    // elastic: the cache has kv.get_size() <= n_cells_max cells, each layer a buffer of its own once they changed
    uint32_t n_cells_max;
    bool     elastic  = false;
    bool     own_bufs = false;
    bufs_t   staged; // buffers of a resize that is going on, while not own_bufs

    std::vector<uint32_t> n_new; // rows per stream of the next batch

    bool state_sized = false; // a stream of the state that is being read has its cells

    llama_context * lctx = nullptr;

    const llama_batch * batch = nullptr; // of the llama_decode() that goes on, nullptr in other calls

    std::bitset<LLAMA_MAX_SEQ> lost; // sequences, those that eviction does not know included

    std::vector<llama_dge_choice_ptr>              choices; // [n_seq] those of threads
    std::vector<std::unique_ptr<llama_dge_scratch>> scorers; // not in use

    llama_dge_settings params;

    uint32_t n_ring = 0; // query rows per sequence

    std::vector<llama_dge_layer> layers;   // by index of the cache's layers
    std::vector<llama_pos>       ring_pos; // [n_seq*n_ring] position stored in a slot, -1: none

    bufs_t ring_bufs;
    bufs_t sums_bufs;
    bufs_t bias_bufs;

    bool     bias_dirty   = false;
    uint64_t bias_version = 0; // graphs that hold another one are built again

    std::vector<llama_dge_seq> seqs; // [n_seq]

    bool active  = true;  // false: eviction is off (yet, or being switched off), capture nothing
    bool rebuild = false; // graphs must be built again: report an update without doing one

    int64_t n_evictions = 0;

    // sequences of a state that is being read; they take effect when the cells are there
    std::vector<std::pair<llama_seq_id, llama_dge_seq>> pending;
};
