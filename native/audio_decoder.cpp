#include "audio_decoder.hpp"

#include <algorithm>

#include "error.hpp"

#define MINIAUDIO_IMPLEMENTATION
#define MA_API static
#define MA_NO_DEVICE_IO
#define MA_NO_THREADING
#define MA_NO_ENCODING
#define MA_NO_STDIO
#define MA_NO_RESOURCE_MANAGER
#define MA_NO_NODE_GRAPH
#define MA_NO_ENGINE
#define MA_NO_GENERATION
#include "miniaudio/miniaudio.h"

namespace paceline {
namespace {

// Padding after the file: a damaged frame makes the decoder of MP3 look for tags there.
constexpr size_t padding_bytes = 4096;

ma_encoding_format encoding(const std::string & format) {
    if (format == "wav") {
        return ma_encoding_format_wav;
    }
    if (format == "mp3") {
        return ma_encoding_format_mp3;
    }
    if (format == "flac") {
        return ma_encoding_format_flac;
    }
    fail("InvalidParams", "an audio file must be wav, mp3 or flac, not " + format);
}

} // namespace

struct AudioDecoder::State {
    ma_decoder decoder;
};

AudioDecoder::AudioDecoder(std::span<const uint8_t> file, const std::string & format, int32_t rate) : file_(file.size() + padding_bytes) {
    if (rate < 1) {
        fail("InvalidParams", "rate must be 1 at least, not " + str(rate));
    }
    std::copy(file.begin(), file.end(), file_.begin());
    ma_decoder_config config = ma_decoder_config_init(ma_format_f32, 1, static_cast<ma_uint32>(rate));
    config.encodingFormat    = encoding(format);
    auto state               = std::make_unique<State>();
    if (file.empty() || ma_decoder_init_memory(file_.data(), file.size(), &config, &state->decoder) != MA_SUCCESS) {
        fail("InvalidParams", "the audio file is damaged: no sound of a " + format + " file can be read from it");
    }
    state_ = std::move(state);
}

AudioDecoder::~AudioDecoder() {
    if (state_) {
        ma_decoder_uninit(&state_->decoder);
    }
}

int32_t AudioDecoder::file_rate() const noexcept {
    ma_uint32 rate = 0;
    ma_data_source_get_data_format(state_->decoder.pBackend, nullptr, nullptr, &rate, nullptr, 0);
    return static_cast<int32_t>(rate);
}

std::vector<float> AudioDecoder::read(int32_t max_samples) {
    if (max_samples < 1) {
        fail("InvalidParams", "max_samples must be 1 at least, not " + str(max_samples));
    }
    std::vector<float> samples(static_cast<size_t>(max_samples));
    ma_uint64          count = 0;
    const ma_result    result = ma_decoder_read_pcm_frames(&state_->decoder, samples.data(), samples.size(), &count);
    samples.resize(result == MA_SUCCESS || result == MA_AT_END ? static_cast<size_t>(count) : 0);
    return samples;
}

int64_t resampled_length(int64_t num_frames, int32_t file_rate, int32_t rate) {
    if (num_frames < 0 || file_rate < 1 || rate < 1) {
        fail("InvalidParams", "num_frames must be 0 and rates 1 at least");
    }
    return static_cast<int64_t>(ma_calculate_frame_count_after_resampling(static_cast<ma_uint32>(rate), static_cast<ma_uint32>(file_rate),
                                                                          static_cast<ma_uint64>(num_frames)));
}

} // namespace paceline
