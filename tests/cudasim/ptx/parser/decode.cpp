// Decode the body of a kernel: registers, labels, operands, source lines.
#include "parser/decode.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "parser/words.h"
#include "threads/machine.h"

namespace cudasim {
namespace {

class Body : Cursor {
 public:
  explicit Body(Kernel& kernel)
      : Cursor(kernel.module->text.substr(kernel.body, kernel.end - kernel.body), kernel.line),
        kernel_(kernel) {
    for (size_t i = 0; i < kernel.parameters.size(); ++i) {
      const std::string name = kernel.symbol + "_param_" + std::to_string(i);
      add_symbol(name, kernel.parameters[i].offset).is_parameter = true;
    }
    lay_out_shared();
  }

  void decode() {
    int depth = 1;
    while (depth > 0) {
      skip_space();
      if (text_[at_] == '{') {
        scopes_.emplace_back();
        ++depth, ++at_;
      } else if (text_[at_] == '}') {
        scopes_.pop_back();
        --depth, ++at_;
      } else if (is_at("//")) {
        skip_line();
      } else if (is_at(".loc") && isspace(static_cast<unsigned char>(text_[at_ + 4]))) {
        set_place();
      } else if (!read_label()) {
        read_statement();
      }
    }
    Instruction last;
    last.flow = Flow::exit;
    add(std::move(last), "ret;");
    for (const auto& [index, label] : jumps_) kernel_.code[index].target = target(label);
    const auto mentions = [&](const char* what) { return text_.find(what) != std::string::npos; };
    kernel_.waits_for_grid = mentions("griddepcontrol.wait");
    kernel_.uses_async_proxy =
        mentions("fence.proxy.async") || mentions("cp.async.bulk") || mentions("wgmma.mma_async");
  }

 private:
  Operand& add_symbol(const std::string& name, s64 value) {
    Operand& symbol = symbols_[name];
    symbol.type = Operand::integer;
    symbol.value = value;
    return symbol;
  }

  // Static arrays come first, dynamic shared memory behind them.
  void lay_out_shared() {
    std::vector<std::string> declarations;
    for (const auto& [name, declared] : kernel_.module->shared)
      if (text_.find(name) != std::string::npos) declarations.push_back(declared);
    for (size_t at = text_.find(".shared ."); at != std::string::npos;
         at = text_.find(".shared .", at + 1)) {
      const char before = at ? text_[at - 1] : '\n';
      if (isspace(static_cast<unsigned char>(before)))
        declarations.push_back(text_.substr(at, text_.find(';', at) - at));
    }
    u32 end = 0;
    for (const std::string& text : declarations) {
      const Declaration declared(text);
      end = (end + declared.align - 1) / declared.align * declared.align;
      add_symbol(declared.name, s64{kSharedStart} + end);
      end += declared.element * static_cast<u32>(declared.count);
    }
    u32 align = 16;
    for (const auto& [name, wanted] : kernel_.module->dynamic_shared)
      if (text_.find(name) != std::string::npos) align = std::max(align, wanted);
    kernel_.static_shared = end;
    kernel_.dynamic_shared_at = (end + align - 1) / align * align;
    for (const auto& [name, wanted] : kernel_.module->dynamic_shared)
      add_symbol(name, s64{kSharedStart} + kernel_.dynamic_shared_at);
  }

  // .loc 1 20 5, function_name $L, inlined_at 2 30 3: the call's last place has its own caller.
  void set_place() {
    using Source = std::array<int, 3>;  // file, line, column
    const auto read = [](const char* from, const char* format) {
      Source source{};
      sscanf(from, format, &source[0], &source[1], &source[2]);
      return source;
    };
    const auto add = [&](const Source& source, int caller) {
      kernel_.module->places.push_back({source[0], source[1], caller});
      return last_places_[source] = static_cast<int>(kernel_.module->places.size()) - 1;
    };
    const size_t begin = at_;
    skip_line();
    const std::string text = text_.substr(begin, at_ - begin);
    int caller = -1;
    if (const char* const inlined = strstr(text.c_str(), "inlined_at")) {
      const Source call = read(inlined, "inlined_at %d %d %d");
      const auto known = last_places_.find(call);
      caller = known == last_places_.end() ? add(call, -1) : known->second;
    }
    place_ = add(read(text.c_str(), ".loc %d %d %d"), caller);
  }

