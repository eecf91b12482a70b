#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Sets of entries. A row is the K and V of one position in one layer and KV head.

using llama_dge_rows  = std::vector<int32_t>;                     // ascending, or by slot
using llama_dge_kept  = std::vector<std::vector<llama_dge_rows>>; // [layer][head]
using llama_dge_ranks = std::vector<std::vector<float>>;          // [head][n_past] scores

// neighbouring values: { first index, length }
using llama_dge_runs = std::vector<std::pair<size_t, size_t>>;

// rows of the head with the most: the cells that the set takes, which all layers and heads share
size_t llama_dge_capacity(const llama_dge_kept & kept);

// do layers or heads keep different numbers of rows?
bool llama_dge_is_uneven(const llama_dge_kept & kept);

// ascending, each once, in [0, n_past)
bool llama_dge_rows_ok(const llama_dge_rows & rows, int32_t n_past);

llama_dge_runs llama_dge_find_runs(const std::vector<uint32_t> & cells);
