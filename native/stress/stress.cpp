// Random calls on one context, to be run under sanitizers: sequences that are filled, armed, evicted, re-selected, copied to
// the host, restored, copied, saved, loaded, shortened and cleared, with failing allocations and selections on threads.
//
//   dge-stress MODEL.gguf FOLDER [N_STEPS [SEED]]

#include "llama-dge.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

static const int n_seq  = 3;
static const int budget = 40;

static std::mt19937 rng;

static int pick(int lo, int hi) {
    return std::uniform_int_distribution<int>(lo, hi)(rng);
}

static void check(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

struct run {
    llama_context * ctx     = nullptr;
    llama_batch     batch   = {};
    int             n_vocab = 0;

    std::vector<std::vector<uint8_t>> states;

    int n_decoded  = 0;
    int n_evicted  = 0;
    int n_recalls  = 0;
    int n_restored = 0;

    llama_pos end(int s) const { return llama_memory_seq_pos_max(llama_get_memory(ctx), s) + 1; }

    // 0: done, 1: no room, the sequence is as it was
    int decode(int s, int n) {
        const llama_pos pos = end(s);

        batch.n_tokens = n;
        for (int i = 0; i < n; ++i) {
            batch.token[i]     = pick(3, n_vocab - 1);
            batch.pos[i]       = pos + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = s;
            batch.logits[i]    = i == n - 1;
        }

        const int rc = llama_decode(ctx, batch);

        check(rc == 0 || rc == 1, "llama_decode returns 0 or 1");

        if (rc == 0) {
            const float * logits = llama_get_logits_ith(ctx, -1);
            for (int i = 0; i < n_vocab; ++i) {
                check(std::isfinite(logits[i]), "logits are finite");
            }
            n_decoded += n;
        }

        return rc;
    }

    llama_dge_seq_info info(int s) const {
        llama_dge_seq_info res;
        check(llama_dge_get_seq_info(ctx, s, &res) == LLAMA_DGE_OK, "llama_dge_get_seq_info");
        return res;
    }

    void step() {
        auto * mem = llama_get_memory(ctx);

        const int s     = pick(0, n_seq - 1);
        const int other = (s + pick(1, n_seq - 1)) % n_seq;
        const int what  = pick(0, 99);

        if (what < 30) {
            // a prompt, and its answer
            const int n_prompt = pick(1, 200);

            const int state = info(s).state;

            if ((state == LLAMA_DGE_STATE_EMPTY || state == LLAMA_DGE_STATE_FULL) && decode(s, n_prompt) == 0) {
                llama_dge_seq_arm(ctx, s, end(s));
                for (int i = pick(0, 30); i > 0 && decode(s, 1) == 0; --i) {
                }
            }
        } else if (what < 55) {
            for (int i = pick(1, 12); i > 0 && decode(s, pick(1, 3)) == 0; --i) {
            }
        } else if (what < 62) {
            const int n = llama_dge_seq_restore(ctx, s, pick(1, 300));
            check(n >= 0 || n == LLAMA_DGE_ERR_MEMORY || n == LLAMA_DGE_ERR_PARK, "llama_dge_seq_restore");
            n_restored += n > 0;
        } else if (what < 70) {
            llama_memory_seq_rm(mem, s, std::max(0, end(s) - pick(0, 6)), -1);
        } else if (what < 76) {
            llama_memory_seq_rm(mem, s, -1, -1);
        } else if (what < 80) {
            llama_memory_seq_cp(mem, s, other, -1, -1);
        } else if (what < 84) {
            states.emplace_back(llama_state_seq_get_size(ctx, s));
            llama_state_seq_get_data(ctx, states.back().data(), states.back().size(), s);
        } else if (what < 88 && !states.empty()) {
            auto & state = states[pick(0, states.size() - 1)];
            if (pick(0, 3) == 0) {
                state.resize(pick(0, state.size()));
            }
            if (llama_state_seq_set_data(ctx, state.data(), state.size(), s) == 0) {
                llama_memory_seq_rm(mem, s, -1, -1);
            }
        } else if (what < 91) {
            llama_dge_seq_evict(ctx, s);
        } else if (what < 94) {
            llama_dge_debug_poison(ctx, 0x6bcd);
        } else if (what < 98) {
            llama_dge_debug_fail_alloc(pick(1, 6));
            decode(s, pick(1, 150));
            llama_dge_debug_fail_alloc(0);
        } else {
            llama_memory_clear(mem, false);
            states.clear();
        }

        for (int i = 0; i < n_seq; ++i) {
            const auto now = info(i);
            n_evicted += now.state == LLAMA_DGE_STATE_EVICTED;
            n_recalls += now.n_recalls > 0;
        }
    }
};

int main(int argc, char ** argv) {
    check(argc >= 3, "usage: dge-stress MODEL.gguf FOLDER [N_STEPS [SEED]]");

    const int n_steps = argc > 3 ? atoi(argv[3]) : 400;
    rng.seed(argc > 4 ? atoi(argv[4]) : 1);

    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();

    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    check(model, "cannot load the model");

    int n_evicted = 0, n_recalls = 0, n_restored = 0;

    // elastic or not, one stream or several, flash attention or not; host copies and selections differ as well
    for (int i = 0; i < 8; ++i) {
        auto cparams = llama_context_default_params();

        cparams.n_ctx           = 1536;
        cparams.n_batch         = 512;
        cparams.n_seq_max       = n_seq;
        cparams.n_threads       = 2;
        cparams.n_threads_batch = 2;
        cparams.kv_unified      = i & 1;
        cparams.flash_attn_type = i & 2 ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;

        llama_dge_set_elastic(i & 4);

        run r;
        r.ctx     = llama_init_from_model(model, cparams);
        r.batch   = llama_batch_init(512, 0, 1);
        r.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

        check(r.ctx, "cannot create the context");

        for (int j = 0; j < 4; ++j) {
            auto params = llama_dge_default_params();

            params.budget       = budget;
            params.draft_tokens = 2;
            params.park         = j == 3 ? LLAMA_DGE_PARK_DISK : LLAMA_DGE_PARK_RAM;
            params.park_dir     = argv[2];
            params.recall       = j == 3 ? 0 : j == 2 ? LLAMA_DGE_RECALL_AUTO : 3;
            params.recall_async = j == 1 || (j == 2 && i % 2);
            params.head_budgets = i % 3 == 0 ? LLAMA_DGE_HEAD_BUDGETS_ADAPTIVE : LLAMA_DGE_HEAD_BUDGETS_UNIFORM;
            params.scores       = j == 3 ? LLAMA_DGE_SCORES_BOTH : LLAMA_DGE_SCORES_DRAFT;

            check(llama_dge_enable(r.ctx, &params) == LLAMA_DGE_OK, "llama_dge_enable");

            for (int k = 0; k < n_steps / 4; ++k) {
                r.step();
            }
        }

        n_evicted += r.n_evicted;
        n_recalls += r.n_recalls;
        n_restored += r.n_restored;

        printf("context %d: %d tokens, %d restores\n", i, r.n_decoded, r.n_restored);
        fflush(stdout);

        llama_batch_free(r.batch);
        llama_free(r.ctx);
    }

    // a run in which nothing happened proves nothing
    check(n_evicted > 0 && n_recalls > 0 && n_restored > 0, "evictions, recalls and restores took place");

    llama_model_free(model);
    llama_backend_free();
}
