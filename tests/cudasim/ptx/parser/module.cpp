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

constexpr size_t kAlignment = 256;

Variable allocate(const Declaration& declared) {
  const size_t bytes = declared.element * declared.count;
  const size_t whole = (bytes + kAlignment) / kAlignment * kAlignment;
  u8* const memory = static_cast<u8*>(aligned_alloc(kAlignment, whole));
  memset(memory, 0, whole);
  for (size_t i = 0; i < declared.values.size(); ++i)
    memcpy(memory + i * declared.element, &declared.values[i], declared.element);
  return {memory, bytes};
}

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
    const size_t begin = at_;
    skip_line();
    std::istringstream line(text_.substr(begin + 5, at_ - begin - 5));
    int number = 0;
    std::string path;
    line >> number >> path;
    const size_t close = path.find('"', 1);
    if (close != std::string::npos) module_.files[number] = path.substr(1, close - 1);
  }

  // Up to a semicolon, or a kernel and its body.
  void read_declaration() {
    size_t end = at_;
    int depth = 0;
    while (end < text_.size() && (depth > 0 || (text_[end] != ';' && text_[end] != '{'))) {
      if (text_[end] == '(') ++depth;
      if (text_[end] == ')') --depth;
      if (text_[end] == '=') {
        end = text_.find(';', end);
        break;
      }
      ++end;
    }
    const std::string head = strip(text_.substr(at_, end - at_));
    if (end < text_.size() && text_[end] == '{') {
      const size_t begin = end;
      depth = 0;
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
    } else if (head.find(".global") != std::string::npos ||
               head.find(".const") != std::string::npos) {
      const Declaration declared(head);
      module_.globals[declared.name] = allocate(declared);
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
      kernel->most_threads = 1;
      for (const std::string& n :
           split(tail.substr(most + 8, tail.find('.', most + 1) - most - 8), ','))
        kernel->most_threads *= static_cast<u32>(atoi(n.c_str()));
    }
    kernel->body = at_;
    kernel->end = end;
    kernel->line = line_;
    module_.kernels.push_back(std::move(kernel));
  }

  static void add_parameter(Kernel& kernel, std::string declared) {
    // ".ptr .align 8" describes the target of a pointer.
    u32 pointer = 0;
    if (const size_t ptr = declared.find(".ptr"); ptr != std::string::npos) {
      pointer = static_cast<u32>(bits_of(declared.find("64") < ptr ? "u64" : "u32") / 8);
      declared = declared.substr(0, ptr) + declared.substr(declared.find_last_of(" \t"));
    }
    const Declaration parameter(declared);
    const u32 bytes = pointer ? pointer : parameter.element * static_cast<u32>(parameter.count);
    const u32 align = pointer ? pointer : parameter.align;
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

}  // namespace cudasim