  bool read_label() {
    size_t end = at_;
    while (is_name(text_[end])) ++end;
    if (end == at_) return false;
    size_t colon = end;
    while (isspace(static_cast<unsigned char>(text_[colon]))) ++colon;
    if (text_[colon] != ':' || text_[colon + 1] == ':') return false;
    labels_[text_.substr(at_, end - at_)] = static_cast<s32>(kernel_.code.size());
    advance(colon + 1);
    return true;
  }

  void read_statement() {
    const size_t stop = text_.find(';', at_);
    std::string statement;
    for (size_t i = at_; i < stop; ++i) {
      if (text_.compare(i, 2, "//") == 0) i = text_.find('\n', i);
      statement += isspace(static_cast<unsigned char>(text_[i])) ? ' ' : text_[i];
    }
    statement = strip(statement);
    if (statement.starts_with(".reg "))
      declare_registers(statement.substr(5));
    else if (statement.starts_with(".local "))
      declare_local(statement);
    else if (!statement.empty() && statement[0] != '.')
      decode_statement(statement);
    else if (!statement.starts_with(".shared ") && !statement.starts_with(".pragma") &&
             !statement.starts_with(".param") && !statement.empty())
      fault("", "unknown directive %s", statement.c_str());
    advance(stop + 1);
  }

  Operand new_register(int bits) {
    Operand made;
    made.type = bits == 1 ? Operand::predicate : Operand::row;
    made.bits = bits;
    made.at = static_cast<int>(bits == 1 ? kernel_.predicates++ : kernel_.words);
    if (bits > 1) kernel_.words += static_cast<u32>((bits + 31) / 32 * kLanes);
    return made;
  }

  void declare_registers(const std::string& text) {  // .b32 %r<5>, x
    const size_t space = text.find(' ');
    const int bits = bits_of(strip(text.substr(1, space - 1)));
    if (!bits) fault("", "unknown type of registers: %s", text.c_str());
    for (const std::string& name : split(text.substr(space), ',')) {
      const size_t angle = name.find('<');
      if (angle == std::string::npos) scopes_.back()[name] = new_register(bits);
      for (int i = 0; angle < name.size() && i < atoi(name.c_str() + angle + 1); ++i)
        scopes_.back()[name.substr(0, angle) + std::to_string(i)] = new_register(bits);
    }
  }

  void declare_local(const std::string& text) {
    const Declaration declared(text);
    u32& end = kernel_.local_bytes;
    end = (end + declared.align - 1) / declared.align * declared.align;
    add_symbol(declared.name, end);
    end += declared.element * static_cast<u32>(declared.count);
  }

