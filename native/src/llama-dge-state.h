#pragma once

#include "llama-dge-seq.h"

#include <map>

struct llama_dge;
class llama_io_read_i;
class llama_io_write_i;

// A state without an evicted sequence is byte for byte a stock state. One with evicted sequences starts with a section of
// its own, whose mark stands where stock expects its small stream count, so that stock, and this library with DGE off,
// refuse it.

// writes the section, if there is an evicted sequence among those asked for (-1: all)
void llama_dge_state_write(const llama_dge & dge, llama_io_write_i & io, llama_seq_id seq_id);

// word: what stands where the stream count is expected; where it is the mark, the section is read and the word replaced by
// the count. Returns the evicted sequences, for llama_dge::loaded() when their entries are there. throws
std::map<llama_seq_id, llama_dge_seq> llama_dge_state_read(
        llama_dge & dge, llama_io_read_i & io, llama_seq_id seq_id, uint32_t & word);
