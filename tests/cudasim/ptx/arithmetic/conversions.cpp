// Convert between types, and run instructions under modifiers.
#include <immintrin.h>

#include "arithmetic/lanes.h"

namespace cudasim {
namespace {

// To whole numbers. Out of range: the nearest. NaN: 0, or the sign bit alone of 64 bits and from
// fp64.
template <class D, class S>
D to_integer(S s) {
  using Limits = std::numeric_limits<D>;
  const double x = static_cast<double>(widen(s));
  if (x != x) {
    if (!std::is_same_v<S, double> && sizeof(D) < 8) return 0;
    return static_cast<D>(std::make_unsigned_t<D>{1} << (8 * sizeof(D) - 1));
  }
  const double whole = std::nearbyint(x);
  if (whole < static_cast<double>(Limits::min())) return Limits::min();
  if (whole >= std::ldexp(1.0, Limits::digits)) return Limits::max();
  return static_cast<D>(whole);
}

template <class D, class S, bool kToZero>
struct Convert {
  D operator()(S s) const {
    if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
      return static_cast<D>(s);
    } else if constexpr (std::is_integral_v<D>) {
      return to_integer<D>(s);
    } else if constexpr (is_half<D>) {
      D half;
      if constexpr (std::is_same_v<D, bf16> && kToZero)
        narrow(static_cast<float>(widen(s)), half, kToZero);
      else if constexpr (std::is_same_v<S, float>)
        narrow(s, half);
      else
        narrow(static_cast<double>(widen(s)), half);
      return half;
    } else {
      return canonical(static_cast<D>(widen(s)));
    }
  }
};

// A narrow result fills a register of 16 bits.
template <class D>
using Register = std::conditional_t<std::is_same_v<D, u8>, u16,
                                    std::conditional_t<std::is_same_v<D, s8>, s16, D>>;

template <bool kToZero>
bool decode_types(Decoder& d) {
  using Numbers = Types<u8, s8, u16, s16, u32, s32, u64, s64, float, double, f16, bf16>;
  const std::string from = d.type(), to = d.type(1);
  if (from == "f32" && to.ends_with("f16x2"))  // the first source is the upper half
    return with_type(Types<f16, bf16>(), to.substr(0, to.size() - 2), [&]<class H>() {
      using One = Convert<H, float, kToZero>;
      d.lanes<x2<H>, float, float>(
          [](float high, float low) { return x2<H>{One{}(low), One{}(high)}; });
    });
  return with_type(Numbers(), from, [&]<class S>() {
    with_type(Numbers(), to, [&]<class D>() {
      d.lanes<Register<D>, S>([](S s) { return Register<D>(Convert<D, S, kToZero>{}(s)); });
    });
  });
}

void modified(Warp& w, const Instruction& it, u32 lanes) {
  const u32 state = _mm_getcsr();
  _mm_setcsr(state | static_cast<u32>(it.mode));
  it.inner(w, it, lanes);
  _mm_setcsr(state);
  if (!it.flags) return;
  each_lane(lanes, [&](int lane) {
    float& x = w.destination<float>(it.rows[0])[lane];
    x = x > 0 ? std::min(x, 1.0f) : 0.0f;
  });
}

}  // namespace

bool set_modifiers(Decoder& d) {
  const std::string type = d.type();
  const bool has_few_bits = type.find("16") != std::string::npos;
  if (d.has("relu") || d.has("satfinite") || (has_few_bits && (d.has("ftz") || d.has("sat"))))
    d.unknown("a modifier");
  if (d.has("rz") || d.has("rzi")) d.to.mode = _MM_ROUND_TOWARD_ZERO;
  if (d.has("rm") || d.has("rmi")) d.to.mode = _MM_ROUND_DOWN;
  if (d.has("rp") || d.has("rpi")) d.to.mode = _MM_ROUND_UP;
  if (d.has("ftz")) d.to.mode |= 0x8040;  // MXCSR's flush to zero, of results and operands
  d.to.flags = d.has("sat");
  if (!d.to.mode && !d.to.flags) return true;
  d.to.inner = d.to.run;
  return d.runs(modified);
}

bool decode_conversion(Decoder& d) {
  if (d.name() != "cvt") return false;
  const std::string from = d.type(), to = d.type(1);
  if (d.has("sat") && to != "f32") d.unknown("a modifier");
  if (from == to && from[0] == 'f' && !d.has("sat")) d.unknown("a rounding");
  if (to.starts_with("bf16") && (d.has("rm") || d.has("rp"))) d.unknown("a rounding");
  return (d.has("rz") ? decode_types<true>(d) : decode_types<false>(d)) && d.to.run &&
         set_modifiers(d);
}

}  // namespace cudasim
