# Our attention on a CPU (docs/adr/0019): it hooks into llama.cpp where its headers promise nothing, so it is left out where
# a user's tree does not compile with it.
include_guard()

# 1 or 0: whether the module has it.
function(paceline_choose_attention result)
    set(${result} 0 PARENT_SCOPE)
    if(NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" OR MSVC)
        paceline_say("attention on the CPU: llama.cpp's (${CMAKE_CXX_COMPILER_ID} does not compile ours)")
        return()
    endif()
    if(NOT PACELINE_LLAMA_CPP_SOURCE STREQUAL "")
        paceline_try_attention(works "${CMAKE_BINARY_DIR}/attention")
        if(NOT works)
            paceline_say("attention on the CPU: llama.cpp's (ours does not compile with this tree)")
            return()
        endif()
    endif()
    set(${result} 1 PARENT_SCOPE)
endfunction()

function(paceline_try_attention result folder)
    set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
    paceline_attention_folders(folders)
    try_compile(works "${folder}"
        SOURCES "${CMAKE_SOURCE_DIR}/native/attention/install.cpp" "${CMAKE_SOURCE_DIR}/native/attention/flash_attention.cpp"
        CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${folders}" CXX_STANDARD 20)
    set(${result} ${works} PARENT_SCOPE)
endfunction()

function(paceline_attention_folders result)
    set(${result} "${LLAMA_CPP_TREE}/ggml/include" "${LLAMA_CPP_TREE}/ggml/src" "${LLAMA_CPP_TREE}/ggml/src/ggml-cpu" PARENT_SCOPE)
endfunction()

# Compiled for the processor that llama.cpp's own kernels were compiled for.
function(paceline_add_attention name)
    file(GLOB sources CONFIGURE_DEPENDS native/attention/*.cpp)
    if(NOT PACELINE_OWN_ATTENTION)
        set(sources native/attention/one_pass.cpp)
    endif()
    paceline_attention_folders(folders)
    get_target_property(options llama_cpp PACELINE_CPU_OPTIONS)
    add_library(${name}_attention OBJECT ${sources})
    target_include_directories(${name}_attention SYSTEM PRIVATE ${folders})
    target_compile_options(${name}_attention PRIVATE ${options} -ffp-contract=fast -Wall -Wextra)
    set_target_properties(${name}_attention PROPERTIES
        POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
    target_sources(${name} PRIVATE "$<TARGET_OBJECTS:${name}_attention>")
    target_compile_definitions(${name} PRIVATE PACELINE_OWN_ATTENTION=${PACELINE_OWN_ATTENTION})
endfunction()
