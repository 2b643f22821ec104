# Our matrix products on a CPU (docs/adr/0056).
include_guard()

# Adds the library `name` of its objects. Each kernel is compiled for its own instruction set, and chosen when the module is
# loaded.
function(paceline_add_matmul name)
    paceline_add_own_kernels(${name} matmul)
    # GCC 12 takes what its own header for AVX-512 leaves undefined on purpose for a mistake.
    set(own "$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-uninitialized>")
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(arm64|aarch64)$" OR CMAKE_OSX_ARCHITECTURES MATCHES "arm64")
        set(sets neon_dotprod neon_i8mm)
        if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang") # Zig takes no -march
            set(neon_dotprod -mcpu=generic+dotprod)
            set(neon_i8mm -mcpu=generic+dotprod+i8mm)
        else() # with -mcpu=generic, GCC 12 leaves dot products out
            set(neon_dotprod -march=armv8.2-a+dotprod)
            set(neon_i8mm -march=armv8.2-a+dotprod+i8mm)
        endif()
    elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
        set(sets avx2 avx512_vnni)
        set(avx2 -mavx2 -mfma -mf16c)
        set(avx512_vnni ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni)
    endif()
    foreach(set IN LISTS sets)
        set_source_files_properties("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../native/matmul/kernel_${set}.cpp"
            PROPERTIES COMPILE_OPTIONS "${${set}};-O3;${own}")
    endforeach()
endfunction()
