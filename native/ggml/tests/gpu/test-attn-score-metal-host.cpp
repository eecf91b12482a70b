// GGML_OP_ATTN_SCORE through ggml-metal as a Mac runs it, on a stand-in for the device: what is supported, the memory of a
// result, the encoding of a graph, the kernels. See metal-device-shim.h.
//
//   attn-score-metal-host [FILE]   FILE: gets the source that the device is asked to compile

#define CUDA_SHIM_NO_TYPES

#include "cuda-shim.h"

#include "attn-score-cases.h"

#include "ggml-attn-score.h"
#include "ggml-backend-impl.h"
#include "ggml-metal-attn-score.h"
#include "ggml-metal-fusion.h"
#include "ggml-metal-ops.h"
#include "ggml-metal.h"

#include <climits>
#include <map>
#include <memory>
#include <set>

// functions of C have the names of Metal's
namespace msl {
#include "metal_stdlib"

#include "attn-score-metal.h" // attn-score.metal by way of msl2cpp.py
} // namespace msl

using namespace msl;

#include "metal-device-shim.h"

static int n_fail = 0;

static void check(bool ok, const std::string & what) {
    if (!ok) {
        printf("FAIL %s\n", what.c_str());
        n_fail++;
    }
}

// --- graphs

struct test_graph {
    ggml_context *                     ctx;
    ggml_backend_buffer_type_t         buft;
    std::vector<ggml_backend_buffer_t> buffers;

    test_graph() {
        ctx  = ggml_init({ 64 * ggml_tensor_overhead() + 2 * ggml_graph_overhead(), nullptr, true });
        buft = ggml_backend_dev_buffer_type(ggml_backend_reg_dev_get(ggml_backend_metal_reg(), 0));
    }

    ~test_graph() {
        for (auto * buffer : buffers) {
            ggml_backend_buffer_free(buffer);
        }
        ggml_free(ctx);
    }

    // a buffer of its own that ends where the tensor, or what its operation needs behind it, does
    void alloc(ggml_tensor * t) {
        buffers.push_back(ggml_backend_buft_alloc_buffer(buft, ggml_backend_buft_get_alloc_size(buft, t)));
        ggml_backend_tensor_alloc(buffers.back(), t, ggml_backend_buffer_get_base(buffers.back()));
        memset(t->data, 0xff, ggml_backend_buffer_get_size(buffers.back()));
    }

    template <typename T>
    ggml_tensor * input(ggml_type type, std::vector<int64_t> ne, std::vector<size_t> nb, const std::vector<T> & data) {
        ggml_tensor * t = ggml_new_tensor(ctx, type, (int) ne.size(), ne.data());
        for (size_t i = 0; i < nb.size(); ++i) {
            t->nb[i + 1] = nb[i];
        }
        alloc(t);
        GGML_ASSERT(ggml_nbytes(t) == data.size() * sizeof(T));
        memcpy(t->data, data.data(), ggml_nbytes(t));
        return t;
    }

    void compute(std::vector<ggml_tensor *> nodes) {
        ggml_cgraph * gf = ggml_new_graph(ctx);
        for (auto * node : nodes) {
            ggml_build_forward_expand(gf, node);
        }

        auto * finfo = ggml_metal_fusion_info_init(true, 0);
        auto * op    = ggml_metal_op_init(&mock_device, nullptr, gf, finfo, 0, ggml_graph_n_nodes(gf), true, false, 0);
        for (int i = 0; i < ggml_metal_op_n_nodes(op);) {
            i += ggml_metal_op_encode(op, i);
        }
        ggml_metal_op_free(op);
        ggml_metal_fusion_info_free(finfo);
    }
};

struct test_op {
    ggml_tensor * q;
    ggml_tensor * k;
    ggml_tensor * mask    = nullptr;
    ggml_tensor * sinks   = nullptr;
    ggml_tensor * weights = nullptr;
    ggml_tensor * out;
};

static test_op make_op(test_graph & g, const attn_score_problem & p) {
    const auto & c = p.c;

    test_op op;
    op.q = g.input(GGML_TYPE_F32, { c.d, c.n_q, c.n_head_kv * c.n_group, c.n_seq }, { p.nbq1, p.nbq2, p.nbq3 }, p.q);
    op.k = g.input(c.type, { c.d, c.n_kv, c.n_head_kv, c.n_seq }, { p.nbk1, p.nbk2, p.nbk3 }, p.k);
    if (c.mask != MASK_NONE) {
        op.mask = g.input(c.mask == MASK_F16 ? GGML_TYPE_F16 : GGML_TYPE_F32, { c.n_kv, c.n_q, 1, c.n_seq },
                { p.nbm1, p.nbm3, p.nbm3 }, p.mask);
    }
    if (c.sinks) {
        op.sinks = g.input(GGML_TYPE_F32, { c.n_head_kv * c.n_group }, {}, p.sinks);
    }
    if (c.weights) {
        op.weights = g.input(GGML_TYPE_F32, { c.n_q }, {}, p.weights);
    }
    op.out = ggml_attn_score(
            g.ctx, op.q, op.k, op.mask, op.sinks, op.weights, nullptr, p.scale, c.logit_softcap, p.norm);
    return op;
}

