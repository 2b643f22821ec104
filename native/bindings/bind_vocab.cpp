#include "bindings.hpp"

namespace paceline {

void bind_vocab(nb::module_ &) {}

} // namespace paceline
