// Name the PTX line and the source lines of an instruction.
#include "memory/memory.h"

namespace cudasim {

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