// what is added to is not ggml-metal's: see what is supported
static std::vector<float> run(const attn_score_problem & p) {
    const auto & c = p.c;

    test_graph g;
    test_op    op = make_op(g, p);
    g.alloc(op.out);
    g.compute({ op.out });

    std::vector<float> res = p.dst;
    for (int s = 0; s < c.n_seq; ++s) {
        for (int h = 0; h < c.n_head_kv; ++h) {
            for (int j = 0; j < c.n_kv; ++j) {
                float & x = res[s * p.nbd2 / 4 + h * p.nbd1 / 4 + j];
                x         = (c.acc ? x : 0.0f) + ((const float *) op.out->data)[(s * c.n_head_kv + h) * c.n_kv + j];
            }
        }
    }
    return res;
}

// --- what is supported

static bool supported(const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(ggml_backend_reg_dev_get(ggml_backend_metal_reg(), 0), op);
}

static ggml_tensor * shape(test_graph & g, ggml_type type, int64_t d, int64_t n_kv = 100, bool acc = false) {
    ggml_tensor * q    = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, d, 8, 4);
    ggml_tensor * k    = ggml_new_tensor_3d(g.ctx, type, d, n_kv, 2);
    ggml_tensor * mask = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F16, n_kv, 8);
    ggml_tensor * sums = acc ? ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, n_kv, 2) : nullptr;

    return ggml_attn_score(g.ctx, q, k, mask, nullptr, nullptr, sums, 1.0f, 0.0f, 1.0f);
}

static void test_supported() {
    test_graph g;

    const std::set<ggml_type> with_kernel = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0,
        GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1 };

    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = (ggml_type) i;
        if (type == GGML_TYPE_F32 || (ggml_blck_size(type) > 0 && ggml_get_type_traits(type)->to_float)) {
            check(supported(shape(g, type, 256)) == (with_kernel.count(type) == 1), ggml_type_name(type));
            ggml_reset(g.ctx);
        }
    }
    check(mock_n_compiled == 1, "kernels are compiled once");

    for (int64_t d : { 4, 40, 64, 80, 128, 576 }) {
        check(supported(shape(g, GGML_TYPE_F16, d)), "head size");
    }
    check(!supported(shape(g, GGML_TYPE_F16, 64, 100, true)), "added to in place");
    check(!supported(shape(g, GGML_TYPE_F16, 64, INT_MAX)), "number of keys");

    const auto with = [&](ggml_type type, auto change) {
        ggml_reset(g.ctx);
        ggml_tensor * op = shape(g, type, 64);
        change(op);
        return supported(op);
    };
    // behind rows that begin where others do
    check(!with(GGML_TYPE_F16, [](ggml_tensor * op) { op->src[0]->ne[0] = op->src[1]->ne[0] = 62; }), "head size 62");
    check(!with(GGML_TYPE_F16, [](ggml_tensor * op) { op->src[0]->view_offs = 8; }), "beginning of q");
    check(!with(GGML_TYPE_F16, [](ggml_tensor * op) { op->src[0]->nb[1] += 8; }), "rows of q");
    check(with(GGML_TYPE_F16, [](ggml_tensor * op) { op->src[1]->view_offs = 2; }), "beginning of k in f16");
    check(!with(GGML_TYPE_F32, [](ggml_tensor * op) { op->src[1]->view_offs = 8; }), "beginning of k in f32");
    check(!with(GGML_TYPE_F32, [](ggml_tensor * op) { op->src[1]->nb[2] += 8; }), "heads of k in f32");
    check(!with(GGML_TYPE_F16, [](ggml_tensor * op) { op->src[2]->nb[1] += 1; }), "rows of the mask");
    check(!with(GGML_TYPE_F16, [](ggml_tensor * op) { op->src[0]->ne[1] = INT_MAX / 4; }), "number of rows");

    // a device, and what it lacks; each has a library of its own
    static std::vector<std::unique_ptr<ggml_metal_device>> devices;

    const auto lacks = [&](const char * what, ggml_type type, auto change) {
        ggml_reset(g.ctx);
        devices.push_back(std::make_unique<ggml_metal_device>(mock_device));
        change(devices.back()->props);
        check(!ggml_metal_device_supports_op(devices.back().get(), shape(g, type, 64)), what);
        mock_compiles  = true;
        mock_n_threads = 1024;
        mock_missing   = "";
    };
    lacks("shuffles", GGML_TYPE_F16, [](ggml_metal_device_props & props) { props.has_simdgroup_reduction = false; });
    lacks("memory", GGML_TYPE_F16, [](ggml_metal_device_props & props) { props.max_theadgroup_memory_size = 8192; });
    lacks("bfloat", GGML_TYPE_BF16, [](ggml_metal_device_props & props) { props.has_bfloat = false; });
    lacks("a compiler", GGML_TYPE_F16, [](ggml_metal_device_props &) { mock_compiles = false; });
    lacks("threads", GGML_TYPE_F16, [](ggml_metal_device_props &) { mock_n_threads = 96; });
    for (const char * name : { "rows_f16", "combine", "columns_f16" }) {
        lacks(name, GGML_TYPE_F16,
                [&](ggml_metal_device_props &) { mock_missing = std::string("kernel_attn_score_") + name; });
    }
}

