// Runs an optimizer's step in one launch: the walk over parameters and access to their tensors.
#pragma once

#include <cstring>

#include "amp_ext/optim.h"
#include "lists/foreach.cuh"
#include "reduce.cuh"

namespace amp_ext {

constexpr int kUpdateThreads = 256;
constexpr int kUpdateBlocksPerSm = 4;  // leave each thread 64 registers
constexpr int kUpdateElements = 4;     // elements per thread and visit: 16 bytes of fp32

using UpdateSpan = Span<kUpdateThreads>;

// The rounding of bf16 state: to nearest, or stochastically by noise(key, element, pair).
struct Rounding {
  bool by_chance;
  uint32_t key;
};

// A chunk of an optional tensor of any dtype but fp64. With kPlain, is_plain() holds.
template <bool kPlain>
struct ChunkOf {
  char* data = nullptr;
  DType dtype_ = DType::f32;
  bool aligned_ = true;  // kUpdateElements elements can be one access

  __device__ ChunkOf(const void* tensor, DType dtype, int64_t offset) : dtype_(dtype) {
    if (!tensor) return;
    data = static_cast<char*>(const_cast<void*>(tensor)) + offset * size_of(dtype);
    const uintptr_t mask = kUpdateElements * (dtype == DType::f32 ? 4 : 2) - 1;
    aligned_ = (reinterpret_cast<uintptr_t>(data) & mask) == 0;
  }

  __device__ bool is_plain() const { return !data || (dtype_ == DType::f32 && aligned_); }
  __device__ bool is_f32() const { return kPlain || dtype_ == DType::f32; }
  __device__ bool is_aligned() const { return kPlain || aligned_; }
  __device__ char* at(int i) const { return ptx::global(data + i * (is_f32() ? 4 : 2)); }

  // Loads the bits of kSize elements from index `i`. The bits are not converted here, so that many
  // loads can be in flight.
  template <int kSize>
  __device__ uint4 load(int i) const {
    uint4 bits{};
    if (kSize == kUpdateElements && is_aligned()) {
      if (is_f32()) return ptx::load16(at(i));
      const uint2 half = ptx::load8(at(i));
      return {half.x, half.y, 0, 0};
    }
    if (is_f32()) {
      uint32_t words[4] = {};
#pragma unroll
      for (int j = 0; j < kSize; ++j) words[j] = *reinterpret_cast<const uint32_t*>(at(i + j));
      memcpy(&bits, words, sizeof bits);
    } else {
      uint16_t halves[8] = {};
#pragma unroll
      for (int j = 0; j < kSize; ++j) halves[j] = *reinterpret_cast<const uint16_t*>(at(i + j));
      memcpy(&bits, halves, sizeof bits);
    }
    return bits;
  }

  template <int kSize>
  __device__ void store(int i, uint4 bits) const {
    if (kSize == kUpdateElements && is_aligned()) {
      if (is_f32()) return ptx::store16(at(i), bits);
      return ptx::store8(at(i), {bits.x, bits.y});
    }
    if (is_f32()) {
      uint32_t words[4];
      memcpy(words, &bits, sizeof bits);
#pragma unroll
      for (int j = 0; j < kSize; ++j) *reinterpret_cast<uint32_t*>(at(i + j)) = words[j];
    } else {
      uint16_t halves[8];
      memcpy(halves, &bits, sizeof bits);
#pragma unroll
      for (int j = 0; j < kSize; ++j) *reinterpret_cast<uint16_t*>(at(i + j)) = halves[j];
    }
  }

  template <int kSize>
  __device__ void widen(uint4 bits, float (&values)[kSize]) const {
    if (is_f32()) return widen_as<float>(bits, values);
    dtype_ == DType::f16 ? widen_as<__half>(bits, values) : widen_as<__nv_bfloat16>(bits, values);
  }

  template <int kSize>
  __device__ uint4 rounded(const float (&values)[kSize]) const {
    if (is_f32()) return rounded_as<float>(values);
    return dtype_ == DType::f16 ? rounded_as<__half>(values) : rounded_as<__nv_bfloat16>(values);
  }

  template <int kSize>
  __device__ void store_nearest(int i, const float (&values)[kSize]) const {
    store<kSize>(i, rounded(values));
  }

  // Replaces values that do not round to the loaded bits, of 16-bit elements.
  template <int kSize>
  __device__ void replace_stale(uint4 bits, float (&values)[kSize]) const {
    float stored[kSize];
    widen(bits, stored);
    const uint4 expected_bits = rounded(values);
    uint16_t halves[8], expected[8];
    memcpy(halves, &bits, sizeof bits);
    memcpy(expected, &expected_bits, sizeof expected_bits);
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = halves[j] == expected[j] ? values[j] : stored[j];
  }

  // Stores values of state, rounded with the bits of noise() from `shift` on.
  template <int kSize>
  __device__ void store_state(int i, const float (&values)[kSize], Rounding rounding, uint32_t pair,
                              int shift) const {
    if (!rounding.by_chance || is_f32() || dtype_ != DType::bf16) return store_nearest(i, values);
    uint16_t halves[8] = {};
#pragma unroll
    for (int j = 0; j < kSize; ++j)
      halves[j] = bf16_by_chance(values[j], noise(rounding.key, i + j, pair) >> shift & 0xffff);
    uint4 bits;
    memcpy(&bits, halves, sizeof bits);
    store<kSize>(i, bits);
  }

