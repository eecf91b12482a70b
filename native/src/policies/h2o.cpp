#include "llama-dge-select.h"

// H2O, arXiv 2306.14048: the rows that got the most attention of all rows so far ("heavy hitters"), per head, and the
// window as the recent part. The sums come from the capture; they run on through the draft.
static llama_dge_rows llama_dge_select_h2o(
        const llama_dge_select_input & input, const std::vector<float> & rank, int32_t n) {
    (void) input;

    return llama_dge_top_rows(rank, n);
}

const llama_dge_policy_impl llama_dge_policy_h2o = {
    /*.name         =*/"h2o",
    /*.needs_scores =*/true,
    /*.needs_sums   =*/true,
    /*.caps         =*/nullptr,
    /*.select       =*/llama_dge_select_h2o,
};
