#include "bindings.hpp"

#include <new>

#include "error.hpp"
#include "llama.h"

namespace {

// Raises the class of paceline.errors that the native error names.
void translate(const std::exception_ptr & pointer, void *) {
    try {
        std::rethrow_exception(pointer);
    } catch (const paceline::Error & error) {
        nb::object type = nb::module_::import_("paceline.errors").attr(error.kind());
        PyErr_SetObject(type.ptr(), paceline::as_text(error.what()).ptr());
    } catch (const std::bad_alloc &) {
        nb::object type = nb::module_::import_("paceline.errors").attr("NotEnoughMemory");
        PyErr_SetString(type.ptr(), "llama.cpp could not allocate memory");
    }
}

} // namespace

NB_MODULE(_native, m) {
    nb::register_exception_translator(translate);
    paceline::bind_process(m);
    paceline::bind_build_info(m);
    paceline::bind_log(m); // before llama.cpp looks for devices, which it logs
    llama_backend_init();
    paceline::bind_device(m);
    paceline::bind_gguf(m);
    paceline::bind_matmul(m); // before anything reads llama.cpp's list of buffer types, as the next does
    paceline::bind_attention(m); // before anything computes
    paceline::bind_model(m);
    paceline::bind_vocab(m);
    paceline::bind_chat_format(m);
    paceline::bind_adapter(m);
    paceline::bind_sampler(m);
    paceline::bind_context(m);
    paceline::bind_step(m);
    paceline::bind_media(m);
    paceline::bind_quantize(m);
    paceline::bind_rpc(m);
}
