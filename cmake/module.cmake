# The module paceline._native: what is compiled into it and what it shows.
include_guard()

# Adds the module _native, or with several cores a module for each, _native_<core>: the same objects, linked with the kernels of
# the core. Sets PACELINE_MODULES to what is installed.
function(paceline_add_modules cores)
    set_source_files_properties(native/rpc.cpp native/rpc_sockets.cpp PROPERTIES # alone, so that little is compiled anew
        COMPILE_DEFINITIONS PACELINE_RPC=${PACELINE_HAS_RPC})
    set_source_files_properties(native/bindings/bind_matmul.cpp PROPERTIES
        COMPILE_DEFINITIONS PACELINE_OWN_MATMUL=${PACELINE_HAS_MATMUL})
    if(PACELINE_HAS_MATMUL)
        paceline_add_matmul(_native_matmul)
    endif()
    file(GLOB sources CONFIGURE_DEPENDS native/*.cpp native/bindings/*.cpp native/hardening/*.cpp)
    if(NOT cores)
        get_target_property(options llama_cpp PACELINE_CPU_OPTIONS)
        paceline_add_module(_native llama_cpp "${options}" ${sources})
        paceline_precompile_headers(_native)
        set(PACELINE_MODULES _native PARENT_SCOPE)
        return()
    endif()
    set(modules "")
    foreach(core IN LISTS cores)
        paceline_core_options(options ${core})
        paceline_add_module(_native_${core} llama_cpp_${core} "${options}" ${sources})
        set_target_properties(_native_${core} PROPERTIES SUFFIX ".so") # it is loaded by its path
        list(APPEND modules _native_${core})
        list(GET modules 0 first)
        set(sources "$<TARGET_OBJECTS:${first}>")
    endforeach()
    paceline_precompile_headers(${first})
    paceline_add_processor(_processor "${cores}")
    set(PACELINE_MODULES ${modules} _processor PARENT_SCOPE)
endfunction()

# Reads the headers that most files include once, which saves a second for each file. ccache keeps no objects that were compiled
# so, unless it is configured for it. nanobind needs <cstdio> and does not include it: the limited API of Python does not, either.
function(paceline_precompile_headers name)
    if(CMAKE_CXX_COMPILER_LAUNCHER)
        target_compile_options(${name} PRIVATE "SHELL:-include cstdio")
    else()
        target_precompile_headers(${name} PRIVATE
            <cstdio> <algorithm> <functional> <map> <memory> <mutex> <optional> <set> <span> <string> <string_view> <utility> <vector>
            <nanobind/nanobind.h> <llama.h>)
    endif()
endfunction()

# Adds the module `name` of these sources, linked with the library `llama_cpp` and our kernels, of which attention is compiled
# with `options`.
function(paceline_add_module name llama_cpp options)
    nanobind_add_module(${name} STABLE_ABI FREE_THREADED NB_STATIC NOMINSIZE NB_SUPPRESS_WARNINGS ${ARGN})
    get_target_property(libraries ${name} LINK_LIBRARIES)
    list(FILTER libraries INCLUDE REGEX "^nanobind")
    target_compile_options(${libraries} PRIVATE "SHELL:-include cstdio")
    target_include_directories(${name} PRIVATE native "${CMAKE_BINARY_DIR}/generated")
    target_include_directories(${name} SYSTEM PRIVATE "${LLAMA_CPP_TREE}/vendor") # stb_image.h
    target_compile_options(${name} PRIVATE -Wall -Wextra)
    target_compile_definitions(${name} PRIVATE PACELINE_OWN_ATTENTION=${PACELINE_HAS_ATTENTION})
    foreach(folder IN ITEMS "${CMAKE_SOURCE_DIR}" "${PACELINE_LLAMA_CPP_ENTRY}/include") # as for llama.cpp itself
        target_compile_options(${name} PRIVATE "-fmacro-prefix-map=${folder}/=")
    endforeach()
    target_link_libraries(${name} PRIVATE libmtmd ggml_rpc ${llama_cpp})
    set_target_properties(${name} PROPERTIES C_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
    paceline_hide_symbols(${name})
    if(PACELINE_HAS_MATMUL)
        target_sources(${name} PRIVATE "$<TARGET_OBJECTS:_native_matmul>")
    endif()
    if(PACELINE_HAS_ATTENTION)
        paceline_add_attention(${name}_attention "${options}")
        target_sources(${name} PRIVATE "$<TARGET_OBJECTS:${name}_attention>")
    endif()
endfunction()

function(paceline_hide_symbols name)
    if(APPLE)
        target_link_options(${name} PRIVATE "LINKER:-exported_symbol,_PyInit__native")
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
