// Asynchronous copies: made when they are issued, as late as possible or at random, by seed.
#include <cstring>
#include <ptx/sm80.cuh>
#include <ptx/sm90.cuh>
#include <utility>

#include "engine.h"
#include "sanitizers.h"

namespace simt {
namespace {

enum class Timing { eager, lazy, random };
constexpr int kTimings = 3;
constexpr int kAdvanceOneIn = 8;  // steps of the scheduler, at random

std::vector<std::shared_ptr<Copy>> in_flight;

Timing timing() { return static_cast<Timing>(options.seed % kTimings); }

// Does the next step, in the name of the thread that issued the copy.
void advance(Copy& copy) {
  const tsan::Quiet quiet;
  Thread* const here = current;
  if (copy.block || copy.read) current = copy.issuer;  // the issuer of others may have exited
  std::exchange(copy.read ? copy.read : copy.write, nullptr)();
  current = here;
  if (copy.write) return;
  in_flight.back()->place = copy.place;
  std::swap(in_flight[copy.place], in_flight.back());
  in_flight.pop_back();
}

void finish(Copy& copy) {
  while (copy.write) advance(copy);
}

bool advance_one_of(const std::vector<std::shared_ptr<Copy>>& copies) {
  if (copies.empty()) return false;
  const std::shared_ptr<Copy> copy = copies[random(copies.size())];
  advance(*copy);
  return true;
}

// Calls finish(copy) for the committed groups but the last ones, which may be pending.
template <class Finish>
void wait(CopyGroups& groups, int pending, Finish finish) {
  for (const auto& copy : groups.copies) {
    if (copy->group >= groups.committed - pending) continue;
    finish(*copy);
    copy->waited = true;
  }
  const tsan::Quiet quiet;
  std::erase_if(groups.copies, [](const auto& copy) { return !copy->write && copy->waited; });
}

}  // namespace

void start(Copy copy, CopyGroups* groups) {
  const tsan::Quiet quiet;
  copy.place = in_flight.size();
  copy.group = groups ? groups->committed : 0;
  const auto started = in_flight.emplace_back(std::make_shared<Copy>(std::move(copy)));
  if (groups) groups->copies.push_back(started);
  if (timing() == Timing::eager) finish(*started);
}

void advance_now_and_then() {
  if (timing() == Timing::random && random(kAdvanceOneIn) == 0) advance_one_of(in_flight);
}

bool advance_needed() {
  std::vector<std::shared_ptr<Copy>> loads;
  for (const auto& copy : in_flight)
    if (copy->block) loads.push_back(copy);
  return advance_one_of(loads) || advance_one_of(in_flight);
}

void forget_copies() { in_flight.clear(); }

void check_copies_at_exit(const Thread& thread) {
  for (const CopyGroups* groups : {&thread.copies, &thread.bulk})
    for (const auto& copy : groups->copies)
      if (!copy->waited)
        fail("exit with %s in flight, at shared+%zu: no wait follows", copy->operation,
             copy->offset);
}

void check_copies_at_end(const Block& block) {
  for (const auto& copy : in_flight)
    if (copy->block == &block)
      fail("%s ended with %s to shared+%zu in flight", name(block).c_str(), copy->operation,
           copy->offset);
}

void cp_async16(void* to, const void* from, int bytes) {
  static constexpr char kOperation[] = "cp_async16";
  constexpr size_t kWhole = 16;
  const size_t offset = shared_offset(kOperation, to, kWhole, kWhole);
  if (bytes < 0 || bytes > static_cast<int>(kWhole)) fail("%s: %d bytes", kOperation, bytes);
  check_aligned(kOperation, from, kWhole);
  check_global(kOperation, from, bytes);
  tsan::reads(from, bytes);
  tsan::writes(to, kWhole);
  const tsan::Quiet quiet;
  poison(*current->block, offset, kWhole);
  counters.bytes_copied += bytes;
  const auto write = [=] {
    memset(to, 0, kWhole);
    if (bytes > 0) memcpy(to, from, bytes);
  };
  start({kOperation, current, current->block, offset, kWhole, nullptr, write}, &current->copies);
}

void cp_async_wait(int pending) {
  wait(current->copies, pending, [](Copy& copy) {
    finish(copy);
    unsigned char* const to = current->block->shared + copy.offset;
    tsan::writes(to, copy.bytes);
    wrote_shared(to, copy.bytes);
  });
  may_preempt();
}

void bulk_wait_read(int pending) {
  wait(current->bulk, pending, [](Copy& copy) {
    while (copy.read) advance(copy);
  });
  may_preempt();
}

}  // namespace simt

void amp_ext::ptx::cp_async_commit() { ++simt::current->copies.committed; }
void amp_ext::ptx::bulk_commit() { ++simt::current->bulk.committed; }
