#include "bindings.hpp"

#include <cstdint>
#include <cstring>
#include <limits>

namespace paceline {
namespace {

// The memory of a Python object, for as long as this lives.
class BufferView {
  public:
    explicit BufferView(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) {
            throw nb::python_error();
        }
    }
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView &)             = delete;
    BufferView & operator=(const BufferView &) = delete;

    const char * data() const { return static_cast<const char *>(view_.buf); }
    uint64_t     size() const { return static_cast<uint64_t>(view_.len); }

  private:
    Py_buffer view_{};
};

// Strings of a GGUF file (a length of 64 bits, then as many bytes), and the place behind the last one. Fewer than `count` where
// data ends before the next one does: then the place is the end that its length promises, or where its length begins if that is cut.
nb::tuple gguf_strings(nb::handle data, uint64_t at, uint64_t count) {
    const BufferView file(data);
    nb::list found;
    for (uint64_t index = 0; index < count; index++) {
        uint64_t length = 0; // in the byte order of the file, little, as that of all machines here
        if (at > file.size() || file.size() - at < sizeof(length)) {
            break;
        }
        std::memcpy(&length, file.data() + at, sizeof(length));
        at += sizeof(length);
        if (file.size() - at < length) {
            at = length > std::numeric_limits<uint64_t>::max() - at ? std::numeric_limits<uint64_t>::max() : at + length;
            break;
        }
        found.append(nb::bytes(file.data() + at, length));
        at += length;
    }
    return nb::make_tuple(found, at);
}

} // namespace

void bind_gguf(nb::module_ & m) {
    m.def("gguf_strings", &gguf_strings, nb::arg("data"), nb::arg("at"), nb::arg("count"));
}

} // namespace paceline
