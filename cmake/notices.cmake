# The licences of the code that is linked into a wheel, collected from the unpacked sources.
include_guard()
include("${CMAKE_CURRENT_LIST_DIR}/report.cmake")

# Writes to `file` the part of `source` that `pattern` matches first: a licence that a source file has as a comment.
function(paceline_extract_notice source pattern file)
    file(READ "${source}" text)
    string(REGEX MATCH "${pattern}" notice "${text}")
    if(notice STREQUAL "")
        paceline_fail("${source} has no licence where one was expected" "look for it there, and correct cmake/notices.cmake.")
    endif()
    file(WRITE "${file}" "${notice}")
endfunction()

# Writes the licences of what is linked from a llama.cpp tree and of nanobind (`nanobind`: its package) into `folder`, a folder
# for each project.
function(paceline_collect_notices folder tree nanobind)
    file(REMOVE_RECURSE "${folder}")
    set(vendor "${tree}/vendor")
    file(COPY "${tree}/LICENSE" DESTINATION "${folder}/llama.cpp") # of ggml as well
    paceline_extract_notice("${tree}/ggml/src/ggml-cpu/llamafile/sgemm.cpp" "// Copyright[^\n]*\n(//[^\n]*\n)+"
        "${folder}/llamafile/LICENSE")
    paceline_extract_notice("${tree}/ggml/src/ggml-cpu/ops.cpp" "// YaRN algorithm[^\n]*\n//[^\n]*Copyright[^\n]*\n"
        "${folder}/yarn/NOTICE") # the text of the MIT licence is llama.cpp's
    file(COPY "${tree}/licenses/LICENSE-jsonhpp" DESTINATION "${folder}/nlohmann-json")
    foreach(header IN ITEMS miniaudio/miniaudio.h stb/stb_image.h)
        get_filename_component(name "${header}" DIRECTORY)
        paceline_extract_notice("${vendor}/${header}" "This software is available (as a choice|under 2 licenses).*[^*/\n]"
            "${folder}/${name}/LICENSE")
    endforeach()
    if(EXISTS "${vendor}/cpp-httplib/LICENSE") # linked with a tree of the user's alone
        file(COPY "${vendor}/cpp-httplib/LICENSE" DESTINATION "${folder}/cpp-httplib")
    endif()
    file(GLOB license "${nanobind}/../nanobind-*.dist-info/licenses/LICENSE")
    file(COPY ${license} DESTINATION "${folder}/nanobind")
    paceline_extract_notice("${nanobind}/ext/robin_map/include/tsl/robin_map.h" "MIT License\n( [*]\n| [*][^/\n][^\n]*\n)+"
        "${folder}/robin-map/LICENSE")
endfunction()

# A wheel carries them beside its own licence.
function(paceline_install_notices)
    if(SKBUILD_STATE STREQUAL "wheel")
        set(folder "${CMAKE_BINARY_DIR}/licenses")
        paceline_collect_notices("${folder}" "${LLAMA_CPP_TREE}" "${NB_DIR}")
        install(DIRECTORY "${folder}/" DESTINATION "${SKBUILD_METADATA_DIR}/licenses")
    endif()
endfunction()
