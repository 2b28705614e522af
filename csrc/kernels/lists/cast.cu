// cast_: outputs = inputs, rounded to nearest even into the outputs' dtypes, in one launch.
#include "foreach.cuh"

namespace amp_ext {
namespace {

// Converts one element. fp64 converts to 16 bits by way of fp32, as in torch.
template <class To, class From>
__device__ To converted(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else {
    using Compute = typename Element<To>::Compute;
    return Element<To>::round(static_cast<Compute>(Element<From>::widen(x)));
  }
}

// The unit of one element.
template <class To, class From>
struct Single {
  static constexpr int kSize = 1;
  static constexpr int kInFlight = kPacksInFlight;

  From element;

  __device__ void load(const From* from) { element = *from; }
  __device__ void store(To* to) const { *to = converted<To>(element); }
};

// The unit of one 16-byte store. A warp's store is contiguous. If each thread stored two adjacent
// words, each of the warp's two stores would have gaps.
template <class To, class From>
struct Group {
  static constexpr int kSize = Pack<To>::kSize, kBytes = kSize * sizeof(From);
  using Word =
      std::conditional_t<(kBytes >= 16), uint4, std::conditional_t<kBytes == 8, uint2, uint32_t>>;
  static constexpr int kLoads = kBytes / sizeof(Word);
  static constexpr int kInFlight = std::clamp(kPacksInFlight * 16 / kBytes, 1, 8);

  Word words[kLoads];

  __device__ void load(const From* from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
  }

  __device__ void store(To* to) const {
    From from[kSize];
    memcpy(from, words, sizeof(from));
    Pack<To> pack;
#pragma unroll
    for (int i = 0; i < kSize; ++i) pack.at[i] = converted<To>(from[i]);
    ptx::store16(to, pack.bits());
  }
};

// Moves `count` Units by one block; each thread keeps several loads in flight.
template <class Unit, class To, class From>
__device__ void move_units(To* to, const From* from, int count, int thread) {
  constexpr int kStride = kForeachThreads * Unit::kSize;
  to += thread * Unit::kSize;
  from += thread * Unit::kSize;
  int left = (count - thread + kForeachThreads - 1) / kForeachThreads;
#pragma unroll 1
  for (; left >= Unit::kInFlight; left -= Unit::kInFlight) {
    Unit units[Unit::kInFlight];
#pragma unroll
    for (int k = 0; k < Unit::kInFlight; ++k) units[k].load(from + k * kStride);
#pragma unroll
    for (int k = 0; k < Unit::kInFlight; ++k) units[k].store(to + k * kStride);
    to += Unit::kInFlight * kStride;
    from += Unit::kInFlight * kStride;
  }
#pragma unroll 1
  for (; left > 0; --left) {
    Unit unit;
    unit.load(from);
    unit.store(to);
    to += kStride;
    from += kStride;
  }
}

// Returns how many of n elements precede the first aligned group. The result is n if the two sides
// are never aligned together.
template <class To, class From>
__device__ int head_of(const To* to, const From* from, int n) {
  using Word = typename Group<To, From>::Word;
  const int head = elements_to_alignment(to);
  return head < n && reinterpret_cast<uintptr_t>(from + head) % sizeof(Word) == 0 ? head : n;
}

// Casts the elements of a span of any alignment.
template <class To, class From>
__device__ void cast(const ForeachSpan& span, To* to, const From* from) {
  const int n = span.n;
  const int head = head_of(to, from, n);
  const int groups = (n - head) / Group<To, From>::kSize;
  const int tail = head + groups * Group<To, From>::kSize;
  move_units<Single<To, From>>(to, from, head, span.thread());
  move_units<Group<To, From>>(to + head, from + head, groups, span.thread());
  move_units<Single<To, From>>(to + tail, from + tail, n - tail, span.thread());
}

template <class Table>
__global__ __launch_bounds__(kForeachThreads, kForeachBlocksPerSm) void cast_kernel(
    const Table __grid_constant__ table) {
  begin_grid();
  for_each_span<kForeachThreads>(
      table, Share(table), [](const CastRef& entry, const ForeachSpan& span) {
        with_elements(entry.output, entry.output_dtype, [&](auto* to) {
          with_elements(entry.input, entry.input_dtype, [&](const auto* from) {
            cast(span, to + span.offset, from + span.offset);
          });
        });
      });
}

}  // namespace

Status cuda::CudaBackend::cast(const CastArgs& args, Services& services) const {
  return launch_list(args.casts, services, [&](const auto& table, const Target& target) {
    if (table.chunks == 0) return Status::ok;
    const int blocks = foreach_blocks(table.chunks, target);
    return launch(cast_kernel<std::decay_t<decltype(table)>>, blocks, kForeachThreads, 0,
                  target.stream, table);
  });
}

}  // namespace amp_ext
