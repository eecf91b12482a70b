#pragma once

#include "llama.h"

#include <stdint.h>

// Draft-Guided Eviction (DGE) of a sequence's KV cache
//
// The prompt is evaluated as always and the first k answer tokens, the draft tokens, are decoded on the full cache. Then
// the cache is evicted once, in place: each layer and KV head keeps its own `budget` entries of the prompt. Decoding goes
// on over the kept entries with unchanged positions. An entry ("row" in names) is the K and V of one position in one layer
// and KV head.
//
// How to use it:
//
//   struct llama_dge_params params = llama_dge_default_params();
//   params.budget = 512;
//   if (llama_dge_enable(ctx, &params) != LLAMA_DGE_OK) { ... }
//
//   llama_decode(ctx, prompt);               // in one batch or in many
//   llama_dge_seq_arm(ctx, 0, n_prompt);     // the prompt is complete
//   llama_decode(ctx, y1); ...               // ordinary decoding: the eviction happens by itself at the start of the
//                                            // first llama_decode() that finds n_prompt + k - 1 entries or more
//
// While nothing is enabled, or after llama_dge_disable(), the library behaves bit for bit like stock llama.cpp.
//
// After an eviction, for that sequence:
//   - positions go on as if nothing had happened; llama_memory_seq_pos_max() is unchanged
//   - llama_memory_seq_pos_min() is the first position after which no entry is missing
//   - llama_memory_seq_rm() is exact for p0 above the last prompt position, and for the whole sequence; any other
//     removal returns false and changes nothing
//   - llama_memory_seq_cp() copies the whole sequence; copying a part is refused with an error in the log
//   - llama_memory_seq_add() and _div() are refused with an error in the log; llama_memory_can_shift() is false
//   - a saved state holds the kept entries only and can be loaded where DGE is enabled
//   - with `recall`, entries are selected again while the answer is decoded; "last prompt position" above then means the
//     last position of the latest selection
//   - with `park`, a copy of the full cache stays in host memory or in a file: llama_dge_seq_restore() puts it back
//
// An eviction, a selection or a restore that fails before its first entry moves changes nothing. After that only a device
// error can occur: the sequence is emptied and its host copy dropped. Other sequences stay as they are, unless the device
// cannot copy their entries either; then they are emptied as well. llama_dge_seq_info.error is ERR_LOST then.
// llama_decode() returns -2 for a batch that continues such a sequence, with nothing of the batch in the cache, until the
// sequence is removed as a whole, cleared, or started again at position 0.

