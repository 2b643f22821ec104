# Where the source of llama.cpp comes from: a tree of the user's, or the pinned source distribution, fetched once.
include_guard()
include("${CMAKE_CURRENT_LIST_DIR}/report.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/cache.cmake")

set(PACELINE_PINNED_VERSION "0.3.36") # of llama-cpp-python, whose source distribution carries llama.cpp
set(PACELINE_PINNED_SHA256 "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")
set(PACELINE_PINNED_COMMIT "0c1e57098") # of the llama.cpp in it

# Sets, for the caller: <prefix>_TREE, _VERSION and _COMMIT of llama.cpp, and _ID, which changes when the source does.
# `user_tree` is PACELINE_LLAMA_CPP_SOURCE; empty means the pinned source.
function(paceline_find_source prefix user_tree cache_dir)
    if(user_tree STREQUAL "")
        paceline_fetch_source(tree "${cache_dir}" CMakeLists.txt include/llama.h ggml/CMakeLists.txt)
        set(commit "${PACELINE_PINNED_COMMIT}")
        set(id "llama-cpp-python ${PACELINE_PINNED_VERSION} ${PACELINE_PINNED_SHA256}")
    else()
        paceline_check_tree("${user_tree}")
        get_filename_component(tree "${user_tree}" REALPATH)
        paceline_tree_commit(commit "${tree}")
        paceline_tree_fingerprint(id "${tree}")
        paceline_say("llama.cpp source: ${tree} (PACELINE_LLAMA_CPP_SOURCE)")
    endif()
    paceline_tree_version(version "${tree}")
    set(${prefix}_TREE "${tree}" PARENT_SCOPE)
    set(${prefix}_VERSION "${version}" PARENT_SCOPE)
    set(${prefix}_COMMIT "${commit}" PARENT_SCOPE)
    set(${prefix}_ID "${id}" PARENT_SCOPE)
endfunction()

# ---- a tree of the user's

function(paceline_looks_like_llama_cpp result folder)
    set(${result} TRUE PARENT_SCOPE)
    foreach(file IN ITEMS CMakeLists.txt include/llama.h ggml/CMakeLists.txt common/CMakeLists.txt)
        if(NOT EXISTS "${folder}/${file}")
            set(${result} FALSE PARENT_SCOPE)
        endif()
    endforeach()
endfunction()

function(paceline_check_tree folder)
    if(NOT IS_ABSOLUTE "${folder}")
        paceline_fail("PACELINE_LLAMA_CPP_SOURCE is \"${folder}\", a relative path" "give it as an absolute path.")
    elseif(NOT IS_DIRECTORY "${folder}")
        paceline_fail("PACELINE_LLAMA_CPP_SOURCE is \"${folder}\", which is no folder"
            "point it at an unpacked llama.cpp, or unset it to have the pinned source fetched.")
    endif()
    paceline_looks_like_llama_cpp(good "${folder}")
    if(good)
        return()
    endif()
    paceline_looks_like_llama_cpp(inside "${folder}/vendor/llama.cpp")
    set(way_out "point it at the folder that holds llama.cpp's CMakeLists.txt, include/, ggml/ and common/.")
    if(inside)
        set(way_out "did you mean ${folder}/vendor/llama.cpp?")
    endif()
    paceline_fail("PACELINE_LLAMA_CPP_SOURCE is \"${folder}\", which is not a llama.cpp source tree" "${way_out}")
endfunction()

