// Forks of this process.
#pragma once

#include <unistd.h>

namespace paceline {

// The process that an object was made in. A fork copies the object but none of its threads.
class Home {
public:
    bool here() const noexcept { return pid_ == getpid(); }
    // Raises Closed in another process. `what`: "the context".
    void check(const char * what) const;

private:
    pid_t pid_ = getpid();
};

} // namespace paceline
