// Eight prompts of unlike length, each evicted as soon as its draft tokens are decoded, in one unified cache that could not
// hold them all. Afterwards all of them are decoded in common batches.
//
//   dge-many-sequences MODEL.gguf

#include "llama-dge.h"

#include <algorithm>
#include <cstdio>
#include <vector>

static const int n_cells  = 1024;
static const int budget   = 64;
static const int n_answer = 24;

static const std::vector<int> lengths = { 500, 120, 380, 640, 50, 410, 256, 333 };

struct sequence {
    llama_token token    = 0;
    int         n_past   = 0;
    int         n_answer = 0;
};

static llama_token best(llama_context * ctx, int i, int n_vocab) {
    const float * logits = llama_get_logits_ith(ctx, i);

    return (llama_token) (std::max_element(logits, logits + n_vocab) - logits);
}

static void add(llama_batch & batch, llama_token token, llama_pos pos, llama_seq_id seq_id, bool logits) {
    const int i = batch.n_tokens++;

    batch.token[i]     = token;
    batch.pos[i]       = pos;
    batch.n_seq_id[i]  = 1;
    batch.seq_id[i][0] = seq_id;
    batch.logits[i]    = logits;
}

static int fail(const char * what, int status) {
    fprintf(stderr, "%s: %d\n", what, status);

    return 1;
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return fail("usage: dge-many-sequences MODEL.gguf; number of arguments", argc - 1);
    }

    llama_log_set(
            [](ggml_log_level level, const char * text, void *) {
                if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
                    fputs(text, stderr);
                }
            },
            nullptr);

    llama_backend_init();

    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        return fail("cannot load the model", 0);
    }

    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const int n_seq   = lengths.size();

    auto cparams = llama_context_default_params();

    cparams.n_ctx      = n_cells;
    cparams.n_batch    = n_cells;
    cparams.n_seq_max  = n_seq;
    cparams.kv_unified = true;

    llama_context * ctx = llama_init_from_model(model, cparams);
    if (!ctx) {
        return fail("cannot create the context", 0);
    }

    auto params = llama_dge_default_params();

    params.budget       = budget;
    params.draft_tokens = 2;

    int status = llama_dge_enable(ctx, &params);
    if (status != LLAMA_DGE_OK) {
        return fail(llama_dge_status_str(status), status);
    }

    std::vector<sequence> seqs(n_seq);
    llama_batch           batch = llama_batch_init(n_cells, 0, 1);

    // each prompt in turn, and the tokens of its answer after which it is evicted
    for (int s = 0; s < n_seq; ++s) {
        auto & seq = seqs[s];

        batch.n_tokens = 0;
        for (int i = 0; i < lengths[s]; ++i) {
            add(batch, (i * (17 + s) + 5 * s) % n_vocab, i, s, i == lengths[s] - 1);
        }

        seq.n_past = lengths[s];

        for (int i = 0; i <= params.draft_tokens; ++i) {
            if ((status = llama_decode(ctx, batch)) != 0) {
                return fail("llama_decode", status);
            }
            if (i == 0 && (status = llama_dge_seq_arm(ctx, s, lengths[s])) < 0) {
                return fail(llama_dge_status_str(status), status);
            }

            seq.token = best(ctx, batch.n_tokens - 1, n_vocab);
            seq.n_answer++;

            batch.n_tokens = 0;
            add(batch, seq.token, seq.n_past, s, true);
            seq.n_past += i < params.draft_tokens;
        }
    }

    // all of them together
    while (seqs[0].n_answer < n_answer) {
        batch.n_tokens = 0;
        for (int s = 0; s < n_seq; ++s) {
            add(batch, seqs[s].token, seqs[s].n_past++, s, true);
        }
        if ((status = llama_decode(ctx, batch)) != 0) {
            return fail("llama_decode", status);
        }
        for (int s = 0; s < n_seq; ++s) {
            seqs[s].token = best(ctx, s, n_vocab);
            seqs[s].n_answer++;
        }
    }

    for (int s = 0; s < n_seq; ++s) {
        llama_dge_seq_info info;
        llama_dge_get_seq_info(ctx, s, &info);

        printf("sequence %d: prompt %3d, answer %d, %s, %3d entries of %d cells\n", s, lengths[s], seqs[s].n_answer,
                info.state == LLAMA_DGE_STATE_EVICTED ? "evicted" : "full", info.n_rows, n_cells);
    }

    llama_batch_free(batch);
    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
}