function(paceline_tree_version result tree)
    file(STRINGS "${tree}/CMakeLists.txt" lines REGEX "^set\\(LLAMA_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
    string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
    list(JOIN numbers "." version)
    if(version STREQUAL "")
        set(version "unknown")
    endif()
    set(${result} "${version}" PARENT_SCOPE)
endfunction()

function(paceline_tree_commit result tree)
    set(${result} "unknown" PARENT_SCOPE)
    if(EXISTS "${tree}/.git")
        execute_process(COMMAND git rev-parse --short=9 HEAD WORKING_DIRECTORY "${tree}"
            OUTPUT_VARIABLE output ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
        if(status EQUAL 0)
            set(${result} "${output}" PARENT_SCOPE)
        endif()
    endif()
endfunction()

function(paceline_tree_files result tree)
    set(globs "${tree}/CMakeLists.txt")
    foreach(folder IN ITEMS cmake common ggml include src vendor tools/mtmd)
        list(APPEND globs "${tree}/${folder}/*")
    endforeach()
    file(GLOB_RECURSE files LIST_DIRECTORIES false ${globs})
    set(${result} "${files}" PARENT_SCOPE)
endfunction()

# A tree that may be edited: its path, and name, size and time of every file that is compiled.
function(paceline_tree_fingerprint result tree)
    paceline_tree_files(files "${tree}")
    set(text "")
    foreach(file IN LISTS files)
        file(SIZE "${file}" size)
        file(TIMESTAMP "${file}" time "%s.%f" UTC)
        string(APPEND text "${file} ${size} ${time}\n")
    endforeach()
    string(SHA256 hash "${text}")
    set(${result} "${tree} ${hash}" PARENT_SCOPE)
endfunction()

# ---- the pinned source

# Behind the folder: the files to look at in what is there already, else all.
function(paceline_fetch_source result cache_dir)
    string(SUBSTRING "${PACELINE_PINNED_SHA256}" 0 12 short)
    set(entry "${cache_dir}/sources/llama.cpp-${PACELINE_PINNED_VERSION}-${short}")
    paceline_cache_entry("${entry}"
        KEY "llama-cpp-python ${PACELINE_PINNED_VERSION} ${PACELINE_PINNED_SHA256}"
        BUILDER paceline_download_source GLANCE ${ARGN}
        SPACE_MB 600 WHAT "the source of llama.cpp")
    set(${result} "${entry}" PARENT_SCOPE)
endfunction()

# Before it is compiled, every file of the pinned source must be as it was unpacked; else all of it is fetched anew. This
# look takes 0.2 to 1 s, a glance at the landmarks 3 ms.
function(paceline_require_whole_source user_tree cache_dir)
    if(user_tree STREQUAL "")
        paceline_fetch_source(tree "${cache_dir}")
    endif()
endfunction()

# Builder of the cache entry: downloads, verifies and unpacks vendor/llama.cpp of the source distribution.
function(paceline_download_source aside)
    set(distribution "llama-cpp-python ${PACELINE_PINNED_VERSION}")
    paceline_say("fetching the source distribution of ${distribution}")
    paceline_pip_download("${aside}")
    file(GLOB archive "${aside}/download/*.tar.gz")
    paceline_verify_archive("${archive}")
    file(MAKE_DIRECTORY "${aside}/unpacked")
    set(inside "llama_cpp_python-${PACELINE_PINNED_VERSION}/vendor/llama.cpp")
    execute_process(COMMAND "${CMAKE_COMMAND}" -E tar xzf "${archive}" "${inside}"
        WORKING_DIRECTORY "${aside}/unpacked" RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        paceline_fail_command("the source distribution of ${distribution} cannot be unpacked" "${output}"
            "try again; or set PACELINE_LLAMA_CPP_SOURCE to an unpacked llama.cpp.")
    endif()
    set(tree "${aside}/unpacked/${inside}")
    paceline_looks_like_llama_cpp(good "${tree}")
    if(NOT good)
        paceline_fail("the source distribution of ${distribution} holds no llama.cpp in vendor/llama.cpp"
            "set PACELINE_LLAMA_CPP_SOURCE to an unpacked llama.cpp.")
    endif()
    file(RENAME "${tree}" "${aside}/entry")
endfunction()

# pip checks the hash before it runs anything of the archive (it asks an archive for its metadata even to download it).
function(paceline_pip_download aside)
    file(WRITE "${aside}/requirements.txt"
        "llama-cpp-python==${PACELINE_PINNED_VERSION} --hash=sha256:${PACELINE_PINNED_SHA256}\n")
    file(MAKE_DIRECTORY "${aside}/tmp")
    paceline_pip_isolation(isolation)
    execute_process(
        COMMAND "${CMAKE_COMMAND}" -E env --unset=CMAKE_ARGS "TMPDIR=${aside}/tmp"
            "${Python_EXECUTABLE}" -m pip download --no-input --progress-bar off --no-deps ${isolation}
            --no-binary llama-cpp-python --dest "${aside}/download" --requirement "${aside}/requirements.txt"
        RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        paceline_explain_pip_failure("${output}")
    endif()
endfunction()

# The archive's build backend is usually at hand, being ours too; then pip need not fetch it once more.
function(paceline_pip_isolation result)
    set(${result} "" PARENT_SCOPE)
    execute_process(COMMAND "${Python_EXECUTABLE}" -c "import scikit_build_core"
        RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
    if(status EQUAL 0)
        set(${result} "--no-build-isolation" PARENT_SCOPE)
    endif()
endfunction()

function(paceline_explain_pip_failure output)
    set(own_tree "set PACELINE_LLAMA_CPP_SOURCE to an unpacked llama.cpp")
    if(output MATCHES "DO NOT MATCH THE HASHES")
        string(REGEX MATCH "Got +([0-9a-f]+)" ignored "${output}")
        paceline_fail_checksum("${CMAKE_MATCH_1}")
    elseif(output MATCHES "No module named pip")
        paceline_fail("the source of llama.cpp cannot be fetched, since ${Python_EXECUTABLE} has no pip"
            "install pip there, or ${own_tree}.")
    endif()
    paceline_fail_command("the source of llama.cpp (llama-cpp-python ${PACELINE_PINNED_VERSION}) cannot be downloaded"
        "${output}" "connect to a package index (PIP_INDEX_URL names one of your own), or ${own_tree}." 4)
endfunction()

function(paceline_verify_archive archive)
    set(hash "nothing was downloaded")
    if(archive)
        file(SHA256 "${archive}" hash)
    endif()
    if(NOT hash STREQUAL PACELINE_PINNED_SHA256)
        paceline_fail_checksum("${hash}")
    endif()
endfunction()

function(paceline_fail_checksum got)
    paceline_fail(
"the checksum of llama-cpp-python ${PACELINE_PINNED_VERSION} differs
    expected ${PACELINE_PINNED_SHA256}
    got      ${got}"
        "try again, or another package index (PIP_INDEX_URL); do not use this archive. \
PACELINE_LLAMA_CPP_SOURCE takes an unpacked llama.cpp that you trust.")
endfunction()
