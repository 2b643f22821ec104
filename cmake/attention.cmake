# Our attention on a CPU (docs/adr/0019). It hooks into llama.cpp where its headers promise nothing, so a user's tree has it
# only if that is asked for.
include_guard()

# 1 or 0: whether the module has it.
function(paceline_choose_attention result wanted)
    if(NOT wanted MATCHES "^(auto|ON|OFF)$")
        paceline_fail("PACELINE_OWN_ATTENTION: \"${wanted}\" is none of auto, ON and OFF")
    endif()
    set(${result} 1 PARENT_SCOPE)
    if(wanted STREQUAL "ON")
        return()
    elseif(wanted STREQUAL "OFF")
        set(reason "PACELINE_OWN_ATTENTION is OFF")
    elseif(NOT PACELINE_LLAMA_CPP_SOURCE STREQUAL "")
        set(reason "ours was not tried with this tree; PACELINE_OWN_ATTENTION=ON takes it all the same")
    elseif(MSVC OR NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
        set(reason "${CMAKE_CXX_COMPILER_ID} does not compile ours")
    else()
        return()
    endif()
    paceline_say("attention on the CPU: llama.cpp's (${reason})")
    set(${result} 0 PARENT_SCOPE)
endfunction()

# Compiled for the processor that llama.cpp's own kernels were compiled for.
function(paceline_add_attention name)
    target_compile_definitions(${name} PRIVATE PACELINE_OWN_ATTENTION=${PACELINE_HAS_ATTENTION})
    if(NOT PACELINE_HAS_ATTENTION)
        return()
    endif()
    file(GLOB sources CONFIGURE_DEPENDS native/attention/*.cpp)
    get_target_property(options llama_cpp PACELINE_CPU_OPTIONS)
    add_library(${name}_attention OBJECT ${sources})
    target_include_directories(${name}_attention SYSTEM PRIVATE
        "${LLAMA_CPP_TREE}/ggml/include" "${LLAMA_CPP_TREE}/ggml/src" "${LLAMA_CPP_TREE}/ggml/src/ggml-cpu")
    # Infinities and NaN mean something there, whatever flags a user gives for speed.
    target_compile_options(${name}_attention PRIVATE ${options} -fno-fast-math -ffp-contract=fast -Wall -Wextra)
    set_target_properties(${name}_attention PROPERTIES
        POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
    target_sources(${name} PRIVATE "$<TARGET_OBJECTS:${name}_attention>")
endfunction()
