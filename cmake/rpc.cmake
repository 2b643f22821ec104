# ggml's RPC backend, by which a model is computed on several hosts: from the cache beside llama.cpp, whose entry stays valid
# with it and without it.
include_guard()
include("${CMAKE_CURRENT_LIST_DIR}/llama_cpp.cmake")

set(PACELINE_RPC_BUILD "${CMAKE_CURRENT_LIST_DIR}/rpc_build")

# 1 or 0: whether the module has it.
function(paceline_choose_rpc result wanted)
    if(NOT wanted MATCHES "^(ON|OFF)$")
        paceline_fail("PACELINE_RPC: \"${wanted}\" is neither ON nor OFF" "set it to ON to compute on other hosts.")
    endif()
    foreach(name IN ITEMS GGML_RPC GGML_RPC_RDMA)
        if(${name})
            paceline_fail("${name} is on, but paceline builds the RPC backend itself" "leave it out, and set PACELINE_RPC=ON.")
        endif()
    endforeach()
    set(${result} 0 PARENT_SCOPE)
    if(wanted STREQUAL "ON")
        set(${result} 1 PARENT_SCOPE)
    endif()
endfunction()

# Builder of the cache entry.
function(paceline_build_rpc aside)
    paceline_configure_build("${aside}" "${PACELINE_RPC_BUILD}")
    paceline_num_jobs(jobs)
    paceline_say("compiling ggml's RPC backend, once on this machine")
    paceline_run("compile" "${aside}" "${CMAKE_COMMAND}" --build "${aside}/build" --parallel ${jobs})
    paceline_run("install" "${aside}" "${CMAKE_COMMAND}" --install "${aside}/build")
endfunction()

# Defines the target `ggml_rpc`, empty without RPC, and PACELINE_HAS_RPC (1 or 0), behind paceline_find_llama_cpp, whose settings decide how it is compiled.
macro(paceline_find_rpc)
    paceline_choose_rpc(PACELINE_HAS_RPC "${PACELINE_RPC}")
    add_library(ggml_rpc INTERFACE)
    if(PACELINE_HAS_RPC)
        set(paceline_rpc_recipe "")
        foreach(paceline_file IN ITEMS CMakeLists.txt bounded_sockets.h)
            file(SHA256 "${PACELINE_RPC_BUILD}/${paceline_file}" paceline_hash)
            string(APPEND paceline_rpc_recipe " ${paceline_hash}")
        endforeach()
        set(paceline_rpc_key "rpc      ${paceline_rpc_recipe}\n${paceline_key}")
        paceline_library_entry(PACELINE_RPC_ENTRY "${paceline_rpc_key}" rpc)
        paceline_entry_problem(paceline_problem "${PACELINE_RPC_ENTRY}" "${paceline_rpc_key}")
        if(NOT paceline_problem STREQUAL "")
            paceline_require_whole_source("${PACELINE_LLAMA_CPP_SOURCE}" "${PACELINE_CACHE_DIR}")
        endif()
        paceline_cache_entry("${PACELINE_RPC_ENTRY}" KEY "${paceline_rpc_key}"
            BUILDER paceline_build_rpc SPACE_MB 50
            WHAT "the RPC backend of llama.cpp ${LLAMA_CPP_VERSION} (${LLAMA_CPP_COMMIT})")
        target_link_libraries(ggml_rpc INTERFACE "${PACELINE_RPC_ENTRY}/lib/libggml-rpc.a" llama_cpp)
    endif()
endmacro()
