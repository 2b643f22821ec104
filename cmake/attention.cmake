# Our attention on a CPU (docs/adr/0019).
include_guard()

# Compiled for the processor that llama.cpp's own kernels were compiled for.
function(paceline_add_attention name)
    target_compile_definitions(${name} PRIVATE PACELINE_OWN_ATTENTION=${PACELINE_HAS_ATTENTION})
    if(NOT PACELINE_HAS_ATTENTION)
        return()
    endif()
    paceline_add_own_kernels(${name} attention)
    get_target_property(options llama_cpp PACELINE_CPU_OPTIONS)
    # Where a compiler joins a product and a sum differs from place to place, and bits must not: the source says it, and this takes
    # back what own_kernels.cmake allows.
    target_compile_options(${name}_attention PRIVATE ${options} -ffp-contract=off)
endfunction()
