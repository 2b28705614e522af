// Run groups of lanes, warps and blocks in an order that the schedule chooses.
#include <algorithm>
#include <cstdlib>

#include "memory/memory.h"

namespace cudasim {

Statistics statistics;

Options& options() {
  static Options chosen;
  return chosen;
}

// ---- groups of lanes ----------------------------------------------------------------------------

namespace {

bool can_run(const Group& group, const Grid& grid) {
  return group.state == Group::runs || (group.state == Group::polls && group.seen != grid.progress);
}

}  // namespace

bool Warp::can_run() const {
  return std::any_of(groups, groups + group_count,
                     [&](const Group& g) { return cudasim::can_run(g, *grid); });
}

bool Warp::pick() {
  for (int i = 0; i < group_count; ++i) {
    if (groups[i].state == Group::blocked) continue;
    for (int j = i + 1; j < group_count; ++j) {
      if (groups[j].pc != groups[i].pc || groups[j].state == Group::blocked) continue;
      groups[i].lanes |= groups[j].lanes;
      groups[i].state = Group::runs;
      groups[j--] = groups[--group_count];
    }
  }
  int best = -1, seen = 0;
  for (int i = 0; i < group_count; ++i) {
    if (!cudasim::can_run(groups[i], *grid)) continue;
    ++seen;
    if (best < 0 || (grid->order == Order::forward   ? groups[i].pc < groups[best].pc
                     : grid->order == Order::reverse ? groups[i].pc > groups[best].pc
                                                     : grid->below(static_cast<u64>(seen)) == 0))
      best = i;
  }
  if (best < 0) return false;
  current = best;
  groups[best].state = Group::runs;
  return true;
}

void Warp::poll() {
  group().state = Group::polls;
  group().seen = grid->progress;
}

void Warp::tick(u32 lanes, u8 does) {
  if (!grid->races) return;
  lane_order.add(time(), lanes, does, lanes == all);
  clock.set(actor, time() + 1);
  if (time() >= Access::kMostTime) grid->races = false;
}

void Warp::acquire(u32 lanes, const Clock& released) {
  clock.join(released);
  const u32 until = released.of(actor);
  if (!grid->races || !lane_order.matters(lanes, until)) return;
  lane_order.acquire(time(), lanes, until);
  clock.set(actor, time() + 1);
}

namespace {

void check_exit(const Warp& w, u32 lanes) {
  each_lane(lanes, [&](int lane) {
    for (const BulkStore& bulk : w.bulk_stores[lane])
      if (!bulk.read)
        fault_of(lane, "cp.async.bulk.wait_group.read comes before the exit.",
                 "exits while a bulk store has still to read shared memory");
  });
  for (const CopyInFlight& copy : w.copies)
    if (copy.lanes & lanes)
      fault("cp.async.wait_all comes before the exit.", "exits with cp.async in flight");
  for (const auto& group : w.products)
    if (!group.empty())
      fault("wgmma.wait_group comes before the exit.", "exits with wgmma in flight");
}

void branch(Warp& w, const Instruction& it, u32 taken) {
  Group& group = w.group();
  const u32 target = static_cast<u32>(it.target);
  if (taken && taken != group.lanes) {
    w.groups[w.group_count++] = {target, taken, Group::runs, 0};
    group.lanes &= ~taken;
    taken = 0;
  }
  group.pc = taken ? target : group.pc + 1;
}

// Returns whether the group goes on.
bool exit_lanes(Warp& w, u32 lanes) {
  Group& group = w.group();
  check_exit(w, lanes);
  w.live &= ~lanes;
  w.block->live -= static_cast<u32>(__builtin_popcount(lanes));
  group.lanes &= ~lanes;
  ++w.grid->progress;
  ++group.pc;
  if (group.lanes) return true;
  group = w.groups[--w.group_count];
  return false;
}

// Lanes that meet: the mask names them, or all do. False: the group waits for the others.
bool have_met(Warp& w, const Instruction& it, u32 lanes) {
  if (lanes != w.group().lanes)
    fault("A condition of some lanes must not guard what lanes do together.",
          "lanes %08x of %08x come", lanes, w.group().lanes);
  const bool by_mask = it.flow == Flow::members;
  const u32 needed = by_mask ? w.source(it.rows[9])[__builtin_ctz(lanes)] & w.all : w.all;
  if (lanes & ~needed)
    fault("The mask has a bit for each lane that comes.", "lanes %08x come, the mask is %08x",
          lanes, needed);
  if (needed & ~w.live)
    fault("Return behind what the lanes of a warp do together.",
          "needs lanes %08x, of which %08x have exited", needed, needed & ~w.live);
  if (lanes == needed) return true;
  w.group().state = Group::converges;
  return false;
}

[[noreturn]] void fault_at(const Warp& w, const Instruction& it, const Fault& cause) {
  const Group& group = w.groups[w.current];
  const u32 lanes = group.lanes ? group.lanes : w.all;
  const int lane = cause.lane >= 0 ? cause.lane : __builtin_ctz(lanes);
  const u32 code = static_cast<u32>(&it - w.kernel->code.data());
  throw Fault{text("%s\n  at: %s\n  by: block %u,%u,%u thread %d (warp %d lane %d)%s%s",
                   cause.text.c_str(), describe(*w.kernel, code).c_str(), w.block->index[0],
                   w.block->index[1], w.block->index[2], w.thread(lane), w.index, lane,
                   cause.hint.empty() ? "" : "\n  hint: ", cause.hint.c_str()),
              ""};
}

}  // namespace

void Warp::run(int budget) {
  const Instruction* const code = kernel->code.data();
  const Instruction* it = nullptr;
  try {
    if (!pick()) return;
    for (; budget > 0; --budget) {
      if (group_count > 1 && !pick()) return;
      it = &code[group().pc];
      ++statistics.instructions;
      u32 lanes = group().lanes;
      if (it->guard >= 0)
        lanes &= it->guard_negated ? ~predicates[it->guard] : predicates[it->guard];
      if (lanes == 0 && it->flow != Flow::branch) {
        ++group().pc;
        continue;
      }
      it->ran = true;
      if (it->flow == Flow::branch) {
        branch(*this, *it, lanes);
      } else if (it->flow == Flow::exit) {
        if (!exit_lanes(*this, lanes) && (group_count == 0 || !pick())) return;
      } else if (it->flow == Flow::lanes || have_met(*this, *it, lanes)) {
        it->run(*this, *it, lanes);
        if (group().state != Group::blocked) ++group().pc;
      }
      if (group().state != Group::runs && !pick()) return;
    }
  } catch (const Fault& cause) {
    if (!it) throw;
    fault_at(*this, *it, cause);
  }
}

// ---- blocks -------------------------------------------------------------------------------------

Actor Block::actor(Engine engine, u32 index) {
  const auto [found, is_new] = actors.try_emplace({engine, index}, 0);
  if (is_new) {
    if (actor_count == kMostActors) {
      grid->races = false;
      --actor_count;
    }
    found->second = order << kActorBits | actor_count++;
  }
  return found->second;
}

bool Grid::is_late() { return async == Async::late || (async == Async::random && below(2) == 0); }

void Grid::run_pending() {
  if (pending.empty()) return;
  const size_t at = order == Order::forward   ? 0
                    : order == Order::reverse ? pending.size() - 1
                                              : below(pending.size());
  const Pending one = std::move(pending[at]);
  pending.erase(pending.begin() + static_cast<long>(at));
  one.run();
  ++progress;
}

namespace {

u32 part_of(u32 n, const u32 size[3], u32 axis) {
  return axis == 0 ? n % size[0] : axis == 1 ? n / size[0] % size[1] : n / size[0] / size[1];
}

u32 special(const Warp& w, const std::string& name, int lane) {
  const Launch& launch = w.grid->launch;
  for (u32 axis = 0; axis < 3; ++axis) {
    const std::string end{'.', "xyz"[axis]};
    if (name == "%tid" + end) return part_of(static_cast<u32>(w.thread(lane)), launch.block, axis);
    if (name == "%ntid" + end) return launch.block[axis];
    if (name == "%ctaid" + end) return w.block->index[axis];
    if (name == "%nctaid" + end) return launch.grid[axis];
  }
  if (name == "%laneid") return static_cast<u32>(lane);
  if (name == "%warpid") return static_cast<u32>(w.index);
  if (name == "%lanemask_lt") return (1u << lane) - 1;
  fault("", "unknown register %s", name.c_str());
}

void add_warps(Grid& grid, Block& block) {
  Kernel& kernel = *grid.kernel;
  const u32 threads = block.live = grid.threads(), count = (threads + kLanes - 1) / kLanes;
  block.actor_count = count;
  // Registers that nothing has set are NaN.
  block.registers.assign(size_t{kernel.words} * count, 0xffffffffu);
  block.predicates.assign(size_t{kernel.predicates} * count + 1, 0xa5a5a5a5u);
  block.local.assign(size_t{kernel.local_bytes} * count * kLanes, 0xff);
  for (u32 i = 0; i < count; ++i) {
    Warp& w = *block.warps.emplace_back(std::make_unique<Warp>());
    w.grid = &grid;
    w.block = &block;
    w.kernel = &kernel;
    w.index = static_cast<int>(i);
    w.registers = block.registers.data() + size_t{i} * kernel.words;
    w.constants = kernel.constants.data();
    w.predicates = block.predicates.data() + size_t{i} * kernel.predicates;
    w.local = block.local.data() + size_t{i} * kernel.local_bytes * kLanes;
    w.all = w.live = kAllLanes >> (kLanes - std::min<u32>(kLanes, threads - i * kLanes));
    w.groups[0] = {0, w.all, Group::runs, 0};
    w.actor = block.order << kActorBits | i;
    w.clock = w.fenced[0] = w.fenced[1] = w.unfenced[0] = w.unfenced[1] = Clock(block.order);
    w.clock.set(w.actor, 1);
    for (const auto& [name, row] : kernel.specials)
      for (int lane = 0; lane < kLanes; ++lane)
        w.registers[row + static_cast<u32>(lane)] = special(w, name, lane);
  }
}

void start_block(Grid& grid, u32 number) {
  Kernel& kernel = *grid.kernel;
  const u32 bytes = kernel.dynamic_shared_at + grid.launch.dynamic_shared;
  Block& block = *grid.resident.emplace_back(std::make_unique<Block>(bytes));
  block.grid = &grid;
  block.number = number;
  block.order = static_cast<u32>(grid.numbers.size());
  grid.numbers.push_back(number);
  for (u32 i = 0; i < 3; ++i) block.index[i] = part_of(number, grid.launch.grid, i);
  add_warps(grid, block);
  if (block.order >= kMostBlocks || block.actor_count > kMostActors) grid.races = false;
  if (kernel.uses_async_proxy) block.shared.writers.assign(bytes / 16 + 2, 0);
  if (!grid.races) return;
  block.shared.cells.assign(bytes / 16 + 2, Cell{});
  block.shared.lanes.resize(bytes / 16 + 2);
}

void finish_block(Grid& grid, Block& block) {
  for (const Barrier& barrier : block.barriers)
    if (barrier.arrived)
      fault("Count the threads that come to it.", "block %u ends while %u threads are at a barrier",
            block.number, barrier.arrived);
  for (const Pending& pending : grid.pending)
    if (pending.block == &block)
      fault("Wait for the mbarrier before the exit.",
            "block %u ends before an asynchronous copy to its shared memory is done", block.number);
  for (auto& w : block.warps)
    for (auto& stores : w->bulk_stores)
      for (BulkStore& bulk : stores)
        if (!bulk.written) grid.at_end.push_back(std::move(bulk));
}

// ---- grids --------------------------------------------------------------------------------------

std::string where_all_wait(const Grid& grid) {
  std::string result;
  int shown = 0;
  for (const auto& block : grid.resident)
    for (const auto& w : block->warps)
      for (int i = 0; i < w->group_count && shown < 20; ++i, ++shown) {
        const Group& group = w->groups[i];
        result +=
            text("\n  block %u warp %d lanes %08x %s: %s", block->number, w->index, group.lanes,
                 group.state == Group::converges ? "wait for other lanes" : "wait",
                 describe(*w->kernel, group.pc).c_str());
      }
  return result;
}

class Schedule {
 public:
  explicit Schedule(Grid& grid) : grid_(grid) {
    const u32* const blocks = grid.launch.grid;
    const u64 count = u64{blocks[0]} * blocks[1] * blocks[2];
    for (u32 i = 0; i < count; ++i) numbers_.push_back(i);
    if (grid.order == Order::reverse) std::reverse(numbers_.begin(), numbers_.end());
    if (grid.order == Order::random) std::shuffle(numbers_.begin(), numbers_.end(), grid.random);
    most_resident_ = grid.order == Order::forward ? 1 : 1 + grid.below(4);
  }

