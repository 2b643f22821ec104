// Times of the operations of a context's passes. Each is computed by itself, so a timed pass takes longer than others: by
// some microseconds an operation, and by missing fusions of ggml.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ggml.h"

namespace paceline {

// All operations of one kind, name and type of weights, over all layers.
struct OperationTime {
    std::string operation; // as ggml calls it: MUL_MAT
    std::string name;      // as llama.cpp calls its result, without the layer: ffn_up
    std::string type;      // of the first operand
    int64_t     num_times = 0;
    double      seconds   = 0;
    double      bytes     = 0; // read and written
    double      products  = 0; // of two numbers, that are summed: in matrix products and attention
};

class OperationTimes {
public:
    // ggml_backend_sched_eval_callback, with an OperationTimes.
    static bool on_node(ggml_tensor * node, bool ask, void * times);

    // The times since the last call, in the order in which they were seen first.
    std::vector<OperationTime> take();

private:
    void add(const ggml_tensor * node, double seconds);

    std::chrono::steady_clock::time_point start_;
    std::vector<OperationTime>            times_;
    std::map<std::pair<std::string, std::string>, size_t> places_; // in times_, by operation and name with type
};

} // namespace paceline
