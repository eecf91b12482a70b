#pragma once

#include "llama-dge-kv.h"

#include <cstdint>
#include <vector>

// An elastic cache starts small, grows with use and shrinks after an eviction. Sizes come from a ladder, so that they do
// not depend on how a prompt was split, and every step is worth its copy.

// cells of an elastic cache of at most n_max that holds n_rows
uint32_t llama_dge_elastic_cells(uint32_t n_rows, uint32_t n_max);

// cells of a cache that shrinks to n_rows
uint32_t llama_dge_shrunk_cells(uint32_t n_rows);

class llama_dge_elastic {
public:
    explicit llama_dge_elastic(llama_dge_kv & kv) : kv(kv), on(kv.size() < kv.size_max()) {}

    bool is_on() const { return on; }

    // the cache gets its full size and keeps it. A status, as of grow()
    int32_t set_off();

    // Makes room for n_rows in a stream, or as many cells as there may be. OK; ERR_MEMORY, ERR_COMPUTE: nothing changed;
    // ERR_LOST: a device failed on the way back, and what the cells hold is lost
    int32_t grow(uint32_t n_rows);

    // cells that are enough for n_top, or those that there are
    uint32_t shrunk(uint32_t n_top) const;

    // tokens per stream of the batch at hand
    void set_batch(std::vector<uint32_t> n_new_in) { n_new = std::move(n_new_in); }

    // cells that the batch needs, 0 where they are there or cannot be made
    uint32_t wanted() const;

    // a state is read: what was read of a stream is written when all is read, into the tensors that were there, so nothing
    // grows after the first stream that has cells
    void    state_begins() { state_sized = false; }
    int32_t state_cells(uint32_t strm, llama_seq_id seq_id, uint32_t n_cells); // a status, as of grow()

private:
    int32_t resize(uint32_t n_cells);

    llama_dge_kv & kv;

    bool on;

    std::vector<uint32_t> n_new;

    bool state_sized = false;
};
