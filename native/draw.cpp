#include "draw.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>

namespace paceline {

namespace {

constexpr float  impossible = -std::numeric_limits<float>::infinity();
constexpr size_t first_look = 256; // candidates sorted at first, if the number needed is unknown

bool before(const llama_token_data & a, const llama_token_data & b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Keeps the candidates for which `wanted` is true, in order.
template <typename Wanted> void keep_if(Candidates & list, Wanted wanted) {
    const auto sorted_end = list.items.begin() + static_cast<ptrdiff_t>(list.sorted());
    const auto sorted     = std::count_if(list.items.begin(), sorted_end, wanted);
    std::erase_if(list.items, [&](const llama_token_data & item) { return !wanted(item); });
    list.set_sorted(static_cast<size_t>(sorted));
}

// Number of the likeliest candidates, in order, until `go_on` returns false, including that candidate.
template <typename GoOn> size_t walk_down(Candidates & list, GoOn go_on) {
    for (size_t i = 0; i < list.size(); ++i) {
        if (i >= list.sorted()) {
            list.sort_first(std::max(first_look, 4 * list.sorted()));
        }
        if (!go_on(list.items[i])) {
            return i;
        }
    }
    return list.size();
}

// Entropy in nats, by the probabilities that softmax left.
double entropy(const Candidates & list) {
    double sum = 0;
    for (const llama_token_data & item : list.items) {
        sum -= item.p > 0 ? item.p * std::log(static_cast<double>(item.p)) : 0.0;
    }
    return sum;
}

double unit(uint32_t bits) { return (bits + 0.5) * 0x1p-32; }

} // namespace

Philox philox(const Philox & counter, uint32_t key0, uint32_t key1) {
    constexpr uint64_t multiplier0 = 0xD2511F53, multiplier1 = 0xCD9E8D57;
    constexpr uint32_t weyl0 = 0x9E3779B9, weyl1 = 0xBB67AE85;
    Philox x = counter;
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = multiplier0 * x[0], b = multiplier1 * x[2];
        x = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ key0, static_cast<uint32_t>(b),
             static_cast<uint32_t>(a >> 32) ^ x[3] ^ key1, static_cast<uint32_t>(a)};
        key0 += weyl0;
        key1 += weyl1;
    }
    return x;
}

Philox Noise::block(uint32_t index, uint32_t stream) const {
    return philox({index, k_, choice_, stream}, static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32));
}

Philox Noise::of_four(uint32_t index) const { return block(index, 0); }

double Noise::uniform(uint32_t stream) const { return unit(block(0, stream + 1)[0]); }

void Candidates::sort_first(size_t count) {
    count = std::min(count, size());
    if (count <= sorted_) {
        return;
    }
    const auto from = items.begin() + static_cast<ptrdiff_t>(sorted_);
    const auto to   = items.begin() + static_cast<ptrdiff_t>(count);
    if (count < size()) {
        std::nth_element(from, to - 1, items.end(), before);
    }
    std::sort(from, to, before);
    sorted_ = count;
}

void Candidates::keep_first(size_t count) {
    if (count < size()) {
        sort_first(count);
        items.resize(count);
        sorted_ = count;
    }
}

void Candidates::keep_above(float logit) {
    keep_if(*this, [logit](const llama_token_data & item) { return item.logit >= logit; });
}

void Candidates::drop_impossible() { keep_above(-FLT_MAX); }

float Candidates::max_logit() const {
    if (sorted_ > 0) {
        return items[0].logit;
    }
    float highest = impossible;
    for (const llama_token_data & item : items) {
        highest = std::max(highest, item.logit);
    }
    return highest;
}

void Candidates::softmax() {
    const float highest = max_logit();
    double      sum     = 0;
    for (llama_token_data & item : items) {
        item.p = std::exp(item.logit - highest);
        sum += item.p;
    }
    for (llama_token_data & item : items) {
        item.p = static_cast<float>(item.p / sum);
    }
}

