// Reports of faults.
#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "engine.h"

namespace simt {
namespace {

std::string formatted(const char* format, va_list arguments) {
  char buffer[512];
  vsnprintf(buffer, sizeof(buffer), format, arguments);
  return buffer;
}

std::string place(uint3 i, dim3 n) {
  return n.y * n.z > 1 ? text("%u,%u,%u", i.x, i.y, i.z) : text("%u", i.x);
}

}  // namespace

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string result = formatted(format, arguments);
  va_end(arguments);
  return result;
}

std::string name(const Block& block) { return "block " + place(block.index, gridDim); }

std::string name(const Thread& thread) {
  return name(*thread.block) + ", thread " + place(thread.index, blockDim);
}

std::string ranges(std::vector<int> numbers) {
  std::ranges::sort(numbers);
  std::string result;
  for (size_t i = 0, end; i < numbers.size(); i = end) {
    for (end = i + 1; end < numbers.size() && numbers[end] == numbers[end - 1] + 1;) ++end;
    result += (i ? ", " : "") + std::to_string(numbers[i]);
    if (end - i > 1) result += "-" + std::to_string(numbers[end - 1]);
  }
  return result;
}

std::string deadlock() {
  std::string result = "deadlock:";
  for (const Cluster& cluster : resident) {
    for (const Block& block : cluster.blocks) {
      std::map<std::string, std::vector<int>> groups;
      for (const Thread& thread : block.threads)
        groups[thread.exited ? "have exited" : thread.waits()].push_back(thread.number);
      for (const auto& [what, threads] : groups)
        result += "\n  " + name(block) + ": threads " + ranges(threads) + " " + what;
    }
  }
  return result;
}

void set_fault(const std::string& what) {
  if (!fault.empty()) return;
  fault = what + text("\n  seed %lu, %d resident blocks, %d multiprocessors", options.seed,
                      options.resident_blocks, options.multiprocessors);
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = formatted(format, arguments);
  va_end(arguments);
  if (current) text += "\n  in " + name(*current);
  set_fault(text);
  if (Fiber::inside()) current->fiber.leave(true);
  throw Stopped{};
}

}  // namespace simt
