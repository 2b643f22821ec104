#include "product.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ggml-cpu-impl.h"

#include "packed_weights.hpp"
#include "work_partition.hpp"

namespace paceline::matmul {
namespace {

constexpr int64_t alignment = 64;

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

template <typename T> T * at(const ggml_tensor * tensor, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<T *>(static_cast<char *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3]);
}

// A row of activations and the address of its products.
struct RowPair {
    const float * from;
    float * to;
};

// The rows of activations of one node, in the order of the matrices (experts) that they are multiplied with.
class Rows {
  public:
    // With experts `memory` keeps the order: see bytes().
    Rows(const ggml_tensor * node, void * memory)
        : node_(node), x_(node->src[1]), ids_(node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr),
          num_matrices_(ids_ ? node->src[0]->ne[2] : 1), starts_(static_cast<int32_t *>(memory)), order_(starts_ + num_matrices_ + 1) {}

    static int64_t count_of(const ggml_tensor * node) { return ggml_nrows(node); }
    static int64_t bytes(const ggml_tensor * node) {
        return node->op == GGML_OP_MUL_MAT_ID ? (node->src[0]->ne[2] + 1 + ggml_nrows(node)) * static_cast<int64_t>(sizeof(int32_t)) : 0;
    }

    bool have_experts() const { return ids_; }
    int64_t num_matrices() const { return num_matrices_; }
    int64_t count() const { return count_of(node_); }
    int64_t start_of(int64_t matrix) const { return ids_ ? starts_[matrix] : matrix * count(); }

    // Sorts by expert, counting: called by one thread, before the rows of nodes with experts are used.
    void sort() {
        std::fill(starts_, starts_ + num_matrices_ + 1, 0);
        for_each_pair([&](int32_t expert, int64_t) { ++starts_[expert + 1]; });
        for (int64_t i = 0; i < num_matrices_; ++i) {
            starts_[i + 1] += starts_[i];
        }
        for_each_pair([&](int32_t expert, int64_t row) { order_[starts_[expert]++] = static_cast<int32_t>(row); });
        std::copy_backward(starts_, starts_ + num_matrices_, starts_ + num_matrices_ + 1);
        starts_[0] = 0;
    }

    RowPair operator[](int64_t index) const {
        if (ids_) {
            const int64_t row = order_[index], slot = row % node_->ne[1], token = row / node_->ne[1];
            return {at<const float>(x_, slot % x_->ne[1], token, 0), at<float>(node_, slot, token, 0)};
        }
        const int64_t i1 = index % x_->ne[1], i2 = index / x_->ne[1] % x_->ne[2], i3 = index / (x_->ne[1] * x_->ne[2]);
        return {at<const float>(x_, i1, i2, i3), at<float>(node_, i1, i2, i3)};
    }

  private:
    template <typename Visit> void for_each_pair(Visit && visit) const {
        for (int64_t token = 0; token < ids_->ne[1]; ++token) {
            for (int64_t slot = 0; slot < ids_->ne[0]; ++slot) {
                const int32_t expert = *reinterpret_cast<const int32_t *>(static_cast<const char *>(ids_->data) + token * ids_->nb[1] + slot * ids_->nb[0]);
                GGML_ASSERT(expert >= 0 && expert < num_matrices_);
                visit(expert, token * ids_->ne[0] + slot);
            }
        }
    }

    const ggml_tensor *node_, *x_, *ids_;
    int64_t num_matrices_;
    int32_t *starts_, *order_; // starts_[matrix]: its first row in order_
};

class Product {
  public:
    Product(const Kernel & kernel, const ggml_compute_params * params, ggml_tensor * node)
        : kernel_(kernel), params_(params), weights_(node->src[0]), rows_(node, aligned(params->wdata)),
          tiles_(aligned(params->wdata) + rounded_up(Rows::bytes(node), alignment)), num_columns_(weights_->ne[0]), num_rows_(weights_->ne[1]) {
        has_format(weights_->type, format_);
    }

    void run() {
        if (rows_.have_experts()) {
            if (params_->ith == 0) {
                rows_.sort();
            }
            ggml_barrier(params_->threadpool);
        }
        if (params_->ith == 0) {
            ggml_threadpool_chunk_set(params_->threadpool, params_->nth);
        }
        quantise();
        ggml_barrier(params_->threadpool);
        multiply();
    }

