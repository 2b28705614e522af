// Add, multiply, divide and compare sizes, lane by lane.
#include <algorithm>
#include <cfenv>

#include "arithmetic/lanes.h"

namespace cudasim {
namespace {

// ---- modifiers of floating point: .ftz, .sat and roundings --------------------------------------

template <class F, bool kFlush, bool kSaturate>
struct Modified {
  template <class... T>
  float operator()(T... x) const {
    float result = canonical(F{}((kFlush ? flush(x) : x)...));
    if (kFlush) result = flush(result);
    return kSaturate ? saturate(result) : result;
  }
};

template <class... A, class F>
bool float_lanes(Decoder& d, F) {
  const bool flushes = d.has("ftz"), saturates = d.has("sat");
  if (flushes && saturates)
    d.lanes<float, A...>(Modified<F, true, true>());
  else if (flushes)
    d.lanes<float, A...>(Modified<F, true, false>());
  else if (saturates)
    d.lanes<float, A...>(Modified<F, false, true>());
  else
    d.lanes<float, A...>(Modified<F, false, false>());
  return true;
}

bool set_named_rounding(Decoder& d) {
  return set_rounding(d, std::max(rounding_of(d, ""), FE_TONEAREST));
}

// Applies f to floating point of any width; 16-bit operands are computed in fp64.
template <class F>
struct Widened {
  template <class T, class... Rest>
  T operator()(T first, Rest... rest) const {
    if constexpr (is_pair<T>) {
      return {(*this)(first.low, rest.low...), (*this)(first.high, rest.high...)};
    } else if constexpr (is_half<T>) {
      T to;
      narrow(F{}(double{widen(first)}, double{widen(rest)}...), to);
      return to;
    } else {
      return canonical(F{}(first, rest...));
    }
  }
};

template <int kSources, class F>
bool all_floats(Decoder& d, F f) {
  const std::string type = d.type();
  if (type == "f32") {
    if constexpr (kSources == 3)
      float_lanes<float, float, float>(d, f);
    else
      float_lanes<float, float>(d, f);
    return set_named_rounding(d);
  }
  if (d.has("sat") || d.has("relu") || d.has("ftz")) d.unknown("a modifier");
  if (type == "f64")
    return same_type<kSources>(d, Types<double>(), Widened<F>()) && set_named_rounding(d);
  return same_type<kSources>(d, Halves(), Widened<F>());
}

// ---- whole numbers ------------------------------------------------------------------------------

template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, s64, u64>,
                       std::conditional_t<std::is_signed_v<T>, s32, u32>>>;

struct Divide {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return static_cast<T>(-1);
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return static_cast<T>(-a);
    return static_cast<T>(a / b);
  }
};
struct Remainder {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return 0;
    return static_cast<T>(a % b);
  }
};

bool decode_products(Decoder& d) {
  const std::string type = d.type();
  const bool adds = d.name() == "mad";
  if (d.has("wide"))
    return with_type(Types<u16, s16, u32, s32>(), type, [&]<class T>() {
      using W = Wide<T>;
      adds ? d.lanes<W, T, T, W>([](T a, T b, W c) { return static_cast<W>(W{a} * b + c); })
           : d.lanes<W, T, T>([](T a, T b) { return static_cast<W>(W{a} * b); });
    });
  if (d.has("hi"))
    return with_type(Integers(), type, [&]<class T>() {
      constexpr auto high = [](T a, T b) {
        return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b) >> (8 * sizeof(T)));
      };
      adds ? d.lanes<T, T, T, T>(
                 [](T a, T b, T c) { return static_cast<T>(decltype(high){}(a, b) + c); })
           : d.lanes<T, T, T>(high);
    });
  if (d.has("sat") || d.has("cc")) d.unknown("a modifier");
  return with_type(Integers(), type, [&]<class T>() {
    adds ? d.lanes<T, T, T, T>(
               [](T a, T b, T c) { return static_cast<T>(u64(a) * u64(b) + u64(c)); })
         : d.lanes<T, T, T>([](T a, T b) { return static_cast<T>(u64(a) * u64(b)); });
  });
}

// ---- minimum and maximum ------------------------------------------------------------------------

