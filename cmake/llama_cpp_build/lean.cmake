# What the pinned llama.cpp is compiled with less of, so that a first build takes less time. A tree of the user's is compiled as
# its own build says, since these lists were made for the pinned source alone.
include_guard()

# Files of the library `common` that the core calls nothing of: command lines, downloads. Where the core begins to call one,
# importing it fails with "undefined symbol", and the file leaves this list.
set(PACELINE_UNUSED_COMMON
    arg console debug download hf-cache imatrix-loader llguidance preset subproc)

# Files that run once a model or once a request, or that only unused functions of other files refer to. The optimiser's time there
# is lost.
set(PACELINE_COLD_COMMON chat chat-auto-parser-generator chat-auto-parser-helpers chat-diff-analyzer common fit
    json-schema-to-grammar log ngram-cache ngram-map ngram-mod sampling speculative)
set(PACELINE_COLD_LLAMA llama-adapter llama-arch llama-grammar llama-model llama-model-loader llama-model-saver llama-sampler)
set(PACELINE_COLD_GGML ggml-backend-meta ggml-opt gguf)
set(PACELINE_COLD_OPTIONS "$<$<CONFIG:Release,RelWithDebInfo>:-O1>")

# Trims the targets of llama.cpp, which are defined by now.
function(paceline_trim_llama_cpp)
    paceline_trim_common()
    list(JOIN PACELINE_COLD_COMMON "|" cold_common)
    list(JOIN PACELINE_COLD_LLAMA "|" cold_llama)
    # The graphs of the architectures: 40,000 lines that call ggml to describe a pass.
    paceline_split_off(llama llama-models "/src/models/[^/]+" 40 "${PACELINE_COLD_OPTIONS}")
    paceline_split_off(llama llama-cold "/src/(${cold_llama})" 4 "${PACELINE_COLD_OPTIONS}")
    paceline_split_off(llama llama-caches "/src/llama-(kv-cache|memory)[^/]*" 7 "")
    paceline_split_off(llama llama-others "/src/llama(-batch|-chat|-context|-cparams|-graph|-hparams|-impl|-io|-mmap)?" 5 "")
    paceline_split_off(llama-common common-parsers "/common/parsers/[^/]+" 8 "${PACELINE_COLD_OPTIONS}")
    paceline_split_off(llama-common common-cold "/common/(${cold_common})" 5 "${PACELINE_COLD_OPTIONS}")
    paceline_split_off(llama-common common-others "/common/(jinja/[^/]+|[^j][^/]+)" 5 "") # json.cpp has to come first
    paceline_mark_cold(ggml-base ${PACELINE_COLD_GGML})
endfunction()

# The HTTP library serves downloads alone.
function(paceline_trim_common)
    get_target_property(sources llama-common SOURCES)
    list(JOIN PACELINE_UNUSED_COMMON "|" names)
    list(FILTER sources EXCLUDE REGEX "^(.*/common/)?(${names})\\.cpp$")
    set_target_properties(llama-common PROPERTIES SOURCES "${sources}")
    get_target_property(libraries llama-common LINK_LIBRARIES)
    if(libraries)
        list(REMOVE_ITEM libraries cpp-httplib)
        set_target_properties(llama-common PROPERTIES LINK_LIBRARIES "${libraries}")
    endif()
endfunction()

# Compiles the sources of `target` with these names in batches of `size` files, whose headers are read once, and with `options`.
function(paceline_split_off target name pattern size options)
    get_target_property(folder ${target} SOURCE_DIR)
    get_target_property(sources ${target} SOURCES)
    set(batch "")
    set(others "")
    foreach(source IN LISTS sources)
        if(NOT source MATCHES "^\\$<")
            cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY "${folder}")
        endif()
        if(source MATCHES "${pattern}\\.cpp$")
            list(APPEND batch "${source}")
        else()
            list(APPEND others "${source}")
        endif()
    endforeach()
    if(NOT batch)
        message(FATAL_ERROR "the pinned llama.cpp has no sources ${pattern}: these lists were made for another version")
    endif()
    add_library(${name} OBJECT ${batch})
    get_directory_property(definitions DIRECTORY "${folder}" COMPILE_DEFINITIONS)
    target_include_directories(${name} PRIVATE $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>)
    target_compile_definitions(${name} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS> ${definitions})
    target_compile_options(${name} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_OPTIONS> ${options})
    target_compile_features(${name} PRIVATE cxx_std_17)
    get_target_property(libraries ${target} LINK_LIBRARIES)
    list(FILTER libraries EXCLUDE REGEX "::") # found by the target's folder alone
    target_link_libraries(${name} PRIVATE ${libraries})
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${size})
    set_target_properties(${target} PROPERTIES SOURCES "${others};$<TARGET_OBJECTS:${name}>")
endfunction()

function(paceline_mark_cold target)
    get_target_property(folder ${target} SOURCE_DIR)
    foreach(name IN LISTS ARGN)
        set_property(SOURCE "${folder}/${name}.cpp" TARGET_DIRECTORY ${target}
            APPEND PROPERTY COMPILE_OPTIONS "${PACELINE_COLD_OPTIONS}")
    endforeach()
endfunction()
