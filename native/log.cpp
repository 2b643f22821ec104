#include "log.hpp"

#include <mutex>

#include <pthread.h>

#include "llama.h"
#include "log.h"

namespace paceline {
namespace {

constexpr size_t max_queued   = 10000; // lines
constexpr size_t max_quoted = 2000;  // characters; a broken file can produce thousands of lines

std::mutex                  queue_mutex;
std::vector<LogLine>        queue;
size_t                      num_dropped = 0;
thread_local LogCapture *   capture     = nullptr;
thread_local std::string    pending; // a line that llama.cpp has not finished yet
thread_local ggml_log_level pending_level = GGML_LOG_LEVEL_NONE;

void put_in_queue(LogLine line) {
    std::lock_guard<std::mutex> lock(queue_mutex);
    if (queue.size() < max_queued) {
        queue.push_back(std::move(line));
    } else {
        ++num_dropped;
    }
}

void emit(LogLine line) {
    if (line.text.empty()) {
        return;
    }
    if (capture) {
        capture->add(std::move(line));
    } else {
        put_in_queue(std::move(line));
    }
}

void on_log(ggml_log_level level, const char * text, void *) {
    if (level != GGML_LOG_LEVEL_CONT) {
        pending_level = level;
    }
    pending += text ? text : "";
    size_t end;
    while ((end = pending.find('\n')) != std::string::npos) {
        LogLine line{pending_level, pending.substr(0, end)};
        pending.erase(0, end + 1);
        emit(std::move(line));
    }
}

} // namespace

void install_log() {
    // A fork must not catch another thread in the middle of the queue.
    pthread_atfork([] { queue_mutex.lock(); }, [] { queue_mutex.unlock(); }, [] { queue_mutex.unlock(); });
    llama_log_set(on_log, nullptr);
    common_log_set_verbosity_thold(-1); // of llama.cpp's chat layer, which throws its errors and logs conversations
}

std::vector<LogLine> take_log() {
    std::vector<LogLine>        taken;
    std::lock_guard<std::mutex> lock(queue_mutex);
    taken.swap(queue);
    if (num_dropped > 0) {
        taken.push_back({GGML_LOG_LEVEL_WARN, std::to_string(num_dropped) + " lines of llama.cpp's log were dropped"});
        num_dropped = 0;
    }
    return taken;
}

LogCapture::LogCapture() : outer_(capture) { capture = this; }

LogCapture::~LogCapture() {
    capture = outer_;
    for (LogLine & line : lines_) {
        put_in_queue(std::move(line));
    }
}

std::string LogCapture::words(const std::string & fallback) const {
    for (ggml_log_level level : {GGML_LOG_LEVEL_ERROR, GGML_LOG_LEVEL_WARN}) {
        std::string text;
        for (const LogLine & line : lines_) {
            if (line.level == level && text.size() + line.text.size() < max_quoted) {
                text += (text.empty() ? "" : "; ") + line.text;
            }
        }
        if (!text.empty()) {
            return text;
        }
    }
    return fallback;
}

void LogCapture::demote() {
    for (LogLine & line : lines_) {
        line.level = GGML_LOG_LEVEL_DEBUG;
    }
}

void LogCapture::add(LogLine line) {
    if (lines_.size() < max_queued) {
        lines_.push_back(std::move(line));
    }
}

} // namespace paceline
