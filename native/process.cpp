#include "process.hpp"

#include <string>

#include "error.hpp"

namespace paceline {

void Home::check(const char * what) const {
    if (!here()) {
        fail("Closed", std::string(what) + " was made before a fork, and its threads are not in this process: make it in "
                                           "the child, or start processes with multiprocessing's \"spawn\"");
    }
}

} // namespace paceline
