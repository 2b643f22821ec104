// NEON with dotprod (ARMv8.2 and later, most server and phone cores since 2018): 16 products in an instruction.
#include "kernel.hpp"

#if defined(__aarch64__)

#include "kernel_neon.hpp"

namespace paceline::matmul {
namespace {

constexpr Kernel kernel = {"neon_dotprod", quantise<Neon>, multiply<Neon>, sum_of_bytes<Neon>, spin_dots<Neon>, spin_float_dots<Neon>};

} // namespace

const Kernel * neon_dotprod_kernel() { return has_dotprod() ? &kernel : nullptr; }

} // namespace paceline::matmul

#else

namespace paceline::matmul {
const Kernel * neon_dotprod_kernel() { return nullptr; }
} // namespace paceline::matmul

#endif
