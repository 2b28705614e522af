// Format texts and throw faults.
#include "base.h"

#include <cstdarg>
#include <cstdio>

namespace cudasim {
namespace {

std::string formatted(const char* format, va_list arguments) {
  char buffer[2048];
  vsnprintf(buffer, sizeof buffer, format, arguments);
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

void fault(const char* hint, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Fault result{formatted(format, arguments), hint};
  va_end(arguments);
  throw result;
}

void fault_of(int lane, const char* hint, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Fault result{formatted(format, arguments), hint, lane};
  va_end(arguments);
  throw result;
}

}  // namespace cudasim
