#include "bindings.hpp"

namespace paceline {

void bind_sampler(nb::module_ &) {}

} // namespace paceline
