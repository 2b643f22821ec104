# Kernels of our own for a CPU (docs/adr/0019, 0056). They hook into llama.cpp where its headers promise nothing, so a user's
# tree has them only if that is asked for.
include_guard()

# 1 or 0: whether the module has the kernels that the setting (auto, ON or OFF) is about.
function(paceline_choose_own_kernels result setting what)
    set(wanted "${${setting}}")
    if(NOT wanted MATCHES "^(auto|ON|OFF)$")
        paceline_fail("${setting}: \"${wanted}\" is none of auto, ON and OFF")
    endif()
    set(${result} 1 PARENT_SCOPE)
    if(wanted STREQUAL "ON")
        return()
    elseif(wanted STREQUAL "OFF")
        set(reason "${setting} is OFF")
    elseif(NOT PACELINE_LLAMA_CPP_SOURCE STREQUAL "")
        set(reason "ours was not tried with this tree; ${setting}=ON takes it all the same")
    elseif(MSVC OR NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
        set(reason "${CMAKE_CXX_COMPILER_ID} does not compile ours")
    else()
        return()
    endif()
    paceline_say("${what} on the CPU: llama.cpp's (${reason})")
    set(${result} 0 PARENT_SCOPE)
endfunction()

# Adds the library `name` of the objects of native/<folder>.
function(paceline_add_own_kernels name folder)
    file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../native/${folder}/*.cpp")
    add_library(${name} OBJECT ${sources})
    target_include_directories(${name} SYSTEM PRIVATE
        "${LLAMA_CPP_TREE}/ggml/include" "${LLAMA_CPP_TREE}/ggml/src" "${LLAMA_CPP_TREE}/ggml/src/ggml-cpu")
    # Infinities and NaN mean something there, whatever flags a user gives for speed.
    target_compile_options(${name} PRIVATE -fno-fast-math -ffp-contract=fast -Wall -Wextra)
    set_target_properties(${name} PROPERTIES
        POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()
