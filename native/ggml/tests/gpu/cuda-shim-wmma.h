#pragma once

// nvcuda::wmma for cuda-shim.h: products of 16 x 16 halves, summed in f32.
//
// A call is made by all lanes of a warp with the same arguments, at the same line, and pointers and strides are what the
// CUDA programming guide asks for; else it aborts. Which lane has which element of a fragment is shuffled. A fragment that
// nothing was loaded into must not be used.
//
// Sums are those of the coarsest unit that has been looked into (V100; Fasi et al. 2021, doi 10.7717/peerj-cs.330): four
// products and the sum so far are aligned to the largest of them and cut off, not rounded, to 24 bits.

#include "cuda-shim.h"

#include <array>

namespace nvcuda {
namespace wmma {

struct matrix_a {
    static constexpr unsigned seed = 1;
};

struct matrix_b {
    static constexpr unsigned seed = 2;
};

struct accumulator {
    static constexpr unsigned seed = 3;
};

struct row_major {
    static constexpr bool is_row = true;
};

struct col_major {
    static constexpr bool is_row = false;
};

enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int m, int n, int k, typename T, typename Layout = void>
struct fragment {
    static_assert(m == 16 && n == 16 && k == 16, "no other shape here");

    static constexpr int num_elements = 8; // 256 by 32 lanes

    T    x[num_elements];
    bool is_set = false;