#ifdef __cplusplus
extern "C" {
#endif

// changes with every change of a signature or a struct in this file
#define LLAMA_DGE_ABI_VERSION 7

// return codes: 0 is success, negative is an error, positive is "nothing was done, and that is fine"
enum llama_dge_status {
    LLAMA_DGE_OK               = 0,
    LLAMA_DGE_NOTHING_TO_EVICT = 1,  // the prompt is not longer than the budget
    LLAMA_DGE_ERR_PARAMS       = -1, // see llama_dge_check_params()
    LLAMA_DGE_ERR_UNSUPPORTED  = -2, // see llama_dge_supported()
    LLAMA_DGE_ERR_DISABLED     = -3, // llama_dge_enable() was not called
    LLAMA_DGE_ERR_SEQ          = -4, // no such sequence, or it holds fewer entries than stated, or not from position 0
    LLAMA_DGE_ERR_QUERIES = -5,   // queries that the scores need were not captured: evaluate the last `window` prompt
                                  // tokens again, see llama_dge_seq_reuse()
    LLAMA_DGE_ERR_SHARED   = -6,  // another sequence shares entries of this one
    LLAMA_DGE_ERR_EVICTED  = -7,  // the sequence was evicted already
    LLAMA_DGE_ERR_MEMORY   = -8,  // out of memory
    LLAMA_DGE_ERR_COMPUTE  = -9,  // the scores could not be computed
    LLAMA_DGE_ERR_ABORTED  = -10, // the abort callback fired; the next llama_decode() tries again
    LLAMA_DGE_ERR_CALLBACK = -11, // the `select` callback failed or returned entries that cannot be kept
    LLAMA_DGE_ERR_PARK     = -12, // the host copy could not be made, or it is damaged
    LLAMA_DGE_ERR_LOST = -13, // a device failed while entries moved: the sequence is empty, evaluate its prompt again
};

// what ranks the entries
enum llama_dge_scores {
    LLAMA_DGE_SCORES_AUTO   = 0, // what suits the policy, see llama_dge_policy_info.auto_scores
    LLAMA_DGE_SCORES_DRAFT  = 1, // the queries that produced the first k answer tokens
    LLAMA_DGE_SCORES_POLICY = 2, // the policy's own score
    LLAMA_DGE_SCORES_BOTH   = 3, // both, each pooled and divided by its sum, added
};

enum llama_dge_pooling {
    LLAMA_DGE_POOLING_NONE = 0,
    LLAMA_DGE_POOLING_MAX  = 1,
    LLAMA_DGE_POOLING_AVG  = 2,
};

// PyramidKV: how the integers of its falling line are found
enum llama_dge_layer_budgets {
    LLAMA_DGE_LAYER_BUDGETS_EXACT     = 0, // the mean over the layers is the budget
    LLAMA_DGE_LAYER_BUDGETS_REFERENCE = 1, // as published: keeps more entries than the budget
};

enum llama_dge_head_budgets {
    LLAMA_DGE_HEAD_BUDGETS_UNIFORM  = 0,
    LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE = 1, // Ada-KV: heads share their layer's entries by the scores
    LLAMA_DGE_HEAD_BUDGETS_TABLE    = 2, // llama_dge_params.table
};

// where a copy of the full cache is kept
enum llama_dge_park {
    LLAMA_DGE_PARK_OFF  = 0, // nowhere: evicted entries are lost
    LLAMA_DGE_PARK_RAM  = 1, // in host memory
    LLAMA_DGE_PARK_DISK = 2, // in a temporary file of park_dir, deleted with the copy
};

enum llama_dge_state {
    LLAMA_DGE_STATE_EMPTY   = 0,
    LLAMA_DGE_STATE_FULL    = 1, // nothing was evicted
    LLAMA_DGE_STATE_ARMED   = 2, // an eviction will follow
    LLAMA_DGE_STATE_EVICTED = 3,
    LLAMA_DGE_STATE_LOST    = 4, // emptied because a device failed
};

// the policy's own score (SCORES_POLICY)
enum llama_dge_scorer {
    LLAMA_DGE_SCORER_NONE   = 0, // positions decide, attention is not needed
    LLAMA_DGE_SCORER_LAST   = 1, // attention of the last prompt token
    LLAMA_DGE_SCORER_WINDOW = 2, // attention of the observation window
    LLAMA_DGE_SCORER_SUMS   = 3, // attention of all tokens, summed while they are evaluated
};

// Selection of one layer: scores [n_head_kv][n_past] as the settings make them, higher = keep; n is the number of entries
// per head that the budget allows. Writes the entries of head h, ascending, to rows[h*n_past ...] and their number to
// n_rows[h]. Runs on the host inside llama_decode(). Non-zero: the sequence is not evicted.
typedef int32_t (*llama_dge_select_callback)(void * user_data, int32_t il, int32_t n_head_kv, int32_t n_past, int32_t n,
        const float * scores, int32_t * rows, int32_t * n_rows);

struct llama_dge_params {
    const char * policy;       // name, see llama_dge_get_policy(); NULL with `select`
    int32_t      scores;       // enum llama_dge_scores; with `recall` the last queries rank: AUTO or DRAFT
    int32_t      pooling;      // enum llama_dge_pooling, over neighbouring entries of scores that come from few queries
    int32_t      kernel_size;  // entries that pooling spans, odd
    int32_t      budget;       // prompt entries kept per layer and KV head, window included
    float        budget_share; // > 0: this share of the prompt, in (0, 1], instead of `budget`
    int32_t      draft_tokens; // k >= 1; 1 evicts at the end of prefill
    int32_t      window;       // >= 1, observation window: last prompt tokens, always kept
    int32_t      sinks;        // StreamingLLM: attention sinks, first prompt tokens, always kept
    int32_t      layer_budgets; // enum llama_dge_layer_budgets
    int32_t      head_budgets;  // enum llama_dge_head_budgets; ADAPTIVE needs a policy that ranks by attention

    // HEAD_BUDGETS_TABLE: entries of each layer (in the order of llama_dge_get_layers()) and KV head, window included;
    // [n_table], the heads of the first layer first. Replaces `budget`. Copied.
    const int32_t * table;
    int32_t         n_table;

    // a selection of your own instead of `policy`
    llama_dge_select_callback select;
    void *                    select_user_data;

    int32_t      park;       // enum llama_dge_park
    const char * park_dir;   // PARK_DISK: an existing folder. Copied.
    int64_t      park_limit; // bytes that all host copies may take; 0: no limit. An eviction that would exceed it is
                             // refused with ERR_PARK

    // Recall: entries are selected again from the host copy every `recall` tokens after the eviction, by the attention of
    // the last `window` queries, pooled. All entries compete, generated ones as well, so that `budget` entries per layer
    // and KV head are attended however long the answer is. 0: never; RECALL_AUTO: when it pays. Needs PARK_RAM.
    int32_t recall;
    float   recall_mass; // RECALL_AUTO: re-select when the kept set's attention mass falls below this fraction of its
                         // value at the last selection, in (0, 1]
    bool recall_async;   // a thread selects while decoding goes on with the kept set of the selection before, so each
                         // takes effect one selection later. Not with `select`.
};

#define LLAMA_DGE_RECALL_AUTO (-1)

// what is known of a policy; static memory
struct llama_dge_policy_info {
    const char * name;
    const char * summary;     // one sentence in English
    const char * paper;       // arXiv number
    int32_t      scorer;      // enum llama_dge_scorer
    int32_t      auto_scores; // enum llama_dge_scores that SCORES_AUTO stands for
};

// range of a number in llama_dge_params; static memory
struct llama_dge_field_info {
    const char * name;
    double       least;
    double       most;
};

// what is known of a sequence; all zero (boundary and pos_min: -1) where it does not apply
struct llama_dge_seq_info {
    int32_t   state;         // enum llama_dge_state
    int32_t   error;         // enum llama_dge_status, of the last attempt to evict
    int32_t   n_prompt;      // tokens of the prompt, as armed
    int32_t   n_draft;       // entries after the prompt when it was evicted
    int32_t   budget;        // prompt entries that may be kept (a share is resolved), on average over layers and heads
    int32_t   n_rows_before; // entries per layer and KV head just before the eviction
    int32_t   n_rows_after;  // ... and just after, in the layer and head with the most
    int32_t   n_rows;        // cells that the sequence holds now, counted in the cache
    int32_t   n_kv;          // cells that attention reads now for a batch of this sequence (padding included)
    int32_t   n_layer;       // layers that were evicted
    llama_pos boundary;      // last prompt position: entries above it can be removed
    llama_pos pos_min;       // first position after which no entry is missing
    int64_t   bytes_before;  // K and V of this sequence in the evicted layers, just before the eviction
    int64_t   bytes_after;   // ... and just after, cells that only some layers or heads use included
    int64_t   bytes_kept;    // K and V of the entries that are really attended
    int64_t   t_score_us;    // microseconds: scores on the device
    int64_t   t_select_us;   //               selection on the host
    int64_t   t_compact_us;  //               entries moved, cells freed
    int64_t   n_evictions;   // in this context since it was enabled, of all sequences
    int32_t   n_parked;      // entries that llama_dge_seq_restore() can put back, from position 0 on
    int32_t   n_restored;    // entries that the last restore of this sequence put back; 0: none since it was empty
    int64_t   bytes_parked;  // of the host copy
    int64_t   t_park_us;     // microseconds: making the host copy, part of t_compact_us
    int64_t   t_restore_us;  //               the last restore
    int64_t   n_recalls;     // selections after the eviction, since the sequence was empty
    int64_t   n_checks;      // RECALL_AUTO: how often the attention mass was estimated
    int64_t   n_moved;       // entries of one layer and head that these selections moved into the cache
    int64_t   t_recall_us;   // microseconds of all of them, checks included
};

// bytes that a context uses, over all devices
struct llama_dge_memory_info {
    int64_t weights; // tensors of the model, each once
    int64_t kv;      // buffers of the cache that can be evicted, as they are now
    int64_t kv_max;  // ... at their full size
    int64_t other;   // other memory of the context: sliding-window caches, recurrent states
    int64_t compute; // buffers of the graphs, as they are now
    int64_t dge;     // captured queries, sums, biases
    int64_t parked;  // host copies
    int32_t n_cells; // cells of the cache, per stream, as they are now
    int32_t n_cells_max;
};

// what a prompt will need
struct llama_dge_estimate {
    int32_t status;       // enum llama_dge_status: OK, or why nothing will be evicted
    int32_t n_rows;       // entries per layer and KV head just before the eviction, draft included
    int32_t n_rows_after; // ... and just after, in the layer and head with the most
    bool    at_most;      // n_rows_after, and what follows from it, is an upper bound: heads share entries by scores
    int32_t n_cells;      // cells of the cache just before the eviction
    int32_t n_cells_after;
    int64_t kv; // bytes of the cache just before the eviction
    int64_t kv_after;
    int64_t kv_max;  // ... at its full size
    int64_t compute; // bytes that the graphs need beside the model's own, while the prompt is evaluated
    int64_t dge;     // bytes of captured queries, sums, biases
    int64_t parked;  // bytes of the host copy
};

LLAMA_API int32_t llama_dge_abi_version(void);

// every field valid: the settings that docs/results.md speaks for
LLAMA_API struct llama_dge_params llama_dge_default_params(void);

// LLAMA_DGE_OK, or LLAMA_DGE_ERR_PARAMS with a sentence in `reason` (up to n bytes with the terminator; may be NULL) that
// names the field, its value and what is allowed
LLAMA_API int32_t llama_dge_check_params(const struct llama_dge_params * params, char * reason, size_t n);

// the least `budget` that these settings allow
LLAMA_API int32_t llama_dge_least_budget(const struct llama_dge_params * params);

// policies by name, ascending: false for an index that is out of range
LLAMA_API bool llama_dge_get_policy(int32_t index, struct llama_dge_policy_info * info);

// ranges of numbers in llama_dge_params, in its order; likewise
LLAMA_API bool llama_dge_get_field(int32_t index, struct llama_dge_field_info * info);

// a short sentence in English for a return code; static memory
LLAMA_API const char * llama_dge_status_str(int32_t status);

// LLAMA_DGE_OK, or LLAMA_DGE_ERR_UNSUPPORTED with the reason in English in `reason` (up to n bytes with the
// terminator; may be NULL)
LLAMA_API int32_t llama_dge_supported(const struct llama_context * ctx, char * reason, size_t n);

// Start to capture queries for all sequences of the context. Allocates window + draft_tokens - 1 rows of Q per layer
// and sequence beside the cache; with `recall` 16 more, for tokens that are removed again. Called again with other
// parameters it applies to evictions still to come; the captured queries are dropped. Evicted sequences stay so.
// ERR_PARAMS (the log names the field), ERR_UNSUPPORTED, ERR_MEMORY
LLAMA_API int32_t llama_dge_enable(struct llama_context * ctx, const struct llama_dge_params * params);

// ERR_EVICTED while an evicted sequence lives, ERR_LOST while a lost one was not started again: clear it first
LLAMA_API int32_t llama_dge_disable(struct llama_context * ctx);

// The prompt of this sequence is complete and has n_prompt tokens (its positions are 0 .. n_prompt - 1). Replaces an earlier
// call; on an error no eviction follows.
// NOTHING_TO_EVICT, ERR_DISABLED, ERR_SEQ, ERR_QUERIES, ERR_SHARED, ERR_EVICTED
LLAMA_API int32_t llama_dge_seq_arm(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt);

// no eviction follows
LLAMA_API int32_t llama_dge_seq_disarm(struct llama_context * ctx, llama_seq_id seq_id);

// Evict now, with the queries at hand, instead of waiting for k tokens. Arms the whole sequence as the prompt if it is
// not armed. On an error the sequence is as it was before; on ERR_LOST it is empty.
LLAMA_API int32_t llama_dge_seq_evict(struct llama_context * ctx, llama_seq_id seq_id);

// A prompt of n_prompt tokens shares its first n_match tokens with what the sequence holds. How many of them may be
// reused so that a later eviction has all the queries it needs, and none was made with other LoRA adapters than those in
// force? Returns n_match or less, or a negative status.
LLAMA_API int32_t llama_dge_seq_reuse(
        const struct llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt, int32_t n_match);

// What was captured of a sequence and its state does not hold: queries, and H2O's sums where its own score is asked for.
// A state of a sequence that was not evicted, loaded together with them, can be evicted at once, with other settings as
// well. Returns the bytes; writes them if dst is not NULL and size is enough, else returns 0. 0 where nothing is captured.
LLAMA_API size_t llama_dge_seq_get_queries(
        const struct llama_context * ctx, llama_seq_id seq_id, uint8_t * dst, size_t size);

// The same model, LoRA adapters and entries are expected, as for a state. Queries of tokens that the sequence does not
// hold are left out; sums that count such tokens are discarded, and an eviction that needs sums is refused then. What the
// settings in force do not need is left out. On an error nothing changed.
// ERR_DISABLED, ERR_SEQ, ERR_EVICTED, ERR_SHARED, ERR_PARAMS
LLAMA_API int32_t llama_dge_seq_set_queries(
        struct llama_context * ctx, llama_seq_id seq_id, const uint8_t * src, size_t size);

// Put the host copy back: the sequence holds min(n_match, n_parked) entries afterwards, exactly as before the eviction.
// What it decoded after the eviction is dropped and has to be evaluated again. Returns the number of entries; 0, with
// nothing changed, where none can be put back for this n_match: there is no host copy, other LoRA adapters are in force,
// or the state of the other layers (sliding windows, recurrent ones) is not known at n_match. On an error the sequence is
// as it was; on ERR_LOST it is empty. ERR_DISABLED, ERR_SEQ, ERR_PARAMS, ERR_MEMORY, ERR_PARK, ERR_LOST
LLAMA_API int32_t llama_dge_seq_restore(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_match);

// Contexts that this thread creates from now on start with a small cache, which grows with use up to n_ctx and shrinks
// after an eviction. llama_dge_is_elastic(): whether a context does; caches that cannot are created as always.
LLAMA_API void llama_dge_set_elastic(bool elastic);
LLAMA_API bool llama_dge_is_elastic(const struct llama_context * ctx);

LLAMA_API void llama_dge_get_memory(const struct llama_context * ctx, struct llama_dge_memory_info * info);

// What a prompt of n_prompt tokens will need under these settings. Nothing is decoded, and neither the model nor the
// context needs memory behind its tensors (llama_model_params.no_alloc). elastic: as llama_dge_set_elastic() would create
// the context. ERR_PARAMS for settings or a length that are out of range.
LLAMA_API int32_t llama_dge_get_estimate(const struct llama_context * ctx, const struct llama_dge_params * params,
        int32_t n_prompt, bool elastic, struct llama_dge_estimate * res);

// A number that differs between models and between caches of unlike types, for keys of saved states; 0 where eviction is
// not supported. Reads some of the weights.
LLAMA_API uint64_t llama_dge_fingerprint(const struct llama_context * ctx);

LLAMA_API int32_t llama_dge_get_seq_info(
        const struct llama_context * ctx, llama_seq_id seq_id, struct llama_dge_seq_info * info);

// Model layers that an eviction applies to, ascending. Returns their number; writes up to n of them. Needs no enable.
LLAMA_API int32_t llama_dge_get_layers(const struct llama_context * ctx, int32_t * layers, int32_t n);

// KV heads of a model layer that an eviction applies to, or ERR_PARAMS
LLAMA_API int32_t llama_dge_get_n_head_kv(const struct llama_context * ctx, int32_t il);

// Original positions that a layer and KV head kept, ascending: prompt, then draft. Returns their number; writes up to n
// of them. ERR_SEQ where nothing was evicted, ERR_PARAMS for a wrong layer or head
LLAMA_API int32_t llama_dge_get_kept(
        const struct llama_context * ctx, llama_seq_id seq_id, int32_t il, int32_t ih, llama_pos * pos, int32_t n);

// For tests: fills every free cell of the cache that can be evicted, and the free cells' part of V, with a 16-bit
// pattern (0x7e00 is NaN in f16). Attention must never see it. Returns the number of cells filled.
LLAMA_API int32_t llama_dge_debug_poison(struct llama_context * ctx, uint16_t pattern);

// For tests: removes the entries [p0, p1) from the cache that can be evicted and from no other part of the memory, as
// llama_memory_seq_rm() would. What is decoded afterwards is the reference for an eviction of these entries everywhere.
LLAMA_API bool llama_dge_debug_seq_rm(struct llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1);

// For tests: the n-th allocation of this library from now on fails, and those after it do not; 0: none
LLAMA_API void llama_dge_debug_fail_alloc(int32_t n);

// For tests: likewise the n-th step that moves entries in an eviction, a selection or a restore: a device's graph for one
// layer (rehearsals count), a layer that is copied
LLAMA_API void llama_dge_debug_fail_move(int32_t n);

#ifdef __cplusplus
}
#endif
