// Split PTX text.
#pragma once

#include <vector>

#include "base.h"

namespace cudasim {

bool is_name(char c);
std::string strip(const std::string& text);
// Splits outside of brackets.
std::vector<std::string> split(const std::string& text, char separator);
// Bits of a type such as u32 or bf16x2; 0 if the word is none.
int bits_of(const std::string& type);

// A place in a text, and the number of its line.
class Cursor {
 protected:
  Cursor(std::string text, u32 line) : text_(std::move(text)), line_(line) {}

  bool is_at(const char* start) const { return text_.compare(at_, strlen(start), start) == 0; }
  void advance(size_t to);
  void skip_line() { advance(text_.find('\n', at_)); }
  void skip_space();

  const std::string text_;
  size_t at_ = 0;
  u32 line_;
};

// A declaration of memory: ".shared .align 16 .b8 tile[1024] = {...}".
struct Declaration {
  std::string name;
  u32 align = 1, element = 1;
  size_t count = 1;
  bool has_bounds = true;  // false: extern array of unknown size

  explicit Declaration(const std::string& text);
};

}  // namespace cudasim
