#include "bindings.hpp"

#include "log.hpp"

namespace paceline {
namespace {

PyObject * sink = nullptr; // owned; read and written with the interpreter's lock or inside a critical section

// Whether the line was delivered; if not, an exception is set.
bool deliver(PyObject * to, const LogLine & line) {
    // A line may hold bytes of a model's file.
    PyObject * text = PyUnicode_DecodeUTF8(line.text.data(), static_cast<Py_ssize_t>(line.text.size()), "replace");
    PyObject * done = text ? PyObject_CallFunction(to, "iO", static_cast<int>(line.level), text) : nullptr;
    Py_XDECREF(text);
    Py_XDECREF(done);
    return done != nullptr;
}

int raise_pending(void * exception) {
    PyObject * raised = static_cast<PyObject *>(exception);
    PyErr_SetObject(PyExceptionInstance_Class(raised), raised);
    Py_DECREF(raised);
    return -1;
}

bool in_main_thread() noexcept {
    try {
        const nb::module_ threading = nb::module_::import_("threading");
        return threading.attr("current_thread")().is(threading.attr("main_thread")());
    } catch (const nb::python_error &) { // only at the very end, when no other thread runs Python any more
        return true;
    }
}

// KeyboardInterrupt and others that are no Exception are meant for the program, so Python raises them as soon as the call that
// is being returned from has ended. A thread of its own gets only the class: Python offers no more.
void raise_later(const nb::python_error & error) {
    if (!in_main_thread()) {
        PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), error.type().ptr());
        return;
    }
    nb::object raised = nb::borrow(error.value());
    if (Py_AddPendingCall(raise_pending, raised.ptr()) == 0) {
        raised.release(); // raise_pending owns it
    } else {
        PyErr_SetInterrupt();
    }
}

} // namespace

void flush_log() {
    if (!sink) {
        return;
    }
    std::optional<nb::python_error> leaving;
    for (const LogLine & line : take_log()) {
        if (deliver(sink, line)) {
            continue;
        }
        if (PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_WriteUnraisable(sink); // must not look like the call's own
        } else {
            leaving.emplace();
        }
    }
    if (leaving) {
        raise_later(*leaving);
    }
}

void bind_log(nb::module_ & m) {
    install_log();
    m.def(
        "set_log_sink", [](nb::object to) { sink = to.release().ptr(); }, nb::arg("sink"),
        "Calls sink(level, text) with every line of llama.cpp's log, on the thread whose call returns to Python. "
        "Levels: 1 debug, 2 info, 3 warning, 4 error. Set once, at import.");
    m.def("flush_log", &flush_log, "Delivers what was logged since the last native call returned.");
}

} // namespace paceline
