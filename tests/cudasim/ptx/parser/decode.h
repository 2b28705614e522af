// Turn a statement of PTX into an instruction that runs.
#pragma once

#include <initializer_list>
#include <tuple>
#include <type_traits>

#include "parser/module.h"

namespace cudasim {

struct Operand {
  enum Type { none, row, predicate, integer, real, address, vector, sink, label, pair };
  Type type = none;
  int at = 0;    // a row, or the number of a predicate
  int bits = 0;  // of a register or of a real
  bool negated = false;
  s64 value = 0;
  bool is_parameter = false;   // an integer relative to the parameters
  std::string name;            // a label
  std::vector<Operand> parts;  // of a vector, a pair, or an address and its coordinates
  s64 offset = 0;              // of an address
};

class Decoder {
 public:
  Kernel& kernel;
  Instruction& to;
  const std::string& statement;
  std::vector<std::string> words;  // of the opcode; the first is its name
  std::vector<Operand> operands;

  const std::string& name() const { return words[0]; }
  bool has(const char* word) const;
  // The type is the last word, the type of a source before it the last but one.
  std::string type(int from_end = 0) const;
  // Each takes an operand or its number.
  Row source(const Operand& operand, int bits);
  Row source(size_t i, int bits) { return source(operands.at(i), bits); }
  Row destination(const Operand& operand, int bits);
  Row destination(size_t i, int bits) { return destination(operands.at(i), bits); }
  Row base(const Operand& address, int symbol_bits);  // and to.offset
  Row base(size_t i, int symbol_bits) { return base(operands.at(i), symbol_bits); }
  void set_predicate(int which, const Operand& operand);  // a destination
  void set_predicate(int which, size_t i) { set_predicate(which, operands.at(i)); }
  void set_source_predicate(int which, size_t i);
  bool runs(Run run) { return to.run = run, true; }
  [[noreturn]] void unknown(const char* why = "") const;

  // Runs f(a, b, ...) on each lane: the destination has type D, the sources A....
  template <class D, class... A, class F>
  bool lanes(F f);
};

// Each returns false for an instruction of another file.
bool decode_arithmetic(Decoder& d);
bool decode_logic(Decoder& d);
bool decode_moves(Decoder& d);
bool decode_conversion(Decoder& d);
bool decode_memory(Decoder& d);
bool decode_atomic(Decoder& d);
bool decode_fence(Decoder& d);
bool decode_warp(Decoder& d);
bool decode_barrier(Decoder& d);
bool decode_matrix(Decoder& d);
bool decode_wgmma(Decoder& d);
bool decode_copy(Decoder& d);
bool decode_mbarrier(Decoder& d);
bool decode_tensor_copy(Decoder& d);

}  // namespace cudasim
