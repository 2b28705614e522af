#include <algorithm>
#include <cstring>

#include "backend.h"
#include "isa/span.h"
#include "lists/foreach.h"

namespace amp_ext::cpu {
namespace {

constexpr int64_t kTile = 1024;

struct Cast {
  const SpanKernels& span;
  DType to;
  DType from;

  void operator()(const char* input, int64_t n, char* output) const {
    if (to == from) {
      std::memcpy(output, input, n * size_of(to));
    } else if (from == DType::f32) {
      span.narrow[static_cast<int>(to)](reinterpret_cast<const float*>(input), n, output);
    } else if (to == DType::f32) {
      span.widen[static_cast<int>(from)](input, n, reinterpret_cast<float*>(output));
    } else {
      by_way_of_fp32(input, n, output);
    }
  }

  void by_way_of_fp32(const char* input, int64_t n, char* output) const {
    float tile[kTile];
    for (int64_t at = 0; at < n; at += kTile) {
      const int64_t count = std::min(kTile, n - at);
      span.widen[static_cast<int>(from)](element(input, from, at), count, tile);
      span.narrow[static_cast<int>(to)](tile, count, element(output, to, at));
    }
  }
};

}  // namespace

Status CpuBackend::cast(const CastArgs& args, Services&) const {
  const SpanKernels& span = span_kernels();
  for_each_chunk(args.casts, host_, [&](const CastRef& c, const Chunk& chunk) {
    const Cast cast{span, c.output_dtype, c.input_dtype};
    cast(element(c.input, c.input_dtype, chunk.offset), chunk.numel,
         element(c.output, c.output_dtype, chunk.offset));
  });
  return Status::ok;
}

}  // namespace amp_ext::cpu
