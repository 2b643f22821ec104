# cmake -DSOURCE= -DWORK= -DNPM= -DCHOICE= -P build_web_page.cmake: builds the page from a copy of SOURCE in WORK, into
# WORK/src/paceline/webui. CHOICE: ON, or auto, where what fails leaves the page out with a warning.
include("${CMAKE_CURRENT_LIST_DIR}/report.cmake")

set(copy "${WORK}/web")
set(output "${WORK}/src/paceline/webui")

# Runs npm, and sets `failed` where that fails, or ends the build.
function(run_npm what)
    execute_process(COMMAND "${NPM}" ${ARGN} WORKING_DIRECTORY "${copy}"
        RESULT_VARIABLE status OUTPUT_VARIABLE printed ERROR_VARIABLE printed)
    if(status EQUAL 0)
        return()
    elseif(CHOICE STREQUAL "auto")
        paceline_tail(tail "${printed}" 10)
        message(WARNING "paceline: the web page is left out, as ${what} it failed (npm):\n${tail}\n"
            "PACELINE_WEBUI=OFF builds without it and without trying, ON fails where it cannot be built.")
        set(failed TRUE PARENT_SCOPE)
    else()
        paceline_fail_command("${what} the web page failed" "${printed}"
            "look at npm's output above, or set PACELINE_WEBUI=OFF to build without the page.")
    endif()
endfunction()

set(failed FALSE)
# Files that are there stay where their times are within a second of the new ones: none may be there.
file(GLOB stale LIST_DIRECTORIES FALSE "${copy}/*")
list(REMOVE_ITEM stale "${copy}/.installed")
file(REMOVE_RECURSE ${stale} "${copy}/src" "${copy}/public" "${output}")
file(COPY "${SOURCE}/" DESTINATION "${copy}" PATTERN node_modules EXCLUDE PATTERN tests EXCLUDE)
file(SHA256 "${copy}/package-lock.json" lock)
set(installed "")
if(EXISTS "${copy}/.installed")
    file(READ "${copy}/.installed" installed)
endif()
if(NOT installed STREQUAL lock) # packages stay for the next build, until the lock file changes
    run_npm("installing the packages of" ci --no-audit --no-fund --fetch-retries=1)
    if(NOT failed)
        file(WRITE "${copy}/.installed" "${lock}")
    endif()
endif()
if(NOT failed)
    run_npm("building" run build)
endif()
if(failed)
    file(REMOVE_RECURSE "${output}")
elseif(NOT EXISTS "${output}/index.html")
    paceline_fail("the build of the web page left no ${output}/index.html" "set PACELINE_WEBUI=OFF to build without the page.")
endif()
file(TOUCH "${WORK}/built")
