# The static libraries of llama.cpp, from the cache, built there first where missing.
include_guard()
include("${CMAKE_CURRENT_LIST_DIR}/backend.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/cache.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/cores.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/forward.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/source.cmake")

set(PACELINE_LLAMA_CPP_BUILD "${CMAKE_CURRENT_LIST_DIR}/llama_cpp_build")

# Everything that decides what the libraries are: two builds share an entry only if this text is the same.
function(paceline_library_key result source_id backend initial_cache)
    paceline_machine_fingerprint(machine)
    paceline_backend_fingerprint(toolkit "${backend}" "${GGML_NATIVE}")
    set(recipe "")
    foreach(file IN ITEMS CMakeLists.txt lean.cmake yielding_pause.h)
        file(SHA256 "${PACELINE_LLAMA_CPP_BUILD}/${file}" hash)
        list(APPEND recipe "${hash}")
    endforeach()
    list(JOIN recipe " " recipe)
    foreach(language IN ITEMS C CXX)
        paceline_real_compiler(compiler_${language} "${CMAKE_${language}_COMPILER}")
        string(REPLACE "set(CMAKE_${language}_COMPILER [==[${CMAKE_${language}_COMPILER}]==]"
            "set(CMAKE_${language}_COMPILER [==[${compiler_${language}}]==]" initial_cache "${initial_cache}")
    endforeach()
    set(dated no)
    if(DEFINED ENV{SOURCE_DATE_EPOCH}) # llama.cpp chooses other instruction sets then
        set(dated yes)
    endif()
    set(${result}
"source    ${source_id}
recipe    ${recipe}
system    ${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}
compiler  ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} ${compiler_CXX}
compiler  ${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION} ${compiler_C}
machine   ${machine}
toolkit   ${toolkit}
dated     ${dated}
${initial_cache}" PARENT_SCOPE)
endfunction()

# The program that a compiler's name leads to: cc, gcc and x86_64-linux-gnu-gcc are often one, and every Python names the
# one it was built with. A launcher under a compiler's name leads to any compiler, so that name is kept.
function(paceline_real_compiler result compiler)
    set(${result} "${compiler}" PARENT_SCOPE)
    if(EXISTS "${compiler}")
        file(REAL_PATH "${compiler}" real)
        get_filename_component(name "${real}" NAME)
        if(NOT name MATCHES "ccache|distcc|icecc")
            set(${result} "${real}" PARENT_SCOPE)
        endif()
    endif()
endfunction()

# What the compiler defines on this machine: C library, and with GGML_NATIVE the features of this CPU, since a home folder
# may be shared by machines that differ in them.
function(paceline_machine_fingerprint result)
    set(probe "${CMAKE_BINARY_DIR}/paceline_probe.c")
    file(WRITE "${probe}" "#include <limits.h>\n")
    separate_arguments(flags UNIX_COMMAND "${CMAKE_C_FLAGS}")
    set(attempts "plain")
    if(GGML_NATIVE)
        set(attempts "-march=native" "-mcpu=native" "plain")
    endif()
    foreach(attempt IN LISTS attempts)
        string(REPLACE "plain" "" option "${attempt}")
        execute_process(COMMAND "${CMAKE_C_COMPILER}" ${flags} ${option} -dM -E "${probe}"
            OUTPUT_VARIABLE macros ERROR_QUIET RESULT_VARIABLE status)
        if(status EQUAL 0)
            break()
        endif()
    endforeach()
    cmake_host_system_information(RESULT processor QUERY PROCESSOR_DESCRIPTION)
    if(attempt STREQUAL "plain" AND GGML_NATIVE) # this compiler does not report what native means
        string(APPEND macros "${processor}")
    endif()
    string(SHA256 hash "${macros}")
    set(${result} "${hash}" PARENT_SCOPE)
endfunction()

