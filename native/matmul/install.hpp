// Installs our products in front of llama.cpp's, for weights that are loaded from then on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernel.hpp"
#include "packed_file.hpp"

namespace paceline::matmul {

// Call once, before llama.cpp's list of buffer types is read (attention::install and any load do so).
void install();

// Names of the kernels that this processor can run, the fastest first; empty if there is none.
std::vector<std::string> kernel_names();

// Selects a kernel by its name from the next operation on; false if this processor cannot run it.
bool use_kernel(const std::string & name);

// Whether weights that are loaded from now on are packed for our kernels. Weights that are packed stay so.
void use_ours(bool wanted) noexcept;
bool uses_ours() noexcept; // false as well if there is no kernel

struct PackedMemory;

// The file of packed weights of one load. The load runs on one thread, between `begin` and `end`.
class PackedLoad {
  public:
    PackedLoad(std::string path, const FileKey & key); // opens the file and starts to verify it
    ~PackedLoad();
    PackedLoad(const PackedLoad &)             = delete;
    PackedLoad & operator=(const PackedLoad &) = delete;

    void begin() noexcept;
    void end() noexcept;

    // Called by the load: the file, if it has a buffer of this size and is intact, and the buffer's memory.
    std::unique_ptr<PackedFile> take_file(size_t size);
    void set_memory(const std::shared_ptr<PackedMemory> & memory);

    bool has_packed() const;      // whether tensors were packed, since the file did not have them
    size_t mapped_bytes() const;  // 0 if the weights are not mapped from the file, or are freed
    const std::string & problem() const noexcept { return problem_; } // of the file; empty if it is missing or was used

    void start_writing(); // on a thread, which keeps the memory until the file is written
    std::string wait_until_written() const; // returns the problem, or an empty text

  private:
    struct Writing;

    std::string path_, problem_;
    FileKey key_;
    std::unique_ptr<PackedFile> file_;
    std::weak_ptr<PackedMemory> memory_;
    std::shared_ptr<Writing> writing_;
};

std::string kernel_name(); // of the kernel in use; empty if there is none
const Kernel * kernel_in_use();

} // namespace paceline::matmul
