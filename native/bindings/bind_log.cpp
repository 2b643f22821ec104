#include "bindings.hpp"

#include "log.hpp"

namespace paceline {
namespace {

PyObject * sink = nullptr; // owned; read and written with the interpreter's lock or inside a critical section

void deliver(PyObject * to, const LogLine & line) {
    // A line may hold bytes of a model's file; an exception of a log handler must not look like the call's own.
    PyObject * text = PyUnicode_DecodeUTF8(line.text.data(), static_cast<Py_ssize_t>(line.text.size()), "replace");
    PyObject * done = text ? PyObject_CallFunction(to, "iO", static_cast<int>(line.level), text) : nullptr;
    Py_XDECREF(text);
    if (done) {
        Py_DECREF(done);
    } else {
        PyErr_WriteUnraisable(to);
    }
}

} // namespace

void flush_log() {
    if (!sink) {
        return;
    }
    for (const LogLine & line : take_log()) {
        deliver(sink, line);
    }
}

void bind_log(nb::module_ & m) {
    install_log();
    m.def(
        "set_log_sink", [](nb::object to) { sink = to.release().ptr(); }, nb::arg("sink"),
        "Gives every line of llama.cpp's log to sink(level, text), on the thread whose call returns to Python. "
        "Levels: 1 debug, 2 info, 3 warning, 4 error. Set once, at import.");
    m.def("flush_log", &flush_log, "Delivers what was logged since the last native call returned.");
}

} // namespace paceline
