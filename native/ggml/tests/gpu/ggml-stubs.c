// What ggml-quants.c asks of the rest of ggml, which the tests of kernels do not build.

#include "ggml.h"

#include <stdio.h>
#include <stdlib.h>

void ggml_abort(const char * file, int line, const char * fmt, ...) {
    fprintf(stderr, "%s:%d: %s\n", file, line, fmt);
    abort();
}

size_t ggml_type_size(enum ggml_type type) {
    (void) type;
    abort();
}

size_t ggml_row_size(enum ggml_type type, int64_t ne) {
    (void) type;
    (void) ne;
    abort();
}

const char * ggml_type_name(enum ggml_type type) {
    (void) type;
    abort();
}
