# Settings that come from -D or from the environment variable of the same name.
include_guard()
include("${CMAKE_CURRENT_LIST_DIR}/report.cmake")

# A value is kept over later configurations of the same build folder, where the environment may be another one:
# -D decides, then an environment variable that has changed, then what was chosen before, then `default`.
function(paceline_setting name default doc)
    set(environment "$ENV{${name}}")
    if(NOT DEFINED ${name})
        set(value "${default}")
        if(NOT environment STREQUAL "")
            set(value "${environment}")
        endif()
    elseif(DEFINED PACELINE_SEEN_${name} AND NOT environment STREQUAL ""
           AND NOT environment STREQUAL PACELINE_SEEN_${name})
        set(value "${environment}")
    else()
        set(value "${${name}}")
    endif()
    set(${name} "${value}" CACHE STRING "${doc}" FORCE)
    set(PACELINE_SEEN_${name} "${environment}" CACHE INTERNAL "")
endfunction()

# The folder of this user that outlives a checkout, by the custom of the system.
function(paceline_default_cache_dir result)
    if(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
        set(folder "$ENV{XDG_CACHE_HOME}/paceline")
    elseif("$ENV{HOME}" STREQUAL "")
        set(folder "")
    elseif(CMAKE_HOST_SYSTEM_NAME STREQUAL "Darwin")
        set(folder "$ENV{HOME}/Library/Caches/paceline")
    else()
        set(folder "$ENV{HOME}/.cache/paceline")
    endif()
    set(${result} "${folder}" PARENT_SCOPE)
endfunction()

# Creates the cache folder, or fails with the reason why it cannot be used.
function(paceline_prepare_cache_dir folder)
    if(folder STREQUAL "")
        paceline_fail("neither HOME nor XDG_CACHE_HOME is set, so there is no cache folder"
            "set PACELINE_CACHE_DIR to a folder that outlives the build.")
    elseif(NOT IS_ABSOLUTE "${folder}")
        paceline_fail("PACELINE_CACHE_DIR is \"${folder}\", a relative path" "give it as an absolute path.")
    endif()
    execute_process(COMMAND "${CMAKE_COMMAND}" -E make_directory "${folder}"
        RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(status EQUAL 0)
        execute_process(COMMAND "${CMAKE_COMMAND}" -E touch "${folder}/.writable"
            RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    endif()
    if(NOT status EQUAL 0)
        paceline_fail_command("the cache folder ${folder} cannot be written" "${output}"
            "set PACELINE_CACHE_DIR to a folder you can write to.")
    endif()
    file(REMOVE "${folder}/.writable")
endfunction()
