#include <algorithm>
#include <cstring>

#include "backend.h"
#include "isa/span.h"
#include "lists/foreach.h"

namespace amp_ext::cpu {
namespace {

void convert(const char* input, DType from, int64_t n, char* output, DType to) {
  const SpanKernels& span = span_kernels();
  const auto widen = span.widen[static_cast<int>(from)];
  const auto narrow = span.narrow[static_cast<int>(to)];
  if (to == from) {
    std::memcpy(output, input, n * size_of(to));
  } else if (from == DType::f32) {
    narrow(reinterpret_cast<const float*>(input), n, output);
  } else if (to == DType::f32) {
    widen(input, n, reinterpret_cast<float*>(output));
  } else {
    constexpr int64_t kTile = 1024;
    float tile[kTile];
    for (int64_t at = 0; at < n; at += kTile) {
      const int64_t count = std::min(kTile, n - at);
      widen(element(input, from, at), count, tile);
      narrow(tile, count, element(output, to, at));
    }
  }
}

}  // namespace

Status CpuBackend::cast(const CastArgs& args, Services&) const {
  for_each_chunk(args.casts, host_, [&](const CastRef& c, const Chunk& chunk) {
    convert(element(c.input, c.input_dtype, chunk.offset), c.input_dtype, chunk.numel,
            element(c.output, c.output_dtype, chunk.offset), c.output_dtype);
  });
  return Status::ok;
}

}  // namespace amp_ext::cpu