  void run() {
    while (next_ < numbers_.size() || !grid_.resident.empty()) {
      while (grid_.resident.size() < most_resident_ && next_ < numbers_.size()) start_next();
      if (!run_warps()) {
        if (!grid_.pending.empty())
          grid_.run_pending();
        else if (next_ < numbers_.size() && !all_done())
          start_next();  // perhaps they wait for a block that has not begun
        else if (!all_done())
          fault("Does a condition, a return or a wrong mask or count keep some from it?",
                "deadlock: all wait, and nothing can end it%s", where_all_wait(grid_).c_str());
      }
      finish();
    }
    while (!grid_.pending.empty()) grid_.run_pending();
    for (const BulkStore& bulk : grid_.at_end) bulk.write(bulk.data);
  }

 private:
  static constexpr int kBudget = 1 << 18, kMostIdlePasses = 400;

  void start_next() { start_block(grid_, numbers_[next_++]); }

  // One pass over the warps that can run; false if none can.
  bool run_warps() {
    std::vector<Warp*> warps;
    for (auto& block : grid_.resident)
      for (auto& w : block->warps)
        if (w->group_count && w->can_run()) warps.push_back(w.get());
    if (warps.empty()) return false;
    if (grid_.order == Order::reverse) std::reverse(warps.begin(), warps.end());
    const bool is_random = grid_.order == Order::random;
    if (is_random) {
      std::swap(warps[0], warps[grid_.below(warps.size())]);
      warps.resize(1);
    }
    if (statistics.instructions > options().most_instructions)
      fault("", "endless: more than %lu instructions", options().most_instructions);
    const u64 before = grid_.progress;
    for (Warp* const w : warps) {
      if (!w->group_count || !w->can_run()) continue;
      w->run(is_random ? 1 + static_cast<int>(grid_.below(400)) : kBudget);
      if (grid_.async == Async::random && grid_.below(4) == 0) grid_.run_pending();
    }
    // Loops may wait for a block that has not begun, or for ever.
    idle_ = grid_.progress == before ? idle_ + 1 : 0;
    const int most = is_random ? kMostIdlePasses * 1000 : kMostIdlePasses;
    if (idle_ > most / 50 && next_ < numbers_.size()) start_next(), idle_ = 0;
    if (idle_ > most)
      fault("Who ends the loop, and is it resident?",
            "endless: loops wait for what does not come%s", where_all_wait(grid_).c_str());
    return true;
  }

