#include "block.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ggml-cpu.h"
#include "ggml.h"

#include "lanes.hpp"

namespace paceline::attention {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float log2_e   = 1.44269504f; // scores are to the base 2, since a power of two is cheaper than one of e

const char * at(const ggml_tensor * tensor, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<const char *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3];
}

void to_floats(float * to, const char * from, ggml_type type, int64_t count) {
    if (type == GGML_TYPE_F32) {
        std::memcpy(to, from, count * sizeof(float));
    } else {
        ggml_cpu_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t *>(from), to, count);
    }
}

void read_tile(const Operation & op, const Rows & rows, int64_t first_cell, int num_cells, Room & room) {
    for (int cell = 0; cell < num_cells; ++cell) {
        to_floats(room.keys + cell * op.dim_k, at(op.k, first_cell + cell, rows.kv_head, rows.stream), op.k->type, op.dim_k);
        to_floats(room.values + cell * op.dim_v, at(op.v, first_cell + cell, rows.kv_head, rows.stream), op.v->type, op.dim_v);
    }
}

// What a token sees of a tile.
enum class Sight : uint8_t { all, nothing, some };

Sight sight_of(const ggml_fp16_t * mask, int num_cells) {
    constexpr ggml_fp16_t hidden = 0xFC00; // minus infinity
    ggml_fp16_t any = 0, differs = 0;
    for (int cell = 0; cell < num_cells; ++cell) {
        any |= mask[cell];
        differs |= mask[cell] ^ hidden;
    }
    return any == 0 ? Sight::all : differs == 0 ? Sight::nothing : Sight::some;
}

// A tile's mask for the rows of a block, by vectors of rows.
struct TileMask {
    bool is_seen[max_rows / num_lanes];   // by any row of the vector
    bool is_masked[max_rows / num_lanes]; // some of it for some row
};

const ggml_fp16_t * mask_of(const Operation & op, const Rows & rows, int64_t token, int64_t head, int64_t cell) {
    const char * row = at(op.mask, token, head % op.mask->ne[2], rows.stream % op.mask->ne[3]);
    return reinterpret_cast<const ggml_fp16_t *>(row) + cell;
}

// The rows [first, end) of the block that are one token's; with a mask for each head, one row each.
template <typename Visit> void for_each_token(const Operation & op, const Rows & rows, Visit && visit) {
    const bool by_head = op.mask->ne[2] > 1;
    for (int row = 0; row < rows.count;) {
        const int64_t token = (rows.first + row) / op.group, head = (rows.first + row) % op.group;
        const int end = by_head ? row + 1 : static_cast<int>(std::min<int64_t>(rows.count, row + op.group - head));
        visit(row, end, token, rows.kv_head * op.group + head);
        row = end;
    }
}

TileMask read_mask(const Operation & op, const Rows & rows, int64_t first_cell, int num_cells, Room & room) {
    const int width = rows.num_vectors() * num_lanes;
    TileMask found{};
    if (!op.mask) {
        std::fill_n(found.is_seen, rows.num_vectors(), true);
        return found;
    }
    Sight sights[max_rows];
    for_each_token(op, rows, [&](int row, int end, int64_t token, int64_t head) {
        const Sight sight = sight_of(mask_of(op, rows, token, head, first_cell), num_cells);
        std::fill(sights + row, sights + end, sight);
        for (int vector = row / num_lanes; vector <= (end - 1) / num_lanes; ++vector) {
            found.is_seen[vector] |= sight != Sight::nothing;
            found.is_masked[vector] |= sight != Sight::all;
        }
    });
    for (int vector = 0; vector < rows.num_vectors(); ++vector) {
        if (found.is_seen[vector] && found.is_masked[vector]) {
            for (int cell = 0; cell < num_cells; ++cell) {
                store(room.masks + cell * width + vector * num_lanes, Lanes{});
            }
        }
    }
    float floats[tile_cells];
    for_each_token(op, rows, [&](int row, int end, int64_t token, int64_t head) {
        if (sights[row] == Sight::all) {
            return;
        }
        to_floats(floats, reinterpret_cast<const char *>(mask_of(op, rows, token, head, first_cell)), GGML_TYPE_F16, num_cells);
        for (int one = row; one < end; ++one) {
            if (found.is_seen[one / num_lanes]) {
                for (int cell = 0; cell < num_cells; ++cell) {
                    room.masks[cell * width + one] = floats[cell] * room.slopes[one];
                }
            }
        }
    });
    return found;
}

