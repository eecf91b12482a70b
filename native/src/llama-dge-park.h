#pragma once

#include "llama-kv-cells.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// The rows of a sequence as they were before its cut, in host memory or in a file. No ggml here: rows are bytes in the
// cache's own type.

struct llama_dge_park_layer {
    size_t size_k = 0; // bytes of a row of K
    size_t size_v = 0; // bytes of a row of V; with a transposed V: of one element
    size_t n_v    = 0; // 1; with a transposed V: elements of a row, each with those of all rows behind one another

    size_t n_cap = 0; // rows that there is room for, which is what the elements of a transposed V are apart

    std::unique_ptr<uint8_t[]> k;
    std::unique_ptr<uint8_t[]> v;

    std::vector<float> sums; // of H2O, [n_head_kv][n_rows]
};

// rows that were made with other adapters are of no use
using llama_dge_adapters = std::vector<std::pair<const void *, float>>;

// LoRA adapters that the rows of a sequence were made with
struct llama_dge_origin {
    bool known = false; // no: of a state
    bool mixed = false;

    llama_dge_adapters adapters;

    bool is(const llama_dge_adapters & others) const { return !mixed && (!known || adapters == others); }

    // of rows of both
    llama_dge_origin with(const llama_dge_origin & other) const {
        llama_dge_origin res = known ? *this : other;

        res.mixed = mixed || other.mixed || (known && other.known && adapters != other.adapters);

        return res;
    }
};

struct llama_dge_parked {
    llama_dge_parked();
    ~llama_dge_parked();

    llama_dge_parked(const llama_dge_parked &)             = delete;
    llama_dge_parked & operator=(const llama_dge_parked &) = delete;

    // room for n_cap rows, the first n_keep of those at hand are kept. false: out of memory, nothing changed
    static bool alloc(llama_dge_park_layer & layer, size_t n_cap, size_t n_keep = 0);

    // nullptr: out of memory
    std::shared_ptr<llama_dge_parked> clone() const;

    // one that takes any of the layers; false: out of memory
    bool alloc_largest(llama_dge_park_layer & buf) const;

    int64_t n_bytes_layer(const llama_dge_park_layer & layer) const;
    int64_t n_bytes() const;

    // false: the file cannot be made, written, or read, or does not hold what was written; `error` tells
    bool file_begin(const std::string & dir, std::string & error);
    bool file_write(const llama_dge_park_layer & layer, std::string & error);
    bool file_end(std::string & error);
    bool file_check(llama_dge_park_layer & buf, std::string & error) const;
    bool file_read(size_t i, llama_dge_park_layer & buf, std::string & error) const;

    int32_t n_rows   = 0;
    int32_t n_exact  = 0; // rows of before the first cut; those behind were made with what was left
    int32_t n_summed = 0;

    std::vector<llama_dge_park_layer> layers; // with a file: sizes only
    std::vector<llama_kv_cell_ext>    exts;   // [n_exact]

    // layers that are not cut: their state just before the cut, and the first position of sliding windows in it
    std::vector<uint8_t> others;
    int32_t              others_pos_min = 0;

    llama_dge_adapters adapters;
    bool               mixed = false; // some rows with others

    std::string path;

private:
    struct file;

    std::unique_ptr<file> out;
    std::vector<uint64_t> hashes; // of each layer in the file
};
