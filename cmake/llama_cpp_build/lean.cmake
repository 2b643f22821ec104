# What the pinned llama.cpp is compiled with less of, so that a first build takes less time. A tree of the user's is compiled as
# its own build says, since these lists were made for the pinned source alone.
include_guard()

# Files of the library `common` that the core calls nothing of: command lines, downloads. Where the core begins to call one,
# importing it fails with "undefined symbol", and the file leaves this list.
set(PACELINE_UNUSED_COMMON
    arg console debug download hf-cache imatrix-loader llguidance preset subproc)

# Files that run once a model, or that only unused functions of other files refer to. The optimiser's time there is lost.
set(PACELINE_COLD_COMMON chat chat-auto-parser-generator chat-auto-parser-helpers chat-diff-analyzer common fit log ngram-cache
    ngram-map ngram-mod sampling speculative)
set(PACELINE_COLD_LLAMA llama-adapter llama-arch llama-model llama-model-loader llama-model-saver)
set(PACELINE_COLD_OPTIONS "$<$<CONFIG:Release,RelWithDebInfo>:-O1>")

# Trims the targets of llama.cpp, which are defined by now.
function(paceline_trim_llama_cpp)
    paceline_trim_common()
    paceline_split_off_models()
    paceline_mark_cold(llama-common ${PACELINE_COLD_COMMON})
    paceline_mark_cold(llama ${PACELINE_COLD_LLAMA})
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

# The graphs of the architectures: 40,000 lines that call ggml to describe a pass. They are compiled in larger batches than
# llama.cpp's own, which would read its headers once for every 16 files.
function(paceline_split_off_models)
    get_target_property(models llama SOURCES)
    set(others "${models}")
    list(FILTER models INCLUDE REGEX "/models/[^/]+\\.cpp$")
    list(FILTER others EXCLUDE REGEX "/models/[^/]+\\.cpp$")
    if(NOT models)
        message(FATAL_ERROR "the pinned llama.cpp has no src/models/*.cpp: these lists were made for another version")
    endif()
    add_library(llama-models OBJECT ${models})
    target_include_directories(llama-models PRIVATE $<TARGET_PROPERTY:llama,INCLUDE_DIRECTORIES>)
    target_compile_options(llama-models PRIVATE $<TARGET_PROPERTY:llama,COMPILE_OPTIONS> ${PACELINE_COLD_OPTIONS})
    target_compile_features(llama-models PRIVATE cxx_std_17)
    target_link_libraries(llama-models PRIVATE ggml)
    set_target_properties(llama-models PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 40)
    set_target_properties(llama PROPERTIES SOURCES "${others};$<TARGET_OBJECTS:llama-models>")
endfunction()

function(paceline_mark_cold target)
    get_target_property(folder ${target} SOURCE_DIR)
    foreach(name IN LISTS ARGN)
        set_property(SOURCE "${folder}/${name}.cpp" TARGET_DIRECTORY ${target}
            APPEND PROPERTY COMPILE_OPTIONS "${PACELINE_COLD_OPTIONS}")
    endforeach()
endfunction()
