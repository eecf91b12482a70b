#include "llama-dge-selector.h"

#include "llama-dge.h"

#include <algorithm>
#include <new>

static constexpr size_t LLAMA_DGE_MASS_LAYERS = 4; // where held_mass() estimates, spread over the model

llama_dge_selection::~llama_dge_selection() {
    cancel = true;
    wait();
}

void llama_dge_selection::add_layer(const llama_dge_attn & attn, std::vector<float> q, std::vector<float> sinks) {
    layers.push_back({ attn, std::move(q), std::move(sinks) });
}

void llama_dge_selection::start() {
    thread = std::thread([this] { run(); });
}

void llama_dge_selection::wait() {
    if (thread.joinable()) {
        thread.join();
    }
}

int32_t llama_dge_selection::score(size_t i, int32_t n, std::vector<float> & scores) {
    const auto & layer = layers[i];

    return scorer->score(kv.layer(i), layer.attn, layer.sinks, layer.q, n_q, n, store->entries(i).k, n_rows, scores);
}

void llama_dge_selection::run() {
    status = LLAMA_DGE_OK;

    try {
        std::vector<float> all;

        for (size_t i = 0; scorer && i < layers.size(); ++i) {
            status = cancel ? (int32_t) LLAMA_DGE_ERR_ABORTED : score(i, n_q, all);
            if (status != LLAMA_DGE_OK) {
                return;
            }

            auto & scores = input.layers[i].draft;

            for (int64_t ih = 0; ih < kv.layer(i).n_head_kv; ++ih) {
                const auto begin = all.begin() + ih * n_rows;
                scores.insert(scores.end(), begin, begin + input.n_past);
            }
        }

        if (!llama_dge_select(input, chosen)) {
            status = LLAMA_DGE_ERR_CALLBACK;
        }
    } catch (const std::bad_alloc &) {
        status = LLAMA_DGE_ERR_MEMORY;
    } catch (const std::exception &) {
        status = LLAMA_DGE_ERR_COMPUTE; // must not leave a thread
    }
}

int32_t llama_dge_selection::held_mass(const llama_dge_kept & kept, llama_pos pos_min, float & mass) {
    const size_t n_step = std::max<size_t>(1, layers.size() / LLAMA_DGE_MASS_LAYERS);

    double held  = 0.0;
    size_t n_all = 0;

    std::vector<float> scores;

    // the last layers of equal parts of the model
    for (size_t i = n_step - 1; i < layers.size(); i += n_step) {
        const int32_t res = score(i, 1, scores);
        if (res != LLAMA_DGE_OK) {
            return res;
        }

        for (size_t ih = 0; ih < kept[i].size(); ++ih) {
            const float * row = scores.data() + ih * n_rows;

            for (const int32_t r : kept[i][ih]) {
                held += row[r];
            }
            for (int32_t r = pos_min; r < n_rows; ++r) {
                held += row[r];
            }
            n_all++;
        }
    }

    mass = (float) (held / n_all);

    return LLAMA_DGE_OK;
}
