// The devices that ggml can compute on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-backend.h"

namespace paceline {

struct Device {
    std::string name;
    std::string description;
    std::string kind; // cpu, gpu, igpu, accel
    uint64_t    free_bytes;
    uint64_t    total_bytes;
};

std::vector<Device> devices();

// "CPU : AVX2 = 1 | ..." as name and value pairs, of every backend
std::vector<std::pair<std::string, std::string>> backend_features();

// nullptr-terminated, as llama.cpp wants it. Raises InvalidParams with the unknown name and the existing names.
std::vector<ggml_backend_dev_t> find_devices(const std::vector<std::string> & names);

} // namespace paceline
