# The compiler: searched for before CMake does, for an error message of our own where there is none; flags of sanitizers.
include_guard()
include("${CMAKE_CURRENT_LIST_DIR}/report.cmake")

macro(paceline_enable_languages)
    foreach(paceline_language IN ITEMS C CXX)
        paceline_has_compiler(paceline_found ${paceline_language})
        if(NOT paceline_found)
            paceline_fail("no ${paceline_language} compiler was found (the environment variables CC and CXX name one)"
                "install one with C++20, such as g++ 11 or clang 14: \"apt install g++\", \"dnf install gcc-c++\" or \"xcode-select --install\".")
        endif()
    endforeach()
    enable_language(C CXX)
    paceline_check_compiler()
endmacro()

# A glance at the usual names; only where it finds nothing, CMake's own search, which takes a second.
function(paceline_has_compiler result language)
    set(names_C cc gcc clang)
    set(names_CXX c++ g++ clang++)
    find_program(found NAMES ${names_${language}} NO_CACHE)
    set(variable_C CC)
    set(variable_CXX CXX)
    if(NOT found OR DEFINED ENV{${variable_${language}}} OR CMAKE_${language}_COMPILER OR CMAKE_TOOLCHAIN_FILE)
        include(CheckLanguage)
        check_language(${language})
        set(found "${CMAKE_${language}_COMPILER}")
    endif()
    set(${result} "${found}" PARENT_SCOPE)
endfunction()

function(paceline_check_compiler)
    if(WIN32 OR MSVC)
        paceline_fail("Windows is not supported yet" "use WSL 2.")
    elseif(NOT "cxx_std_20" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
        paceline_fail("${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}) does not support C++20"
            "install g++ 11, clang 14 or newer, and name it in the environment variables CC and CXX.")
    endif()
endfunction()

# PACELINE_SANITIZE=address,undefined builds llama.cpp and the core with these sanitizers.
function(paceline_sanitize_flags result)
    set(${result} "" PARENT_SCOPE)
    if(PACELINE_SANITIZE)
        set(${result} "-fsanitize=${PACELINE_SANITIZE} -fno-omit-frame-pointer" PARENT_SCOPE)
    endif()
endfunction()