  Operand parse(std::string text) {
    text = strip(text);
    Operand operand;
    if (text.empty()) fault("", "an empty operand");
    if (text[0] == '!') {
      operand = parse(text.substr(1));
      operand.negated = true;
      return operand;
    }
    if (text == "_") {
      operand.type = Operand::sink;
      return operand;
    }
    if (text[0] == '{' || text[0] == '(') {
      operand.type = Operand::vector;
      for (const std::string& part : split(text.substr(1, text.size() - 2), ','))
        operand.parts.push_back(parse(part));
      return operand;
    }
    if (text[0] == '[') return parse_address(text);
    if (const size_t bar = text.find('|'); bar != std::string::npos) {
      operand.type = Operand::pair;
      operand.parts = {parse(text.substr(0, bar)), parse(text.substr(bar + 1))};
      return operand;
    }
    for (size_t i = scopes_.size(); i-- > 0;)
      if (const auto found = scopes_[i].find(text); found != scopes_[i].end()) return found->second;
    if (text[0] == '%') return special(text);
    if (const auto symbol = symbols_.find(text); symbol != symbols_.end()) return symbol->second;
    if (isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-') return number(text);
    if (const size_t plus = text.find('+'); plus != std::string::npos) {
      operand = parse(text.substr(0, plus));
      operand.value += strtoll(text.c_str() + plus + 1, nullptr, 0);
      return operand;
    }
    operand.type = Operand::label;
    operand.name = text;
    return operand;
  }

  // Return the row of a special register; the start of a block fills it.
  Operand special(const std::string& name) {
    const auto [found, is_new] = specials_.try_emplace(name);
    if (is_new) {
      found->second = new_register(32);
      kernel_.specials.emplace_back(name, static_cast<u32>(found->second.at));
    }
    return found->second;
  }

  Operand parse_address(const std::string& text) {
    const auto parts = split(text.substr(1, text.rfind(']') - 1), ',');
    Operand operand;
    operand.type = Operand::address;
    std::string base = parts[0];
    if (const size_t plus = base.find('+'); plus != std::string::npos) {
      operand.offset = strtoll(base.c_str() + plus + 1, nullptr, 0);
      base.resize(plus);
    }
    operand.parts.push_back(parse(base));
    for (size_t i = 1; i < parts.size(); ++i) operand.parts.push_back(parse(parts[i]));
    if (operand.parts[0].type == Operand::integer) {
      operand.parts[0].value += operand.offset;
      operand.offset = 0;
    }
    return operand;
  }

  static Operand number(const std::string& text) {
    Operand operand;
    const char kind = text.size() > 2 && text[0] == '0' ? static_cast<char>(tolower(text[1])) : 0;
    if (kind == 'f' || kind == 'd') {
      operand.type = Operand::real;
      operand.bits = kind == 'f' ? 32 : 64;
      operand.value = static_cast<s64>(strtoull(text.c_str() + 2, nullptr, 16));
    } else {
      operand.type = Operand::integer;
      operand.value = text[0] == '-' ? strtoll(text.c_str(), nullptr, 0)
                                     : static_cast<s64>(strtoull(text.c_str(), nullptr, 0));
    }
    return operand;
  }

  void add(Instruction instruction, const std::string& statement) {
    instruction.statement = static_cast<u32>(kernel_.statements.size());
    kernel_.statements.push_back({statement, line_, place_});
    kernel_.code.push_back(std::move(instruction));
  }

  void decode_statement(const std::string& compiled) {
    const bool is_edited = kernel_.edited == static_cast<s64>(kernel_.statements.size());
    const std::string& statement = is_edited ? kernel_.edit : compiled;
    Instruction instruction;
    try {
      std::string rest = statement;
      if (rest[0] == '@') {
        const size_t space = rest.find(' ');
        const Operand guard = parse(rest.substr(1, space - 1));
        instruction.guard = static_cast<s16>(guard.at);
        instruction.guard_negated = guard.negated;
        rest = strip(rest.substr(space));
      }
      const size_t space = rest.find(' ');
      Decoder d{kernel_, instruction, statement, split(rest.substr(0, space), '.'), {}};
      if (space != std::string::npos)
        for (const std::string& operand : split(strip(rest.substr(space)), ','))
          d.operands.push_back(parse(operand));
      decode_instruction(d);
    } catch (const Fault& cause) {
      // The fault occurs in a thread that reaches the instruction.
      static auto& reasons = *new std::vector<std::string>;
      instruction.offset = static_cast<s64>(reasons.size());
      reasons.push_back(cause.text);
      instruction.flow = Flow::lanes;
      instruction.run = [](Warp&, const Instruction& it, u32) {
        fault("The executor lacks this instruction or this form of it.", "%s",
              reasons[static_cast<size_t>(it.offset)].c_str());
      };
    }
    add(std::move(instruction), statement);
  }

  void decode_instruction(Decoder& d) {
    const std::string& name = d.name();
    if (name == "bra") {
      d.to.flow = Flow::branch;
      jumps_.emplace_back(kernel_.code.size(), d.operands.at(0).name);
    } else if (name == "ret" || name == "exit") {
      d.to.flow = Flow::exit;
    } else if (name == "trap") {
      d.to.run = [](Warp&, const Instruction&, u32) {
        fault("An assertion or __trap() of the kernel.", "trap");
      };
    } else if (name == "griddepcontrol" && d.has("wait")) {
      d.to.run = [](Warp& w, const Instruction&, u32 lanes) { w.waited |= lanes; };
    } else if (name == "nop" || name == "prefetch" || name == "nanosleep" || name == "setmaxnreg" ||
               name == "griddepcontrol") {
      if (d.has("aligned")) d.to.flow = Flow::aligned;
      d.to.run = [](Warp&, const Instruction&, u32) {};
    } else if (!(decode_arithmetic(d) || decode_moves(d) || decode_logic(d) ||
                 decode_conversion(d) || decode_memory(d) || decode_atomic(d) || decode_fence(d) ||
                 decode_warp(d) || decode_barrier(d) || decode_matrix(d) || decode_wgmma(d) ||
                 decode_copy(d) || decode_mbarrier(d) || decode_tensor_copy(d))) {
      d.unknown();
    }
  }

  s32 target(const std::string& label) const {
    const auto found = labels_.find(label);
    if (found == labels_.end()) fault("", "no label %s", label.c_str());
    return found->second;
  }

  Kernel& kernel_;
  int place_ = -1;
  std::vector<std::map<std::string, Operand>> scopes_{1};
  std::map<std::string, Operand> specials_;
  std::map<std::string, Operand> symbols_;
  std::map<std::string, s32> labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;
  std::map<std::array<int, 3>, int> last_places_;
};

Row constant(Kernel& kernel, u64 value, int bits, bool is_parameter) {
  static std::map<std::tuple<Kernel*, u64, int, bool>, s32> known;
  s32& at = known[{&kernel, value, bits, is_parameter}];
  if (at == 0) {
    const u32 word = static_cast<u32>(kernel.constants.size());
    for (int lane = 0; lane < kLanes; ++lane) {
      kernel.constants.push_back(static_cast<u32>(value));
      if (bits == 64) kernel.constants.push_back(static_cast<u32>(value >> 32));
    }
    if (is_parameter) kernel.parameter_addresses.emplace_back(word, static_cast<s64>(value));
    at = ~static_cast<s32>(word);
  }
  return {at};
}

}  // namespace

bool Decoder::has(const char* word) const {
  return std::find(words.begin() + 1, words.end(), word) != words.end();
}

std::string Decoder::type(int from_end) const {
  const int at = static_cast<int>(words.size()) - 1 - from_end;
  return at > 0 ? words[static_cast<size_t>(at)] : "";
}

void Decoder::unknown(const char* why) const {
  fault("", "unknown instruction%s%s", *why ? ": " : "", why);
}

Row Decoder::source(const Operand& operand, int bits) {
  const int width = bits == 64 ? 64 : 32;
  if (operand.type == Operand::row) {
    if ((operand.bits == 64) != (width == 64)) unknown("a register of another width");
    return {operand.at};
  }
  if (operand.type == Operand::real) {
    if (operand.bits != bits) unknown("a constant of another width");
    return constant(kernel, static_cast<u64>(operand.value), width, false);
  }
  if (operand.type != Operand::integer) unknown("an operand");
  if (operand.is_parameter && width == 32) unknown("an address of a parameter in 32 bits");
  const u64 value = static_cast<u64>(operand.value);
  return constant(kernel,
                  bits == 16    ? static_cast<u16>(value)
                  : width == 32 ? static_cast<u32>(value)
                                : value,
                  width, operand.is_parameter);
}

Row Decoder::destination(const Operand& operand, int bits) {
  if (operand.type == Operand::sink) {
    const Row row{static_cast<s32>(kernel.words)};
    kernel.words += static_cast<u32>(bits == 64 ? 2 * kLanes : kLanes);
    return row;
  }
  if (operand.type != Operand::row) unknown("the destination");
  if ((operand.bits == 64) != (bits == 64)) unknown("a destination of another width");
  return {operand.at};
}

void Decoder::set_predicate(int i, const Operand& operand) {
  if (operand.type == Operand::sink) return;
  if (operand.type != Operand::predicate) unknown("no predicate");
  to.predicates[i] = operand.at;
}

void Decoder::set_source_predicate(int which, size_t i) {
  const Operand& operand = operands.at(i);
  if (operand.type != Operand::predicate) unknown("no predicate");
  to.predicates[which] = operand.at;
  if (operand.negated) to.negated |= static_cast<u8>(1 << which);
}

Row Decoder::base(const Operand& operand, int symbol_bits) {
  if (operand.type != Operand::address) unknown("no address");
  const Operand& first = operand.parts[0];
  to.offset = operand.offset;
  const int bits = first.type == Operand::row ? first.bits : symbol_bits;
  to.wide = bits == 64;
  return source(first, bits);
}

void decode(Kernel& kernel) {
  if (kernel.decoded) return;
  Body(kernel).decode();
  kernel.decoded = true;
}

void edit(Kernel& kernel, u32 statement, const std::string& text) {
  kernel.code.clear();
  kernel.statements.clear();
  kernel.specials.clear();
  kernel.words = kernel.predicates = kernel.local_bytes = 0;
  kernel.edited = statement;
  kernel.edit = text;
  kernel.decoded = false;
  decode(kernel);
}

}  // namespace cudasim
