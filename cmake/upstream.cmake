# Have scripts/upstream.py fetch, unpack and patch llama.cpp; sets LLAMA_DGE_UPSTREAM_DIR (the tree) and
# LLAMA_DGE_UPSTREAM_VERSION (NAME-VERSION of the pinned sdist).

# scikit-build-core sets Python_EXECUTABLE to the interpreter that builds the wheel
find_package(Python 3.9 REQUIRED COMPONENTS Interpreter)

get_filename_component(LLAMA_DGE_ROOT "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(LLAMA_DGE_UPSTREAM_DIR "${LLAMA_DGE_ROOT}/build/upstream/llama.cpp")

execute_process(
    COMMAND "${Python_EXECUTABLE}" "${LLAMA_DGE_ROOT}/scripts/upstream.py" prepare
    RESULT_VARIABLE LLAMA_DGE_UPSTREAM_RESULT)
if (NOT LLAMA_DGE_UPSTREAM_RESULT EQUAL 0)
    message(FATAL_ERROR "scripts/upstream.py could not prepare the llama.cpp source; its message is above")
endif()

file(STRINGS "${LLAMA_DGE_ROOT}/patches/UPSTREAM" LLAMA_DGE_UPSTREAM_VERSION LIMIT_COUNT 1)
string(REGEX REPLACE "^([^=]+)==([^ ]+) .*" "\\1-\\2" LLAMA_DGE_UPSTREAM_VERSION "${LLAMA_DGE_UPSTREAM_VERSION}")

# a changed pin or patch configures anew
file(GLOB LLAMA_DGE_PATCHES CONFIGURE_DEPENDS "${LLAMA_DGE_ROOT}/patches/*.patch")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${LLAMA_DGE_ROOT}/patches/UPSTREAM" ${LLAMA_DGE_PATCHES}
    "${LLAMA_DGE_ROOT}/scripts/upstream.py" "${LLAMA_DGE_ROOT}/scripts/upstream_tree.py")
