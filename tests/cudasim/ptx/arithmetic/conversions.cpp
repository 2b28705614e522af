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

// ---- to 16 bits ---------------------------------------------------------------------------------

template <class H, bool kToZero>
struct Narrow {
  H operator()(float x) const {
    H half;
    if constexpr (std::is_same_v<H, bf16>)
      narrow(x, half, kToZero);
    else
      narrow(x, half);
    return half;
  }
};

template <class H, bool kToZero>
bool set_narrow(Decoder& d, bool is_pair) {
  using One = Narrow<H, kToZero>;
  if (is_pair)  // the first source is the upper half
    return d.lanes<x2<H>, float, float>(
        [](float high, float low) { return x2<H>{One{}(low), One{}(high)}; });
  return d.lanes<H, float>(One());
}

template <class H>
bool narrow_floats(Decoder& d, bool is_pair) {
  const int mode = rounding_of(d, "");
  if (mode != FE_TONEAREST && mode != FE_TOWARDZERO) d.unknown("a rounding");
  if (mode == FE_TONEAREST) return set_narrow<H, false>(d, is_pair);
  set_narrow<H, true>(d, is_pair);
  return std::is_same_v<H, bf16> || set_rounding(d, mode);
}

// ---- between floats -----------------------------------------------------------------------------

template <class T>
bool round_to_whole(Decoder& d) {
  if (d.has("sat") && std::is_same_v<T, float> && rounding_of(d, "i") < 0)
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
  return set_rounding(d, rounding_of(d, "i"));
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
  if (to == "f32" && from == "f64") {
    d.has("sat")
        ? d.lanes<float, double>([](double x) { return saturate(static_cast<float>(x)); })
        : d.lanes<float, double>([](double x) { return canonical(static_cast<float>(x)); });
    return set_rounding(d, rounding_of(d, ""));
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

void rounded(Warp& w, const Instruction& it, u32 lanes) {
  fesetround(it.mode);
  it.inner(w, it, lanes);
  fesetround(FE_TONEAREST);
}

}  // namespace

int rounding_of(const Decoder& d, const char* suffix) {
  static const std::pair<const char*, int> modes[] = {
      {"rn", FE_TONEAREST}, {"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}};
  for (const auto& [name, mode] : modes)
    if (d.has((std::string(name) + suffix).c_str())) return mode;
  return -1;
}

bool set_rounding(Decoder& d, int mode) {
  if (mode < 0) d.unknown("a rounding");
  if (mode != FE_TONEAREST) {
    d.to.mode = mode;
    d.to.inner = d.to.run;
    d.to.run = rounded;
  }
  return true;
}

bool decode_conversion(Decoder& d) {
  if (d.name() != "cvt") return false;
  const std::string from = d.type(), to = d.type(1);
  if (d.has("ftz") && (from != "f32" || to == "f32")) d.unknown("ftz");
  if (d.has("relu") || d.has("satfinite")) d.unknown("a modifier");
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
           set_rounding(d, rounding_of(d, "i"));
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
  return with_type(Bytes(), from, pick) && set_rounding(d, rounding_of(d, ""));
}

}  // namespace cudasim
