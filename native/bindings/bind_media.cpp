#include "bindings.hpp"

#include <algorithm>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "audio_decoder.hpp"
#include "image_file.hpp"
#include "media_projector.hpp"

namespace paceline {
namespace {

using Pixels  = nb::ndarray<const uint8_t, nb::numpy, nb::shape<-1, -1, 3>, nb::c_contig, nb::device::cpu>;
using Samples = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<MediaProjector> load(std::shared_ptr<Model> model, const std::string & path, bool use_gpu, int32_t n_threads,
                                     int32_t image_min_tokens, int32_t image_max_tokens, int32_t flash_attn) {
    Unlocked unlocked;
    return MediaProjector::load(std::move(model), path, {use_gpu, n_threads, image_min_tokens, image_max_tokens, flash_attn});
}

// One tuple a part: tokens, cells, positions, whether causal, places or None, embeddings or None.
nb::list as_list(std::vector<MediaPart> && parts, size_t n_embd) {
    nb::list list;
    for (MediaPart & part : parts) {
        const size_t num_cells  = static_cast<size_t>(part.num_cells);
        nb::object   places     = part.places.empty() ? nb::none() : to_numpy(std::move(part.places), {num_cells, 3});
        nb::object   embeddings = part.embeddings.empty() ? nb::none() : to_numpy(std::move(part.embeddings), {num_cells, n_embd});
        list.append(nb::make_tuple(part.tokens, part.num_cells, part.num_positions, part.is_causal, places, embeddings));
    }
    return list;
}

// The caller holds the arrays, and does not write to them.
nb::list images(MediaProjector & projector, const std::vector<Pixels> & arrays) {
    std::vector<ImagePixels> images;
    for (const Pixels & one : arrays) {
        const auto side = [&](size_t axis) { return static_cast<int32_t>(std::min<size_t>(one.shape(axis), INT32_MAX)); };
        images.push_back({side(1), side(0), {one.data(), one.size()}});
    }
    std::vector<std::vector<MediaPart>> parts;
    {
        Unlocked unlocked;
        parts = projector.images(images);
    }
    nb::list list;
    for (std::vector<MediaPart> & one : parts) {
        list.append(as_list(std::move(one), static_cast<size_t>(projector.n_embd())));
    }
    return list;
}

nb::list measure_image(MediaProjector & projector, int32_t width, int32_t height) {
    std::vector<MediaPart> parts;
    {
        Unlocked unlocked;
        parts = projector.measure_image(width, height);
    }
    return as_list(std::move(parts), static_cast<size_t>(projector.n_embd()));
}

nb::list audio(MediaProjector & projector, const Samples & samples) {
    std::vector<MediaPart> parts;
    {
        Unlocked unlocked;
        parts = projector.audio(as_span(samples));
    }
    return as_list(std::move(parts), static_cast<size_t>(projector.n_embd()));
}

nb::list measure_audio(MediaProjector & projector, int64_t num_samples) {
    std::vector<MediaPart> parts;
    {
        Unlocked unlocked;
        parts = projector.measure_audio(num_samples);
    }
    return as_list(std::move(parts), static_cast<size_t>(projector.n_embd()));
}

std::unique_ptr<AudioDecoder> open_audio(const nb::bytes & file, const std::string & format, int32_t rate) {
    Unlocked unlocked;
    return std::make_unique<AudioDecoder>(std::span(static_cast<const uint8_t *>(file.data()), file.size()), format, rate);
}

nb::object read_samples(AudioDecoder & decoder, int32_t max_samples) {
    std::vector<float> samples;
    {
        Unlocked unlocked;
        samples = decoder.read(max_samples);
    }
    const size_t size = samples.size();
    return to_numpy(std::move(samples), {size});
}

nb::object decode(const nb::bytes & file, int32_t width, int32_t height) {
    DecodedImage image;
    {
        Unlocked unlocked; // bytes do not change, and the caller holds them
        image = decode_image({static_cast<const uint8_t *>(file.data()), file.size()}, width, height);
    }
    return to_numpy(std::move(image.pixels), {static_cast<size_t>(image.height), static_cast<size_t>(image.width), 3});
}

} // namespace

void bind_media(nb::module_ & m) {
    install_media_log();
    nb::class_<MediaProjector>(m, "MediaProjector")
        .def_static("load", &load, nb::arg("model"), nb::arg("path"), nb::arg("use_gpu"), nb::arg("n_threads"),
                    nb::arg("image_min_tokens"), nb::arg("image_max_tokens"), nb::arg("flash_attn"))
        .def_prop_ro("sees", &MediaProjector::sees)
        .def_prop_ro("hears", &MediaProjector::hears)
        .def_prop_ro("sample_rate", &MediaProjector::sample_rate)
        .def_prop_ro("n_embd", &MediaProjector::n_embd)
        .def("images", &images, nb::arg("arrays"),
             "Returns a list of parts an image, a part being a tuple: tokens, cells, positions, whether causal, places or None, "
             "embeddings or None.")
        .def("measure_image", &measure_image, nb::arg("width"), nb::arg("height"))
        .def("audio", &audio, nb::arg("samples").noconvert())
        .def("measure_audio", &measure_audio, nb::arg("num_samples"))
        .def("abort", &MediaProjector::abort);
    nb::class_<AudioDecoder>(m, "AudioDecoder")
        .def_prop_ro("file_rate", &AudioDecoder::file_rate)
        .def("read", &read_samples, nb::arg("max_samples"), "Returns the next samples, float32; none at the end.");
    m.def("open_audio", &open_audio, nb::arg("file"), nb::arg("format"), nb::arg("rate"));
    m.def("resampled_length", &resampled_length, nb::arg("num_frames"), nb::arg("file_rate"), nb::arg("rate"));
    m.def(
        "plan_projector",
        [](const std::string & path, bool use_gpu, int32_t image_min_tokens, int32_t image_max_tokens) {
            Unlocked unlocked;
            return plan_projector(path, {use_gpu, 1, image_min_tokens, image_max_tokens, -1});
        },
        nb::arg("path"), nb::arg("use_gpu"), nb::arg("image_min_tokens"), nb::arg("image_max_tokens"),
        "Returns the bytes that it would take, by device, weights among the buffers.");
    m.def("decode_image", &decode, nb::arg("file"), nb::arg("width"), nb::arg("height"), "Returns pixels, uint8 (height, width, 3).");
}

} // namespace paceline
