#pragma once

#include "llama-dge-ctx.h"
#include "llama-dge-kv.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// The host copy: the entries of a sequence as they were before its eviction, in host memory or in a file, and with recall
// those that were decoded since.

// entries that the host copy may grow by before it moves to more memory
static constexpr size_t LLAMA_DGE_STORE_SPARE = 1024;

class llama_dge_store {
public:
    explicit llama_dge_store(const llama_dge_kv & kv);
    ~llama_dge_store();

    llama_dge_store(const llama_dge_store &)             = delete;
    llama_dge_store & operator=(const llama_dge_store &) = delete;

    // room for n_cap rows in layer i, the first n_keep of those at hand are kept. false: out of memory, nothing changed
    bool alloc(size_t i, size_t n_cap, size_t n_keep = 0);

    // the same in all layers, with some to spare, where n rows do not fit
    bool grow(size_t n);

    // nullptr: out of memory
    std::shared_ptr<llama_dge_store> clone() const;

    // of a file: what file_read() brought
    llama_dge_entries entries(size_t i) const;

    // what alloc() made, also on its way to a file
    llama_dge_entries memory_of(size_t i) const;

    int64_t n_bytes() const;
    int64_t n_bytes_rows(int32_t n) const;

    //
    // file; false: it cannot be made, written, or read, or does not hold what was written, and `error` says why
    //

    bool on_disk() const { return !path.empty(); }

    bool file_begin(const std::string & dir, std::string & error);
    bool file_write(size_t i, std::string & error); // layer i goes to the file and its memory is freed
    bool file_end(std::string & error);

    // layer i comes back; its memory is that of the next one
    bool file_read(size_t i, std::string & error);
    bool file_check(std::string & error);

    // a buffer for reading. false: out of memory
    bool file_reserve();

    int32_t n_rows   = 0;
    int32_t n_exact  = 0; // entries of before the first eviction; those behind were made with what was kept
    int32_t n_summed = 0;

    std::vector<std::vector<float>> sums; // of H2O, per layer [n_head_kv][n_exact]; empty without

    std::vector<llama_kv_cell_ext> exts; // [n_exact]

    llama_dge_ctx::others others; // state of the other layers just before the eviction

    llama_dge_origin origin;

private:
    struct memory {
        std::unique_ptr<uint8_t[]> k;
        std::unique_ptr<uint8_t[]> v;

        size_t n_cap = 0;
    };

    struct file;

    const llama_dge_kv & kv;

    std::vector<memory> layers;
    memory              buffer; // of the layer that was read last

    std::string           path;
    std::unique_ptr<file> out;
    std::vector<uint64_t> hashes; // of each layer in the file
};
