#include "processor_features.hpp"

#if defined(__x86_64__)

#include <cpuid.h>

#include <cstdint>
#include <cstring>

namespace paceline {
namespace {

enum Word { leaf_1_ecx, leaf_7_ebx, leaf_7_ecx };
enum Registers : uint32_t { general = 0, vectors_of_256 = 0x6, vectors_of_512 = 0xe6 }; // that the system must save, as bits of XCR0

constexpr struct {
    const char * name;
    Word word;
    int bit;
    Registers registers;
} features[] = {
    {"sse4.2", leaf_1_ecx, 20, general},
    {"popcnt", leaf_1_ecx, 23, general},
    {"fma", leaf_1_ecx, 12, vectors_of_256},
    {"f16c", leaf_1_ecx, 29, vectors_of_256},
    {"bmi", leaf_7_ebx, 3, general},
    {"bmi2", leaf_7_ebx, 8, general},
    {"avx2", leaf_7_ebx, 5, vectors_of_256},
    {"avx512f", leaf_7_ebx, 16, vectors_of_512},
    {"avx512cd", leaf_7_ebx, 28, vectors_of_512},
    {"avx512bw", leaf_7_ebx, 30, vectors_of_512},
    {"avx512dq", leaf_7_ebx, 17, vectors_of_512},
    {"avx512vl", leaf_7_ebx, 31, vectors_of_512},
    {"avx512vnni", leaf_7_ecx, 11, vectors_of_512},
};

} // namespace

bool processor_has(const char * feature) {
    unsigned words[3] = {}, ignored[3];
    __get_cpuid(1, &ignored[0], &ignored[1], &words[leaf_1_ecx], &ignored[2]);
    __get_cpuid_count(7, 0, &ignored[0], &words[leaf_7_ebx], &words[leaf_7_ecx], &ignored[1]);
    uint32_t saved = 0, high = 0;
    if (words[leaf_1_ecx] >> 27 & 1) { // the system has enabled XGETBV
        __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    }
#if defined(__APPLE__)
    saved |= vectors_of_512; // macOS enables them when a thread first uses them
#endif
    for (const auto & known : features) {
        if (std::strcmp(known.name, feature) == 0) {
            return (words[known.word] >> known.bit & 1) && (saved & known.registers) == known.registers;
        }
    }
    return false;
}

} // namespace paceline

#endif
