// Audio files: WAV, MP3 and FLAC, decoded by miniaudio to mono samples at any rate.
//
// One thread at a time. The caller has checked the file's header, and how much comes of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace paceline {

class AudioDecoder {
public:
    // format: "wav", "mp3" or "flac". rate: of the samples that it returns, in Hz. Copies the file. InvalidParams if invalid.
    AudioDecoder(std::span<const uint8_t> file, const std::string & format, int32_t rate);
    ~AudioDecoder();
    AudioDecoder(const AudioDecoder &)             = delete;
    AudioDecoder & operator=(const AudioDecoder &) = delete;

    int32_t file_rate() const noexcept; // Hz, as the decoder found it
    // The next samples, as many as there are; empty at the end, or if the rest cannot be decoded.
    std::vector<float> read(int32_t max_samples);

private:
    struct State;
    std::vector<uint8_t>   file_;
    std::unique_ptr<State> state_;
};

// How many samples at `rate` miniaudio makes of as many at `file_rate`.
int64_t resampled_length(int64_t num_frames, int32_t file_rate, int32_t rate);

} // namespace paceline
