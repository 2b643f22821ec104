// Recent results for texts: values by their keys, bounded in number and size, the least recently used dropped first.
#pragma once

#include <cstddef>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace paceline {

// Safe to call from several threads. Values are constant, so that all who hold one share it.
template <typename Value> class RecentCache {
public:
    RecentCache(std::size_t max_entries, std::size_t max_bytes) : max_entries_(max_entries), max_bytes_(max_bytes) {}

    // Null if there is none.
    std::shared_ptr<const Value> find(const std::string & key) {
        const std::lock_guard lock(mutex_);
        const auto            found = places_.find(key);
        if (found == places_.end()) {
            return nullptr;
        }
        entries_.splice(entries_.begin(), entries_, found->second);
        return entries_.front().value;
    }

    // In place of another value of the key. `bytes`: of the value; one that is larger than all may be is not kept.
    void put(const std::string & key, std::shared_ptr<const Value> value, std::size_t bytes) {
        const std::lock_guard lock(mutex_);
        if (const auto found = places_.find(key); found != places_.end()) {
            drop(found->second);
        }
        bytes += 2 * key.size(); // in the list and in the index
        if (bytes > max_bytes_) {
            return;
        }
        entries_.push_front({key, std::move(value), bytes});
        places_[key] = entries_.begin();
        bytes_ += bytes;
        while (entries_.size() > max_entries_ || bytes_ > max_bytes_) {
            drop(std::prev(entries_.end()));
        }
    }

private:
    struct Entry {
        std::string                  key;
        std::shared_ptr<const Value> value;
        std::size_t                  bytes;
    };
    using Entries = std::list<Entry>;

    void drop(typename Entries::iterator entry) {
        bytes_ -= entry->bytes;
        places_.erase(entry->key);
        entries_.erase(entry);
    }

    std::size_t                                                 max_entries_;
    std::size_t                                                 max_bytes_;
    std::size_t                                                 bytes_ = 0;
    Entries                                                     entries_; // the latest first
    std::unordered_map<std::string, typename Entries::iterator> places_;
    std::mutex                                                  mutex_;
};

} // namespace paceline
