# Compile through ccache where it is installed. With the project root as its base folder, paths below it are hashed
# relative to the build folder: another clone and another folder build/NAME hit the same entries.
#
# -DGGML_CCACHE=OFF or a CMAKE_<LANG>_COMPILER_LAUNCHER of the user's wins.

option(GGML_CCACHE "ggml: use ccache if available" ON)

if (NOT GGML_CCACHE OR CMAKE_C_COMPILER_LAUNCHER OR CMAKE_CXX_COMPILER_LAUNCHER)
    return()
endif()

find_program(LLAMA_DGE_CCACHE ccache)
mark_as_advanced(LLAMA_DGE_CCACHE)
if (NOT LLAMA_DGE_CCACHE)
    return()
endif()

get_filename_component(LLAMA_DGE_CCACHE_BASE "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

# not `cmake -E env` where there is another: pip's build isolation gives cmake a new path each time, and a changed
# command line compiles everything again
find_program(LLAMA_DGE_ENV env)
mark_as_advanced(LLAMA_DGE_ENV)
if (LLAMA_DGE_ENV)
    set(LLAMA_DGE_LAUNCHER "${LLAMA_DGE_ENV}")
else()
    set(LLAMA_DGE_LAUNCHER "${CMAKE_COMMAND}" -E env)
endif()
list(APPEND LLAMA_DGE_LAUNCHER "CCACHE_BASEDIR=${LLAMA_DGE_CCACHE_BASE}" CCACHE_NOHASHDIR=1)

foreach (lang C CXX HIP OBJC OBJCXX)
    set(CMAKE_${lang}_COMPILER_LAUNCHER ${LLAMA_DGE_LAUNCHER} "${LLAMA_DGE_CCACHE}")
endforeach()
# a toolkit that was unpacked once more is the same compiler
set(CMAKE_CUDA_COMPILER_LAUNCHER ${LLAMA_DGE_LAUNCHER} CCACHE_COMPILERCHECK=content "${LLAMA_DGE_CCACHE}")
message(STATUS "ccache: ${LLAMA_DGE_CCACHE}")
