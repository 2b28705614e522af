// Split PTX text, format texts and throw faults.
#include "parser/words.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace cudasim {
namespace {

bool is_space(char c) { return isspace(static_cast<unsigned char>(c)); }

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

bool is_name(char c) {
  return isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}

std::string strip(const std::string& text) {
  size_t begin = 0, end = text.size();
  while (begin < end && is_space(text[begin])) ++begin;
  while (end > begin && is_space(text[end - 1])) --end;
  return text.substr(begin, end - begin);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    if (c == '{' || c == '[' || c == '(') ++depth;
    if (c == '}' || c == ']' || c == ')') --depth;
    if (c == separator && depth == 0) {
      parts.push_back(strip(part));
      part.clear();
    } else {
      part += c;
    }
  }
  part = strip(part);
  if (!part.empty() || !parts.empty()) parts.push_back(part);
  return parts;
}

int bits_of(const std::string& type) {
  if (type == "pred") return 1;
  if (type == "f16x2" || type == "bf16x2" || type == "tf32") return 32;
  if (type == "bf16") return 16;
  if (type.empty() || !strchr("busf", type[0])) return 0;
  char* end = nullptr;
  const long bits = strtol(type.c_str() + 1, &end, 10);
  if (*end || (bits != 8 && bits != 16 && bits != 32 && bits != 64 && bits != 128)) return 0;
  return static_cast<int>(bits);
}

void Cursor::advance(size_t to) {
  to = std::min(to, text_.size());
  const auto begin = text_.begin();
  line_ += static_cast<u32>(
      std::count(begin + static_cast<long>(at_), begin + static_cast<long>(to), '\n'));
  at_ = to;
}

void Cursor::skip_space() {
  size_t to = at_;
  while (to < text_.size() && is_space(text_[to])) ++to;
  advance(to);
}

Declaration::Declaration(const std::string& text) {
  std::istringstream words(text.substr(0, text.find('=')));
  std::string word;
  while (words >> word) {
    if (word == ".align")
      words >> align;
    else if (word[0] == '.')
      element = bits_of(word.substr(1)) ? bits_of(word.substr(1)) / 8 : element;
    else
      name += word;
  }
  if (const size_t bracket = name.find('['); bracket != std::string::npos) {
    has_bounds = name[bracket + 1] != ']';
    for (size_t at = bracket; at != std::string::npos; at = name.find('[', at + 1))
      count *= strtoull(name.c_str() + at + 1, nullptr, 0);
    name.resize(bracket);
  }
  if (align < element) align = element;
}

}  // namespace cudasim
