// ATTN_SCORE on every device that there is, against double precision and against the graph that it stands for.
//
//   make test-native           the CPU's, with sanitizers
//   make test-backend-ops      all backends of the build, beside llama.cpp's own test of operations

#include "attn-score-case.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

static int n_failed = 0;
static int n_run    = 0;
static int n_graph  = 0;

static double nmse(const std::vector<float> & x, const std::vector<float> & ref) {
    double num = 0.0;
    double den = 0.0;
    for (size_t i = 0; i < ref.size(); ++i) {
        num += ((double) x[i] - ref[i]) * ((double) x[i] - ref[i]);
        den += (double) ref[i] * ref[i];
    }
    // NaN is no small number
    return std::isnan(num) || x.size() != ref.size() ? INFINITY : num / std::max(den, 1e-30);
}

static void fail(const attn_score_case & c, const char * what, double value) {
    fprintf(stderr, "failed: %s: %s (%g)\n", c.text().c_str(), what, value);
    n_failed++;
}

static std::vector<attn_score_case> make_cases() {
    std::vector<attn_score_case> res;

    attn_score_case base;

    // types of the cache, head sizes
    for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                 GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL }) {
        for (int64_t n_embd : { 64, 80, 96, 128, 256 }) {
            attn_score_case c = base;
            c.type_k          = type;
            c.n_embd          = n_embd;
            c.n_kv            = 257 + n_embd;
            c.norm            = 0.25f;
            if (n_embd % ggml_blck_size(type) == 0) {
                res.push_back(c);
            }
        }
    }

    // heads, rows, keys
    for (int64_t n_group : { 1, 2, 3, 4, 7, 8 }) {
        for (int64_t n_kv : { 1, 7, 8, 16, 255, 256, 777 }) {
            attn_score_case c = base;
            c.n_group         = n_group;
            c.n_kv            = n_kv;
            c.n_q             = std::min<int64_t>(n_kv, 1 + n_kv % 9);
            c.n_heads         = 1 + n_group % 3;
            res.push_back(c);
        }
    }

    // the last keys, one of them alone in what is computed at once
    for (int64_t n_kv : { 15, 17, 257, 273, 1009 }) {
        attn_score_case c = base;
        c.mask            = ATTN_SCORE_MASK_NONE;
        c.n_kv            = n_kv;
        res.push_back(c);
    }

    // masks, each with all that can be there or not
    for (attn_score_mask mask : { ATTN_SCORE_MASK_NONE, ATTN_SCORE_MASK_CAUSAL, ATTN_SCORE_MASK_HOLES,
                 ATTN_SCORE_MASK_FAR, ATTN_SCORE_MASK_ROWS, ATTN_SCORE_MASK_ADDITIVE }) {
        for (int bits = 0; bits < 16; ++bits) {
            attn_score_case c = base;
            c.mask            = mask;
            c.type_m          = bits & 1 ? GGML_TYPE_F32 : GGML_TYPE_F16;
            c.sinks           = bits & 2;
            c.weights         = bits & 4;
            c.acc             = bits & 8;
            c.cap             = bits % 3 == 0 ? 2.5f : 0.0f;
            c.n_seq           = 1 + bits % 2;
            c.n_kv            = 530;
            c.n_q             = 11;
            c.poison          = bits < 12;
            res.push_back(c);
        }
    }

    // more rows than fit into the working memory at once; many heads at once
    for (int64_t n_kv : { 5000, 20011 }) {
        attn_score_case c = base;
        c.n_q             = n_kv == 5000 ? 24 : 8;
        c.n_group         = 4;
        c.n_kv            = n_kv;
        c.n_heads         = 1;
        c.acc             = n_kv == 5000;
        c.weights         = n_kv == 5000;
        c.type_k          = n_kv == 5000 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
        res.push_back(c);
    }
    {
        attn_score_case c = base;
        c.n_heads         = 12;
        c.n_group         = 1;
        c.n_kv            = 600;
        c.n_q             = 20;
        c.n_seq           = 3;
        res.push_back(c);
    }

    // a row that is nearly one key, and one that is flat
    for (float peak : { 0.01f, 12.0f }) {
        attn_score_case c = base;
        c.peak            = peak;
        c.n_kv            = 700;
        res.push_back(c);
    }

    return res;
}

