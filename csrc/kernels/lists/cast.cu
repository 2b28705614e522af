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

// Resident blocks per multiprocessor, and 16-byte loads that a thread issues before the first use.
// With two blocks ptxas spills registers for targets other than 8.0 and 9.0, which therefore use
// one block. On 10.0 and 10.3, with the fastest memory, each thread issues more loads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900
constexpr int kCastBlocksPerSm = 1;
constexpr int kCastPacks = __CUDA_ARCH__ / 100 == 10 ? 6 : kPacksInFlight;
#else
constexpr int kCastBlocksPerSm = kForeachBlocksPerSm;
constexpr int kCastPacks = kPacksInFlight;
#endif

// The unit of one element.
template <class To, class From>
struct Single {
  static constexpr int kSize = 1;
  static constexpr int kInFlight = kPacksInFlight;

  From element;

  __device__ void load(const From* from) { element = *from; }
  __device__ void store(To* to) const { *to = converted<To>(element); }
};

// The unit of the fewest elements that fill 16-byte accesses on both sides.
template <class To, class From>
struct Group {
  static constexpr int kSize = std::max(Pack<To>::kSize, Pack<From>::kSize);
  static constexpr int kLoads = kSize / Pack<From>::kSize;
  static constexpr int kStores = kSize / Pack<To>::kSize;
  static constexpr int kInFlight = (kCastPacks + kLoads - 1) / kLoads;

  uint4 bits[kLoads];

  __device__ void load(const From* from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) bits[i] = ptx::load16(from + i * Pack<From>::kSize);
  }

  __device__ void store(To* to) const {
    From from[kSize];
    memcpy(from, bits, sizeof(from));
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      Pack<To> pack;
#pragma unroll
      for (int j = 0; j < Pack<To>::kSize; ++j)
        pack.at[j] = converted<To>(from[i * Pack<To>::kSize + j]);
      ptx::store16(to + i * Pack<To>::kSize, pack.bits());
    }
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
  const int head =
      sizeof(To) < sizeof(From) ? elements_to_alignment(to) : elements_to_alignment(from);
  const bool together =
      elements_to_alignment(to + head) == 0 && elements_to_alignment(from + head) == 0;
  return together && head < n ? head : n;
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
__global__ __launch_bounds__(kForeachThreads, kCastBlocksPerSm) void cast_kernel(
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
