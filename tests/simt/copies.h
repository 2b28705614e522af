// Asynchronous copies: made when they are issued, as late as possible or at random, by seed.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace simt {

struct Block;
struct Thread;

struct Copy {
  const char* operation;
  Thread* issuer;  // null once its block has ended
  Block* block;    // whose shared memory it writes, or reads
  bool into_shared;
  size_t offset, bytes;
  std::function<void()> read, write;  // its steps, empty once they are done
  size_t place = 0;                   // among the copies in flight
};

// Copies that one thread has issued, and waits for by groups.
struct CopyGroups {
  struct Group {
    std::vector<std::shared_ptr<Copy>> copies;
    bool known_read = false;
  };

  std::vector<std::shared_ptr<Copy>> open;
  std::vector<Group> committed;

  void commit();
  void wait_read(int pending);
  void wait(int pending);
};

std::shared_ptr<Copy> start(Copy copy);
void finish_read(Copy& copy);
void finish(Copy& copy);

void advance_now_and_then();

// Advances a copy to shared memory, for which others may wait, or if there is none another one;
// false if nothing is in flight. To be called when nothing else can run.
bool advance_needed();

void forget_copies();

// Fail if copies are in flight that nobody can wait for any more.
void check_copies_at_exit(const Thread& thread);
void check_copies_at_end(const Block& block);

}  // namespace simt