 private:
  template <class T, int kSize>
  __device__ static void widen_as(uint4 bits, float (&values)[kSize]) {
    const Pack<T> pack = Pack<T>::from(bits);
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = Element<T>::widen(pack.at[j]);
  }
  template <class T, int kSize>
  __device__ static uint4 rounded_as(const float (&values)[kSize]) {
    Pack<T> pack = Pack<T>::from({});
#pragma unroll
    for (int j = 0; j < kSize; ++j) pack.at[j] = Element<T>::round(values[j]);
    return pack.bits();
  }
};

// Calls update.visit<kSize>(i) for the elements of a span, kSize elements from index `i`.
template <class Update>
__device__ void update_span(const Update& update, const UpdateSpan& span) {
  const int n = span.n;
  int i = span.thread() * kUpdateElements;
#pragma unroll 1
  for (; i + kUpdateElements <= n; i += kUpdateThreads * kUpdateElements)
    update.template visit<kUpdateElements>(i);
  const int thread = i / kUpdateElements % kUpdateThreads;  // saves a register
  const int last = n - n % kUpdateElements + thread;
  if (last < n) update.template visit<1>(last);
}

template <class Factors>
struct UpdateShared {
  Factors factors;
  float step;  // the step that `factors` belong to
  uint32_t number;
  Share share;
  bool differ;  // whether the steps of the block's tensors differ
  bool last;
};

// Runs the whole step. Op provides
//   kBlocksPerSm<Table>, the resident blocks per multiprocessor,
//   Factors factors(const StepFactors&, uint32_t number) of an update, and
//   update(entry, span, factors, rounding).
template <class Op, class Table>
__device__ void update_list(const Op& op, const Table& table, const StepScalars& scalars,
                            uint32_t* tickets) {
  begin_grid();
  using Factors = typename Op::Factors;
  auto& shared = ptx::shared<UpdateShared<Factors>>();
  if (has_bad_norm(scalars)) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && scalars.found_inf)
      ptx::store_any(scalars.found_inf, 1.0f);
    return;
  }
  if (is_skipped(scalars)) return;
  const auto set_factors = [&](const float* step) {
    shared.step = step ? *step : -1.0f;
    shared.number = step ? update_number(shared.step) : 0;
    shared.factors =
        op.factors(step_factors(scalars, op.options.lr, op.options.maximize), shared.number);
  };

  // Usually all steps are equal. Comparing them first spares the barriers below.
  const Share share(table);
  const UpdateRef* const entries = table.entries();
  bool differ = false;
  if (share.begin < share.end) {
    const float* const step = entries[share.first].step;
    if (threadIdx.x == 0) set_factors(step);
    for (int i = share.first + threadIdx.x;
         step && i < table.size && entries[i].first_chunk * kChunkPieces < share.end;
         i += kUpdateThreads)
      differ |= *entries[i].step != *step;
  }
  differ = ptx::block_any(differ);
  if (threadIdx.x == 0) {  // shared memory spares registers
    shared.differ = differ;
    shared.share = share;
  }
  ptx::block_sync();

  for_each_span<kUpdateThreads>(
      table, shared.share, [&](const UpdateRef& entry, const UpdateSpan& span) {
        if (shared.differ && *entry.step != shared.step) {
          ptx::block_sync();  // all threads have used the previous factors
          if (threadIdx.x == 0) set_factors(entry.step);
          ptx::block_sync();
        }
        const uint32_t key = noise_key(shared.number, entry.place, span.chunk - entry.first_chunk);
        const auto behind = static_cast<uint32_t>(span.offset % kChunkElements);
        const Rounding rounding{op.options.stochastic_rounding, noise_key_behind(key, behind)};
        op.update(entry, span, shared.factors, rounding);
      });
  // Steps advance once no thread of any block reads them.
  if (!tickets) return;
  ptx::block_sync();
  if (!is_last_block(tickets, gridDim.x, shared.last)) return;
  for (int i = threadIdx.x; i < table.size; i += kUpdateThreads) *table.entries()[i].step += 1.0f;
}

// Launches kernel_of(table) with (table, op, scalars, tickets).
template <class Op, class GetKernel>
Status launch_update(const UpdateList& list, const Op& op, const StepScalars& scalars,
                     Services& services, GetKernel kernel_of) {
  uint32_t* const tickets = has_steps(list) ? services.tickets(1) : nullptr;
  return launch_list(list, services, [&](const auto& table, const cuda::Target& target) {
    if (table.chunks == 0 && !tickets && !scalars.norm) return Status::ok;
    constexpr int kBlocksPerSm = Op::template kBlocksPerSm<std::decay_t<decltype(table)>>;
    const int blocks = std::max(foreach_blocks(table.chunks, kBlocksPerSm, target), 1);
    return launch(kernel_of(table), blocks, kUpdateThreads,
                  sizeof(UpdateShared<typename Op::Factors>), target.stream, table, op, scalars,
                  tickets);
  });
}

}  // namespace amp_ext