void cap(const Operation & op, float * scores, int count) { // they are log2(e) times too large before and after
    for (int i = 0; i < count; ++i) {
        scores[i] = op.softcap * log2_e * std::tanh(scores[i] / (op.softcap * log2_e));
    }
}

bool sees_any(Lanes largest) { return any(largest > all(-infinity)); }

// Outputs hold anything until a row of their vector sees a cell: most streams see few of them.
void clear_outputs(const Sums & sums, int column) {
    for (int64_t i = 0; i < sums.dim_v; ++i) {
        store(sums.outputs + i * sums.width + column, Lanes{});
    }
}

// Scores of a tile become weights in place; what was summed up before is scaled to the new largest score.
void weigh(int num_cells, int vector, const Room & room, Sums & sums) {
    const int64_t width = sums.width;
    float * scores      = room.scores + vector * num_lanes;
    Lanes largest       = load(sums.largest + vector * num_lanes);
    const Lanes before  = largest;
    for (int cell = 0; cell < num_cells; ++cell) {
        largest = larger(largest, load(scores + cell * width));
    }
    const Lanes base = largest == all(-infinity) ? Lanes{} : largest; // a row that sees nothing yet
    Lanes total{};
    for (int cell = 0; cell < num_cells; ++cell) {
        const Lanes weight = exp2_of_negative(load(scores + cell * width) - base);
        total += weight;
        store(scores + cell * width, weight);
    }
    float * old_total = sums.total + vector * num_lanes;
    if (!sees_any(before)) {
        clear_outputs(sums, vector * num_lanes);
    } else if (any(largest != before)) {
        const Lanes factor = exp2_of_negative(before - base);
        store(old_total, load(old_total) * factor);
        for (int64_t i = 0; i < sums.dim_v; ++i) {
            float * output = sums.outputs + i * width + vector * num_lanes;
            store(output, load(output) * factor);
        }
    }
    store(old_total, load(old_total) + total);
    store(sums.largest + vector * num_lanes, largest);
}

void read_queries(const Operation & op, const Rows & rows, int vector, Room & room) {
    const int width    = rows.num_vectors() * num_lanes;
    const float factor = op.scale * log2_e;
    for (int row = vector * num_lanes; row < (vector + 1) * num_lanes; ++row) {
        const int64_t token = (rows.first + row) / op.group;
        const int64_t head  = rows.kv_head * op.group + (rows.first + row) % op.group;
        const float * query = row < rows.count ? reinterpret_cast<const float *>(at(op.q, token, head, rows.stream)) : nullptr;
        for (int64_t i = 0; i < op.dim_k; ++i) {
            room.queries[i * width + row] = query ? query[i] * factor : 0.0f;
        }
    }
    room.has_queries[vector] = true;
}

void attend_vectors(const Operation & op, int num_cells, int first, int count, const TileMask & mask, Room & room, Sums & sums) {
    const int width = static_cast<int>(sums.width);
    multiply({room.keys, op.dim_k, 1, room.queries, room.scores, width, static_cast<int>(op.dim_k), false}, num_cells, first, count);
    for (int vector = first; vector < first + count; ++vector) {
        for (int cell = 0; cell < num_cells && (op.softcap != 0 || mask.is_masked[vector]); ++cell) {
            float * scores = room.scores + cell * width + vector * num_lanes;
            if (op.softcap != 0) {
                cap(op, scores, num_lanes);
            }
            if (mask.is_masked[vector]) {
                store(scores, load(scores) + load(room.masks + cell * width + vector * num_lanes));
            }
        }
        weigh(num_cells, vector, room, sums);
    }
    multiply({room.values, 1, op.dim_v, room.scores, sums.outputs, width, num_cells, true}, static_cast<int>(op.dim_v), first, count);
}

float slope_of(const Operation & op, int64_t head) { // ALiBi, as in its paper
    if (op.max_bias <= 0) {
        return 1.0f;
    }
    const int64_t power = int64_t{1} << static_cast<int>(std::floor(std::log2(op.num_heads)));
    const float base    = std::exp2(-(head < power ? op.max_bias : op.max_bias / 2) / power);
    return std::pow(base, static_cast<float>(head < power ? head + 1 : 2 * (head - power) + 1));
}

float param(const ggml_tensor * node, int index) {
    float value;
    std::memcpy(&value, node->op_params + index, sizeof value);
    return value;
}

} // namespace

