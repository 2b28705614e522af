// What a function has returned, for calls that recur.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

namespace amp_ext {

// Of a function of a Key alone, which has == over all of it, and a hash(). A result is forgotten
// when one with the same place comes.
template <class Key, class Value, size_t kPlaces>
class Memo {
 public:
  // compute(key) returns a std::optional<Value>; null where that is empty. Valid until the next
  // call.
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