void select_highest(const float * row, size_t n, size_t count, Candidates & out) {
    constexpr size_t heap_limit = 1024; // above this sorting the lot is faster
    constexpr size_t stride     = 32;   // entries ruled out at once
    out.clear();
    auto & heap = out.items; // its front is the candidate that would go first
    const bool all = count > heap_limit || count >= n;
    out.items.reserve(all ? n : count);
    float floor = impossible;
    for (size_t start = 0; start < n; start += stride) {
        const size_t end = std::min(n, start + stride);
        int          any = 0;
        for (size_t i = start; i < end; ++i) {
            any |= row[i] > floor;
        }
        for (size_t i = start; any && i < end; ++i) {
            if (!(row[i] > floor)) {
                continue;
            }
            if (all) {
                heap.push_back({static_cast<llama_token>(i), row[i], 0});
                continue;
            }
            if (heap.size() == count) {
                std::pop_heap(heap.begin(), heap.end(), before);
                heap.pop_back();
            }
            heap.push_back({static_cast<llama_token>(i), row[i], 0});
            std::push_heap(heap.begin(), heap.end(), before);
            floor = heap.size() == count ? heap.front().logit : impossible;
        }
    }
    if (all) {
        out.keep_first(count);
    } else {
        std::sort_heap(heap.begin(), heap.end(), before);
        out.set_sorted(heap.size());
    }
}

int32_t argmax(const float * row, size_t n) {
    constexpr size_t stride = 32;
    float            best   = impossible;
    int32_t          winner = -1;
    for (size_t start = 0; start < n; start += stride) {
        const size_t end = std::min(n, start + stride);
        int          any = 0;
        for (size_t i = start; i < end; ++i) {
            any |= row[i] > best;
        }
        for (size_t i = start; any && i < end; ++i) {
            if (row[i] > best) {
                best   = row[i];
                winner = static_cast<int32_t>(i);
            }
        }
    }
    return winner;
}

void top_k(Candidates & list, int32_t k) {
    if (k > 0) {
        list.keep_first(static_cast<size_t>(k));
    }
}

void top_p(Candidates & list, float p) {
    if (p >= 1) {
        return;
    }
    list.softmax();
    double       sum  = 0;
    const size_t kept = walk_down(list, [&](const llama_token_data & item) {
        const bool enough = sum >= p && sum > 0;
        sum += item.p;
        return !enough;
    });
    list.keep_first(kept);
}

void min_p(Candidates & list, float p) {
    if (p > 0) {
        list.keep_above(list.max_logit() + std::log(p));
    }
}

void typical_p(Candidates & list, float p) {
    if (p >= 1) {
        return;
    }
    struct Score {
        double           distance;
        llama_token_data item;
    };
    list.softmax();
    const double       expected = entropy(list);
    std::vector<Score> scores;
    scores.reserve(list.size());
    for (const llama_token_data & item : list.items) {
        if (item.p > 0) {
            scores.push_back({std::abs(-std::log(static_cast<double>(item.p)) - expected), item});
        }
    }
    std::sort(scores.begin(), scores.end(), [](const Score & a, const Score & b) {
        return a.distance < b.distance || (a.distance == b.distance && a.item.id < b.item.id);
    });
    double sum = 0;
    list.clear();
    for (size_t i = 0; i < scores.size() && (i == 0 || sum <= p); ++i) {
        sum += scores[i].item.p;
        list.items.push_back(scores[i].item);
    }
}

void top_n_sigma(Candidates & list, float n) {
    if (n <= 0 || list.size() < 2) {
        return;
    }
    const double count = static_cast<double>(list.size());
    double       sum = 0, squares = 0;
    for (const llama_token_data & item : list.items) {
        sum += item.logit;
    }
    const double mean = sum / count;
    for (const llama_token_data & item : list.items) {
        squares += (item.logit - mean) * (item.logit - mean);
    }
    const double highest = list.max_logit();
    const double limit   = highest - n * std::sqrt(squares / count);
    list.keep_above(static_cast<float>(std::clamp<double>(limit, -FLT_MAX, highest)));
}

void xtc(Candidates & list, float probability, float threshold, double coin) {
    if (probability <= 0 || threshold > 0.5f || list.size() < 2 || coin > probability) {
        return;
    }
    list.softmax();
    const size_t likely = walk_down(list, [&](const llama_token_data & item) { return item.p >= threshold; });
    if (likely > 1) { // keep the last of the likely candidates
        const size_t sorted = list.sorted();
        list.items.erase(list.items.begin(), list.items.begin() + static_cast<ptrdiff_t>(likely - 1));
        list.set_sorted(sorted - (likely - 1));
    }
}

