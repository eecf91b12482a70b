#pragma once

#include "llama.h"

#include <stdint.h>

// Draft-Guided Eviction (DGE) of a sequence's KV cache
//
// The prompt is evaluated as always and the first k answer tokens are decoded on the full cache. After that the
// cache is cut once, in place: every layer and KV head keeps its own `budget` rows of the prompt. Decoding goes on
// with unchanged positions over the rows that are left.
//
// How to use it:
//
//   struct llama_dge_params params = llama_dge_default_params();
//   params.budget = 512;
//   if (llama_dge_enable(ctx, &params) != LLAMA_DGE_OK) { ... }
//
//   llama_decode(ctx, prompt);               // in one batch or in many
//   llama_dge_seq_arm(ctx, 0, n_prompt);     // the prompt is complete now
//   llama_decode(ctx, y1); ...               // ordinary decoding: the cut happens by itself at the start of the
//                                            // first llama_decode() that finds n_prompt + k - 1 rows or more
//
// While nothing is enabled, or after llama_dge_disable(), the library behaves bit for bit like stock llama.cpp.
//
// After a cut, for that sequence:
//   - positions go on as if nothing had happened; llama_memory_seq_pos_max() is unchanged
//   - llama_memory_seq_pos_min() is the first position from which on no row is missing
//   - llama_memory_seq_rm() is exact for p0 above the last prompt position, and for the whole sequence; anything
//     else returns false and changes nothing
//   - llama_memory_seq_cp() copies the whole sequence; a part of it is refused with an error in the log
//   - llama_memory_seq_add() and _div() are refused with an error in the log; llama_memory_can_shift() is false
//   - a saved state holds only the rows that are left and can be loaded where DGE is enabled
//   - with `refresh`, the rows are chosen again while the answer is decoded; "last prompt position" above then means the
//     last position of the latest choice
//   - with `park`, the rows of before the cut wait in host memory or in a file: llama_dge_seq_restore() puts them back
//
// A cut, a choice or a restore that fails before its first row moves changes nothing. Where a device fails after that, the
// sequence is emptied and what was parked of it is dropped; others stay as they are, unless the device cannot copy their
// rows, either, and they are emptied, too. llama_dge_seq_info.error is ERR_LOST then. llama_decode() returns -2, with
// nothing of its batch in the cache, if the batch goes on with such a sequence, and so does each later one, until the
// sequence is removed as a whole, cleared, or begun again at position 0.

