#include "packed_file.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "packed_weights.hpp"
#include "parallel.hpp"

// The file, in the byte order of the processor:
//
//   Head            with the checksum of head, tensors and checksums
//   PackedTensor[]  num_tensors
//   uint64_t[]      a checksum of each chunk of the data
//   zeros           up to data_offset, a multiple of 2 MiB, so that the page cache may use large pages
//   data            packed weights, as they lie in memory

namespace paceline::matmul {
namespace {

constexpr char     magic[8]    = {'P', 'L', 'P', 'A', 'C', 'K', 'E', 'D'};
constexpr uint64_t version     = 1; // of the file; a change of a format's layout changes `layouts`
constexpr size_t   chunk_bytes = 4 << 20;
constexpr size_t   alignment   = 2 << 20;
constexpr uint64_t most_tensors = 1 << 20;

struct Head {
    char     magic[8];
    uint64_t version;
    uint8_t  key[32];
    uint64_t layouts; // see layout_checksum
    uint64_t num_tensors;
    uint64_t data_offset;
    uint64_t data_bytes;
    uint64_t checksum;
};

uint64_t rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

// Each step maps the state one to one, so a change of a single word always changes the result.
class Checksum {
  public:
    void add(const void * from, size_t size) {
        const auto * bytes = static_cast<const uint8_t *>(from);
        for (; size >= sizeof lanes_; bytes += sizeof lanes_, size -= sizeof lanes_) {
            uint64_t words[4];
            std::memcpy(words, bytes, sizeof words);
            for (int i = 0; i < 4; ++i) {
                lanes_[i] = step(lanes_[i], words[i]);
            }
        }
        for (; size > 0; ++bytes, --size) {
            lanes_[0] = step(lanes_[0], *bytes);
        }
    }

    uint64_t value() const {
        uint64_t sum = 0;
        for (const uint64_t lane : lanes_) {
            sum = step(rotated(sum, 17), lane ^ lane >> 32);
        }
        return sum ^ sum >> 29;
    }

  private:
    static uint64_t step(uint64_t state, uint64_t word) { return rotated(state ^ word, 27) * 0x9e3779b97f4a7c15u; }

    uint64_t lanes_[4] = {1, 2, 3, 4};
};

uint64_t checksum_of(const void * from, size_t size) {
    Checksum sum;
    sum.add(from, size);
    return sum.value();
}

// Of a packed group of each format, so that files of another version of pack.cpp are not used.
uint64_t layout_checksum() {
    static const uint64_t found = [] {
        Checksum sum;
        for (int i = 0; i < static_cast<int>(Format::count); ++i) {
            const auto format     = static_cast<Format>(i);
            const FormatInfo info = info_of(format);
            std::vector<uint8_t> rows(group_rows * ggml_row_size(info.type, 2 * info.columns));
            std::vector<uint8_t> packed(packed_bytes(format, group_rows, 2 * info.columns));
            uint64_t state = 1;
            for (uint8_t & byte : rows) {
                state = state * 6364136223846793005u + 1442695040888963407u;
                byte  = static_cast<uint8_t>(state >> 56);
            }
            pack_group(format, rows.data(), 0, group_rows, 2 * info.columns, packed.data());
            const int64_t facts[] = {info.type, info.columns, info.bytes, info.code_offset, info.has_minimum};
            sum.add(facts, sizeof facts);
            sum.add(packed.data(), packed.size());
        }
        return sum.value();
    }();
    return found;
}

size_t num_chunks(size_t data_bytes) { return (data_bytes + chunk_bytes - 1) / chunk_bytes; }
size_t chunk_size(size_t data_bytes, size_t chunk) { return std::min(chunk_bytes, data_bytes - chunk * chunk_bytes); }

uint64_t head_checksum(Head head, const std::vector<PackedTensor> & tensors, const std::vector<uint64_t> & checksums) {
    head.checksum = 0;
    Checksum sum;
    sum.add(&head, sizeof head);
    sum.add(tensors.data(), tensors.size() * sizeof(PackedTensor));
    sum.add(checksums.data(), checksums.size() * sizeof(uint64_t));
    return sum.value();
}

class Descriptor {
  public:
    explicit Descriptor(int number) : number_(number) {}
    ~Descriptor() {
        if (number_ >= 0) {
            close(number_);
        }
    }
    Descriptor(const Descriptor &)             = delete;
    Descriptor & operator=(const Descriptor &) = delete;
    operator int() const noexcept { return number_; }

