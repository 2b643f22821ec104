# libmtmd, which encodes images and sound: from the cache beside llama.cpp, whose entry stays valid where only this changes.
include_guard()
include("${CMAKE_CURRENT_LIST_DIR}/llama_cpp.cmake")

set(PACELINE_LIBMTMD_BUILD "${CMAKE_CURRENT_LIST_DIR}/libmtmd_build")

# Builder of the cache entry.
function(paceline_build_libmtmd aside)
    paceline_configure_build("${aside}" "${PACELINE_LIBMTMD_BUILD}")
    paceline_num_jobs(jobs)
    paceline_say("compiling libmtmd with ${jobs} jobs; this takes about a minute, once on this machine")
    paceline_run("compile" "${aside}" "${CMAKE_COMMAND}" --build "${aside}/build" --parallel ${jobs})
    paceline_run("install" "${aside}" "${CMAKE_COMMAND}" --install "${aside}/build")
endfunction()

# Defines the target `libmtmd`, behind paceline_find_llama_cpp, whose settings decide how it is compiled.
macro(paceline_find_libmtmd)
    file(SHA256 "${PACELINE_LIBMTMD_BUILD}/CMakeLists.txt" paceline_libmtmd_recipe)
    set(paceline_libmtmd_key "libmtmd   ${paceline_libmtmd_recipe}\n${paceline_key}")
    paceline_library_entry(PACELINE_LIBMTMD_ENTRY "${paceline_libmtmd_key}" libmtmd)
    paceline_entry_problem(paceline_problem "${PACELINE_LIBMTMD_ENTRY}" "${paceline_libmtmd_key}")
    if(NOT paceline_problem STREQUAL "")
        paceline_require_whole_source("${PACELINE_LLAMA_CPP_SOURCE}" "${PACELINE_CACHE_DIR}")
    endif()
    paceline_cache_entry("${PACELINE_LIBMTMD_ENTRY}" KEY "${paceline_libmtmd_key}"
        BUILDER paceline_build_libmtmd SPACE_MB 100
        WHAT "libmtmd of llama.cpp ${LLAMA_CPP_VERSION} (${LLAMA_CPP_COMMIT})")
    add_library(libmtmd INTERFACE)
    target_include_directories(libmtmd SYSTEM INTERFACE "${PACELINE_LIBMTMD_ENTRY}/include")
    target_link_libraries(libmtmd INTERFACE "${PACELINE_LIBMTMD_ENTRY}/lib/libmtmd.a" llama_cpp)
endmacro()
