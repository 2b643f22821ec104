#include "bindings.hpp"

namespace paceline {

void bind_context(nb::module_ &) {}

} // namespace paceline