  private:
    int number_;
};

bool read_all(int file, void * to, size_t size, size_t offset) {
    auto * bytes = static_cast<uint8_t *>(to);
    while (size > 0) {
        const ssize_t count = pread(file, bytes, size, static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return false;
        }
        bytes += count, offset += count, size -= count;
    }
    return true;
}

bool write_all(int file, const void * from, size_t size, size_t offset) {
    const auto * bytes = static_cast<const uint8_t *>(from);
    while (size > 0) {
        const ssize_t count = pwrite(file, bytes, size, static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return false;
        }
        bytes += count, offset += count, size -= count;
    }
    return true;
}

std::string of_system(const char * what) { return std::string(what) + ": " + std::strerror(errno); }

// A file that no other process has locked, and that still has its name: a writer renames its file before it gives up the lock.
bool is_locked_for_writing(int file, const std::string & path) {
    struct stat by_number, by_name;
    return flock(file, LOCK_EX | LOCK_NB) == 0 && fstat(file, &by_number) == 0 && stat(path.c_str(), &by_name) == 0 &&
           by_number.st_dev == by_name.st_dev && by_number.st_ino == by_name.st_ino;
}

} // namespace

PackedTensor::PackedTensor(const ggml_tensor * tensor, size_t offset) : name{}, type(tensor->type), shape{}, offset(offset) {
    std::copy_n(tensor->name, strnlen(tensor->name, sizeof name - 1), name);
    std::copy(std::begin(tensor->ne), std::end(tensor->ne), shape);
}

std::unique_ptr<PackedFile> PackedFile::open(const std::string & path, const FileKey & key, std::string & problem) {
    problem.clear();
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat facts;
    if (file < 0 || fstat(file, &facts) != 0) {
        problem = errno == ENOENT ? "" : of_system("it cannot be read");
        return nullptr;
    }
    std::unique_ptr<PackedFile> found(new PackedFile());
    Head head;
    if (!S_ISREG(facts.st_mode) || !read_all(file, &head, sizeof head, 0) || std::memcmp(head.magic, magic, sizeof magic) != 0) {
        problem = "it is no file of packed weights";
        return nullptr;
    }
    if (head.version != version || head.layouts != layout_checksum()) {
        problem = "another version of paceline wrote it";
        return nullptr;
    }
    if (std::memcmp(head.key, key.data(), key.size()) != 0) {
        problem = "it belongs to another model, or to other options";
        return nullptr;
    }
    const auto total = static_cast<uint64_t>(facts.st_size);
    problem          = "it is damaged";
    if (head.num_tensors > most_tensors || head.data_bytes == 0 || head.data_offset % alignment != 0 || head.data_offset > total ||
        head.data_bytes != total - head.data_offset) {
        return nullptr;
    }
    const size_t table_bytes = head.num_tensors * sizeof(PackedTensor), sums_bytes = num_chunks(head.data_bytes) * sizeof(uint64_t);
    if (sizeof head + table_bytes + sums_bytes > head.data_offset) {
        return nullptr;
    }
    const ggml_tensor blank{};
    found->tensors_.assign(head.num_tensors, PackedTensor(&blank, 0));
    found->checksums_.resize(num_chunks(head.data_bytes));
    if (!read_all(file, found->tensors_.data(), table_bytes, sizeof head) ||
        !read_all(file, found->checksums_.data(), sums_bytes, sizeof head + table_bytes) ||
        head_checksum(head, found->tensors_, found->checksums_) != head.checksum) {
        return nullptr;
    }
    void * base = mmap(nullptr, total, PROT_READ, MAP_PRIVATE, file, 0);
    if (base == MAP_FAILED) {
        problem = of_system("it cannot be mapped");
        return nullptr;
    }
    problem.clear();
    found->base_         = static_cast<uint8_t *>(base);
    found->mapped_bytes_ = total;
    found->data_offset_  = head.data_offset;
    found->data_bytes_   = head.data_bytes;
    const auto verify    = [self = found.get()] {
        std::atomic<bool> is_intact{true};
        in_parallel(static_cast<int64_t>(self->checksums_.size()), self->data_bytes_, [&](int64_t chunk) {
            uint8_t *    from = self->data() + chunk * chunk_bytes;
            const size_t size = chunk_size(self->data_bytes_, chunk);
            if (!is_intact || checksum_of(from, size) != self->checksums_[chunk]) {
                is_intact = false;
            }
            madvise(from, size, MADV_DONTNEED); // else a load has these pages beside the pages of the model's file
        });
        self->is_intact_ = is_intact;
    };
    try {
        found->verifier_ = std::thread(verify);
    } catch (const std::exception &) { // there are no more threads
        verify();
    }
    return found;
}

PackedFile::~PackedFile() {
    if (verifier_.joinable()) {
        verifier_.join();
    }
    if (base_) {
        munmap(base_, mapped_bytes_);
    }
}

bool PackedFile::is_intact() {
    if (verifier_.joinable()) {
        verifier_.join();
    }
    return is_intact_;
}

bool PackedFile::has(const PackedTensor & tensor) const {
    return std::find(tensors_.begin(), tensors_.end(), tensor) != tensors_.end();
}

bool PackedFile::make_writable(size_t offset, size_t size) noexcept {
    const auto page    = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t begin = (data_offset_ + offset) / page * page;
    return mprotect(base_ + begin, data_offset_ + offset + size - begin, PROT_READ | PROT_WRITE) == 0;
}

std::string write_packed_file(const std::string & path, const FileKey & key, const uint8_t * data, size_t size,
                              const std::vector<PackedTensor> & tensors) {
    Head head{};
    std::memcpy(head.magic, magic, sizeof magic);
    std::memcpy(head.key, key.data(), key.size());
    head.version     = version;
    head.layouts     = layout_checksum();
    head.num_tensors = tensors.size();
    head.data_bytes  = size;
    std::vector<uint64_t> checksums(num_chunks(size));
    const size_t table_bytes = tensors.size() * sizeof(PackedTensor), sums_bytes = checksums.size() * sizeof(uint64_t);
    head.data_offset = (sizeof head + table_bytes + sums_bytes + alignment - 1) / alignment * alignment;

    const std::string part = path + ".part";
    const Descriptor file(open(part.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file < 0) {
        return of_system("it cannot be written");
    }
    if (!is_locked_for_writing(file, part)) {
        return "another process writes it";
    }
    const auto failed = [&](std::string problem) {
        unlink(part.c_str());
        return problem;
    };
    struct statvfs disk;
    if (fstatvfs(file, &disk) == 0 && disk.f_bavail * disk.f_frsize < head.data_offset + size) {
        return failed("the disk is full: it needs " + std::to_string((head.data_offset + size) >> 20) + " MiB");
    }
    if (ftruncate(file, 0) != 0 || ftruncate(file, static_cast<off_t>(head.data_offset + size)) != 0) {
        return failed(of_system("it cannot be written"));
    }
    for (size_t chunk = 0; chunk < checksums.size(); ++chunk) {
        const uint8_t * from = data + chunk * chunk_bytes;
        checksums[chunk]     = checksum_of(from, chunk_size(size, chunk));
        if (!write_all(file, from, chunk_size(size, chunk), head.data_offset + chunk * chunk_bytes)) {
            return failed(of_system("it cannot be written"));
        }
    }
    head.checksum = head_checksum(head, tensors, checksums);
    if (!write_all(file, &head, sizeof head, 0) || !write_all(file, tensors.data(), table_bytes, sizeof head) ||
        !write_all(file, checksums.data(), sums_bytes, sizeof head + table_bytes) || fsync(file) != 0 ||
        std::rename(part.c_str(), path.c_str()) != 0) {
        return failed(of_system("it cannot be written"));
    }
    return "";
}

} // namespace paceline::matmul
