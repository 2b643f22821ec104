#include "media_projector.hpp"

#include <algorithm>
#include <cstring>

#include "error.hpp"
#include "log.hpp"

namespace paceline {
namespace {

constexpr int32_t max_side = 16384; // libmtmd multiplies sides as 32-bit numbers

constexpr int32_t max_audio_seconds = 3600; // libmtmd counts samples as 32-bit numbers

// An encoder's graph is computed so many nodes at a time, after which it can be aborted.
constexpr uint32_t nodes_at_a_time = 64;

struct FreeChunks {
    void operator()(mtmd_input_chunks * chunks) const noexcept { mtmd_input_chunks_free(chunks); }
};
struct FreeBitmap {
    void operator()(mtmd_bitmap * bitmap) const noexcept { mtmd_bitmap_free(bitmap); }
};
struct FreeBatch {
    void operator()(mtmd_batch * batch) const noexcept { mtmd_batch_free(batch); }
};
using Bitmap = std::unique_ptr<mtmd_bitmap, FreeBitmap>;
using Batch  = std::unique_ptr<mtmd_batch, FreeBatch>;

mtmd_context_params params_of(const ProjectorOptions & options) {
    mtmd_context_params params = mtmd_context_params_default();
    params.use_gpu             = options.use_gpu;
    params.print_timings       = false;
    params.n_threads           = options.n_threads;
    params.image_min_tokens    = options.image_min_tokens;
    params.image_max_tokens    = options.image_max_tokens;
    params.flash_attn_type     = static_cast<llama_flash_attn_type>(options.flash_attn);
    return params;
}

} // namespace

class MediaProjector::Chunks {
public:
    Chunks(const mtmd_context * context, const mtmd_bitmap * bitmap, const char * what) : chunks_(mtmd_input_chunks_init()) {
        const mtmd_input_part         part{nullptr, bitmap};
        const mtmd_input_part * const parts[] = {&part};
        LogCapture                    log;
        if (mtmd_tokenize_from_parts(context, chunks_.get(), parts, 1, false) != 0) {
            fail("InvalidParams", std::string("llama.cpp cannot take ") + what + ": " + log.words("it gave no reason"));
        }
    }

