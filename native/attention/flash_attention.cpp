#include "flash_attention.hpp"

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "ggml-cpu-impl.h"

#include "block.hpp"
#include "work_partition.hpp"

namespace paceline::attention {
namespace {

float * aligned(void * memory) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    return reinterpret_cast<float *>(rounded_up(static_cast<int64_t>(address), line_floats * sizeof(float)));
}

// One thread's share of the work.
class ThreadWork {
  public:
    ThreadWork(const ggml_compute_params * params, const Operation & op)
        : op_(op), partition_(op, params->nth), partials_(aligned(params->wdata) + line_floats),
          own_(partials_ + partition_.partial_floats + params->ith * partition_.thread_floats),
          block_(op, own_ + 3 * partition_.state_floats) {}

    int64_t num_units() const { return partition_.num_items * partition_.units_per_item(); }
    int64_t num_merges() const { return partition_.unit == WorkPartition::Unit::block ? 0 : partition_.num_items; }

    void compute(int64_t index) {
        const Rows rows    = partition_.rows_of(op_, index / partition_.units_per_item());
        const int64_t unit = index % partition_.units_per_item();
        block_.begin(rows);
        if (partition_.unit == WorkPartition::Unit::block) {
            SoftmaxState all = own(0, rows), span = own(1, rows);
            attend_span(rows, 0, all);
            for (int64_t i = 1; i < partition_.num_spans; ++i) {
                attend_span(rows, i, span);
                all.merge(span);
            }
            block_.write_outputs(all);
            return;
        }
        SoftmaxState state = partial(index, rows);
        partition_.unit == WorkPartition::Unit::span ? attend_span(rows, unit, state) : attend_chunk(unit, state);
    }

    // In the order in which one thread alone would have merged them.
    void merge(int64_t item) {
        const Rows rows         = partition_.rows_of(op_, item);
        const int64_t per_span  = partition_.unit == WorkPartition::Unit::chunk ? span_cells / chunk_cells : 1;
        const int64_t first = item * partition_.units_per_item(), end = first + partition_.units_per_item();
        SoftmaxState all = partial(first, rows);
        for (int64_t span = first; span < end; span += per_span) {
            SoftmaxState state = partial(span, rows);
            for (int64_t chunk = span + 1; chunk < std::min(end, span + per_span); ++chunk) {
                state.merge(partial(chunk, rows));
            }
            if (span > first) {
                all.merge(state);
            }
        }
        block_.begin(rows);
        block_.write_outputs(all);
    }

  private:
    SoftmaxState own(int index, const Rows & rows) const { return state_at(own_, index, rows); }
    SoftmaxState partial(int64_t index, const Rows & rows) const { return state_at(partials_, index, rows); }
    SoftmaxState state_at(float * memory, int64_t index, const Rows & rows) const {
        return {memory + index * partition_.state_floats, op_.dim_v, rows.width()};
    }

    void attend_chunk(int64_t chunk, SoftmaxState & state) {
        const int64_t first = chunk * chunk_cells;
        block_.attend(first, std::min(op_.num_cells, first + chunk_cells), state);
    }

    void attend_span(const Rows & rows, int64_t span, SoftmaxState & state) {
        const int64_t first = span * (span_cells / chunk_cells);
        SoftmaxState chunk_state     = own(2, rows);
        attend_chunk(first, state);
        for (int64_t chunk = first + 1; chunk < std::min(partition_.num_chunks, first + span_cells / chunk_cells); ++chunk) {
            attend_chunk(chunk, chunk_state);
            state.merge(chunk_state);
        }
    }

    const Operation & op_;
    WorkPartition partition_;
    float *partials_, *own_;
    Block block_;
};

// Gives each thread the next item as soon as it is free.
template <typename Work> void for_each_item(const ggml_compute_params * params, int64_t count, Work && work) {
    for (int64_t i = params->ith; i < count; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        work(i);
    }
}

void set_counter(const ggml_compute_params * params) {
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
}

bool are_rows_of(const ggml_tensor * tensor, ggml_type type) {
    return tensor->type == type && tensor->nb[0] == ggml_type_size(type);
}

size_t our_size(int num_threads, const ggml_tensor * node) {
    return static_cast<size_t>(WorkPartition(Operation(node), num_threads).total_floats) * sizeof(float);
}

// As ggml plans it: tiles for many tokens, partial sums of each thread for one.
size_t their_size(int num_threads, const ggml_tensor * node) {
    const int64_t dim_k = node->src[1]->ne[0], dim_v = node->src[2]->ne[0], num_heads = node->src[0]->ne[2];
    const int64_t tiles = GGML_FA_TILE_Q * (dim_k + dim_v + 2 * GGML_FA_TILE_KV) + GGML_FA_TILE_KV * (dim_k + dim_v);
    const int64_t sums  = num_heads * (2 + dim_v) + dim_k + 2 * dim_v;
    return static_cast<size_t>(num_threads * std::max(tiles, sums)) * sizeof(float);
}

} // namespace

bool handles(const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT || ggml_is_empty(node)) {
        return false;
    }
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    const bool are_floats = k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_F32;
    if (!are_floats || !are_rows_of(q, GGML_TYPE_F32) || !are_rows_of(k, k->type) || !are_rows_of(v, k->type)) {
        return false;
    }
    if (node->src[3] && node->src[3]->ne[2] != 1) { // a mask for each head
        return false;
    }
    return !ggml_is_empty(k) && k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0 && q->ne[3] == k->ne[3] && q->ne[3] == v->ne[3];
}

size_t work_size(int num_threads, const ggml_tensor * node) {
    return std::max(our_size(num_threads, node), their_size(num_threads, node));
}

bool compute(ggml_compute_params * params, ggml_tensor * node, bool is_wanted) {
    auto * agreed = reinterpret_cast<int32_t *>(aligned(params->wdata)); // is_wanted may change at any time, and is one for all threads
    if (params->ith == 0) {
        *agreed = is_wanted && !params->use_ref && params->wsize >= our_size(params->nth, node);
    }
    set_counter(params);
    ggml_barrier(params->threadpool);
    if (!*agreed) {
        ggml_barrier(params->threadpool); // all threads have read it; llama.cpp's kernel may write there
        return false;
    }
    const Operation op(node);
    ThreadWork work(params, op);
    for_each_item(params, work.num_units(), [&](int64_t index) { work.compute(index); });
    if (work.num_merges() > 0) {
        ggml_barrier(params->threadpool);
        set_counter(params);
        ggml_barrier(params->threadpool);
        for_each_item(params, work.num_merges(), [&](int64_t item) { work.merge(item); });
    }
    return true;
}

} // namespace paceline::attention