void temperature(Candidates & list, float temperature, float range, float exponent) {
    double value = temperature;
    if (range > 0 && list.size() > 1) {
        list.softmax();
        const double spread = std::clamp(entropy(list) / std::log(static_cast<double>(list.size())), 0.0, 1.0);
        const double low    = std::max(0.0, static_cast<double>(temperature) - range);
        value = low + (static_cast<double>(temperature) + range - low) * std::pow(spread, exponent);
    }
    if (value <= 0) {
        list.keep_first(1);
        return;
    }
    // A tiny temperature could make infinities of all: then the distances to the highest count, which is 0 in the end.
    const double highest = list.max_logit();
    const double shift   = std::abs(highest / value) > FLT_MAX ? highest : 0;
    for (llama_token_data & item : list.items) {
        item.logit = static_cast<float>((item.logit - shift) / value);
    }
    list.drop_impossible();
}

void mirostat_1(Candidates & list, double mu, int32_t n_vocab) {
    constexpr size_t looked_at = 100; // candidates that the exponent of Zipf's law is estimated from
    if (list.size() < 2) {
        return;
    }
    list.sort_first(looked_at);
    double products = 0, squares = 0;
    for (size_t i = 0; i + 1 < std::min(looked_at, list.size()); ++i) {
        const double t = std::log(static_cast<double>(i + 2) / static_cast<double>(i + 1));
        const double b = static_cast<double>(list.items[i].logit) - list.items[i + 1].logit;
        products += t * b;
        squares += t * t;
    }
    const double s       = products / squares;
    const double epsilon = s - 1;
    const double n       = n_vocab;
    const double ratio   = std::abs(epsilon) < 1e-9 ? 1 / std::log(n) : epsilon / (1 - std::pow(n, -epsilon));
    const double k       = std::pow(ratio * std::exp2(mu), 1 / s);
    if (k < static_cast<double>(list.size())) { // false for NaN and infinity, which come of equal logits
        list.keep_first(static_cast<size_t>(std::max(k, 1.0)));
    }
}

void mirostat_2(Candidates & list, double mu) {
    list.softmax();
    const double least = std::exp2(-mu);
    list.sort_first(1);
    const llama_token_data likeliest = list.items[0];
    keep_if(list, [&](const llama_token_data & item) { return item.p >= least || item.id == likeliest.id; });
}

void adaptive_p(Candidates & list, float target) {
    constexpr double width = 0.3, peak = 5, sharpness = 10;
    list.softmax();
    for (llama_token_data & item : list.items) {
        const double distance = std::abs(item.p - static_cast<double>(target)) / width;
        item.logit            = static_cast<float>(peak - sharpness * distance * distance / (1 + distance));
    }
    list.set_sorted(0);
}

namespace {

// limits[d]: bits that a candidate at least d below the best sum must reach to have a chance, as noise g > d
// means that the bits are above 2^32 exp(-exp(-d)). The highest noise, of bits 2^32 - 1, is below 23.
constexpr size_t num_limits = 23;

std::array<uint32_t, num_limits> make_limits() {
    std::array<uint32_t, num_limits> limits;
    for (size_t d = 0; d < num_limits; ++d) {
        limits[d] = static_cast<uint32_t>(std::exp(-std::exp(-static_cast<double>(d))) * 0x1p32 - 1);
    }
    return limits;
}

} // namespace

size_t draw(const Candidates & list, const Noise & noise) {
    static const auto limits = make_limits();
    const auto &      items  = list.items;
    size_t   winner = highest(list);
    uint32_t index  = ~0u; // of the block of noise at hand
    Philox   block{};
    const auto bits_of = [&](llama_token id) {
        const uint32_t wanted = static_cast<uint32_t>(id) / 4;
        if (wanted != index) {
            index = wanted;
            block = noise.of_four(index);
        }
        return block[static_cast<uint32_t>(id) % 4];
    };
    const auto sum_of = [&](size_t i, uint32_t bits) { return items[i].logit - std::log(-std::log(unit(bits))); };

    double best = sum_of(winner, bits_of(items[winner].id));
    for (size_t i = 0; i < items.size(); ++i) {
        const double gap = best - items[i].logit;
        if (gap >= num_limits) {
            continue;
        }
        const uint32_t bits = bits_of(items[i].id);
        if (gap > 0 && bits < limits[static_cast<size_t>(gap)]) {
            continue;
        }
        const double sum = sum_of(i, bits);
        if (sum > best || (sum == best && items[i].id < items[winner].id)) {
            best   = sum;
            winner = i;
        }
    }
    return winner;
}

size_t highest(const Candidates & list) {
    if (list.sorted() > 0) {
        return 0;
    }
    return static_cast<size_t>(std::min_element(list.items.begin(), list.items.end(), before) - list.items.begin());
}

} // namespace paceline
