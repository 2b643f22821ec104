// llama.cpp's log. Lines are queued here by any thread, whatever locks it holds, and taken by threads that may run Python
// code. Warnings of a call can also be kept for its error message.
#pragma once

#include <string>
#include <vector>

#include "ggml.h"

namespace paceline {

struct LogLine {
    ggml_log_level level;
    std::string    text;
};

// Takes llama.cpp's and ggml's log over from stderr. Call once, before anything else of llama.cpp.
void install_log();

// The lines since the last call. At most 10,000 are kept; a last line has the number that was dropped.
std::vector<LogLine> take_log();

// While it lives, holds the lines logged by this thread, so that an error message can quote them and expected lines can be
// demoted. Queues them when it ends. Nests; the innermost holds them.
class LogCapture {
public:
    LogCapture();
    virtual ~LogCapture();
    LogCapture(const LogCapture &)             = delete;
    LogCapture & operator=(const LogCapture &) = delete;

    // The errors so far joined by "; ", the warnings if there were none, `fallback` if there were neither.
    std::string words(const std::string & fallback) const;

    // Demotes the lines so far, which were expected, to debug.
    void demote();

    virtual void add(LogLine line);

private:
    LogCapture *         outer_;
    std::vector<LogLine> lines_;
};

} // namespace paceline
