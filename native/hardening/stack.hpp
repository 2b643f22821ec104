// Runs a function on a stack of a chosen size, for recursion whose depth follows from the input.
#pragma once

#include <cstddef>
#include <functional>

namespace paceline {

// Calls `work` on a thread of its own with at least `stack_bytes` of stack and waits for it. Only pages that are touched
// take memory. What `work` throws is thrown here; fails with NotEnoughMemory where there is no room for the stack.
void run_on_stack(std::size_t stack_bytes, const std::function<void()> & work);

} // namespace paceline
