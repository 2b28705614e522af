// Caches the results of a pure function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

namespace amp_ext {

// Maps a Key, which has == and hash(), to a result. A new result replaces an older one in the same
// place.
template <class Key, class Value, size_t kPlaces>
class Memo {
 public:
  // Returns the cached result, or computes it by compute(key), which returns a
  // std::optional<Value>. An empty result gives null. The pointer is valid until the next call.
  template <class Compute>
  const Value* of(const Key& key, Compute compute) {
    if (places_.empty()) places_.resize(kPlaces);
    std::optional<Known>& place = places_[key.hash() % kPlaces];
    if (!place || !(place->key == key)) {
      std::optional<Value> value = compute(key);
      if (!value) return nullptr;
      place.emplace(Known{key, *value});
    }
    return &place->value;
  }

 private:
  struct Known {
    Key key;
    Value value;
  };
  std::vector<std::optional<Known>> places_;
};

inline size_t hash_of(std::initializer_list<uint64_t> values) {
  uint64_t hash = 0;
  for (const uint64_t value : values) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace amp_ext