template <bool kMax, bool kNan>
struct Extreme {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return (a < b) != kMax ? a : b;
    } else if constexpr (is_pair<T>) {
      return {(*this)(a.low, b.low), (*this)(a.high, b.high)};
    } else if constexpr (is_half<T>) {
      const float x = widen(a), y = widen(b);
      if ((x != x && y != y) || (kNan && (x != x || y != y))) return {0x7fff};
      if (x != x) return b;
      if (y != y) return a;
      return takes_first(x, y) ? a : b;
    } else {
      if ((a != a && b != b) || (kNan && (a != a || b != b))) return canonical(a + b);
      if (a != a) return b;
      if (b != b) return a;
      return takes_first(a, b) ? a : b;
    }
  }
  // -0 is below +0.
  template <class T>
  static bool takes_first(T a, T b) {
    if (a == b) return std::signbit(a) != kMax;
    return (a < b) != kMax;
  }
};

template <bool kMax, bool kNan>
bool decode_extreme(Decoder& d) {
  const std::string type = d.type();
  if (d.has("xorsign") || d.has("relu") || d.operands.size() != 3) d.unknown();
  constexpr Extreme<kMax, kNan> extreme;
  if (type == "f32") return float_lanes<float, float>(d, extreme);
  return same_type<2>(d, Integers(), extreme) || same_type<2>(d, Floats(), extreme) ||
         same_type<2>(d, Halves(), extreme);
}

// ---- signs --------------------------------------------------------------------------------------

template <bool kAbsolute>
struct Sign {
  template <class T>
  T operator()(T a) const {
    if constexpr (is_pair<T>)
      return {(*this)(a.low), (*this)(a.high)};
    else if constexpr (is_half<T>)
      return {static_cast<u16>(kAbsolute ? a.bits & 0x7fff : a.bits ^ 0x8000)};
    else if constexpr (is_float<T>)
      return kAbsolute ? std::fabs(a) : -a;
    else
      return static_cast<T>(kAbsolute && a > 0 ? a : -a);
  }
};

template <bool kAbsolute>
bool decode_sign(Decoder& d) {
  const std::string type = d.type();
  if (type == "f32" && d.has("ftz"))
    return d.lanes<float, float>([](float a) { return flush(Sign<kAbsolute>()(a)); });
  constexpr Sign<kAbsolute> sign;
  return same_type<1>(d, Types<s16, s32, s64>(), sign) || same_type<1>(d, Floats(), sign) ||
         same_type<1>(d, Halves(), sign);
}

}  // namespace

bool decode_arithmetic(Decoder& d) {
  const std::string& name = d.name();
  const std::string type = d.type();
  const bool floating = type[0] == 'f' || type[0] == 'b';
  if (name == "add" || name == "sub") {
    if (!floating && (d.has("sat") || d.has("cc"))) d.unknown("a modifier");
    if (name == "add") {
      if (floating) return all_floats<2>(d, [](auto a, auto b) { return a + b; });
      return same_type<2>(d, Integers(), [](auto a, auto b) { return a + b; });
    }
    if (floating) return all_floats<2>(d, [](auto a, auto b) { return a - b; });
    return same_type<2>(d, Integers(), [](auto a, auto b) { return a - b; });
  }
  if (name == "fma" || (name == "mad" && floating))
    return all_floats<3>(d, [](auto a, auto b, auto c) { return std::fma(a, b, c); });
  if (name == "mul" && floating) return all_floats<2>(d, [](auto a, auto b) { return a * b; });
  if (name == "mul" || name == "mad") return decode_products(d);
  if (name == "div") {
    if (floating) return all_floats<2>(d, [](auto a, auto b) { return a / b; });
    return same_type<2>(d, Integers(), Divide());
  }
  if (name == "rem") return same_type<2>(d, Integers(), Remainder());
  if (name == "min")
    return d.has("NaN") ? decode_extreme<false, true>(d) : decode_extreme<false, false>(d);
  if (name == "max")
    return d.has("NaN") ? decode_extreme<true, true>(d) : decode_extreme<true, false>(d);
  if (name == "neg") return decode_sign<false>(d);
  if (name == "abs") return decode_sign<true>(d);
  if (name == "copysign")  // the sign of the first, the size of the second
    return same_type<2>(d, Floats(), [](auto a, auto b) { return std::copysign(b, a); });
  return false;
}

}  // namespace cudasim
