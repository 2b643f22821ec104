// Which parts of a rendered prompt are input: llama.cpp's chat layer marks every text that it gives to a template, also roles
// and special tokens, but for keys of objects, and returns the prompt as plain text, without the marks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "jinja/runtime.h"

namespace paceline {

// A stretch of a prompt; `is_input`: it came from the conversation and not from the template.
struct PromptPart {
    std::string text;
    bool        is_input;
};

// A text that stands for another, which is input.
struct Placeholder {
    std::string text;
    std::string input;
};

// Collects the parts of all renderings on this thread, while it lives.
class RenderingRecord {
public:
    // `variables`: names of the template's variables that come with the request.
    explicit RenderingRecord(std::vector<std::string> variables);
    ~RenderingRecord();
    RenderingRecord(const RenderingRecord &)             = delete;
    RenderingRecord & operator=(const RenderingRecord &) = delete;

    static RenderingRecord * current() { return current_; } // of this thread; null if nothing is recorded

    void mark(jinja::context & ctx) const;
    void begin();
    void add(const jinja::value & printed);
    void end();

    // The parts of a prompt that is one of the renderings, without `bos` in front or `eos` behind, and a text that llama.cpp
    // appended, in which placeholders are replaced. Nothing if the prompt is something else.
    std::optional<std::vector<PromptPart>> parts_of(const std::string & prompt, const std::string & bos, const std::string & eos,
                                                    const std::vector<Placeholder> & placeholders) const;

private:
    static thread_local RenderingRecord * current_;

    RenderingRecord *                    outer_;
    std::vector<std::string>             variables_;
    std::vector<PromptPart>              current_rendering_;
    std::vector<std::vector<PromptPart>> renderings_; // finished renderings
};

// Makes a program record its renderings. In a recorded rendering roles that are plain words, and bos_token and eos_token, are
// no input; all other texts of the request are. Call once, before the template is executed.
void record_renderings(jinja::program & program);

} // namespace paceline
