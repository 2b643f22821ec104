#include "operation_times.hpp"

#include <algorithm>
#include <cctype>
#include <utility>

namespace paceline {
namespace {

bool computes(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return false;
        default: return !ggml_is_empty(node);
    }
}

// Without the number of the layer at its end; other numbers, for example ggml's for nodes without a name, are '#'.
std::string name_of(const ggml_tensor * node) {
    std::string name = node->name;
    const size_t end = name.find_last_not_of("0123456789");
    if (end != std::string::npos && end + 1 < name.size() && name[end] == '-') {
        name.resize(end);
    }
    std::string plain;
    for (const char letter : name) {
        const bool is_digit = std::isdigit(static_cast<unsigned char>(letter)) != 0;
        if (!is_digit) {
            plain += letter;
        } else if (plain.empty() || plain.back() != '#') {
            plain += '#';
        }
    }
    return plain;
}

double size_of(const ggml_tensor * tensor) { return static_cast<double>(ggml_nbytes(tensor)); }

// Of rows that are picked out of a matrix.
double rows_of(const ggml_tensor * matrix, int64_t num_rows) {
    return static_cast<double>(ggml_row_size(matrix->type, matrix->ne[0])) * static_cast<double>(num_rows);
}

double bytes_of(const ggml_tensor * node) {
    if (node->op == GGML_OP_GET_ROWS) {
        return rows_of(node->src[0], ggml_nrows(node)) + size_of(node);
    }
    if (node->op == GGML_OP_SET_ROWS) {
        return rows_of(node, ggml_nrows(node->src[0])) + size_of(node->src[0]);
    }
    double bytes = size_of(node);
    for (const ggml_tensor * source : node->src) {
        bytes += source ? size_of(source) : 0;
    }
    if (node->op == GGML_OP_MUL_MAT_ID) { // at most the experts that were chosen
        const int64_t num_experts = node->src[0]->ne[2], num_chosen = std::min(num_experts, ggml_nelements(node->src[2]));
        bytes -= size_of(node->src[0]) * static_cast<double>(num_experts - num_chosen) / static_cast<double>(num_experts);
    }
    return bytes;
}

double products_of(const ggml_tensor * node) {
    const auto size = static_cast<double>(ggml_nelements(node));
    switch (node->op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID: return size * static_cast<double>(node->src[0]->ne[0]);
        case GGML_OP_FLASH_ATTN_EXT: { // keys and values of all cells, seen or not
            const ggml_tensor * keys = node->src[1];
            return size / static_cast<double>(node->ne[0]) * static_cast<double>(keys->ne[1] * (keys->ne[0] + node->ne[0]));
        }
        default: return 0;
    }
}

} // namespace

bool OperationTimes::on_node(ggml_tensor * node, bool ask, void * times) {
    auto & self = *static_cast<OperationTimes *>(times);
    if (ask) {
        self.start_ = std::chrono::steady_clock::now();
        return computes(node);
    }
    self.add(node, std::chrono::duration<double>(std::chrono::steady_clock::now() - self.start_).count());
    return true; // goes on
}

void OperationTimes::add(const ggml_tensor * node, double seconds) {
    const std::string operation = ggml_op_desc(node), name = name_of(node);
    const std::string type      = node->src[0] ? ggml_type_name(node->src[0]->type) : "";
    const auto [place, is_new]  = places_.try_emplace({operation, name + ' ' + type}, times_.size());
    if (is_new) {
        times_.push_back({operation, name, type});
    }
    OperationTime & time = times_[place->second];
    time.num_times += 1;
    time.seconds += seconds;
    time.bytes += bytes_of(node);
    time.products += products_of(node);
}

std::vector<OperationTime> OperationTimes::take() {
    places_.clear();
    return std::exchange(times_, {});
}

} // namespace paceline
