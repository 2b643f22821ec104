# The module paceline._native: what is compiled into it and what it shows.
include_guard()

function(paceline_add_module name)
    file(GLOB sources CONFIGURE_DEPENDS native/*.cpp native/bindings/*.cpp native/hardening/*.cpp)
    nanobind_add_module(${name} STABLE_ABI FREE_THREADED NB_STATIC NOMINSIZE NB_SUPPRESS_WARNINGS ${sources})
    target_include_directories(${name} PRIVATE native "${CMAKE_BINARY_DIR}/generated")
    target_include_directories(${name} SYSTEM PRIVATE "${LLAMA_CPP_TREE}/vendor") # stb_image.h
    target_compile_options(${name} PRIVATE -Wall -Wextra)
    foreach(folder IN ITEMS "${CMAKE_SOURCE_DIR}" "${PACELINE_LLAMA_CPP_ENTRY}/include") # as for llama.cpp itself
        target_compile_options(${name} PRIVATE "-fmacro-prefix-map=${folder}/=")
    endforeach()
    target_link_libraries(${name} PRIVATE libmtmd ggml_rpc llama_cpp)
    set_source_files_properties(native/rpc.cpp native/rpc_sockets.cpp PROPERTIES # alone, so that little is compiled anew
        COMPILE_DEFINITIONS PACELINE_RPC=${PACELINE_HAS_RPC})
    set_target_properties(${name} PROPERTIES C_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
    paceline_hide_symbols(${name})
    paceline_precompile_headers(${name})
endfunction()

# Reads the headers that most files include once, which saves a second for each file. ccache keeps no objects that were compiled
# so, unless it is configured for it.
function(paceline_precompile_headers name)
    if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
        target_precompile_headers(${name} PRIVATE
            <algorithm> <functional> <map> <memory> <mutex> <optional> <set> <span> <string> <string_view> <utility> <vector>
            <nanobind/nanobind.h> <llama.h>)
    endif()
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

# The facts that `paceline info` shows, as a header for native/build_info.cpp.
function(paceline_write_build_facts)
    string(REGEX MATCHALL "set\\([A-Z_]+ \\[==\\[[^\n]*" lines "${paceline_initial_cache}")
    set(flags "")
    foreach(line IN LISTS lines)
        string(REGEX REPLACE "^set\\(([A-Z_0-9a-z]+) \\[==\\[(.*)\\]==\\] CACHE.*$" "\\1=\\2" flag "${line}")
        list(APPEND flags "${flag}")
    endforeach()
    list(FILTER flags INCLUDE REGEX "^(GGML_|LLAMA_|CMAKE_C(XX)?_FLAGS|CMAKE_CUDA_ARCH)")
    list(JOIN flags "\n" PACELINE_FLAGS)
    paceline_tilde(PACELINE_FACT_SOURCE "${LLAMA_CPP_TREE}")
    paceline_tilde(PACELINE_FACT_CACHE "${PACELINE_CACHE_DIR}")
    paceline_tilde(PACELINE_FACT_ENTRY "${PACELINE_LLAMA_CPP_ENTRY}")
    configure_file(native/build_facts.hpp.in "${CMAKE_BINARY_DIR}/generated/build_facts.hpp" @ONLY)
endfunction()

# A path in the home folder begins with a ~: a wheel does not carry its builder's name.
function(paceline_tilde result path)
    set(home "$ENV{HOME}/")
    string(FIND "${path}" "${home}" position)
    if(position EQUAL 0 AND home MATCHES "^/[^/]")
        string(LENGTH "${home}" length)
        string(SUBSTRING "${path}" ${length} -1 path)
        set(path "~/${path}")
    endif()
    set(${result} "${path}" PARENT_SCOPE)
endfunction()

# An editor's language server looks for it in the root of the checkout. An isolated build is gone after it, so no link then.
function(paceline_link_compile_commands)
    if(NOT SKBUILD OR SKBUILD_STATE STREQUAL "editable")
        file(CREATE_LINK "${CMAKE_BINARY_DIR}/compile_commands.json" "${CMAKE_SOURCE_DIR}/compile_commands.json"
            SYMBOLIC RESULT ignored)
    endif()
endfunction()

# A wheel carries the notices of what is linked into it.
function(paceline_install_notices)
    if(NOT SKBUILD_STATE STREQUAL "wheel")
        return()
    endif()
    set(folder "${SKBUILD_METADATA_DIR}/licenses")
    install(FILES "${LLAMA_CPP_TREE}/LICENSE" DESTINATION "${folder}/llama.cpp")
    install(DIRECTORY "${LLAMA_CPP_TREE}/licenses/" DESTINATION "${folder}/llama.cpp")
    install(FILES "${LLAMA_CPP_TREE}/vendor/cpp-httplib/LICENSE" DESTINATION "${folder}/cpp-httplib" OPTIONAL)
    file(GLOB nanobind_license "${NB_DIR}/../nanobind-*.dist-info/licenses/LICENSE")
    install(FILES ${nanobind_license} DESTINATION "${folder}/nanobind")
endfunction()
