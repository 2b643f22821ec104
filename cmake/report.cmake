# Messages of the build: what was chosen, and errors with the way out.
include_guard()

function(paceline_say text)
    message(STATUS "paceline: ${text}")
endfunction()

# Ends the configuration, and removes the scratch folder of a cache entry that was being built. `way_out` says what the
# reader can do about it.
function(paceline_fail problem way_out)
    get_property(aside GLOBAL PROPERTY PACELINE_ASIDE)
    if(aside)
        file(REMOVE_RECURSE "${aside}")
    endif()
    message(FATAL_ERROR "\n  paceline cannot be built: ${problem}\n  What to do: ${way_out}\n")
endfunction()

# The last lines of what a command printed, indented. Compilers print semicolons and brackets, which CMake would read as
# parts of a list, so these stand aside meanwhile.
function(paceline_tail result text num_lines)
    string(ASCII 1 semicolon)
    string(ASCII 2 open)
    string(ASCII 3 close)
    string(STRIP "${text}" text)
    string(REPLACE ";" "${semicolon}" text "${text}")
    string(REPLACE "[" "${open}" text "${text}")
    string(REPLACE "]" "${close}" text "${text}")
    string(REGEX MATCHALL "[^\n]+" lines "${text}")
    list(LENGTH lines length)
    if(length GREATER num_lines)
        math(EXPR first "${length} - ${num_lines}")
        list(SUBLIST lines ${first} -1 lines)
    endif()
    list(TRANSFORM lines PREPEND "    | ")
    list(JOIN lines "\n" text)
    string(REPLACE "${semicolon}" ";" text "${text}")
    string(REPLACE "${open}" "[" text "${text}")
    string(REPLACE "${close}" "]" text "${text}")
    set(${result} "${text}" PARENT_SCOPE)
endfunction()

# Ends the configuration because a command failed: the end of its output (30 lines, or as many as a fourth argument says),
# and the advice that fits it best.
function(paceline_fail_command problem output way_out)
    if(output MATCHES "No space left on device|Disk quota exceeded|ENOSPC")
        set(problem "the disk is full (${problem})")
        set(way_out "free some space, or set PACELINE_CACHE_DIR (and TMPDIR) to a folder on a larger disk.")
    elseif(output MATCHES "Killed|out of memory|Cannot allocate memory")
        set(way_out "this looks like too little memory: set CMAKE_BUILD_PARALLEL_LEVEL=1 and try again.")
    endif()
    set(num_lines 30)
    if(ARGC GREATER 3)
        set(num_lines ${ARGV3})
    endif()
    paceline_tail(tail "${output}" ${num_lines})
    paceline_fail("${problem}\n${tail}" "${way_out}")
endfunction()