    size_t                   size() const noexcept { return mtmd_input_chunks_size(chunks_.get()); }
    const mtmd_input_chunk * operator[](size_t i) const noexcept { return mtmd_input_chunks_get(chunks_.get(), i); }

private:
    std::unique_ptr<mtmd_input_chunks, FreeChunks> chunks_;
};

std::shared_ptr<MediaProjector> MediaProjector::load(std::shared_ptr<Model> model, const std::string & path,
                                                     const ProjectorOptions & options) {
    if (model->vocab_only() || model->no_alloc()) {
        fail("Unsupported", "a projector needs a model with weights, and this one was loaded without");
    }
    const enum llama_rope_type rope = llama_model_rope_type(model->get());
    if (rope == LLAMA_ROPE_TYPE_VISION) {
        fail("ModelLoadError", path + " is for a model that generates; this one has the positions of an encoder of images");
    }
    auto loaded = std::shared_ptr<MediaProjector>(new MediaProjector(std::move(model), options.use_gpu));
    mtmd_context_params params = params_of(options);
    params.cb_eval             = &MediaProjector::on_node;
    params.cb_eval_user_data   = loaded.get();
    LogCapture log;
    loaded->context_ = mtmd_init_from_file(path.c_str(), loaded->model_->get(), params);
    if (!loaded->context_) {
        fail("ModelLoadError", "llama.cpp cannot load the projector " + path + " for this model: " + log.words("it gave no reason"));
    }
    return loaded;
}

MediaProjector::~MediaProjector() {
    if (context_ && (home_.here() || !use_gpu_)) { // a fork has no GPU to free anything of
        mtmd_free(context_);
    }
}

std::vector<std::vector<MediaPart>> MediaProjector::images(std::span<const ImagePixels> images) {
    home_.check("the projector");
    std::vector<Chunks>                 chunks;
    std::vector<std::vector<MediaPart>> parts;
    for (const ImagePixels & one : images) {
        check_image(one.width, one.height);
        const size_t size = static_cast<size_t>(one.width) * static_cast<size_t>(one.height) * 3;
        if (one.pixels.size() != size) {
            fail("InvalidParams", "an image of " + str(one.width) + " x " + str(one.height) + " pixels has " + str(size) + " bytes, not " + str(one.pixels.size()));
        }
        const Bitmap bitmap(mtmd_bitmap_init(static_cast<uint32_t>(one.width), static_cast<uint32_t>(one.height), one.pixels.data()));
        chunks.emplace_back(context_, bitmap.get(), "the image");
        parts.push_back(parts_of(chunks.back()));
    }
    encode(chunks, parts);
    return parts;
}

std::vector<MediaPart> MediaProjector::measure_image(int32_t width, int32_t height) {
    home_.check("the projector");
    check_image(width, height);
    const Bitmap bitmap(mtmd_bitmap_init(static_cast<uint32_t>(width), static_cast<uint32_t>(height), nullptr));
    return parts_of(Chunks(context_, bitmap.get(), "the image"));
}

void MediaProjector::check_image(int32_t width, int32_t height) const {
    if (!sees()) {
        fail("Unsupported", "this model's projector takes no images");
    }
    if (width < 1 || height < 1 || width > max_side || height > max_side) {
        fail("InvalidParams", "an image must be 1 to " + str(max_side) + " pixels wide and high, not " + str(width) + " x " + str(height));
    }
}

std::vector<MediaPart> MediaProjector::audio(std::span<const float> samples) {
    home_.check("the projector");
    check_audio(static_cast<int64_t>(samples.size()));
    const Bitmap           bitmap(mtmd_bitmap_init_from_audio(samples.size(), samples.data()));
    const Chunks           chunks(context_, bitmap.get(), "the audio");
    std::vector<MediaPart> parts = parts_of(chunks);
    encode({&chunks, 1}, {&parts, 1});
    return parts;
}

std::vector<MediaPart> MediaProjector::measure_audio(int64_t num_samples) {
    home_.check("the projector");
    check_audio(num_samples);
    std::lock_guard<std::mutex> lock(measuring_);
    const Bitmap bitmap(mtmd_bitmap_init_from_audio(static_cast<size_t>(num_samples), nullptr));
    return parts_of(Chunks(context_, bitmap.get(), "the audio"));
}

// Some encoders' preprocessing asserts on audio of less than two windows; none takes as little as a tenth of a second.
void MediaProjector::check_audio(int64_t num_samples) const {
    if (!hears()) {
        fail("Unsupported", "this model's projector takes no audio");
    }
    const int64_t least = (sample_rate() + 9) / 10, most = int64_t{max_audio_seconds} * sample_rate();
    if (num_samples < least || num_samples > most) {
        fail("InvalidParams", "audio must have " + str(least) + " to " + str(most) + " samples, not " + str(num_samples));
    }
}

std::vector<MediaPart> MediaProjector::parts_of(const Chunks & chunks) const {
    std::vector<MediaPart> found(chunks.size());
    for (size_t i = 0; i < chunks.size(); ++i) {
        if (mtmd_input_chunk_get_type(chunks[i]) == MTMD_INPUT_CHUNK_TYPE_TEXT) {
            size_t              size   = 0;
            const llama_token * tokens = mtmd_input_chunk_get_tokens_text(chunks[i], &size);
            found[i].tokens.assign(tokens, tokens + size);
        } else {
            add_item(chunks[i], found[i]);
        }
    }
    return found;
}

void MediaProjector::add_item(const mtmd_input_chunk * chunk, MediaPart & part) const {
    part.num_cells     = static_cast<int32_t>(mtmd_input_chunk_get_n_tokens(chunk));
    part.num_positions = mtmd_input_chunk_get_n_pos(chunk);
    part.is_causal     = !mtmd_decode_use_non_causal(context_, chunk);
    if (part.num_cells < 1 || part.num_positions < 1 || part.num_positions > part.num_cells) {
        fail("Unsupported", "llama.cpp makes " + str(part.num_cells) + " embeddings at " + str(part.num_positions) +
                                " positions of it, which no prompt can have");
    }
    const mtmd_image_tokens * image = mtmd_input_chunk_get_tokens_image(chunk);
    const size_t              last  = static_cast<size_t>(part.num_cells) - 1;
    if (!image || !mtmd_decode_use_mrope(context_) || (last > 0 && mtmd_image_tokens_get_decoder_pos(image, 0, last).t == last)) {
        return; // one after another
    }
    part.places.reserve(static_cast<size_t>(part.num_cells) * 3);
    for (int32_t cell = 0; cell < part.num_cells; ++cell) {
        const mtmd_decoder_pos place = mtmd_image_tokens_get_decoder_pos(image, 0, static_cast<size_t>(cell));
        if (place.t != 0 || place.z != 0) {
            fail("Unsupported", "this projector numbers images or frames by positions, which is not supported");
        }
        part.places.insert(part.places.end(), {static_cast<int32_t>(place.t), static_cast<int32_t>(place.y), static_cast<int32_t>(place.x)});
    }
}

void MediaProjector::encode(std::span<const Chunks> chunks, std::span<std::vector<MediaPart>> parts) {
    std::vector<Item> items;
    for (size_t i = 0; i < chunks.size(); ++i) {
        for (size_t j = 0; j < chunks[i].size(); ++j) {
            if (parts[i][j].num_cells > 0) {
                items.push_back({chunks[i][j], &parts[i][j]});
            }
        }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::span<const Item> rest = items; !rest.empty();) {
        rest = rest.subspan(encode_batch(rest));
    }
}

size_t MediaProjector::encode_batch(std::span<const Item> items) {
    const Batch batch(mtmd_batch_init(context_));
    size_t      size = 0;
    while (size < items.size() && mtmd_batch_add_chunk(batch.get(), items[size].chunk) == 0) {
        ++size; // the first one always, then as many as libmtmd takes together
    }
    LogCapture    log;
    const int32_t status = size == 0 || aborted_ || process_is_ending() ? 1 : mtmd_batch_encode(batch.get());
    if (aborted_.exchange(false) || process_is_ending()) {
        fail("Aborted", "the encoder was aborted");
    }
    if (status != 0) {
        fail("DecodeError", "llama.cpp's encoder failed (status " + str(status) + "): " + log.words("it gave no reason"));
    }
    for (const Item & item : items.first(size)) {
        const float * values = mtmd_batch_get_output_embd(batch.get(), item.chunk);
        if (!values) {
            fail("DecodeError", "llama.cpp's encoder made no embeddings");
        }
        item.part->embeddings.assign(values, values + static_cast<size_t>(item.part->num_cells) * static_cast<size_t>(n_embd()));
    }
    return size;
}

void MediaProjector::abort() noexcept {
    aborted_ = true; // also before the encoder runs: the call may be at its pixels yet
}

// Pixtral's graph makes zeros by scaling uninitialised memory, and 0 times NaN is NaN: clear it first.
static void clear_what_is_scaled_by_zero(const ggml_tensor & node) {
    float scale = 1.0F;
    std::memcpy(&scale, node.op_params, sizeof(scale));
    ggml_tensor * source = node.src[0];
    const bool is_unwritten = node.op == GGML_OP_SCALE && scale == 0.0F && source->op == GGML_OP_NONE && source->buffer &&
                              !(source->flags & GGML_TENSOR_FLAG_INPUT) &&
                              ggml_backend_buffer_get_usage(source->buffer) != GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    if (is_unwritten) {
        ggml_backend_tensor_memset(source, 0, 0, ggml_nbytes(source));
    }
}

// Called with `asks` before a node is computed: whether the graph is computed up to it at once; then after that, whether to
// go on.
bool MediaProjector::on_node(ggml_tensor * node, bool asks, void * self) {
    auto & projector = *static_cast<MediaProjector *>(self);
    if (asks) {
        clear_what_is_scaled_by_zero(*node);
    }
    return asks ? ++projector.num_nodes_ % nodes_at_a_time == 0 : !projector.aborted_ && !process_is_ending();
}

std::vector<BufferUse> plan_projector(const std::string & path, const ProjectorOptions & options) {
    const mtmd_context_params params = params_of(options);
    LogCapture             log;
    const auto             sizes = mtmd_get_memory_usage(path.c_str(), params);
    std::vector<BufferUse> uses;
    for (const auto & [device, size] : sizes) {
        const bool is_host = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
        uses.push_back({.buffer = "", .device = ggml_backend_dev_name(device), .is_host = is_host, .compute = size});
    }
    if (uses.empty()) {
        fail("ModelLoadError", "llama.cpp cannot plan the projector " + path + ": " + log.words("it gave no reason"));
    }
    return uses;
}

void install_media_log() {
    ggml_log_callback callback  = nullptr;
    void *            user_data = nullptr;
    llama_log_get(&callback, &user_data);
    mtmd_log_set(callback, user_data);
}

} // namespace paceline
