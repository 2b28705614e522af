// Order accesses by vector clocks of actors: warps and their asynchronous copies.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "base.h"

namespace cudasim {

// An actor: its block, in the order of starts, and its number within the block.
using Actor = u32;
constexpr int kActorBits = 9;
constexpr u32 kMostActors = 1u << kActorBits;  // of a block
constexpr u32 kMostBlocks = 1u << 15;          // of a grid; races of later blocks go unseen
constexpr u32 block_of(Actor actor) { return actor >> kActorBits; }
constexpr u32 number_of(Actor actor) { return actor & (kMostActors - 1); }

// The time up to which each actor's accesses happened before. Times of the own block are dense.
// Few kernels exchange times of other blocks: these are a sorted list that clocks share.
class Clock {
 public:
  explicit Clock(u32 block = 0) : block_(block) {}

  u32 of(Actor actor) const;
  void set(Actor actor, u32 time);  // of the own block
  void join(const Clock& other);

 private:
  using Times = std::vector<std::pair<Actor, u32>>;

  void join_far(const Times& other);

  u32 block_;
  std::vector<u32> near_;
  std::shared_ptr<const Times> far_;
};

}  // namespace cudasim
