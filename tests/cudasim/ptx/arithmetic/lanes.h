// Read and write the registers of lanes as C++ types.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "parser/decode.h"
#include "threads/machine.h"

namespace cudasim {

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
template <class T>
struct x2 {
  T low, high;
};
template <class T>
constexpr bool is_half = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T>
constexpr bool is_pair = std::is_same_v<T, x2<f16>> || std::is_same_v<T, x2<bf16>>;

template <class T>
inline T get(const u32* row, int lane) {
  T value;
  memcpy(&value, row + (sizeof(T) == 8 ? 2 * lane : lane), sizeof value);
  return value;
}

template <class T>
inline void put(u32* row, int lane, T value) {
  u32* const to = row + (sizeof(T) == 8 ? 2 * lane : lane);
  if constexpr (sizeof(T) < 4) *to = 0;
  memcpy(to, &value, sizeof value);
}

// The NaN that arithmetic returns.
inline float canonical(float x) { return x == x ? x : std::bit_cast<float>(0x7fffffffu); }
inline double canonical(double x) {
  return x == x ? x : std::bit_cast<double>(0xfff8000000000000ull);
}
template <class T>
  requires std::is_integral_v<T>
inline T canonical(T x) {
  return x;
}

inline float widen(f16 x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }
inline float widen(bf16 x) { return std::bit_cast<float>(static_cast<u32>(x.bits) << 16); }
template <class T>
  requires std::is_arithmetic_v<T>
inline T widen(T x) {
  return x;
}

// Convert in the current rounding mode.
inline void narrow(float x, f16& to) {
  to = x == x ? f16{std::bit_cast<u16>(static_cast<_Float16>(x))} : f16{0x7fff};
}
// Rounds to nearest even, or towards zero.
inline void narrow(float x, bf16& to, bool to_zero = false) {
  const u32 bits = std::bit_cast<u32>(x);
  to = x != x    ? bf16{0x7fff}
       : to_zero ? bf16{static_cast<u16>(bits >> 16)}
                 : bf16{static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
// Rounds once: the sum of two halves and a product of halves are exact or odd in fp32.
template <class H>
inline void narrow(double x, H& to) {
  float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) != x && std::isfinite(nearest)) {
    u32 bits = std::bit_cast<u32>(nearest);
    if (std::fabs(static_cast<double>(nearest)) > std::fabs(x)) --bits;
    nearest = std::bit_cast<float>(bits | 1);
  }
  narrow(nearest, to);
}

// Has the decoded instruction run under its modifiers: a rounding, .ftz, .sat of fp32.
bool set_modifiers(Decoder& d);

template <class F, class D, class... A, size_t... I>
inline void apply_rows(Warp& w, const Instruction& it, u32 lanes, std::index_sequence<I...>) {
  u32* const to = w.destination(it.rows[0]);
  const u32* const from[] = {w.source(it.rows[1 + I])...};
  if (lanes == kAllLanes) {
#pragma GCC ivdep
    for (int i = 0; i < kLanes; ++i) put<D>(to, i, F{}(get<A>(from[I], i)...));
  } else {
    each_lane(lanes, [&](int i) { put<D>(to, i, F{}(get<A>(from[I], i)...)); });
  }
}
template <class F, class D, class... A>
void apply(Warp& w, const Instruction& it, u32 lanes) {
  apply_rows<F, D, A...>(w, it, lanes, std::index_sequence_for<A...>());
}

template <class T>
constexpr int width = std::max<int>(8 * sizeof(T), 16);

template <class D, class... A, class F>
bool Decoder::lanes(F) {
  if (operands.size() != sizeof...(A) + 1) unknown("another number of operands");
  to.rows[0] = destination(operands[0], width<D>);
  int i = 0;
  ((++i, to.rows[i] = source(operands[static_cast<size_t>(i)], width<A>)), ...);
  to.run = apply<F, D, A...>;
  return true;
}

// Lists of types, and the type of a list that a word names.
template <class... T>
struct Types {};
template <class T>
constexpr const char* type_name = "";
#define CUDASIM_TYPE(T, name) \
  template <>                 \
  inline constexpr const char* type_name<T> = name;
CUDASIM_TYPE(u8, "u8")
CUDASIM_TYPE(s8, "s8")
CUDASIM_TYPE(u16, "u16")
CUDASIM_TYPE(s16, "s16")
CUDASIM_TYPE(u32, "u32")
CUDASIM_TYPE(s32, "s32")
CUDASIM_TYPE(u64, "u64")
CUDASIM_TYPE(s64, "s64")
CUDASIM_TYPE(float, "f32")
CUDASIM_TYPE(double, "f64")
CUDASIM_TYPE(f16, "f16")
CUDASIM_TYPE(bf16, "bf16")
CUDASIM_TYPE(x2<f16>, "f16x2")
CUDASIM_TYPE(x2<bf16>, "bf16x2")
#undef CUDASIM_TYPE

using Integers = Types<u16, s16, u32, s32, u64, s64>;
using Bytes = Types<u8, s8, u16, s16, u32, s32, u64, s64>;
using Floats = Types<float, double, f16, bf16, x2<f16>, x2<bf16>>;

// Calls f.operator()<T>() for the type's name, b32 being u32; false if no type of the list has it.
template <class... T, class F>
bool with_type(Types<T...>, std::string name, F f) {
  if (name == "b8" || name == "b16" || name == "b32" || name == "b64") name[0] = 'u';
  return ((name == type_name<T> && (f.template operator()<T>(), true)) || ...);
}

// Runs f on lanes with sources and result of the type, one of the list.
template <int kSources, class... T, class F>
bool same_type(Decoder& d, Types<T...> list, F) {
  return with_type(list, d.type(), [&]<class U>() {
    constexpr auto run = [](auto... x) { return static_cast<U>(F{}(x...)); };
    if constexpr (kSources == 1) d.lanes<U, U>(run);
    if constexpr (kSources == 2) d.lanes<U, U, U>(run);
    if constexpr (kSources == 3) d.lanes<U, U, U, U>(run);
  });
}

}  // namespace cudasim
