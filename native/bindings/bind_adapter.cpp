#include "bindings.hpp"

namespace paceline {

void bind_adapter(nb::module_ &) {}

} // namespace paceline
