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
  Row source(const Operand& operand, int bits);
  Row destination(const Operand& operand, int bits);
  void set_predicate(int i, const Operand& operand);         // a destination
  void set_source_predicate(int i, const Operand& operand);  // a source
  // The address's base and offset.
  Row base(const Operand& operand, int symbol_bits);
  [[noreturn]] void unknown(const char* why = "") const;

  // Runs f(a, b, ...) on each lane: the destination has type D, the sources A....
  template <class D, class... A, class F>
  bool lanes(F f);
};

// Each returns false for an instruction of another file.
bool decode_arithmetic(Decoder& d);
bool decode_functions(Decoder& d);
bool decode_logic(Decoder& d);
bool decode_moves(Decoder& d);
bool decode_conversion(Decoder& d);
bool decode_memory(Decoder& d);
bool decode_atomic(Decoder& d);
bool decode_warp(Decoder& d);
bool decode_barrier(Decoder& d);
bool decode_matrix(Decoder& d);
bool decode_wgmma(Decoder& d);
bool decode_copy(Decoder& d);
bool decode_mbarrier(Decoder& d);
bool decode_tensor_copy(Decoder& d);

}  // namespace cudasim
