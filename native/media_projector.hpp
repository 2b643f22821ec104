// A multimodal projector (mmproj): the encoders of images and sound that belong to a model, by libmtmd.
//
// Any thread may call. One item is encoded at a time: a mutex makes a second caller wait. abort() ends that.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "model.hpp"
#include "mtmd.h"
#include "process.hpp"

namespace paceline {

// The parts of an image or sound in a prompt, in order: tokens that mark or divide it, and items of embeddings.
struct MediaPart {
    std::vector<int32_t> tokens; // empty for an item; its sizes follow
    int32_t              num_cells     = 0;
    int32_t              num_positions = 0;
    bool                 is_causal     = true;
    std::vector<int32_t> places;     // [num_cells, 3]: t, y and x of M-RoPE, from the item's position on; empty: one after another
    std::vector<float>   embeddings; // [num_cells, n_embd]; empty if not requested
};

struct ImagePixels {
    int32_t                  width  = 0;
    int32_t                  height = 0;
    std::span<const uint8_t> pixels; // RGB, row by row
};

struct ProjectorOptions {
    bool    use_gpu          = true;
    int32_t n_threads        = 1;
    int32_t image_min_tokens = -1; // -1: as the file has it
    int32_t image_max_tokens = -1;
    int32_t flash_attn       = -1; // of the encoders: 0 off, 1 on, -1 as llama.cpp chooses
};

class MediaProjector {
public:
    // ModelLoadError if the file is no projector, or belongs to another model.
    static std::shared_ptr<MediaProjector> load(std::shared_ptr<Model> model, const std::string & path, const ProjectorOptions & options);
    ~MediaProjector();
    MediaProjector(const MediaProjector &)             = delete;
    MediaProjector & operator=(const MediaProjector &) = delete;

    bool    sees() const noexcept { return mtmd_support_vision(context_); }
    bool    hears() const noexcept { return mtmd_support_audio(context_); }
    int32_t sample_rate() const noexcept { return mtmd_get_audio_sample_rate(context_); } // Hz; -1 without audio
    int32_t n_embd() const noexcept { return llama_model_n_embd_inp(model_->get()); }

    // Of RGB pixels, row by row; InvalidParams for an image that it cannot take. Images of one size are encoded together if
    // libmtmd can.
    std::vector<std::vector<MediaPart>> images(std::span<const ImagePixels> images);
    // Its sizes alone.
    std::vector<MediaPart> measure_image(int32_t width, int32_t height);
    // Of mono samples at sample_rate().
    std::vector<MediaPart> audio(std::span<const float> samples);
    // Its sizes alone, of as many samples. libmtmd computes the spectrum of silence for it: one call at a time.
    std::vector<MediaPart> measure_audio(int64_t num_samples);

    // Ends the running encoding; its call fails with Aborted.
    void abort() noexcept;

private:
    MediaProjector(std::shared_ptr<Model> model, bool use_gpu) : model_(std::move(model)), use_gpu_(use_gpu) {}

    struct Item { // of a batch
        const mtmd_input_chunk * chunk;
        MediaPart *              part;
    };
    class Chunks; // libmtmd's parts of an image or sound

    std::vector<MediaPart> parts_of(const Chunks & chunks) const;
    void                   check_image(int32_t width, int32_t height) const;
    void                   check_audio(int64_t num_samples) const;
    void                   add_item(const mtmd_input_chunk * chunk, MediaPart & part) const;
    void                   encode(std::span<const Chunks> chunks, std::span<std::vector<MediaPart>> parts);
    size_t                 encode_batch(std::span<const Item> items); // returns how many of the first were encoded together
    static bool            on_node(ggml_tensor * node, bool asks, void * self);

    Home                   home_;
    std::shared_ptr<Model> model_;
    bool                   use_gpu_;
    mtmd_context *         context_ = nullptr;
    std::mutex             mutex_;
    std::mutex             measuring_;
    uint32_t               num_nodes_ = 0;
    std::atomic<bool>      aborted_{false};
};

// Bytes that a projector would take, its buffers included, without allocating them. ModelLoadError for an invalid file.
std::vector<BufferUse> plan_projector(const std::string & path, const ProjectorOptions & options);

// Hands libmtmd's log to the log of llama.cpp. Call once.
void install_media_log();

} // namespace paceline
