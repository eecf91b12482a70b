#pragma once

#include <cstddef>
#include <cstdint>

// fault injection, see llama_dge_debug_fail_alloc() and llama_dge_debug_fail_move()
bool llama_dge_alloc_fails();
bool llama_dge_move_fails();

// the same, as a backend reports that it cannot copy: throws std::runtime_error
void llama_dge_check_move();

// checksum for damage, not for tampering
uint64_t llama_dge_hash(uint64_t hash, const void * data, size_t size);
