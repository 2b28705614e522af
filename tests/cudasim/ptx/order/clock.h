// Order accesses by vector clocks of actors: warps and their asynchronous copies.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "base.h"

namespace cudasim {

// An actor: its cluster's number, and its number within the cluster.
using Actor = u32;
constexpr int kActorBits = 9;
constexpr u32 kMostActors = 1u << kActorBits;  // of a cluster
constexpr u32 kMostClusters = 1u << 15;        // of a grid; races of later clusters go unseen
constexpr u32 cluster_of(Actor actor) { return actor >> kActorBits; }
constexpr u32 number_of(Actor actor) { return actor & (kMostActors - 1); }

// The time up to which each actor's accesses happened before. Times of the own cluster are dense.
// Few kernels exchange times of other clusters: these are a sorted list that clocks share.
class Clock {
 public:
  explicit Clock(u32 cluster = 0) : cluster_(cluster) {}

  u32 of(Actor actor) const;
  void set(Actor actor, u32 time);  // of the own cluster
  void join(const Clock& other);

 private:
  using Times = std::vector<std::pair<Actor, u32>>;

  void join_far(const Times& other);

  u32 cluster_;
  std::vector<u32> near_;
  std::shared_ptr<const Times> far_;
};

}  // namespace cudasim
