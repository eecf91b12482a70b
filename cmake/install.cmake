# llama_dge_install(TARGET...)
#
# Puts the shared libraries of these targets into llama_dge/lib of the wheel (component llama_dge), and makes
# `llama-dge` the target that builds exactly them.
#
# They lose upstream's version suffixes: a wheel holds no symlinks, so libX.so -> libX.so.0 -> libX.so.0.5.0 would
# become three copies, and llama_cpp asks for libX.so.
function (llama_dge_install)
    foreach (target ${ARGN})
        # a backend that was switched off stays in upstream's list until the cache is deleted
        if (NOT TARGET ${target})
            continue()
        endif()
        set_property(TARGET ${target} PROPERTY VERSION)
        set_property(TARGET ${target} PROPERTY SOVERSION)
        set_property(TARGET ${target} PROPERTY PUBLIC_HEADER)
        set_property(TARGET ${target} PROPERTY PRIVATE_HEADER)
        install(TARGETS ${target}
            LIBRARY DESTINATION llama_dge/lib COMPONENT llama_dge
            RUNTIME DESTINATION llama_dge/lib COMPONENT llama_dge
            ARCHIVE DESTINATION llama_dge/lib COMPONENT llama_dge-development)
        list(APPEND targets ${target})
    endforeach()

    if (WIN32)
        # llama_cpp adds its library folder to the DLL search path and no other
        install(FILES $<TARGET_RUNTIME_DLLS:llama> DESTINATION llama_dge/lib COMPONENT llama_dge)
    endif()

    add_custom_target(llama-dge ALL DEPENDS ${targets})
endfunction()

# the texts that must travel with a wheel that holds compiled llama.cpp; its other bundled headers carry theirs inside
function (llama_dge_install_licenses upstream)
    file(GLOB files RELATIVE "${upstream}" "${upstream}/LICENSE" "${upstream}/AUTHORS" "${upstream}/licenses/*"
        "${upstream}/vendor/hash/*/LICENSE*")
    foreach (file ${files})
        string(REGEX REPLACE "^(licenses|vendor)/" "" name "${file}")
        string(REPLACE "/" "-" name "${name}")
        install(FILES "${upstream}/${file}" DESTINATION llama_dge/licenses RENAME "llama.cpp-${name}" COMPONENT llama_dge)
    endforeach()
endfunction()