#ifdef __cplusplus
extern "C" {
#endif

// changes with every change of a signature or a struct in this file
#define LLAMA_DGE_ABI_VERSION 6

// return codes: 0 is success, negative is an error, positive is "nothing was done, and that is fine"
enum llama_dge_status {
    LLAMA_DGE_OK              = 0,
    LLAMA_DGE_NOTHING_TO_CUT  = 1,  // the prompt is not longer than the budget
    LLAMA_DGE_ERR_PARAMS      = -1, // a parameter is out of range
    LLAMA_DGE_ERR_UNSUPPORTED = -2, // see llama_dge_supported()
    LLAMA_DGE_ERR_DISABLED    = -3, // llama_dge_enable() was not called
    LLAMA_DGE_ERR_SEQ         = -4, // no such sequence, or it holds fewer rows than stated, or not from position 0
    LLAMA_DGE_ERR_QUERIES     = -5, // query rows that the scores need were not captured: evaluate the last
                                    // `window` prompt tokens again, see llama_dge_seq_reuse()
    LLAMA_DGE_ERR_SHARED   = -6,    // rows of the sequence belong to another sequence, too
    LLAMA_DGE_ERR_CUT      = -7,    // the sequence was cut already
    LLAMA_DGE_ERR_MEMORY   = -8,    // out of memory
    LLAMA_DGE_ERR_COMPUTE  = -9,    // the scores could not be computed
    LLAMA_DGE_ERR_ABORTED  = -10,   // the abort callback fired; the cut is tried again at the next llama_decode()
    LLAMA_DGE_ERR_CALLBACK = -11,   // the callback of POLICY_CUSTOM failed or returned rows that cannot be kept
    LLAMA_DGE_ERR_PARK     = -12,   // the rows could not be parked, or what was parked is damaged
    LLAMA_DGE_ERR_LOST     = -13, // a device failed while rows moved: the sequence is empty, evaluate its prompt again
};

enum llama_dge_policy {
    LLAMA_DGE_POLICY_SNAPKV       = 0,
    LLAMA_DGE_POLICY_STREAMINGLLM = 1,
    LLAMA_DGE_POLICY_PYRAMIDKV    = 2,
    LLAMA_DGE_POLICY_H2O          = 3, // its own score is summed while the prompt is evaluated
    LLAMA_DGE_POLICY_CUSTOM       = 4, // llama_dge_params.select
};

enum llama_dge_scores {
    LLAMA_DGE_SCORES_DRAFT  = 0, // the queries that produced the first k answer tokens
    LLAMA_DGE_SCORES_POLICY = 1, // the policy's own score
    LLAMA_DGE_SCORES_BOTH   = 2, // both, each pooled and divided by its sum, added
};

enum llama_dge_pooling {
    LLAMA_DGE_POOLING_NONE = 0,
    LLAMA_DGE_POOLING_MAX  = 1,
    LLAMA_DGE_POOLING_AVG  = 2,
};

// PyramidKV: how the integers of its falling line are found
enum llama_dge_layer_budgets {
    LLAMA_DGE_LAYER_BUDGETS_EXACT     = 0, // the mean over the layers is the budget
    LLAMA_DGE_LAYER_BUDGETS_REFERENCE = 1, // as published: leaves more rows than the budget
};

enum llama_dge_head_budgets {
    LLAMA_DGE_HEAD_BUDGETS_UNIFORM  = 0,
    LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE = 1, // Ada-KV: heads share their layer's rows by the scores
    LLAMA_DGE_HEAD_BUDGETS_TABLE    = 2, // llama_dge_params.table
};

// where the rows of before a cut wait
enum llama_dge_park {
    LLAMA_DGE_PARK_OFF  = 0, // nowhere: they are lost
    LLAMA_DGE_PARK_RAM  = 1, // in host memory
    LLAMA_DGE_PARK_DISK = 2, // in a file of park_dir, removed when the rows are of no use any more
};

enum llama_dge_state {
    LLAMA_DGE_STATE_FULL  = 0, // nothing was evicted
    LLAMA_DGE_STATE_ARMED = 1, // a cut will follow
    LLAMA_DGE_STATE_CUT   = 2,
};

// Choice of the rows of one layer: scores [n_head_kv][n_past] as the settings make them, higher = keep; n is the number
// of rows per head that the budget allows. Writes the rows of head h, ascending, to rows[h*n_past ...] and their number
// to n_rows[h]. Runs on the host inside llama_decode(). Non-zero: the sequence is not cut.
typedef int32_t (*llama_dge_select_callback)(void * user_data, int32_t il, int32_t n_head_kv, int32_t n_past, int32_t n,
        const float * scores, int32_t * rows, int32_t * n_rows);

struct llama_dge_params {
    int32_t policy;        // enum llama_dge_policy
    int32_t scores;        // enum llama_dge_scores
    int32_t pooling;       // enum llama_dge_pooling, of the policy's own score
    int32_t draft_pooling; // enum llama_dge_pooling, of the draft's score; with LLAMA_DGE_SCORES_BOTH, NONE means
                           // the same as `pooling`
    int32_t kernel_size;   // of both poolings, odd
    int32_t budget;        // rows per layer and KV head that are left of the prompt, window included
    float   budget_share;  // > 0: this share of the prompt, in (0, 1], instead of `budget`
    int32_t draft_tokens;  // k >= 1; 1 cuts at the end of the prefill
    int32_t window;        // >= 1, last rows of the prompt that always stay, and SnapKV's observation window
    int32_t sinks;         // StreamingLLM: first rows that always stay
    int32_t layer_budgets; // enum llama_dge_layer_budgets
    int32_t head_budgets;  // enum llama_dge_head_budgets; ADAPTIVE needs a policy that ranks by scores

    // HEAD_BUDGETS_TABLE: rows of each layer (in the order of llama_dge_get_layers()) and KV head, window included;
    // [n_table], the heads of the first layer first. Takes the place of `budget`. Copied.
    const int32_t * table;
    int32_t         n_table;

    // POLICY_CUSTOM
    llama_dge_select_callback select;
    void *                    select_user_data;

    int32_t      park;       // enum llama_dge_park
    const char * park_dir;   // PARK_DISK: an existing folder. Copied.
    int64_t      park_limit; // bytes that may be parked at a time, of all sequences; 0: no limit. A cut that would
                             // exceed it is refused with ERR_PARK

    // Recall: the rows are chosen again from the parked ones every `refresh` tokens after the cut, by the last `window`
    // queries, pooled (`scores` does not count). All rows compete, generated ones too, so that `budget` rows per layer
    // and KV head are attended however long the answer is. 0: never; REFRESH_AUTO: when it pays. Needs PARK_RAM.
    int32_t refresh;
    float   refresh_mass; // REFRESH_AUTO: choose again when the rows at hold less than this share of the attention that
                          // they held when they were chosen, in (0, 1]

    // A thread makes the choice while decoding goes on with the rows of the one before: what synchronous choices would
    // do, one choice late. Not with POLICY_CUSTOM.
    bool refresh_overlap;
};

#define LLAMA_DGE_REFRESH_AUTO (-1)

// what is known of a sequence; all zero (boundary and pos_min: -1) where it does not apply
struct llama_dge_seq_info {
    int32_t   state;         // enum llama_dge_state
    int32_t   error;         // enum llama_dge_status, of the last attempt to cut
    int32_t   n_prompt;      // rows of the prompt, as armed
    int32_t   n_draft;       // rows after the prompt when it was cut
    int32_t   budget;        // rows of the prompt that may stay (a share is resolved), on average over layers and heads
    int32_t   n_rows_before; // rows per layer and KV head just before the cut
    int32_t   n_rows_after;  // ... and just after, in the layer and head with the most
    int32_t   n_rows;        // cells that the sequence holds now, counted in the cache
    int32_t   n_kv;          // cells that attention reads now for a batch of this sequence (padding included)
    int32_t   n_layer;       // layers that were cut
    llama_pos boundary;      // last prompt position: rows above it can be removed
    llama_pos pos_min;       // first position from which on no row is missing
    int64_t   bytes_before;  // K and V of this sequence in the layers that were cut, just before the cut
    int64_t   bytes_after;   // ... and just after, cells that only some layers or heads use included
    int64_t   bytes_kept;    // K and V of the rows that are really attended
    int64_t   t_score_us;    // microseconds: scores on the device
    int64_t   t_select_us;   //               choice of the rows on the host
    int64_t   t_compact_us;  //               rows moved, cells freed
    int64_t   n_cuts;        // cuts in this context since it was enabled, of all sequences
    int32_t   n_parked;      // rows that llama_dge_seq_restore() could put back, from 0 on; no draft rows removed since
    int32_t   n_restored; // rows that the last restore of this sequence put back; 0: there was none since it was empty
    int64_t   bytes_parked;
    int64_t   t_park_us;    // microseconds: rows parked, part of t_compact_us
    int64_t   t_restore_us; //               the last restore
    int64_t   n_refresh;    // choices after the cut, since the sequence was empty
    int64_t   n_checks;     // REFRESH_AUTO: looks at the last query's attention
    int64_t   n_moved;      // rows of one layer and head that these choices moved into the cache
    int64_t   t_refresh_us; // microseconds of all of them, checks included
};

// bytes that a context uses, over all devices
struct llama_dge_memory_info {
    int64_t weights; // tensors of the model, each once
    int64_t kv;      // buffers of the cache that can be cut, as they are now
    int64_t kv_max;  // ... at their full size
    int64_t other;   // other memory of the context: sliding-window caches, recurrent states
    int64_t compute; // buffers of the graphs, as they are now
    int64_t dge;     // captured queries, sums, biases
    int64_t parked;
    int32_t n_cells; // cells of the cache, per stream, as they are now
    int32_t n_cells_max;
};

LLAMA_API int32_t llama_dge_abi_version(void);

LLAMA_API struct llama_dge_params llama_dge_default_params(void);

// a short sentence in English for a return code; static memory
LLAMA_API const char * llama_dge_status_str(int32_t status);

// LLAMA_DGE_OK, or LLAMA_DGE_ERR_UNSUPPORTED with the reason in English in `reason` (up to n bytes with the
// terminator; may be NULL)
LLAMA_API int32_t llama_dge_supported(const struct llama_context * ctx, char * reason, size_t n);

// Start to capture queries for all sequences of the context. Allocates window + draft_tokens - 1 rows of Q per layer
// and sequence beside the cache; with `refresh` 16 more, for rows that are removed again. Called again with other
// parameters it applies to cuts still to come; the captured queries are dropped. Sequences that were cut stay so.
// ERR_PARAMS, ERR_UNSUPPORTED, ERR_MEMORY
LLAMA_API int32_t llama_dge_enable(struct llama_context * ctx, const struct llama_dge_params * params);

// ERR_CUT while a sequence that was cut still lives, ERR_LOST while one that a device lost was not begun anew: clear it first
LLAMA_API int32_t llama_dge_disable(struct llama_context * ctx);

// The prompt of this sequence is complete and is n_prompt rows long (its positions are 0 .. n_prompt - 1).
// NOTHING_TO_CUT, ERR_DISABLED, ERR_SEQ, ERR_QUERIES, ERR_SHARED, ERR_CUT
LLAMA_API int32_t llama_dge_seq_arm(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt);

// no cut follows
LLAMA_API int32_t llama_dge_seq_disarm(struct llama_context * ctx, llama_seq_id seq_id);

// Cut now, with the queries at hand, instead of waiting for k tokens. Arms the whole sequence as the prompt if it is
// not armed. On an error the sequence is as it was before; on ERR_LOST it is empty.
LLAMA_API int32_t llama_dge_seq_cut(struct llama_context * ctx, llama_seq_id seq_id);

// A prompt of n_prompt tokens shares its first n_match tokens with what the sequence holds. How many of them may be
// kept so that a later cut has all the queries it needs, and none was made with other LoRA adapters than those in force
// now? Returns n_match or less, or a negative status.
LLAMA_API int32_t llama_dge_seq_reuse(
        const struct llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt, int32_t n_match);

// What was captured of a sequence and its state does not hold: queries, and the sums of H2O where its own score is asked
// for. A state of a sequence that was not cut, put back together with them, can be cut at once, with other settings, too.
// Returns the bytes; writes them if dst is not NULL and size is enough, else returns 0. 0 where nothing is captured.
LLAMA_API size_t llama_dge_seq_get_queries(
        const struct llama_context * ctx, llama_seq_id seq_id, uint8_t * dst, size_t size);

// The same model, LoRA adapters and rows are expected, as for a state. Queries of rows that the sequence does not hold
// are left out; sums that count such rows are of no use, and a cut that needs sums is refused then. What the settings in
// force do not need is left out. On an error nothing changed. ERR_DISABLED, ERR_SEQ, ERR_CUT, ERR_SHARED, ERR_PARAMS
LLAMA_API int32_t llama_dge_seq_set_queries(
        struct llama_context * ctx, llama_seq_id seq_id, const uint8_t * src, size_t size);

// Put the parked rows back: the sequence holds min(n_match, n_parked) rows afterwards, exactly as before the cut, and
// is not cut any more. What it decoded after the cut is dropped and has to be evaluated again. Returns the number of
// rows; 0, with nothing changed, where no rows can be put back for this n_match: nothing is parked, other LoRA adapters
// are in force, or the state of layers that are not cut (sliding windows, recurrent ones) is not known at n_match. On an error the sequence is as it
// was; on ERR_LOST it is empty. ERR_DISABLED, ERR_SEQ, ERR_PARAMS, ERR_MEMORY, ERR_PARK, ERR_LOST
LLAMA_API int32_t llama_dge_seq_restore(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_match);

// Contexts that this thread creates from now on begin with a small cache, which grows with use up to n_ctx and shrinks
// after a cut. llama_dge_is_elastic() tells whether a context does: caches that cannot are created as always.
LLAMA_API void llama_dge_set_elastic(bool elastic);
LLAMA_API bool llama_dge_is_elastic(const struct llama_context * ctx);

// cells of an elastic cache of at most n_max that holds n_rows rows
LLAMA_API int32_t llama_dge_elastic_cells(int32_t n_rows, int32_t n_max);

LLAMA_API void llama_dge_get_memory(const struct llama_context * ctx, struct llama_dge_memory_info * info);

// A number that differs between models and between caches of unlike types, for keys of saved states; 0 where eviction is
// not supported. Reads some of the weights.
LLAMA_API uint64_t llama_dge_fingerprint(const struct llama_context * ctx);

LLAMA_API int32_t llama_dge_get_seq_info(
        const struct llama_context * ctx, llama_seq_id seq_id, struct llama_dge_seq_info * info);

// Model layers that a cut applies to, ascending. Returns their number; writes up to n of them. Needs no enable.
LLAMA_API int32_t llama_dge_get_layers(const struct llama_context * ctx, int32_t * layers, int32_t n);

// KV heads of a model layer that a cut applies to, or ERR_PARAMS
LLAMA_API int32_t llama_dge_get_n_head_kv(const struct llama_context * ctx, int32_t il);

// Original positions that a layer and KV head kept at the cut, ascending: prompt rows, then draft rows.
// Returns their number; writes up to n of them. ERR_SEQ where nothing was cut, ERR_PARAMS for a wrong layer or head
LLAMA_API int32_t llama_dge_get_kept(
        const struct llama_context * ctx, llama_seq_id seq_id, int32_t il, int32_t ih, llama_pos * pos, int32_t n);

// For tests: fills every free cell of the cache that can be cut, and the free cells' part of V, with a 16-bit
// pattern (0x7e00 is NaN in f16). Attention must never see it. Returns the number of cells filled.
LLAMA_API int32_t llama_dge_debug_poison(struct llama_context * ctx, uint16_t pattern);

// For tests: removes the rows [p0, p1) from the cache that can be cut and from no other part of the memory, as
// llama_memory_seq_rm() would. What is decoded afterwards is the reference for a cut that evicted these rows everywhere.
LLAMA_API bool llama_dge_debug_seq_rm(struct llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1);

// For tests: the n-th allocation of this library from now on fails, and those after it do not; 0: none
LLAMA_API void llama_dge_debug_fail_alloc(int32_t n);

// For tests: likewise the n-th step that moves rows in a cut, a choice or a restore: a device's graph for one layer (trials
// in front of a cut count), a layer that is copied
LLAMA_API void llama_dge_debug_fail_move(int32_t n);

#ifdef __cplusplus
}
#endif
