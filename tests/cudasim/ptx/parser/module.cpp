// Read the declarations of a PTX module; bodies of kernels are decoded when they first run.
#include "parser/module.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "parser/words.h"

namespace cudasim {
namespace {

class Reader : Cursor {
 public:
  explicit Reader(Module& module) : Cursor(module.text, 1), module_(module) {}

  void read() {
    while (skip_space(), at_ < text_.size()) {
      if (is_at("//") || is_at(".version") || is_at(".target") || is_at(".address_size"))
        skip_line();
      else if (is_at(".file"))
        read_file();
      else if (is_at(".section"))
        advance(text_.find('}', at_) + 1);
      else
        read_declaration();
    }
  }

 private:
  void read_file() {  // .file 1 "path", ...
    const size_t open = text_.find('"', at_), close = text_.find('"', open + 1);
    module_.files[atoi(text_.c_str() + at_ + strlen(".file"))] =
        text_.substr(open + 1, close - open - 1);
    skip_line();
  }

  // Up to a semicolon, or a kernel and its body.
  void read_declaration() {
    size_t end = text_.find_first_of(";{=", at_);
    if (end < text_.size() && text_[end] == '=') end = text_.find(';', end);
    const std::string head = strip(text_.substr(at_, end - at_));
    if (end < text_.size() && text_[end] == '{') {
      const size_t begin = end;
      int depth = 0;
      do {
        if (text_[end] == '{') ++depth;
        if (text_[end] == '}') --depth;
        ++end;
      } while (depth > 0);
      advance(begin + 1);
      if (head.find(".entry") != std::string::npos) add_kernel(head, end);
      advance(end);
      return;
    }
    advance(end + 1);
    if (head.find(".func") != std::string::npos) return;
    if (head.find(".shared") != std::string::npos) {
      const Declaration declared(head);
      if (declared.has_bounds)
        module_.shared.emplace_back(declared.name, head);
      else
        module_.dynamic_shared[declared.name] = declared.align;
    }
  }

  void add_kernel(const std::string& head, size_t end) {
    auto kernel = std::make_unique<Kernel>();
    kernel->module = &module_;
    const size_t entry = head.find(".entry") + strlen(".entry");
    const size_t open = head.find('(', entry);
    kernel->symbol = strip(head.substr(entry, open - entry));
    const std::string tail = open == std::string::npos ? "" : head.substr(head.rfind(')'));
    if (open != std::string::npos)
      for (const std::string& parameter :
           split(head.substr(open + 1, head.rfind(')') - open - 1), ','))
        if (!parameter.empty()) add_parameter(*kernel, parameter);
    kernel->name = demangled(kernel->symbol);
    if (const size_t most = tail.find(".maxntid"); most != std::string::npos) {
      u32 n[3] = {1, 1, 1};
      sscanf(tail.c_str() + most, ".maxntid %u, %u, %u", &n[0], &n[1], &n[2]);
      kernel->most_threads = n[0] * n[1] * n[2];
    }
    kernel->body = at_;
    kernel->end = end;
    kernel->line = line_;
    module_.kernels.push_back(std::move(kernel));
  }

  static void add_parameter(Kernel& kernel, std::string declared) {
    // ".ptr .align 8" describes the target of a pointer.
    if (const size_t ptr = declared.find(".ptr"); ptr != std::string::npos)
      declared = declared.substr(0, ptr) + declared.substr(declared.find_last_of(" \t"));
    const Declaration parameter(declared);
    const u32 bytes = parameter.element * static_cast<u32>(parameter.count);
    const u32 align = parameter.align;
    const u32 offset = (kernel.parameter_bytes + align - 1) / align * align;
    kernel.parameters.push_back({offset, bytes});
    kernel.parameter_bytes = offset + bytes;
  }

  Module& module_;
};

}  // namespace

std::string demangled(const std::string& symbol) {
  char* const text = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, nullptr);
  const std::string result = text ? text : symbol;
  free(text);
  return result;
}

std::vector<Kernel*>& all_kernels() {
  static auto& all = *new std::vector<Kernel*>;
  return all;
}

std::unique_ptr<Module> read_module(const std::string& path) {
  auto module = std::make_unique<Module>();
  module->path = path;
  std::ifstream file(path);
  std::stringstream stream;
  stream << file.rdbuf();
  module->text = stream.str();
  if (module->text.empty()) fault("Does the file exist?", "%s: no PTX", path.c_str());
  Reader(*module).read();
  for (auto& kernel : module->kernels) all_kernels().push_back(kernel.get());
  return module;
}

std::string source_of(const Kernel& kernel, u32 statement) {
  const Module& module = *kernel.module;
  std::string result;
  for (int i = kernel.statements[statement].place; i >= 0;) {
    const Place& place = module.places[static_cast<size_t>(i)];
    const auto file = module.files.find(place.file);
    result += text("%s%s:%d", result.empty() ? "" : ", inlined at ",
                   file == module.files.end() ? "?" : file->second.c_str(), place.line);
    i = place.caller;
  }
  return result.empty() ? "source unknown: compile with -lineinfo" : result;
}

std::string describe(const Kernel& kernel, u32 code) {
  const u32 number = kernel.code[code].statement;
  const Statement& statement = kernel.statements[number];
  const std::string& path = kernel.module->path;
  const size_t slash = path.rfind('/');
  return text("%s:%u: %.160s; (%s)", path.c_str() + (slash == std::string::npos ? 0 : slash + 1),
              statement.line, statement.text.c_str(), source_of(kernel, number).c_str());
}

}  // namespace cudasim
