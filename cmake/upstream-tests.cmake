# llama.cpp's own test programs that touch what we patch, linked to our libllama. Off by default: llama-common and they
# take minutes to compile. See `make test-upstream`.

set(LLAMA_DGE_UPSTREAM_TEST_DIR "${LLAMA_DGE_UPSTREAM_DIR}/tests")

foreach (name test-llama-archs test-save-load-state test-recurrent-state-rollback test-state-restore-fragmented)
    add_executable(${name} "${LLAMA_DGE_UPSTREAM_TEST_DIR}/${name}.cpp")
    target_link_libraries(${name} PRIVATE llama llama-common)
    # beside the libraries, which is where $ORIGIN looks
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
    list(APPEND LLAMA_DGE_UPSTREAM_TEST_TARGETS ${name})
endforeach()

add_custom_target(llama-dge-upstream-tests DEPENDS ${LLAMA_DGE_UPSTREAM_TEST_TARGETS})

# a tiny random model of every architecture, on which the others run
set(LLAMA_DGE_TINY_MODELS "${CMAKE_BINARY_DIR}/tiny-models")
file(MAKE_DIRECTORY "${LLAMA_DGE_TINY_MODELS}")

add_test(NAME upstream-archs COMMAND test-llama-archs)
add_test(NAME upstream-tiny-models COMMAND test-llama-archs -o "${LLAMA_DGE_TINY_MODELS}")
set_tests_properties(upstream-tiny-models PROPERTIES FIXTURES_SETUP tiny-models)

foreach (name save-load-state recurrent-state-rollback)
    add_test(NAME upstream-${name} COMMAND test-${name} --models "${LLAMA_DGE_TINY_MODELS}")
    set_tests_properties(upstream-${name} PROPERTIES FIXTURES_REQUIRED tiny-models)
endforeach()
