// The frame around the saved state of a sampler: magic and version, fingerprint, values, checksum; little endian.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace paceline {

// FNV-1a, 64 bits (Fowler, Noll, Vo): detects damage and differences, not malice.
class Fingerprint {
public:
    void add(const void * data, size_t size);
    template <typename T> requires std::is_arithmetic_v<T> void add(T value) { add(&value, sizeof value); }
    void add(const std::vector<int32_t> & values);
    void add(const std::vector<std::string> & texts);

    uint64_t value() const { return value_; }

private:
    uint64_t value_ = 0xcbf29ce484222325;
};

class StateWriter {
public:
    explicit StateWriter(uint64_t fingerprint);

    template <typename T> requires std::is_arithmetic_v<T> void put(T value) { put(&value, sizeof value); }
    void put(const std::vector<int32_t> & values);

    std::string finish();

private:
    void put(const void * data, size_t size);

    std::string bytes_;
};

// Every failure is a StateError with the reason.
class StateReader {
public:
    StateReader(const std::string & bytes, uint64_t fingerprint);

    template <typename T> requires std::is_arithmetic_v<T> void get(T & value) { get(&value, sizeof value); }
    void get(std::vector<int32_t> & values);

    void finish() const; // nothing may be left

private:
    void get(void * data, size_t size);

    const std::string & bytes_;
    size_t              at_;
    size_t              end_;
};

} // namespace paceline
