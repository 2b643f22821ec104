# Our attention on a CPU (docs/adr/0019).
include_guard()

# Adds the library `name` of its objects, compiled with the options that ggml's kernels have for their processor.
function(paceline_add_attention name options)
    paceline_add_own_kernels(${name} attention)
    # Where a compiler joins a product and a sum differs from place to place, and bits must not: the source says it, and this takes
    # back what own_kernels.cmake allows.
    target_compile_options(${name} PRIVATE ${options} -ffp-contract=off)
endfunction()