// --- graphs of more than one

// the second has the first's result for weights: it has to wait
static void test_two() {
    const attn_score_problem p =
            attn_score_make({ GGML_TYPE_F16, 64, 90, 9, 2, 4, 1, MASK_F16, true, false, false, 0 }, 2);

    const auto get = [](const ggml_tensor * t) {
        return std::vector<float>((float *) t->data, (float *) t->data + ggml_nelements(t));
    };
    const auto second = [&](test_graph & g, const test_op & op, ggml_tensor * weights) {
        ggml_tensor * out =
                ggml_attn_score(g.ctx, op.q, op.k, op.mask, op.sinks, weights, nullptr, p.scale, 0.0f, 1.0f);
        g.alloc(out);
        g.compute({ out });
        return get(out);
    };

    std::vector<float> first, want, got;
    {
        test_graph g;
        test_op    op = make_op(g, p);
        g.alloc(op.out);
        g.compute({ op.out });
        first = get(op.out);
        first = { first.begin() + 40, first.begin() + 49 };
        want  = second(g, op, g.input(GGML_TYPE_F32, { 9 }, {}, first));
    }
    {
        test_graph g;
        test_op    op = make_op(g, p);
        g.alloc(op.out);
        ggml_tensor * weights = ggml_view_1d(g.ctx, op.out, 9, 40 * sizeof(float));
        GGML_ASSERT(ggml_backend_view_init(weights) == GGML_STATUS_SUCCESS);
        got = second(g, op, weights);
    }
    check(*std::max_element(want.begin(), want.end()) > 0, "the second of two operations has a result");
    check(got == want, "the second of two operations waits for the first");
}

int main(int argc, char ** argv) {
    mock_device.props = {};
    snprintf(mock_device.props.name, sizeof(mock_device.props.name), "stand-in");
    mock_device.props.has_simdgroup_reduction    = true;
    mock_device.props.has_bfloat                 = true;
    mock_device.props.use_shared_buffers         = true;
    mock_device.props.max_theadgroup_memory_size = 32768;
    mock_device.props.max_buffer_size            = 1u << 30;

    test_supported();
    test_two();

    double worst = 0;

#ifdef FEW_CASES
    auto cases = attn_score_cases_small();
#else
    auto cases = attn_score_cases();
    // parts of the keys that have several tiles
    cases.push_back({ GGML_TYPE_F16, 32, 260, 33, 8, 8, 1, MASK_F16, false, false, false, 0 });
#endif
    // a result that is larger than the memory of the first pass
    cases.push_back({ GGML_TYPE_Q4_0, 32, 16500, 1, 1, 1, 1, MASK_NONE, false, false, false, 0 });

    for (size_t i = 0; i < cases.size(); ++i) {
        const attn_score_problem p = attn_score_make(cases[i], 1);

        shim::order      = (i + 1) % 3;
        const double err = attn_score_error(p, run(p));
        worst            = std::max(worst, err);
        check(err <= ATTN_SCORE_ERROR_MAX, cases[i].name() + ": error " + std::to_string(err));
    }
    printf("%zu cases: largest relative error %.2e, %d failed\n", cases.size(), worst, n_fail);

    if (argc > 1) {
        FILE * file = fopen(argv[1], "w");
        GGML_ASSERT(file && fputs(mock_source.c_str(), file) >= 0 && fclose(file) == 0);
    }
    return n_fail != 0;
}
