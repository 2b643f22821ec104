#include "sampler_state.hpp"

#include <bit>
#include <cstring>
#include <string_view>

#include "error.hpp"

namespace paceline {

static_assert(std::endian::native == std::endian::little, "the saved state is written as it lies in memory");

namespace {

constexpr std::string_view magic = "paceSMP\1"; // the last byte is the version
constexpr size_t           word  = sizeof(uint64_t);

uint64_t checksum(const char * data, size_t size) {
    Fingerprint f;
    f.add(data, size);
    return f.value();
}

} // namespace

void Fingerprint::add(const void * data, size_t size) {
    const auto * bytes = static_cast<const unsigned char *>(data);
    for (size_t i = 0; i < size; ++i) {
        value_ = (value_ ^ bytes[i]) * 0x100000001b3;
    }
}

void Fingerprint::add(const std::vector<int32_t> & values) {
    add(values.size());
    add(values.data(), values.size() * sizeof(int32_t));
}

void Fingerprint::add(const std::vector<std::string> & texts) {
    add(texts.size());
    for (const std::string & text : texts) {
        add(text.size());
        add(text.data(), text.size());
    }
}

StateWriter::StateWriter(uint64_t fingerprint) : bytes_(magic) { put(fingerprint); }

void StateWriter::put(const void * data, size_t size) { bytes_.append(static_cast<const char *>(data), size); }

void StateWriter::put(const std::vector<int32_t> & values) {
    put(static_cast<uint64_t>(values.size()));
    put(values.data(), values.size() * sizeof(int32_t));
}

std::string StateWriter::finish() {
    put(checksum(bytes_.data(), bytes_.size()));
    return std::move(bytes_);
}

StateReader::StateReader(const std::string & bytes, uint64_t fingerprint) : bytes_(bytes), at_(0), end_(bytes.size()) {
    if (bytes.size() < magic.size() + 2 * word || bytes.compare(0, magic.size(), magic) != 0) {
        fail("StateError", "these " + str(bytes.size()) + " bytes are no saved sampler of this version");
    }
    end_ = bytes.size() - word;
    at_  = end_;
    uint64_t sum = 0;
    std::memcpy(&sum, bytes.data() + end_, word);
    if (sum != checksum(bytes.data(), end_)) {
        fail("StateError", "the saved sampler is damaged: its checksum differs");
    }
    at_ = magic.size();
    uint64_t saved = 0;
    get(saved);
    if (saved != fingerprint) {
        fail("StateError", "the saved sampler had other parameters, or another model's vocabulary");
    }
}

void StateReader::get(void * data, size_t size) {
    if (size > end_ - at_) {
        fail("StateError", "the saved sampler is damaged: it ends too early");
    }
    std::memcpy(data, bytes_.data() + at_, size);
    at_ += size;
}

void StateReader::get(std::vector<int32_t> & values) {
    uint64_t size = 0;
    get(size);
    if (size > (end_ - at_) / sizeof(int32_t)) {
        fail("StateError", "the saved sampler is damaged: it ends too early");
    }
    values.resize(size);
    if (size > 0) { // data() of none may be null, which memcpy must not be given
        get(values.data(), size * sizeof(int32_t));
    }
}

void StateReader::finish() const {
    if (at_ != end_) {
        fail("StateError", "the saved sampler is damaged: it continues after its end");
    }
}

} // namespace paceline
