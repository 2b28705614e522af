// Faults, and how they are told.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>

#include "engine.h"

namespace simt {
namespace {

std::string fault;

std::string text(uint3 i, dim3 n) {
  std::string result = std::to_string(i.x);
  if (n.y * n.z > 1) result += "," + std::to_string(i.y) + "," + std::to_string(i.z);
  return result;
}

std::string formatted(const char* format, va_list arguments) {
  char buffer[512];
  vsnprintf(buffer, sizeof(buffer), format, arguments);
  return buffer;
}

}  // namespace

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string result = formatted(format, arguments);
  va_end(arguments);
  return result;
}

std::string name(const Block& block) { return "block " + text(block.index, gridDim); }

std::string name(const Thread& thread) {
  return name(*thread.block) + ", thread " + text(thread.index, blockDim);
}

std::string ranges(const std::vector<int>& numbers) {
  std::vector<int> sorted = numbers;
  std::sort(sorted.begin(), sorted.end());
  std::string result;
  for (size_t i = 0, end; i < sorted.size(); i = end) {
    for (end = i + 1; end < sorted.size() && sorted[end] == sorted[end - 1] + 1;) ++end;
    result += (i ? ", " : "") + std::to_string(sorted[i]);
    if (end - i > 1) result += "-" + std::to_string(sorted[end - 1]);
  }
  return result;
}

std::string deadlock() {
  std::string result = "deadlock:";
  for (const auto& cluster : resident_clusters()) {
    for (const Block& block : cluster->blocks) {
      std::map<std::string, std::vector<int>> groups;
      for (const Thread& thread : block.threads) {
        groups[thread.exited ? "have exited" : thread.waits()].push_back(thread.number);
      }
      for (const auto& [what, threads] : groups)
        result += "\n  " + name(block) + ": threads " + ranges(threads) + " " + what;
    }
  }
  return result;
}

void set_fault(const std::string& text) {
  if (has_fault()) return;
  fault = text + "\n  seed " + std::to_string(options.seed) + ", " +
          std::to_string(options.resident_blocks) + " resident blocks, " +
          std::to_string(options.multiprocessors) + " multiprocessors";
}

void clear_fault() { fault.clear(); }

bool has_fault() { return !fault.empty(); }

const char* report() { return fault.c_str(); }

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = formatted(format, arguments);
  va_end(arguments);
  if (current) text += "\n  in " + name(*current);
  set_fault(text);
  if (Fiber::inside()) current->fiber.leave_for_good();
  throw Stopped{};
}

}  // namespace simt
