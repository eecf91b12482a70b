#include "llama-dge-rows.h"

#include <algorithm>

size_t llama_dge_capacity(const llama_dge_kept & kept) {
    size_t res = 0;

    for (const auto & heads : kept) {
        for (const auto & rows : heads) {
            res = std::max(res, rows.size());
        }
    }

    return res;
}

bool llama_dge_is_uneven(const llama_dge_kept & kept) {
    const size_t n = llama_dge_capacity(kept);

    for (const auto & heads : kept) {
        for (const auto & rows : heads) {
            if (rows.size() != n) {
                return true;
            }
        }
    }

    return false;
}

bool llama_dge_rows_ok(const llama_dge_rows & rows, int32_t n_past) {
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] < (i > 0 ? rows[i - 1] + 1 : 0) || rows[i] >= n_past) {
            return false;
        }
    }

    return true;
}

llama_dge_runs llama_dge_find_runs(const std::vector<uint32_t> & cells) {
    llama_dge_runs res;

    for (size_t i = 0; i < cells.size(); ++i) {
        if (i == 0 || cells[i] != cells[i - 1] + 1) {
            res.push_back({ i, 0 });
        }
        res.back().second++;
    }

    return res;
}
