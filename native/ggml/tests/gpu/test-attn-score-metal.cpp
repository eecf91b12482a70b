// The Metal kernels of GGML_OP_ATTN_SCORE, run on the CPU, against double precision. For clang: see metal-stub/.

#define CUDA_SHIM_NO_TYPES

#include "cuda-shim.h"

#include "attn-score-cases.h"

#include "metal_stdlib"

#include "attn-score-metal.h" // attn-score.metal by way of msl2cpp.py

template <typename K>
static void run_type(
        const attn_score_problem & p, const attn_score_kargs & args, std::vector<float> & dst, unsigned n_split) {
    const auto & c       = p.c;
    const int    n_rows  = c.n_q * c.n_group;
    const int    n_all   = n_rows * c.n_head_kv * c.n_seq;
    const int    n_tiles = (c.n_kv + ATTN_SCORE_KEYS - 1) / ATTN_SCORE_KEYS;

    std::vector<float2> part((size_t) n_all * n_split, float2 { NAN, NAN });
    std::vector<float2> stat(n_all, float2 { NAN, NAN });
    std::vector<float4> shared(ATTN_SCORE_SHARED / sizeof(float4), float4 { NAN, NAN, NAN, NAN });

    const auto launch = [](dim3 grid, std::function<void(uint3, ushort)> body) {
        shim::launch([&](int) { body(uint3 { blockIdx.x, blockIdx.y, blockIdx.z }, (ushort) threadIdx.x); }, grid,
                dim3(ATTN_SCORE_THREADS), 0);
    };
    launch(dim3(n_split, (n_rows + ATTN_SCORE_ROWS - 1) / ATTN_SCORE_ROWS, c.n_head_kv * c.n_seq), [&](uint3      group,
                                                                                                           ushort id) {
        kernel_attn_score_rows<K>(args, p.q.data(), p.k.data(), p.mask.data(), part.data(), shared.data(), group, id);
    });
    launch(dim3((n_all + ATTN_SCORE_THREADS - 1) / ATTN_SCORE_THREADS), [&](uint3 group, ushort id) {
        kernel_attn_score_combine(args, part.data(), p.sinks.data(), p.weights.data(), stat.data(), group, id);
    });
    launch(dim3(n_tiles, c.n_head_kv, c.n_seq), [&](uint3 group, ushort id) {
        kernel_attn_score_columns<K>(args, p.q.data(), p.k.data(), p.mask.data(), stat.data(), (char *) dst.data(),
                shared.data(), group, id);
    });
}

static std::vector<float> run(const attn_score_problem & p) {
    const auto & c = p.c;

    attn_score_kargs args = {};
    args.nbq1             = p.nbq1;
    args.nbq2             = p.nbq2;
    args.nbq3             = p.nbq3;
    args.nbk1             = p.nbk1;
    args.nbk2             = p.nbk2;
    args.nbk3             = p.nbk3;
    args.nbm1             = p.nbm1;
    args.nbm3             = p.nbm3;
    args.nbd1             = p.nbd1;
    args.nbd2             = p.nbd2;
    args.d                = c.d;
    args.n_kv             = c.n_kv;
    args.n_q              = c.n_q;
    args.n_head_kv        = c.n_head_kv;
    args.n_group          = c.n_group;
    args.n_seq            = c.n_seq;
    args.n_split          = 2;
    args.mask             = (int) c.mask;
    args.sinks            = c.sinks;
    args.weights          = c.weights;
    args.acc              = c.acc;
    args.scale            = p.scale;
    args.logit_softcap    = c.logit_softcap;
    args.norm             = p.norm;

    std::vector<float> dst = p.dst;
    switch (c.type) {
        case GGML_TYPE_F32:  run_type<attn_score_f32>(p, args, dst, args.n_split); break;
        case GGML_TYPE_F16:  run_type<attn_score_f16>(p, args, dst, args.n_split); break;
        case GGML_TYPE_BF16: run_type<attn_score_bf16>(p, args, dst, args.n_split); break;
        case GGML_TYPE_Q8_0: run_type<attn_score_q8_0>(p, args, dst, args.n_split); break;
        case GGML_TYPE_Q4_0: run_type<attn_score_q4_0>(p, args, dst, args.n_split); break;
        case GGML_TYPE_Q4_1: run_type<attn_score_q4_1>(p, args, dst, args.n_split); break;
        case GGML_TYPE_Q5_0: run_type<attn_score_q5_0>(p, args, dst, args.n_split); break;
        default:             run_type<attn_score_q5_1>(p, args, dst, args.n_split); break;
    }
    return dst;
}

int main() {
    int    n_fail = 0;
    double worst  = 0;

#ifdef FEW_CASES
    const auto cases = attn_score_cases_small();
#else
    const auto cases = attn_score_cases();
#endif
    for (const auto & c : cases) {
        const attn_score_problem p = attn_score_make(c, 1);
        for (unsigned order = 0; order < 3; ++order) {
            shim::order      = order;
            const double err = attn_score_error(p, run(p));
            worst            = std::max(worst, err);
            if (!(err <= ATTN_SCORE_ERROR_MAX)) {
                printf("FAIL %s, order %u: error %.2e\n", c.name().c_str(), order, err);
                n_fail++;
            }
        }
    }
    printf("%zu cases, 3 orders of threads: largest relative error %.2e, %d failed\n", cases.size(), worst, n_fail);
    return n_fail != 0;
}
