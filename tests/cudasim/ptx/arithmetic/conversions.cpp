// Convert between types.
#include <algorithm>
#include <cfenv>

#include "arithmetic/lanes.h"

namespace cudasim {
namespace {

// ---- to whole numbers ---------------------------------------------------------------------------

// Whole numbers keep their low bits, or are clamped. A narrow result fills a register of 16 bits.
template <class D, class S>
void set_integer(Decoder& d) {
  using Register =
      std::conditional_t<sizeof(D) == 1, std::conditional_t<std::is_signed_v<D>, s16, u16>, D>;
  if (d.has("sat"))
    d.lanes<Register, S>([](S s) {
      const __int128 x = s;
      return static_cast<Register>(
          std::clamp<__int128>(x, std::numeric_limits<D>::min(), std::numeric_limits<D>::max()));
    });
  else
    d.lanes<Register, S>([](S s) { return static_cast<Register>(static_cast<D>(s)); });
}

template <class T>
double as_double(T x) {
  if constexpr (is_half<T>)
    return widen(x);
  else
    return static_cast<double>(x);
}

// Out of range: the nearest number. NaN: 0, or the sign bit alone of 64 bits and from fp64.
template <class D, class S>
struct ToInteger {
  D operator()(S s) const {
    using Limits = std::numeric_limits<D>;
    const double x = as_double(s);
    if (x != x) {
      if (!std::is_same_v<S, double> && sizeof(D) < 8) return 0;
      return static_cast<D>(std::make_unsigned_t<D>{1} << (8 * sizeof(D) - 1));
    }
    const double whole = std::nearbyint(x);
    if (whole < static_cast<double>(Limits::min())) return Limits::min();
    if (whole >= std::ldexp(1.0, Limits::digits)) return Limits::max();
    return static_cast<D>(whole);
  }
};

// ---- roundings ----------------------------------------------------------------------------------

void rounded(Warp& w, const Instruction& it, u32 lanes) {
  fesetround(it.mode);
  it.inner(w, it, lanes);
  fesetround(FE_TONEAREST);
}

// The rounding's letter, or 0. `suffix` is "i" for roundings to whole numbers.
char rounding(const Decoder& d, const std::string& suffix) {
  for (const char letter : {'n', 'z', 'm', 'p', 'a'})
    if (d.has((std::string("r") + letter + suffix).c_str())) return letter;
  return 0;
}

bool set_rounding(Decoder& d, char letter) {
  if (!letter || letter == 'a') d.unknown("a rounding");
  if (letter != 'n') {
    d.to.mode = letter == 'z' ? FE_TOWARDZERO : letter == 'm' ? FE_DOWNWARD : FE_UPWARD;
    d.to.inner = d.to.run;
    d.to.run = rounded;
  }
  return true;
}

// ---- to 16 bits ---------------------------------------------------------------------------------

template <class H, bool kToZero, bool kRelu, bool kFinite>
struct Narrow {
  H operator()(float x) const {
    if (kRelu && !(x > 0) && x == x) x = 0;
    H half;
    if constexpr (std::is_same_v<H, bf16>)
      narrow(x, half, kToZero);
    else
      narrow(x, half);
    constexpr u16 kInfinity = std::is_same_v<H, f16> ? 0x7c00 : 0x7f80;
    if (kFinite && (half.bits & 0x7fff) == kInfinity) --half.bits;
    return half;
  }
};

template <class H, bool kToZero, bool kRelu, bool kFinite>
void set_narrow(Decoder& d, bool is_pair) {
  using One = Narrow<H, kToZero, kRelu, kFinite>;
  if (is_pair)  // the first source is the upper half
    d.lanes<x2<H>, float, float>(
        [](float high, float low) { return x2<H>{One{}(low), One{}(high)}; });
  else
    d.lanes<H, float>(One());
}

template <class H>
bool narrow_floats(Decoder& d, bool is_pair) {
  const char letter = rounding(d, "");
  if (letter != 'n' && letter != 'z') d.unknown("a rounding");
  const bool relu = d.has("relu"), finite = d.has("satfinite");
  if (relu && finite) d.unknown("relu and satfinite");
  if (letter == 'z') {
    relu     ? set_narrow<H, true, true, false>(d, is_pair)
    : finite ? set_narrow<H, true, false, true>(d, is_pair)
             : set_narrow<H, true, false, false>(d, is_pair);
    return std::is_same_v<H, bf16> || set_rounding(d, letter);
  }
  relu     ? set_narrow<H, false, true, false>(d, is_pair)
  : finite ? set_narrow<H, false, false, true>(d, is_pair)
           : set_narrow<H, false, false, false>(d, is_pair);
  return true;
}

// ---- between floats -----------------------------------------------------------------------------

template <class T>
bool round_to_whole(Decoder& d) {
  if (d.has("sat") && std::is_same_v<T, float> && !rounding(d, "i"))
    return d.lanes<float, float>([](float x) { return saturate(x); });
  d.lanes<T, T>([](T x) {
    if constexpr (is_half<T>) {
      T to;
      narrow(std::nearbyint(widen(x)), to);
      return to;
    } else {
      return canonical(std::nearbyint(x));
    }
  });
  return set_rounding(d, rounding(d, "i"));
}

bool decode_floats(Decoder& d, const std::string& to, const std::string& from) {
  if (to == from) {
    if (to == "f32") return round_to_whole<float>(d);
    if (to == "f64") return round_to_whole<double>(d);
    if (to == "f16") return round_to_whole<f16>(d);
    return false;
  }
  if (to == "f16" && from == "f32") return narrow_floats<f16>(d, false);
  if (to == "bf16" && from == "f32") return narrow_floats<bf16>(d, false);
  if (d.has("relu") || d.has("satfinite")) d.unknown("a modifier");
  if (to == "f32" && from == "f64") {
    d.has("sat")
        ? d.lanes<float, double>([](double x) { return saturate(static_cast<float>(x)); })
        : d.lanes<float, double>([](double x) { return canonical(static_cast<float>(x)); });
    return set_rounding(d, rounding(d, ""));
  }
  const auto widens = [&]<class S>() {
    to == "f32" ? d.lanes<float, S>([](S x) { return canonical(static_cast<float>(as_double(x))); })
                : d.lanes<double, S>([](S x) { return canonical(as_double(x)); });
  };
  if (to == "f32" || to == "f64") return with_type(Types<float, f16, bf16>(), from, widens);
  if (to == "f16" && from == "f64")
    return d.lanes<f16, double>([](double x) {
      f16 half;
      narrow(x, half);
      return half;
    });
  return false;
}

}  // namespace

bool decode_conversion(Decoder& d) {
  if (d.name() != "cvt") return false;
  const std::string from = d.type(), to = d.type(1);
  if (d.has("ftz") && (from != "f32" || to == "f32")) d.unknown("ftz");
  if (to == "f16x2" && from == "f32") return narrow_floats<f16>(d, true);
  if (to == "bf16x2" && from == "f32") return narrow_floats<bf16>(d, true);
  const bool from_float = from[0] == 'f' || from[0] == 'b', to_float = to[0] == 'f' || to[0] == 'b';
  if (from_float && to_float) return decode_floats(d, to, from);
  if (!from_float && !to_float)
    return with_type(Bytes(), from, [&]<class S>() {
      with_type(Bytes(), to, [&]<class D>() { set_integer<D, S>(d); }) || (d.unknown(), true);
    });
  if (from_float) {
    const auto pick = [&]<class S>() {
      with_type(Integers(), to, [&]<class D>() { d.lanes<D, S>(ToInteger<D, S>()); }) ||
          (d.unknown(), true);
    };
    return with_type(Types<float, double, f16, bf16>(), from, pick) &&
           set_rounding(d, rounding(d, "i"));
  }
  const auto pick = [&]<class S>() {
    if (to == "f32")
      d.lanes<float, S>([](S s) { return static_cast<float>(s); });
    else if (to == "f64")
      d.lanes<double, S>([](S s) { return static_cast<double>(s); });
    else
      with_type(Types<f16, bf16>(), to,
                [&]<class H>() {
                  d.lanes<H, S>([](S s) {
                    H half;
                    narrow(static_cast<double>(s), half);
                    return half;
                  });
                }) ||
          (d.unknown(), true);
  };
  return with_type(Bytes(), from, pick) && set_rounding(d, rounding(d, ""));
}

}  // namespace cudasim
