#include "llama-dge-fault.h"

#include "llama-dge.h"

#include <atomic>
#include <cstring>
#include <stdexcept>

static std::atomic<int32_t> llama_dge_fail_in { 0 };
static std::atomic<int32_t> llama_dge_move_fail_in { 0 };

bool llama_dge_alloc_fails() {
    return llama_dge_fail_in > 0 && --llama_dge_fail_in == 0;
}

bool llama_dge_move_fails() {
    return llama_dge_move_fail_in > 0 && --llama_dge_move_fail_in == 0;
}

void llama_dge_check_move() {
    if (llama_dge_move_fails()) {
        throw std::runtime_error("a failure that a test asked for");
    }
}

void llama_dge_debug_fail_alloc(int32_t n) {
    llama_dge_fail_in = n;
}

void llama_dge_debug_fail_move(int32_t n) {
    llama_dge_move_fail_in = n;
}

uint64_t llama_dge_hash(uint64_t hash, const void * bytes, size_t size) {
    const auto * data = (const uint8_t *) bytes;

    const auto mix = [&](uint64_t word) {
        hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 29;
    };

    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, data + i, 8);
        mix(word);
    }
    for (; i < size; ++i) {
        mix(data[i]);
    }

    return hash;
}
