// Which parts of a rendered prompt are input: llama.cpp's chat layer marks every text that it gives to a template, also roles
// and special tokens, and returns the prompt as plain text, without the marks.
#pragma once

#include <string>
#include <vector>

#include "jinja/runtime.h"

namespace paceline {

// A stretch of a prompt; `is_input`: it came from the conversation and not from the template.
struct PromptPart {
    std::string text;
    bool        is_input;
};

// Collects the parts of all renderings on this thread, while it lives.
class RenderingRecord {
public:
    RenderingRecord();
    ~RenderingRecord();
    RenderingRecord(const RenderingRecord &)             = delete;
    RenderingRecord & operator=(const RenderingRecord &) = delete;

    static RenderingRecord * current() { return current_; } // of this thread; null where nothing is recorded

    void begin();
    void add(const jinja::value & printed);

    // The parts of a prompt that begins with one of the renderings, apart from `bos` in front of it. What follows the
    // rendering counts as the template's, but for `inputs`, which are looked for there in order.
    std::vector<PromptPart> parts_of(const std::string & prompt, const std::string & bos,
                                     const std::vector<std::string> & inputs) const;

private:
    static thread_local RenderingRecord * current_;

    RenderingRecord *                    outer_;
    std::vector<std::vector<PromptPart>> renderings_;
};

// Makes a program record its renderings. Where one is recorded, roles that are plain words, and bos_token and eos_token, are
// no input; keys of objects are. Call once, before the template is executed.
void record_renderings(jinja::program & program);

} // namespace paceline
