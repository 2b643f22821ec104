#include "bindings.hpp"

namespace paceline {
namespace {

// Thread identifiers as Python has them.
nb::set end(double patience_s) {
    std::vector<pthread_t> threads;
    {
        nb::gil_scoped_release released; // not Unlocked: Python does not take this thread down
        threads = end_calls(std::chrono::milliseconds(static_cast<int64_t>(patience_s * 1000)));
    }
    nb::set idents;
    for (const pthread_t thread : threads) {
        idents.add(nb::steal(PyLong_FromUnsignedLong((unsigned long) thread)));
    }
    return idents;
}

} // namespace

void bind_process(nb::module_ & m) {
    m.def("end_calls", &end, nb::arg("patience_s"), nb::sig("def end_calls(patience_s: float) -> set[int]"));
    // Daemon threads keep their resources until the process ends.
    nb::set_leak_warnings(false);
}

} // namespace paceline
