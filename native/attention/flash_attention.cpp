#include "flash_attention.hpp"

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "ggml-cpu-impl.h"

#include "block.hpp"
#include "lanes.hpp"

namespace paceline::attention {
namespace {

constexpr int64_t max_chunks      = 16;
constexpr int64_t line_floats     = 16;              // a cache line: threads do not share one
constexpr int64_t max_kept_floats = int64_t{8} << 20; // of sums that threads leave one another

int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

float * aligned(void * memory) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    return reinterpret_cast<float *>(rounded_up(static_cast<int64_t>(address), line_floats * sizeof(float)));
}

// How an operation is cut: blocks of rows, and chunks of cells whose sums are merged in order. Where cells are cut follows
// from their number alone, so that what a row gets does not depend on what else is computed or by how many threads.
struct Cut {
    Cut(const Operation & op, int num_threads) {
        cells_per_chunk = std::max<int64_t>(256, rounded_up((op.num_cells + max_chunks - 1) / max_chunks, tile_cells));
        num_chunks      = (op.num_cells + cells_per_chunk - 1) / cells_per_chunk;
        num_blocks      = (op.num_rows() + max_rows - 1) / max_rows;
        rows_per_block  = rounded_up((op.num_rows() + num_blocks - 1) / num_blocks, num_lanes);
        num_blocks      = (op.num_rows() + rows_per_block - 1) / rows_per_block;
        num_items       = num_blocks * op.num_kv_heads * op.num_streams;
        sums_floats     = rounded_up(Sums::num_floats(op.dim_v, rows_per_block), line_floats);
        room_floats     = rounded_up(Room::num_floats(op), line_floats) + 2 * sums_floats;
        const int64_t kept = num_items * num_chunks * sums_floats;
        by_chunks       = num_chunks > 1 && num_items < 4 * num_threads && kept <= max_kept_floats;
        kept_floats     = by_chunks ? kept : 0;
        total_floats    = 2 * line_floats + kept_floats + num_threads * room_floats;
    }

    int64_t cells_per_chunk, num_chunks, num_blocks, rows_per_block, num_items;
    int64_t sums_floats, room_floats, kept_floats, total_floats;
    bool by_chunks; // too few blocks for the threads: chunks are computed side by side, and merged afterwards
};

Rows rows_of(const Operation & op, const Cut & cut, int64_t item) {
    const int64_t block = item % cut.num_blocks, head = item / cut.num_blocks;
    const int64_t first = block * cut.rows_per_block;
    return {head / op.num_kv_heads, head % op.num_kv_heads, first,
            static_cast<int>(std::min(cut.rows_per_block, op.num_rows() - first))};
}

// One thread's part.
class Part {
  public:
    Part(const ggml_compute_params * params, const Operation & op)
        : op_(op), cut_(op, params->nth), memory_(aligned(params->wdata) + line_floats),
          room_memory_(memory_ + cut_.kept_floats + params->ith * cut_.room_floats), room_(op, room_memory_) {}

    int64_t num_first() const { return cut_.num_items * (cut_.by_chunks ? cut_.num_chunks : 1); }
    int64_t num_second() const { return cut_.by_chunks ? cut_.num_items : 0; }

    void first(int64_t index) {
        if (cut_.by_chunks) {
            const Rows rows = rows_of(op_, cut_, index / cut_.num_chunks);
            Sums sums       = kept(index, rows);
            begin(op_, rows, room_);
            attend_chunk(rows, index % cut_.num_chunks, sums);
            return;
        }
        const Rows rows = rows_of(op_, cut_, index);
        Sums all = mine(0, rows), chunk = mine(1, rows);
        begin(op_, rows, room_);
        attend_chunk(rows, 0, all);
        for (int64_t i = 1; i < cut_.num_chunks; ++i) {
            attend_chunk(rows, i, chunk);
            all.merge(chunk, rows.num_vectors());
        }
        write_outputs(op_, rows, all);
    }

