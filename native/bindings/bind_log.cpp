#include "bindings.hpp"

namespace paceline {

void bind_log(nb::module_ &) {}

} // namespace paceline
