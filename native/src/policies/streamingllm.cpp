#include "llama-dge-select.h"

#include <algorithm>

// StreamingLLM, arXiv 2309.17453: attention sinks and the most recent rows, whatever the scores. Rows keep their
// original positions, as in the benchmark code of the field and unlike the paper's cache, which re-positions them.
static llama_dge_rows llama_dge_select_streamingllm(
        const llama_dge_select_input & input, const std::vector<float> & rank, int32_t n) {
    (void) rank;

    const int32_t n_sink = std::min(input.params.sinks, n);

    llama_dge_rows rows;

    for (int32_t i = 0; i < n_sink; ++i) {
        rows.push_back(i);
    }
    for (int32_t i = input.n_past - (n - n_sink); i < input.n_past; ++i) {
        rows.push_back(i);
    }

    return rows;
}

const llama_dge_policy_impl llama_dge_policy_streamingllm = {
    /*.name         =*/"streamingllm",
    /*.needs_scores =*/false,
    /*.needs_sums   =*/false,
    /*.caps         =*/nullptr,
    /*.select       =*/llama_dge_select_streamingllm,
};
