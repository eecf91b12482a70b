"""Build files and tests of llama.cpp that ours hook into."""

from __future__ import annotations

from .probe import Order, Probe

PROBES = (
    Probe(
        name="build-llama",
        file="src/CMakeLists.txt",
        what="target `llama` takes more sources; its unity build can be switched off per file",
        why="how `native/` gets into libllama",
        ours=("CMakeLists.txt",),
        texts=(Order("src/CMakeLists.txt", ("add_library(llama", "UNITY_BUILD ON", "SKIP_UNITY_BUILD_INCLUSION ON")),),
    ),
    Probe(
        name="build-ggml",
        file="ggml/src/CMakeLists.txt",
        what="targets `ggml-base`, and `ggml-cpu` or one `ggml-cpu-*` per instruction set; "
        "`GGML_AVAILABLE_BACKENDS` lists the backends",
        why="how `native/ggml/` gets into them; what the wheel contains",
        ours=("ggml/CMakeLists.txt", "../CMakeLists.txt"),
        texts=(
            Order(
                "ggml/src/CMakeLists.txt",
                ("add_library(ggml-base", "GGML_AVAILABLE_BACKENDS", "ggml_add_cpu_backend_variant("),
            ),
            Order(
                "ggml/src/ggml-cpu/CMakeLists.txt",
                ("set(GGML_CPU_NAME ggml-cpu-${tag_name})", "set(GGML_CPU_NAME ggml-cpu)"),
            ),
        ),
    ),
    Probe(
        name="build-tests",
        file="tests/test-backend-ops.cpp",
        what="`test_case`, and two lists of cases",
        why="cases of `ATTN_SCORE`",
        ours=("../patches/0050-tests-operation-ATTN_SCORE.patch", "ggml/tests/backend-ops-attn-score.h"),
        texts=(
            Order(
                "tests/test-backend-ops.cpp",
                (
                    "struct test_case {",
                    "struct test_lightning_indexer : public test_case {",
                    "static std::vector<std::unique_ptr<test_case>> make_test_cases_eval() {",
                    "static std::vector<std::unique_ptr<test_case>> make_test_cases_perf() {",
                ),
            ),
        ),
    ),
)
