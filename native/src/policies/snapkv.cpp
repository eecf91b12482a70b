#include "llama-dge-select.h"

// SnapKV, arXiv 2404.14469: the rows that the end of the prompt attends most, per head
static llama_dge_rows llama_dge_select_snapkv(
        const llama_dge_select_input & input, const std::vector<float> & rank, int32_t n) {
    (void) input;

    return llama_dge_top_rows(rank, n);
}

const llama_dge_policy_impl llama_dge_policy_snapkv = {
    /*.name         =*/"snapkv",
    /*.needs_scores =*/true,
    /*.needs_sums   =*/false,
    /*.caps         =*/nullptr,
    /*.select       =*/llama_dge_select_snapkv,
};