  private:
    static uint8_t * aligned(void * memory) {
        return reinterpret_cast<uint8_t *>(rounded_up(static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory)), alignment));
    }

    int64_t row_bytes() const { return num_columns_ / block_columns * tile_block_bytes(format_, 1); }

    // An equal share of all blocks of 32 columns, rows in their order.
    void quantise() const {
        const int64_t num_blocks = num_columns_ / block_columns, all = rows_.count() * num_blocks;
        const int64_t end = all * (params_->ith + 1) / params_->nth;
        int64_t matrix = 0;
        for (int64_t i = all * params_->ith / params_->nth; i < end;) {
            const int64_t row = i / num_blocks, first = i % num_blocks, last = std::min(num_blocks, first + end - i);
            while (row >= rows_.start_of(matrix + 1)) {
                ++matrix;
            }
            const int64_t in_matrix = row - rows_.start_of(matrix), tile = in_matrix / tile_tokens;
            const int num_tokens    = tokens_of(matrix, tile);
            kernel_.quantise(rows_[row].from, first * block_columns, last * block_columns, format_, tile_at(matrix, tile), num_tokens,
                             static_cast<int>(in_matrix % tile_tokens));
            i += last - first;
        }
    }

    // Takes the next run as soon as the last is done; items are numbered through all matrices.
    void multiply() const {
        int64_t num_items = 0;
        for (int64_t matrix = 0; matrix < rows_.num_matrices(); ++matrix) {
            num_items += items_of(matrix).count;
        }
        int64_t matrix = 0, before = 0;
        MatrixItems items = items_of(matrix);
        GuidedRuns runs(num_items, params_->nth);
        for (int64_t i = params_->ith; runs.advance_to(i); i = ggml_threadpool_chunk_add(params_->threadpool, 1)) {
            for (int64_t item = runs.begin(); item < runs.end(); ++item) {
                while (item >= before + items.count) {
                    before += items.count;
                    items = items_of(++matrix);
                }
                multiply_item(matrix, items, item - before);
            }
        }
    }

    MatrixItems items_of(int64_t matrix) const {
        const int64_t num_rows = rows_.start_of(matrix + 1) - rows_.start_of(matrix);
        return {num_parts(num_rows_, group_rows), num_parts(num_rows, tile_tokens), params_->nth};
    }

    void multiply_item(int64_t matrix, const MatrixItems & items, int64_t item) const {
        const int64_t group = item / items.num_ranges, first = item % items.num_ranges * items.range;
        for (int64_t tile = first; tile < std::min(first + items.range, items.num_tiles); ++tile) {
            multiply_tile(matrix, group, tile, tile > first);
        }
    }

    void multiply_tile(int64_t matrix, int64_t group, int64_t tile, bool is_cached) const {
        const int64_t group_bytes = packed_bytes(format_, group_rows, num_columns_), matrix_bytes = packed_bytes(format_, num_rows_, num_columns_);
        const auto * weights      = static_cast<const uint8_t *>(weights_->data) + matrix * matrix_bytes + group * group_bytes;
        const int num_tokens      = tokens_of(matrix, tile);
        float * outs[tile_tokens];
        for (int place = 0; place < num_tokens; ++place) {
            outs[place] = rows_[rows_.start_of(matrix) + tile * tile_tokens + place].to + group * group_rows;
        }
        kernel_.multiply(format_, weights, num_columns_, is_cached, tile_at(matrix, tile), num_tokens, outs,
                         static_cast<int>(std::min<int64_t>(group_rows, num_rows_ - group * group_rows)));
    }

    int tokens_of(int64_t matrix, int64_t tile) const {
        return static_cast<int>(std::min<int64_t>(tile_tokens, rows_.start_of(matrix + 1) - rows_.start_of(matrix) - tile * tile_tokens));
    }

    uint8_t * tile_at(int64_t matrix, int64_t tile) const { return tiles_ + (rows_.start_of(matrix) + tile * tile_tokens) * row_bytes(); }

    const Kernel & kernel_;
    const ggml_compute_params * params_;
    const ggml_tensor * weights_;
    Rows rows_;
    uint8_t * tiles_;
    int64_t num_columns_, num_rows_;
    Format format_;
};

} // namespace

size_t work_size(const ggml_tensor * node) {
    Format format;
    has_format(node->src[0]->type, format);
    const int64_t tiles = Rows::count_of(node) * (node->src[0]->ne[0] / block_columns) * tile_block_bytes(format, 1);
    return static_cast<size_t>(2 * alignment + rounded_up(Rows::bytes(node), alignment) + tiles);
}

void compute(const Kernel & kernel, const ggml_compute_params * params, ggml_tensor * node) { Product(kernel, params, node).run(); }

} // namespace paceline::matmul
