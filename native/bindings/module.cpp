#include <nanobind/nanobind.h>
#include "llama.h"
namespace nb = nanobind;
NB_MODULE(_native, m) { m.def("llama_version", [] { return llama_version(); }); }
