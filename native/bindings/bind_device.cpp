#include "bindings.hpp"

namespace paceline {

void bind_device(nb::module_ &) {}

} // namespace paceline
