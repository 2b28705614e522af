#include "copies.h"

#include <cstring>
#include <ptx.cuh>
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

void land(Copy& copy) {
  in_flight.back()->place = copy.place;
  std::swap(in_flight[copy.place], in_flight.back());
  in_flight.pop_back();
}

// Does the next step, in the name of the thread that issued the copy.
void advance(Copy& copy) {
  const tsan::Quiet quiet;
  Thread* const here = current;
  if (copy.issuer) current = copy.issuer;
  std::exchange(copy.read ? copy.read : copy.write, nullptr)();
  current = here;
  if (!copy.write) land(copy);
}

bool advance_one_of(const std::vector<std::shared_ptr<Copy>>& copies) {
  if (copies.empty()) return false;
  const std::shared_ptr<Copy> copy = copies[random(copies.size())];
  advance(*copy);
  return true;
}

}  // namespace

std::shared_ptr<Copy> start(Copy copy) {
  copy.place = in_flight.size();
  in_flight.push_back(std::make_shared<Copy>(std::move(copy)));
  const std::shared_ptr<Copy> started = in_flight.back();
  if (timing() == Timing::eager) finish(*started);
  return started;
}

void finish_read(Copy& copy) {
  if (copy.read) advance(copy);
}

void finish(Copy& copy) {
  while (copy.write) advance(copy);
}

void advance_now_and_then() {
  if (timing() == Timing::random && random(kAdvanceOneIn) == 0) advance_one_of(in_flight);
}

bool advance_needed() {
  std::vector<std::shared_ptr<Copy>> loads;
  for (const auto& copy : in_flight)
    if (copy->into_shared) loads.push_back(copy);
  return advance_one_of(loads) || advance_one_of(in_flight);
}

void forget_copies() { in_flight.clear(); }

void CopyGroups::commit() { committed.push_back({std::exchange(open, {})}); }

void CopyGroups::wait_read(int pending) {
  for (size_t i = 0; i + pending < committed.size(); ++i) {
    for (const auto& copy : committed[i].copies) finish_read(*copy);
    committed[i].known_read = true;
  }
}

void CopyGroups::wait(int pending) {
  while (committed.size() > static_cast<size_t>(pending)) {
    for (const auto& copy : committed.front().copies) finish(*copy);
    committed.erase(committed.begin());
  }
}

void check_copies_at_exit(const Thread& thread) {
  const auto check = [](const Copy& copy) {
    fail("exit with %s in flight, at shared+%zu: no wait follows", copy.operation, copy.offset);
  };
  for (const CopyGroups* groups : {&thread.copies, &thread.bulk}) {
    for (const auto& copy : groups->open) check(*copy);
    for (const CopyGroups::Group& group : groups->committed) {
      if (!group.known_read)
        for (const auto& copy : group.copies) check(*copy);
    }
  }
}

void check_copies_at_end(const Block& block) {
  for (const auto& copy : in_flight) {
    if (copy->block != &block) continue;
    if (copy->into_shared)
      fail("%s ended with %s to shared+%zu in flight", name(block).c_str(), copy->operation,
           copy->offset);
    copy->issuer = nullptr;
  }
}

// ---- cp.async ----------------------------------------------------------------------------------

void cp_async(void* to, const void* from, int bytes, int whole) {
  const size_t offset = shared_offset("cp_async", to, whole, whole);
  if (bytes < 0 || bytes > whole) fail("cp_async: %d bytes of %d", bytes, whole);
  check_aligned("cp_async", from, whole);
  check_global("cp_async", from, bytes);
  tsan::reads(from, bytes);
  tsan::writes(to, whole);
  const tsan::Quiet quiet;
  poison(*current->block, offset, whole);
  counters.bytes_copied += bytes;
  const auto write = [=] {
    memcpy(to, from, bytes);
    memset(static_cast<char*>(to) + bytes, 0, whole - bytes);
  };
  current->copies.open.push_back(start({"cp_async", current, current->block, true, offset,
                                        static_cast<size_t>(whole), nullptr, write}));
}

void cp_async_wait(int pending) {
  CopyGroups& groups = current->copies;
  for (size_t i = 0; i + pending < groups.committed.size(); ++i) {
    for (const auto& copy : groups.committed[i].copies) {
      unsigned char* const to = current->block->shared + copy->offset;
      tsan::writes(to, copy->bytes);
      wrote_shared(to, copy->bytes);
    }
  }
  {
    const tsan::Quiet quiet;
    groups.wait(pending);
  }
  may_preempt();
}

}  // namespace simt

void amp_ext::ptx::cp_async_commit() {
  const simt::tsan::Quiet quiet;
  simt::current->copies.commit();
}
