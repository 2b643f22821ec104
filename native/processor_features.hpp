// Features of an x86-64 processor, by the names that compilers have for them. Not __builtin_cpu_supports: the runtime library of
// Zig's compiler answers no to everything. A function in a file of its own: a file that is compiled for a feature may not ask for it.
#pragma once

namespace paceline {

// Whether the processor has the feature and the system lets programs use it; false for a name that is not in the table.
bool processor_has(const char * feature);

} // namespace paceline
