// The wgmmas of one warp: its 16 rows of the products that the warpgroup has started.
#pragma once

#include <deque>
#include <list>
#include <vector>

#include "simt.h"

namespace simt {

struct Warp;

constexpr int kWarpRows = 16;

// Registers that wgmmas in flight add to: NaN in the threads, which do not see what is here.
struct Accumulator {
  std::vector<float*> lanes;
  int columns;
  std::vector<float> values;  // kWarpRows rows
  int in_flight = 0;          // wgmmas
};

struct WarpMatrices {
  struct Started {
    Wgmma operation;
    Accumulator* accumulator;
  };

  bool fenced = false;
  std::list<Accumulator> accumulators;
  std::vector<Started> open;
  std::deque<std::vector<Started>> groups;
};

// Fails if this warp has wgmmas in flight.
void check_wgmmas_at_exit(const Warp& warp);

}  // namespace simt