    fragment() { memset(x, 0xff, sizeof(x)); } // NaN
};

// element of a 16 x 16 matrix, row by row, that is in x[i] of a lane
template <typename Use>
unsigned element(unsigned lane, int i) {
    static const auto table = [] {
        std::array<unsigned, 256> res;
        std::iota(res.begin(), res.end(), 0u);
        std::mt19937 rng(Use::seed);
        std::shuffle(res.begin(), res.end(), rng);
        return res;
    }();
    return table[lane * 8 + i];
}

// what the lanes of a warp tell each other, two as in shim::exchange
struct message {
    int          line;
    const void * p;
    unsigned     ldm;
    half         a[8];
    half         b[8];
};

inline message messages[2][shim::n_block_max];

[[noreturn]] inline void die(const char * msg, int line) {
    fprintf(stderr, "cuda-shim: %s (thread %u, line %d)\n", msg, shim::cur->lin, line);
    abort();
}

// messages of the warp, once all lanes are here
inline const message * meet(const message & msg) {
    const unsigned lin  = shim::cur->lin;
    const unsigned warp = lin / shim::n_warp * shim::n_warp;
    const unsigned i    = shim::n_exchange[lin]++ % 2;
    if (warp + shim::n_warp > shim::threads.size()) {
        die("the warp has fewer than 32 lanes", msg.line);
    }
    messages[i][lin] = msg;
    shim::wait(shim::WARP, 0);

    const message * res = &messages[i][warp];
    for (unsigned j = 0; j < shim::n_warp; ++j) {
        if (res[j].line != msg.line || res[j].p != msg.p || res[j].ldm != msg.ldm) {
            die("lanes of a warp call different matrix functions, or with different arguments", msg.line);
        }
    }
    return res;
}

inline void check(const void * p, unsigned ldm, size_t size, int line) {
    if ((uintptr_t) p % 32 != 0) {
        die("a matrix has to be aligned to 256 bits", line);
    }
    if (ldm * size % 16 != 0 || ldm < 16) {
        die("the stride of a matrix has to be a multiple of 16 bytes, and 16 elements at least", line);
    }
}

template <typename Use, int m, int n, int k, typename T, typename Layout>
void fill_fragment(fragment<Use, m, n, k, T, Layout> & f, T value) {
    std::fill(f.x, f.x + f.num_elements, value);
    f.is_set = true;
}

// reads before the others are there: what a lane of the same warp has just written needs a barrier
template <typename Use, int m, int n, int k, typename Layout>
void load_matrix_sync(
        fragment<Use, m, n, k, half, Layout> & f, const half * p, unsigned ldm, int line = __builtin_LINE()) {
    check(p, ldm, sizeof(half), line);
    for (int i = 0; i < f.num_elements; ++i) {
        const unsigned e = element<Use>(shim::cur->lin % shim::n_warp, i);
        f.x[i]           = Layout::is_row ? p[e / 16 * ldm + e % 16] : p[e % 16 * ldm + e / 16];
    }
    f.is_set = true;
    meet({ line, p, ldm, {}, {} });
}

template <int m, int n, int k>
void store_matrix_sync(float * p, const fragment<accumulator, m, n, k, float> & f, unsigned ldm, layout_t layout,
        int line = __builtin_LINE()) {
    check(p, ldm, sizeof(float), line);
    meet({ line, p, ldm, {}, {} });
    for (int i = 0; i < f.num_elements; ++i) {
        const unsigned e = element<accumulator>(shim::cur->lin % shim::n_warp, i);

        p[layout == mem_row_major ? e / 16 * ldm + e % 16 : e % 16 * ldm + e / 16] = f.x[i];
    }
}

// x[0] + ... + x[4], cut off. None is a denormal of double
inline float sum_cut(const double (&x)[5]) {
    uint64_t e_max = 0;
    for (double v : x) {
        uint64_t bits;
        memcpy(&bits, &v, sizeof(v));
        e_max = std::max(e_max, bits >> 52 & 2047);
    }
    if (e_max == 0 || e_max == 2047) { // zeros, or one that is not finite
        return (float) (x[0] + x[1] + x[2] + x[3] + x[4]);
    }
    // the largest has 24 bits in these units
    const uint64_t bits = (2 * 1023 + 23 - e_max) << 52;
    double         unit;
    memcpy(&unit, &bits, sizeof(unit));

    int64_t sum = 0;
    for (double v : x) {
        sum += (int64_t) (v * unit);
    }
    int64_t step = 1;
    while (std::abs(sum) >= step << 24) {
        step *= 2;
    }
    return (float) ((double) (sum / step * step) / unit);
}

template <int m, int n, int k, typename LayoutA, typename LayoutB>
void mma_sync(fragment<accumulator, m, n, k, float> & d, const fragment<matrix_a, m, n, k, half, LayoutA> & a,
        const fragment<matrix_b, m, n, k, half, LayoutB> & b, const fragment<accumulator, m, n, k, float> & c,
        int line = __builtin_LINE()) {
    if (!a.is_set || !b.is_set || !c.is_set) {
        die("a fragment is used that holds nothing", line);
    }
    message msg = { line, nullptr, 0, {}, {} };
    std::copy(a.x, a.x + 8, msg.a);
    std::copy(b.x, b.x + 8, msg.b);
    const message * all = meet(msg);

    double ma[256], mb[256]; // row by row, and column by column
    for (unsigned lane = 0; lane < shim::n_warp; ++lane) {
        for (int i = 0; i < 8; ++i) {
            const unsigned eb = element<matrix_b>(lane, i);

            ma[element<matrix_a>(lane, i)] = __half2float(all[lane].a[i]);
            mb[eb % 16 * 16 + eb / 16]     = __half2float(all[lane].b[i]);
        }
    }
    for (int i = 0; i < d.num_elements; ++i) {
        const unsigned e = element<accumulator>(shim::cur->lin % shim::n_warp, i);
        const double * x = ma + e / 16 * 16;
        const double * y = mb + e % 16 * 16;

        float sum = c.x[i];
        for (int j = 0; j < 16; j += 4) {
            sum = sum_cut({ sum, x[j] * y[j], x[j + 1] * y[j + 1], x[j + 2] * y[j + 2], x[j + 3] * y[j + 3] });
        }
        d.x[i] = sum;
    }
    d.is_set = true;
}

} // namespace wmma
} // namespace nvcuda
