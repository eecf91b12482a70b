#pragma once

// Put in front of ggml's sources for AMX. GCC's _tile_loadconfig (seen in 12) tells the compiler that eight bytes of the
// configuration are read, not all 64. The sizes of the tiles, which ggml writes just before, are dropped as dead stores
// then, and the first instruction on a tile ends the process with SIGILL.

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char (*)[64])(config)))

#endif
