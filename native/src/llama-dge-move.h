#pragma once

#include "llama-dge-ctx.h"
#include "llama-dge-elastic.h"
#include "llama-dge-kv.h"
#include "llama-dge-store.h"
#include "llama-dge-sums.h"

#include <memory>
#include <vector>

// Entries of a sequence move in three ways, and nowhere else: the kept set of an eviction to the lowest cells that the
// sequence has, what a later selection adds from the host copy into the cache, and the host copy back as a whole. (A cache
// that grows or shrinks moves whole layers, cell by cell: llama_dge_elastic.) What can fail, but a device, a damaged file and
// a few bytes for cells, comes before the first entry.

// where entries move
struct llama_dge_place {
    llama_dge_kv &      kv;
    llama_dge_ctx &     lctx;
    llama_dge_elastic & elastic;
};

// how a move ended
struct llama_dge_moved {
    int32_t status = 0; // OK; ERR_LOST: what the cells hold is unknown; else nothing changed but the size of the cache

    bool lost_all = false; // with ERR_LOST: of all sequences

    int64_t t_park_us = 0;
    int64_t n_rows    = 0; // of one layer and head, from the host copy
};

// Moves the kept rows of each layer and head into the first cells of the sequence and frees the others. An elastic cache
// moves into smaller buffers on the way, each layer as soon as it is done, and a host copy in memory (store: allocated, or
// nullptr) is filled just before: so there is never more than one layer twice.
llama_dge_moved llama_dge_compact(const llama_dge_place & where, llama_seq_id seq_id,
        const std::vector<uint32_t> & cells, const llama_dge_kept & kept, int32_t n_past, llama_dge_store * store);

// Brings a sequence that was evicted from one kept set (by slot) to another (ascending): rows that are added take the slots
// of those that are dropped, so that only what changes is copied. tail: cells from position pos_min on, of which those below
// n_past give their cells up. `kept` becomes `want`, by slot.
llama_dge_moved llama_dge_replace(const llama_dge_place & where, llama_seq_id seq_id, std::vector<uint32_t> slots,
        const std::vector<uint32_t> & tail, llama_pos pos_min, llama_dge_kept & kept, const llama_dge_kept & want,
        int32_t n_past, const llama_dge_store & store);

// The sequence holds the first n rows of the host copy afterwards, in `cells`, and nothing else.
llama_dge_moved llama_dge_put_back(const llama_dge_place & where, llama_seq_id seq_id, llama_dge_store & store,
        int32_t n, std::vector<uint32_t> & cells);

//
// host copy
//

struct llama_dge_park_args {
    int32_t     where;   // PARK_RAM or PARK_DISK
    std::string folder;  // PARK_DISK
    int64_t     n_bytes; // of other host copies
    int64_t     limit;   // of all; 0: none
    size_t      n_spare; // entries to add without another allocation
};

// The host copy of a sequence that is about to be evicted: complete in a file, allocated in memory. nullptr: see status
std::shared_ptr<llama_dge_store> llama_dge_park(const llama_dge_place & where, const llama_dge_sums & sums,
        llama_seq_id seq_id, const std::vector<uint32_t> & cells, const llama_dge_origin & origin,
        const llama_dge_park_args & args, int32_t & status);

// entries that were decoded since join it. A status
int32_t llama_dge_park_more(
        const llama_dge_kv & kv, llama_seq_id seq_id, llama_dge_store & store, const std::vector<uint32_t> & cells);