Operation::Operation(const ggml_tensor * node)
    : node(node), q(node->src[0]), k(node->src[1]), v(node->src[2]), mask(node->src[3]), sinks(node->src[4]),
      scale(param(node, 0)), max_bias(param(node, 1)), softcap(param(node, 2)), dim_k(q->ne[0]), dim_v(v->ne[0]),
      num_tokens(q->ne[1]), num_heads(q->ne[2]), num_kv_heads(k->ne[2]), num_streams(q->ne[3]), num_cells(k->ne[1]),
      group(num_heads / num_kv_heads) {}

int Rows::num_vectors() const { return (count + num_lanes - 1) / num_lanes; }

int64_t Room::num_floats(const Operation & op) {
    return max_rows * (op.dim_k + 2 * tile_cells + 1) + tile_cells * (op.dim_k + op.dim_v);
}

Room::Room(const Operation & op, float * memory) {
    queries = memory;
    scores  = queries + max_rows * op.dim_k;
    masks   = scores + max_rows * tile_cells;
    slopes  = masks + max_rows * tile_cells;
    keys    = slopes + max_rows;
    values  = keys + tile_cells * op.dim_k;
}

void Sums::clear(int num_vectors) {
    std::fill_n(largest, num_vectors * num_lanes, -infinity);
    std::fill_n(total, num_vectors * num_lanes, 0.0f);
}

void Sums::merge(const Sums & other, int num_vectors) {
    for (int column = 0; column < num_vectors * num_lanes; column += num_lanes) {
        const Lanes mine = load(largest + column), theirs = load(other.largest + column);
        if (!sees_any(theirs)) {
            continue;
        }
        if (!sees_any(mine)) {
            clear_outputs(*this, column);
        }
        const Lanes both = larger(mine, theirs);
        const Lanes base = both == all(-infinity) ? Lanes{} : both;
        const Lanes my_factor = exp2_of_negative(mine - base), their_factor = exp2_of_negative(theirs - base);
        store(largest + column, both);
        store(total + column, load(total + column) * my_factor + load(other.total + column) * their_factor);
        for (int64_t i = 0; i < dim_v; ++i) {
            const int64_t place = i * width + column;
            store(outputs + place, load(outputs + place) * my_factor + load(other.outputs + place) * their_factor);
        }
    }
}

void begin(const Operation & op, const Rows & rows, Room & room) {
    std::fill_n(room.has_queries, rows.num_vectors(), false);
    for (int row = 0; row < rows.count; ++row) {
        room.slopes[row] = slope_of(op, rows.kv_head * op.group + (rows.first + row) % op.group) * log2_e;
    }
}

void attend(const Operation & op, const Rows & rows, int64_t first_cell, int64_t end_cell, Room & room, Sums & sums) {
    for (int64_t cell = first_cell; cell < end_cell; cell += tile_cells) {
        const int num_cells = static_cast<int>(std::min<int64_t>(tile_cells, end_cell - cell));
        const TileMask mask = read_mask(op, rows, cell, num_cells, room);
        bool is_read = false;
        for (int first = 0; first < rows.num_vectors();) {
            int end = first;
            while (end < rows.num_vectors() && mask.is_seen[end]) {
                ++end;
            }
            if (end > first) {
                if (!is_read) {
                    read_tile(op, rows, cell, num_cells, room);
                    is_read = true;
                }
                for (int vector = first; vector < end; ++vector) {
                    if (!room.has_queries[vector]) {
                        read_queries(op, rows, vector, room);
                    }
                }
                attend_vectors(op, num_cells, first, end - first, mask, room, sums);
            }
            first = end + 1;
        }
    }
}

void write_outputs(const Operation & op, const Rows & rows, Sums & sums) {
    for (int row = 0; row < rows.count; ++row) {
        const int64_t token = (rows.first + row) / op.group;
        const int64_t head  = rows.kv_head * op.group + (rows.first + row) % op.group;
        float * output = static_cast<float *>(op.node->data) +
                         ((rows.stream * op.num_tokens + token) * op.num_heads + head) * op.dim_v;
        if (sums.largest[row] == -infinity) {
            std::fill_n(output, op.dim_v, 0.0f);
            continue;
        }
        float weight = 1.0f, total = sums.total[row];
        if (op.sinks) { // a score that takes weight and gives no value
            const float sink = static_cast<const float *>(op.sinks->data)[head] * log2_e;
            const float both = std::max(sink, sums.largest[row]);
            weight           = std::exp2(sums.largest[row] - both);
            total            = total * weight + std::exp2(sink - both);
        }
        const float factor = weight / total;
        for (int64_t i = 0; i < op.dim_v; ++i) {
            output[i] = sums.outputs[i * sums.width + row] * factor;
        }
    }
}

} // namespace paceline::attention