# Configures a build of a part of llama.cpp as the libraries are configured, in <aside>/build.
function(paceline_configure_build aside recipe)
    file(WRITE "${aside}/initial_cache.cmake" "${paceline_initial_cache}${paceline_launchers}")
    set(generator -G "${CMAKE_GENERATOR}")
    if(CMAKE_MAKE_PROGRAM)
        list(APPEND generator "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}")
    endif()
    set(lean OFF)
    if(PACELINE_LLAMA_CPP_SOURCE STREQUAL "")
        set(lean ON)
    endif()
    paceline_run("configure" "${aside}" "${CMAKE_COMMAND}" -C "${aside}/initial_cache.cmake" ${generator}
        -S "${recipe}" -B "${aside}/build" "-DCMAKE_INSTALL_PREFIX=${aside}/entry"
        "-DPACELINE_LLAMA_CPP_TREE=${LLAMA_CPP_TREE}" "-DPACELINE_LEAN=${lean}" --no-warn-unused-cli)
endfunction()

# Builder of the cache entry.
function(paceline_build_llama_cpp aside)
    paceline_configure_build("${aside}" "${PACELINE_LLAMA_CPP_BUILD}")
    paceline_num_jobs(jobs)
    paceline_say("compiling llama.cpp with ${jobs} jobs; this takes some minutes, once on this machine")
    paceline_run("compile" "${aside}" "${CMAKE_COMMAND}" --build "${aside}/build" --parallel ${jobs})
    paceline_run("install" "${aside}" "${CMAKE_COMMAND}" --install "${aside}/build")
endfunction()

function(paceline_run step aside)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE status
        OUTPUT_VARIABLE output ERROR_VARIABLE output ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE)
    if(NOT status EQUAL 0)
        paceline_fail_command("llama.cpp does not ${step}" "${output}"
            "read the lines above; CMAKE_ARGS carries options to llama.cpp, PACELINE_BACKEND=cpu needs nothing but a compiler.")
    endif()
endfunction()

# CMAKE_BUILD_PARALLEL_LEVEL, else one job a core, as far as memory goes (about 1 GiB a job).
function(paceline_num_jobs result)
    set(jobs "$ENV{CMAKE_BUILD_PARALLEL_LEVEL}")
    if(jobs STREQUAL "")
        cmake_host_system_information(RESULT jobs QUERY NUMBER_OF_LOGICAL_CORES)
        cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)
        math(EXPR most "${memory} / 1000")
        if(most LESS 1)
            set(most 1)
        endif()
        if(jobs GREATER most)
            set(jobs ${most})
        endif()
    endif()
    set(${result} "${jobs}" PARENT_SCOPE)
endfunction()

function(paceline_define_llama_cpp entry)
    include("${entry}/llama_cpp.cmake")
    foreach(package IN LISTS llama_cpp_PACKAGES)
        find_package(${package} REQUIRED)
    endforeach()
    list(TRANSFORM llama_cpp_LIBRARIES PREPEND "${entry}/lib/")
    add_library(llama_cpp INTERFACE)
    target_include_directories(llama_cpp SYSTEM INTERFACE "${entry}/include" "${entry}/include/common")
    target_link_libraries(llama_cpp INTERFACE ${llama_cpp_LIBRARIES} ${llama_cpp_SYSTEM_LIBRARIES})
    set_target_properties(llama_cpp PROPERTIES PACELINE_CPU_OPTIONS "${llama_cpp_CPU_OPTIONS}")
    foreach(core IN LISTS llama_cpp_CORES) # ggml's kernels, and after them again the library that they use
        add_library(llama_cpp_${core} INTERFACE)
        target_link_libraries(llama_cpp_${core} INTERFACE
            llama_cpp "${entry}/lib/libggml-cpu-${core}.a" "${entry}/lib/libggml-base.a" ${llama_cpp_SYSTEM_LIBRARIES})
    endforeach()
endfunction()

