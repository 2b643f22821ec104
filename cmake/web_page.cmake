# The web page of web/: built with npm where Node.js is, and installed beside the module.
include_guard()
include("${CMAKE_CURRENT_LIST_DIR}/report.cmake")

set(PACELINE_NODE_MINIMUM "20.19") # what Vite needs

# Sets `result` to auto or ON where the page is built, and to OFF where it is left out. `wanted`: auto (in wheels, where Node.js
# and npm are; what fails then leaves the page out), ON (or fail) or OFF. `state` is scikit-build-core's: wheel, editable or
# empty. `source`: the folder web/.
function(paceline_choose_web_page result wanted state source)
    set(${result} OFF PARENT_SCOPE)
    string(TOUPPER "${wanted}" asked)
    if(asked MATCHES "^(OFF|NO|FALSE|0)$")
        paceline_say("the web page is left out (PACELINE_WEBUI=OFF)")
        return()
    elseif(NOT asked MATCHES "^(AUTO|ON|YES|TRUE|1)$")
        paceline_fail("PACELINE_WEBUI is \"${wanted}\"" "set it to auto, ON or OFF.")
    endif()
    paceline_why_no_page(why "${source}")
    if(asked STREQUAL "AUTO")
        if(why STREQUAL "" AND NOT state STREQUAL "wheel")
            set(why "this is no wheel; \"npm run build\" in web/ puts it where a checkout looks for it")
        endif()
        if(why STREQUAL "")
            set(${result} auto PARENT_SCOPE)
        else()
            paceline_say("the web page is left out: ${why}")
        endif()
    elseif(why STREQUAL "")
        set(${result} ON PARENT_SCOPE)
    else()
        paceline_fail("the web page was asked for (PACELINE_WEBUI=ON), and ${why}"
            "install Node.js ${PACELINE_NODE_MINIMUM} or newer with npm, or set PACELINE_WEBUI=OFF.")
    endif()
endfunction()

# Sets `result` to why the page cannot be built here; empty: it can.
function(paceline_why_no_page result source)
    find_program(PACELINE_NODE node)
    find_program(PACELINE_NPM npm)
    set(why "")
    if(NOT EXISTS "${source}/package.json")
        set(why "its sources (web/) are not there")
    elseif(NOT PACELINE_NODE OR NOT PACELINE_NPM)
        set(why "node or npm was not found")
    else()
        execute_process(COMMAND "${PACELINE_NODE}" --version
            RESULT_VARIABLE status OUTPUT_VARIABLE version ERROR_VARIABLE ignored OUTPUT_STRIP_TRAILING_WHITESPACE)
        string(REGEX REPLACE "^v" "" version "${version}")
        if(NOT status EQUAL 0)
            set(why "${PACELINE_NODE} does not run")
        elseif(version VERSION_LESS PACELINE_NODE_MINIMUM)
            set(why "Node.js is ${version}, older than ${PACELINE_NODE_MINIMUM}")
        endif()
    endif()
    set(${result} "${why}" PARENT_SCOPE)
endfunction()

# Adds the target that builds the page from a copy of its sources, and installs it. A checkout stays as it is. `choice`: auto or
# ON, as chosen above.
function(paceline_add_web_page choice source)
    set(work "${CMAKE_BINARY_DIR}/web_page") # the page is written to ../src/paceline/webui, seen from its sources
    set(script "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/build_web_page.cmake")
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${source}/src/*" "${source}/public/*")
    file(GLOB top CONFIGURE_DEPENDS "${source}/*.json" "${source}/*.ts" "${source}/*.html" "${source}/.npmrc")
    add_custom_command(OUTPUT "${work}/built"
        COMMAND "${CMAKE_COMMAND}" "-DSOURCE=${source}" "-DWORK=${work}" "-DNPM=${PACELINE_NPM}" "-DCHOICE=${choice}"
            -P "${script}"
        DEPENDS ${sources} ${top} "${script}"
        COMMENT "Building the web page" VERBATIM)
    add_custom_target(web_page ALL DEPENDS "${work}/built")
    install(DIRECTORY "${work}/src/paceline/webui/" DESTINATION paceline/webui OPTIONAL)
    if(SKBUILD_STATE STREQUAL "wheel")
        install(DIRECTORY "${work}/licenses/" DESTINATION "${SKBUILD_METADATA_DIR}/licenses/web" OPTIONAL)
    endif()
endfunction()
