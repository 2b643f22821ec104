# The module paceline._native: what is compiled into it and what it shows.
include_guard()

function(paceline_add_module name)
    file(GLOB sources CONFIGURE_DEPENDS native/*.cpp native/bindings/*.cpp)
    nanobind_add_module(${name} STABLE_ABI FREE_THREADED NB_STATIC NOMINSIZE NB_SUPPRESS_WARNINGS ${sources})
    target_include_directories(${name} PRIVATE native "${CMAKE_BINARY_DIR}/generated")
    target_compile_options(${name} PRIVATE -Wall -Wextra)
    target_link_libraries(${name} PRIVATE llama_cpp)
    set_target_properties(${name} PROPERTIES C_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
    paceline_hide_symbols(${name})
endfunction()

function(paceline_hide_symbols name)
    if(APPLE)
        target_link_options(${name} PRIVATE "LINKER:-exported_symbol,_PyInit_${name}")
    else()
        set(map "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/exports_linux.map")
        target_link_options(${name} PRIVATE "LINKER:--version-script=${map}" "LINKER:--as-needed" "LINKER:-z,now")
        set_property(TARGET ${name} APPEND PROPERTY LINK_DEPENDS "${map}")
    endif()
endfunction()

# The facts that `paceline info` tells, as a header for native/build_info.cpp.
function(paceline_write_build_facts)
    string(REGEX MATCHALL "set\\([A-Z_]+ \\[==\\[[^\n]*" lines "${paceline_initial_cache}")
    set(flags "")
    foreach(line IN LISTS lines)
        string(REGEX REPLACE "^set\\(([A-Z_0-9a-z]+) \\[==\\[(.*)\\]==\\] CACHE.*$" "\\1=\\2" flag "${line}")
        list(APPEND flags "${flag}")
    endforeach()
    list(FILTER flags INCLUDE REGEX "^(GGML_|LLAMA_|CMAKE_C(XX)?_FLAGS|CMAKE_CUDA_ARCH)")
    list(JOIN flags "\n" PACELINE_FLAGS)
    configure_file(native/build_facts.hpp.in "${CMAKE_BINARY_DIR}/generated/build_facts.hpp" @ONLY)
endfunction()

# An editor's language server looks for it in the root of the checkout. An isolated build is gone after it, so no link then.
function(paceline_link_compile_commands)
    if(NOT SKBUILD OR SKBUILD_STATE STREQUAL "editable")
        file(CREATE_LINK "${CMAKE_BINARY_DIR}/compile_commands.json" "${CMAKE_SOURCE_DIR}/compile_commands.json"
            SYMBOLIC RESULT ignored)
    endif()
endfunction()