  bool all_done() const {
    return std::all_of(grid_.resident.begin(), grid_.resident.end(),
                       [](const auto& block) { return block->live == 0; });
  }

  void finish() {
    std::erase_if(grid_.resident, [&](const auto& block) {
      if (block->live == 0) finish_block(grid_, *block);
      return block->live == 0;
    });
  }

  Grid& grid_;
  std::vector<u32> numbers_;
  size_t next_ = 0, most_resident_;
  int idle_ = 0;
};

void set_parameters(Grid& grid, u8* memory) {
  Kernel& kernel = *grid.kernel;
  for (size_t i = 0; i < kernel.parameters.size(); ++i)
    memcpy(memory + kernel.parameters[i].offset, grid.launch.parameters[i],
           kernel.parameters[i].bytes);
  grid.parameters = memory;
  for (const auto& [word, offset] : kernel.parameter_addresses) {
    const u64 address = reinterpret_cast<uintptr_t>(memory) + static_cast<u64>(offset);
    for (int lane = 0; lane < kLanes; ++lane) put<u64>(&kernel.constants[word], lane, address);
  }
}

}  // namespace

std::string run(Kernel& kernel, const Launch& launch) {
  static GlobalCells cells;
  try {
    decode(kernel);
    ++statistics.launches;
    statistics.blocks += u64{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    statistics.parameter_bytes += kernel.parameter_bytes;
    statistics.kernel = kernel.name.c_str();
    Grid grid{};
    grid.kernel = &kernel;
    grid.launch = launch;
    grid.random.seed(launch.seed);
    const Options& chosen = options();
    grid.order = chosen.any_order ? static_cast<Order>(launch.seed % 3) : chosen.order;
    grid.async = chosen.any_async ? static_cast<Async>(launch.seed / 3 % 3) : chosen.async;
    grid.races = chosen.races;
    grid.cells = &cells;
    grid.random_cell = launch.seed;
    cells.start_launch();
    if (kernel.most_threads && grid.threads() > kernel.most_threads)
      fault("__launch_bounds__ limits the block.", "%u threads a block, .maxntid says %u",
            grid.threads(), kernel.most_threads);
    constexpr size_t kAlign = 128;
    const std::unique_ptr<void, decltype(&free)> memory(
        aligned_alloc(kAlign, (kernel.parameter_bytes / kAlign + 2) * kAlign), free);
    set_parameters(grid, static_cast<u8*>(memory.get()));
    Schedule(grid).run();
    statistics.most_loads += grid.most_loads;
    return "";
  } catch (const Fault& cause) {
    statistics.fault =
        kernel.name + ": " + cause.text + (cause.hint.empty() ? "" : "\n  hint: " + cause.hint);
    return statistics.fault;
  }
}

}  // namespace cudasim
