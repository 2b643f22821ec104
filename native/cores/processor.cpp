// Tells which cores of a wheel this processor can run, before one of them is loaded (docs/adr/0071). A small library without
// Python: src/paceline/runtime/compiled_core.py calls it through ctypes. cmake/cores.cmake writes cores.def, best core first.
#include <cstring>

#if defined(__aarch64__)
#include <sys/auxv.h>
#else
#include "../processor_features.hpp"
#endif

namespace {

#if defined(__aarch64__)
bool has(const char * feature) {
    constexpr unsigned long dotprod = 1ul << 20, i8mm = 1ul << 13; // bits of Linux' interface, whose names old headers lack
    return std::strcmp(feature, "i8mm") == 0 ? getauxval(AT_HWCAP2) & i8mm : getauxval(AT_HWCAP) & dotprod;
}
#else
bool has(const char * feature) { return paceline::processor_has(feature); }
#endif

constexpr struct {
    const char * core;
    const char * features[16];
} cores[] = {
#define CORE(name, ...) {#name, {__VA_ARGS__}},
#include "cores.def"
};

} // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The names of the cores, each followed by a blank.
EXPORTED const char * paceline_cores() {
    static char names[64];
    names[0] = 0;
    for (const auto & known : cores) {
        std::strcat(std::strcat(names, known.core), " ");
    }
    return names;
}

// The features that the processor lacks for this core, each followed by a blank. Null: no such core.
EXPORTED const char * paceline_core_lacks(const char * core) {
    static char lacks[256];
    lacks[0] = 0;
    for (const auto & known : cores) {
        if (std::strcmp(known.core, core) != 0) {
            continue;
        }
        for (const char * feature : known.features) {
            if (feature && !has(feature)) {
                std::strcat(std::strcat(lacks, feature), " ");
            }
        }
        return lacks;
    }
    return nullptr;
}
