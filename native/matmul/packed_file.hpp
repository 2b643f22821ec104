// Packed weights in a file, which later loads of the same model map instead of packing them again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ggml.h"

namespace paceline::matmul {

// A tensor's place in packed weights, as the file has it.
struct PackedTensor {
    char     name[GGML_MAX_NAME];
    uint64_t type;
    int64_t  shape[GGML_MAX_DIMS];
    uint64_t offset;

    PackedTensor(const ggml_tensor * tensor, size_t offset);
    bool operator==(const PackedTensor & other) const = default;
};

using FileKey = std::array<uint8_t, 32>; // identifies the model and the options of its load

// A mapped file. Its pages are shared with the page cache and with other processes.
class PackedFile {
  public:
    // Maps a file and starts to verify its data on other threads. Returns nullptr if the file is missing, or unusable: `problem`
    // is then the reason.
    static std::unique_ptr<PackedFile> open(const std::string & path, const FileKey & key, std::string & problem);
    ~PackedFile();
    PackedFile(const PackedFile &)             = delete;
    PackedFile & operator=(const PackedFile &) = delete;

    uint8_t * data() const noexcept { return base_ + data_offset_; }
    size_t size() const noexcept { return data_bytes_; }
    bool is_intact(); // waits for the verification of the data

    // Whether the file has the tensor at its place in the data.
    bool has(const PackedTensor & tensor) const;

    // Makes a range of the data writable. Its pages are copied when they are written; the file is unchanged.
    bool make_writable(size_t offset, size_t size) noexcept;

  private:
    PackedFile() = default;

    uint8_t * base_ = nullptr; // of the mapping
    size_t mapped_bytes_ = 0, data_offset_ = 0, data_bytes_ = 0;
    std::vector<PackedTensor> tensors_;
    std::vector<uint64_t> checksums_;
    std::thread verifier_;
    bool is_intact_ = false;
};

// Writes a file beside its final name and renames it when it is complete and on the disk. Returns the problem, or an empty text.
// The file is not written if another process writes the same file.
std::string write_packed_file(const std::string & path, const FileKey & key, const uint8_t * data, size_t size,
                              const std::vector<PackedTensor> & tensors);

} // namespace paceline::matmul