    void second(int64_t item) {
        const Rows rows = rows_of(op_, cut_, item);
        Sums all        = kept(item * cut_.num_chunks, rows);
        for (int64_t i = 1; i < cut_.num_chunks; ++i) {
            all.merge(kept(item * cut_.num_chunks + i, rows), rows.num_vectors());
        }
        write_outputs(op_, rows, all);
    }

  private:
    Sums mine(int index, const Rows & rows) const {
        float * memory = room_memory_ + cut_.room_floats - (2 - index) * cut_.sums_floats;
        return {memory, op_.dim_v, rows.num_vectors() * num_lanes};
    }

    Sums kept(int64_t index, const Rows & rows) const {
        return {memory_ + index * cut_.sums_floats, op_.dim_v, rows.num_vectors() * num_lanes};
    }

    void attend_chunk(const Rows & rows, int64_t chunk, Sums & sums) {
        sums.clear(rows.num_vectors());
        const int64_t first = chunk * cut_.cells_per_chunk;
        attend(op_, rows, first, std::min(op_.num_cells, first + cut_.cells_per_chunk), room_, sums);
    }

    const Operation & op_;
    Cut cut_;
    float *memory_, *room_memory_;
    Room room_;
};

// Threads take one piece of work after the other.
template <typename Work> void share(const ggml_compute_params * params, int64_t count, Work && work) {
    for (int64_t i = params->ith; i < count; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        work(i);
    }
}

bool are_floats(const ggml_tensor * one, const ggml_tensor * other) {
    return one->type == other->type && (one->type == GGML_TYPE_F16 || one->type == GGML_TYPE_F32);
}

} // namespace

bool handles(const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT) {
        return false;
    }
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    if (q->type != GGML_TYPE_F32 || !are_floats(k, v) || k->ne[2] != v->ne[2] || q->ne[3] != k->ne[3] || q->ne[3] != v->ne[3]) {
        return false;
    }
    // A stream's rows fill few lanes where heads share no keys; llama.cpp's products by the row are faster there.
    return q->ne[2] / k->ne[2] >= 4 || q->ne[1] >= 40;
}

namespace {

size_t our_size(int num_threads, const ggml_tensor * node) {
    return static_cast<size_t>(Cut(Operation(node), num_threads).total_floats) * sizeof(float);
}

// As ggml plans it: tiles for many tokens, sums of each thread for one.
size_t their_size(int num_threads, const ggml_tensor * node) {
    const int64_t dim_k = node->src[1]->ne[0], dim_v = node->src[2]->ne[0], num_heads = node->src[0]->ne[2];
    const int64_t tiles = GGML_FA_TILE_Q * (dim_k + dim_v + 2 * GGML_FA_TILE_KV) + GGML_FA_TILE_KV * (dim_k + dim_v);
    const int64_t sums  = num_heads * (2 + dim_v) + dim_k + 2 * dim_v;
    return static_cast<size_t>(num_threads * std::max(tiles, sums)) * sizeof(float);
}

void set_counter(const ggml_compute_params * params) {
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
}

} // namespace

size_t work_size(int num_threads, const ggml_tensor * node) {
    return std::max(our_size(num_threads, node), their_size(num_threads, node));
}

bool compute(ggml_compute_params * params, ggml_tensor * node, bool is_wanted) {
    float * agreed = aligned(params->wdata); // the choice may change at any time, but not between two threads
    if (params->ith == 0) {
        *agreed = is_wanted && params->wsize >= our_size(params->nth, node) ? 1.0f : 0.0f;
    }
    set_counter(params);
    ggml_barrier(params->threadpool);
    if (*agreed == 0) {
        ggml_barrier(params->threadpool); // everybody has read it; llama.cpp's may write there
        return false;
    }
    const Operation op(node);
    Part part(params, op);
    share(params, part.num_first(), [&](int64_t index) { part.first(index); });
    if (part.num_second() > 0) {
        ggml_barrier(params->threadpool);
        set_counter(params);
        ggml_barrier(params->threadpool);
        share(params, part.num_second(), [&](int64_t item) { part.second(item); });
    }
    return true;
}

} // namespace paceline::attention