// stages of the weights' test: no row counts
static void test_no_rows(ggml_backend_t backend) {
    attn_score_case c;
    c.weights = true;
    c.n_q     = 1; // the only weight is 0

    for (bool acc : { false, true }) {
        c.acc = acc;

        const attn_score_data data(c, backend, 5);

        const auto out = data.run(true);
        if (out.empty() && !ggml_backend_is_cpu(backend)) {
            printf("  not supported: %s\n", c.text().c_str()); // Metal does not add in place
            continue;
        }
        const auto ref = data.reference();

        if (out.size() != ref.size() || memcmp(out.data(), ref.data(), ref.size() * sizeof(float)) != 0) {
            fail(c, "no row counts, and yet there is a sum", 0.0);
        }
    }
}

static void set_threads(ggml_backend_t backend, int n) {
    auto * reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    auto   set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set) {
        set(backend, n);
    }
}

static void test_case_on(ggml_backend_t backend, const attn_score_case & c, uint32_t seed, bool is_cpu) {
    const attn_score_data data(c, backend, seed);

    set_threads(backend, 2);

    const auto out = data.run(true);
    if (out.empty()) {
        printf("  not supported: %s\n", c.text().c_str());
        return;
    }
    n_run++;

    if (data.damaged()) {
        fail(c, "wrote beside the sums", 0.0);
    }

    const auto   ref = data.reference();
    const double err = nmse(out, ref);

    // a CPU's f32; a device may round K's products
    if (!(err < (is_cpu ? 1e-10 : 1e-6))) {
        fail(c, "error against double precision", err);
    }

    if (c.has_graph() && !(c.weights && c.poison)) {
        const auto graph = data.run(false);
        n_graph += !graph.empty();

        const double err_graph = graph.empty() ? 0.0 : nmse(out, graph);
        if (!(err_graph < (is_cpu ? 1e-9 : 1e-6))) {
            fail(c, "error against the graph", err_graph);
        }
    }

    if (!is_cpu) {
        return;
    }

    // more threads than cores wait for each other: some cases are enough
    for (int n_threads : seed % 5 == 0 ? std::vector<int> { 1, 3, 5 } : std::vector<int> { 1 }) {
        set_threads(backend, n_threads);

        const auto other = data.run(true);
        if (other.size() != out.size() || memcmp(other.data(), out.data(), out.size() * sizeof(float)) != 0) {
            fail(c, "another number of threads gives another result", n_threads);
        }
    }

    // the plain version that the CPU runs as a reference of other backends
    ggml_backend_cpu_set_use_ref(backend, true);
    const double err_ref = nmse(data.run(true), ref);
    ggml_backend_cpu_set_use_ref(backend, false);

    if (!(err_ref < 1e-12)) {
        fail(c, "error of the reference mode", err_ref);
    }
}

int main() {
    // errors alone
    ggml_log_set(
            [](ggml_log_level level, const char * text, void *) {
                if (level == GGML_LOG_LEVEL_ERROR) {
                    fputs(text, stderr);
                }
            },
            nullptr);

    ggml_backend_load_all();

    const auto cases = make_cases();

    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        auto * dev = ggml_backend_dev_get(i);

        ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
        if (!backend) {
            fprintf(stderr, "failed: %s does not start\n", ggml_backend_dev_name(dev));
            n_failed++;
            continue;
        }

        const bool is_cpu = ggml_backend_is_cpu(backend.get());

        n_run   = 0;
        n_graph = 0;

        uint32_t seed = 1;
        for (const auto & c : cases) {
            test_case_on(backend.get(), c, seed++, is_cpu);
        }
        test_no_rows(backend.get());

        printf("%s: %d of %zu cases, %d of them also against the graph\n", ggml_backend_dev_name(dev), n_run,
                cases.size(), n_graph);

        // the CPU has all of them
        if (is_cpu && n_run != (int) cases.size()) {
            n_failed++;
        }
    }

    printf("%s\n", n_failed ? "FAILED" : "ok");
    return n_failed ? 1 : 0;
}
