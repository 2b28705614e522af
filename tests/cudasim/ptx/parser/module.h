// Describe a PTX module: its kernels, its variables and the instructions of a kernel.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base.h"

namespace cudasim {

struct Warp;
struct Instruction;
using Run = void (*)(Warp&, const Instruction&, u32 lanes);

// How an instruction finds its lanes and its successor.
enum class Flow : u8 {
  lanes,    // each lane on its own
  branch,   // bra
  exit,     // ret, exit
  members,  // the lanes of the mask operand, together
  aligned,  // all lanes of the warp, together
};

// An operand: 32 words (or double words) from `at` of the registers, or from ~at of the constants.
struct Row {
  s32 at = 0;
};

// One decoded instruction. `run` gives its other fields their meaning.
struct Instruction {
  Run run = nullptr;
  Run inner = nullptr;  // under another rounding mode
  Flow flow = Flow::lanes;
  bool guard_negated = false;
  bool wide = false;  // the address has 64 bits
  mutable bool ran = false;
  u8 negated = 0;  // a bit for each source predicate
  s16 guard = -1;
  s32 target = -1;
  s32 kind = 0, count = 0, flags = 0, mode = 0;
  s64 offset = 0;
  Row rows[10];
  s32 predicates[4] = {-1, -1, -1, -1};
  std::vector<Row> more;
  u32 statement = 0;
};

// A line of source. A place in an inlined function has the place of the call.
struct Place {
  int file, line, caller;
};

struct Statement {
  std::string text;
  u32 line;   // in the PTX
  int place;  // -1: unknown
};

struct Parameter {
  u32 offset, bytes;
};

struct Module;
struct Kernel {
  Module* module;
  std::string symbol, name;
  std::vector<Parameter> parameters;
  u32 parameter_bytes = 0;
  u32 most_threads = 0;  // .maxntid; 0: any number
  size_t body = 0, end = 0;
  u32 line = 1;

  // A mutant of one statement, in place of the compiler's.
  s64 edited = -1;
  std::string edit;

  // Filled by decode().
  bool decoded = false;
  std::vector<Instruction> code;
  std::vector<Statement> statements;
  u32 words = 0;  // of the registers of a warp
  u32 predicates = 0;
  std::vector<u32> constants;
  std::vector<std::pair<std::string, u32>> specials;     // special registers and their rows
  std::vector<std::pair<u32, s64>> parameter_addresses;  // constants that parameters' address moves
  u32 local_bytes = 0, static_shared = 0, dynamic_shared_at = 0;
  bool uses_async_proxy = false;
  bool waits_for_grid = false;  // griddepcontrol.wait
};

struct Module {
  std::string path, text;
  std::map<int, std::string> files;
  std::map<std::string, u32> dynamic_shared;                // extern arrays and their alignment
  std::vector<std::pair<std::string, std::string>> shared;  // shared variables of the module
  std::vector<Place> places;
  std::vector<std::unique_ptr<Kernel>> kernels;
};

std::unique_ptr<Module> read_module(const std::string& path);
std::vector<Kernel*>& all_kernels();
void decode(Kernel& kernel);
// Decodes a kernel again, with another text of one statement.
void edit(Kernel& kernel, u32 statement, const std::string& text);
std::string demangled(const std::string& symbol);
// "file.cu:12" of a statement, with the calls that it was inlined through.
std::string source_of(const Kernel& kernel, u32 statement);
std::string describe(const Kernel& kernel, u32 code);

}  // namespace cudasim
