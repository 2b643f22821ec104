// Runs a function on a stack of a chosen size, for recursion with a depth that follows from the input.
#pragma once

#include <cstddef>
#include <functional>

namespace paceline {

// Calls `work` on a thread of its own with at least `stack_bytes` of stack and waits for it. Only pages that are touched
// take memory. Rethrows exceptions of `work`; fails with NotEnoughMemory if there is no room for the stack.
void run_on_stack(std::size_t stack_bytes, const std::function<void()> & work);

} // namespace paceline