# Defines the target `llama_cpp`, and with several cores llama_cpp_<core>. Sets PACELINE_BUILT_BACKEND, PACELINE_BACKEND_REASON,
# PACELINE_BUILT_CORES, PACELINE_LLAMA_CPP_ENTRY, LLAMA_CPP_TREE, _VERSION and _COMMIT, and paceline_initial_cache.
macro(paceline_find_llama_cpp)
    paceline_choose_backend(PACELINE_BUILT_BACKEND PACELINE_BACKEND_REASON "${PACELINE_BACKEND}")
    paceline_say("backend: ${PACELINE_BUILT_BACKEND} (${PACELINE_BACKEND_REASON})")
    paceline_pass_nvcc("${PACELINE_BUILT_BACKEND}")
    paceline_refuse_shared_libraries()
    paceline_set_llama_cpp_defaults("${PACELINE_BUILT_BACKEND}")
    paceline_choose_cores(PACELINE_BUILT_CORES "${PACELINE_CORES}" "${PACELINE_BUILT_BACKEND}")
    paceline_prepare_cache_dir("${PACELINE_CACHE_DIR}")
    paceline_find_source(LLAMA_CPP "${PACELINE_LLAMA_CPP_SOURCE}" "${PACELINE_CACHE_DIR}")
    paceline_watch_tree("${PACELINE_LLAMA_CPP_SOURCE}")
    paceline_forwarded_cache(paceline_initial_cache)
    paceline_cores_cache(paceline_cores_text "${PACELINE_BUILT_CORES}")
    string(APPEND paceline_initial_cache "${paceline_cores_text}")
    paceline_launcher_cache(paceline_launchers)
    paceline_library_key(paceline_key "${LLAMA_CPP_ID}" "${PACELINE_BUILT_BACKEND}" "${paceline_initial_cache}")
    paceline_library_entry(PACELINE_LLAMA_CPP_ENTRY "${paceline_key}" llama.cpp)
    paceline_entry_problem(paceline_problem "${PACELINE_LLAMA_CPP_ENTRY}" "${paceline_key}")
    if(NOT paceline_problem STREQUAL "")
        paceline_require_whole_source("${PACELINE_LLAMA_CPP_SOURCE}" "${PACELINE_CACHE_DIR}")
    endif()
    paceline_library_space(paceline_space)
    paceline_cache_entry("${PACELINE_LLAMA_CPP_ENTRY}" KEY "${paceline_key}"
        BUILDER paceline_build_llama_cpp SPACE_MB ${paceline_space}
        WHAT "llama.cpp ${LLAMA_CPP_VERSION} (${LLAMA_CPP_COMMIT}, ${PACELINE_BUILT_BACKEND})")
    paceline_define_llama_cpp("${PACELINE_LLAMA_CPP_ENTRY}")
endmacro()

# The folder of the entry below that of its kind: words for a reader, a hash for the machine.
function(paceline_library_entry result key kind)
    string(SHA256 hash "${key}")
    string(SUBSTRING "${hash}" 0 16 hash)
    set(name "${LLAMA_CPP_VERSION}-${PACELINE_BUILT_BACKEND}-${CMAKE_BUILD_TYPE}-${hash}")
    set(${result} "${PACELINE_CACHE_DIR}/${kind}/${name}" PARENT_SCOPE)
endfunction()

# MiB that a build takes for a while: object files are large with a GPU's kernels or with debug information.
function(paceline_library_space result)
    set(${result} 200 PARENT_SCOPE)
    if(NOT PACELINE_BUILT_BACKEND MATCHES "cpu|metal" OR CMAKE_BUILD_TYPE MATCHES "Deb")
        set(${result} 2000 PARENT_SCOPE)
    endif()
endfunction()

# A user's tree that is edited configures, and so builds, anew.
function(paceline_watch_tree tree)
    if(NOT tree STREQUAL "")
        paceline_tree_files(files "${tree}")
        set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
    endif()
endfunction()
