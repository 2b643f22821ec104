#include "device.hpp"

#include "error.hpp"
#include "llama.h"

namespace paceline {
namespace {

const char * kind_name(enum ggml_backend_dev_type type) {
    switch (type) {
        case GGML_BACKEND_DEVICE_TYPE_CPU: return "cpu";
        case GGML_BACKEND_DEVICE_TYPE_GPU: return "gpu";
        case GGML_BACKEND_DEVICE_TYPE_IGPU: return "igpu";
        default: return "accel";
    }
}

} // namespace

std::vector<Device> devices() {
    std::vector<Device> found;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        size_t             free = 0, total = 0;
        ggml_backend_dev_memory(device, &free, &total);
        found.push_back({ggml_backend_dev_name(device), ggml_backend_dev_description(device),
                         kind_name(ggml_backend_dev_type(device)), free, total});
    }
    return found;
}

std::vector<std::pair<std::string, std::string>> backend_features() {
    std::vector<std::pair<std::string, std::string>> found;
    for (size_t i = 0; i < ggml_backend_reg_count(); ++i) {
        ggml_backend_reg_t reg = ggml_backend_reg_get(i);
        auto get_features = reinterpret_cast<ggml_backend_get_features_t>(
            ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features"));
        if (!get_features) {
            continue;
        }
        for (ggml_backend_feature * feature = get_features(reg); feature->name; ++feature) {
            found.emplace_back(std::string(ggml_backend_reg_name(reg)) + "." + feature->name, feature->value);
        }
    }
    return found;
}

std::vector<ggml_backend_dev_t> find_devices(const std::vector<std::string> & names) {
    std::vector<ggml_backend_dev_t> found;
    for (const std::string & name : names) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
        if (!device) {
            std::string known;
            for (const Device & other : devices()) {
                known += (known.empty() ? "" : ", ") + other.name;
            }
            fail("InvalidParams", "devices: there is no device '" + name + "'; this build has " + known);
        }
        found.push_back(device);
    }
    found.push_back(nullptr);
    return found;
}

} // namespace paceline
