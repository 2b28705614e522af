// Add, multiply, divide, compare sizes, and compute functions, lane by lane.
#include "arithmetic/lanes.h"

namespace cudasim {
namespace {

// ---- floating point -----------------------------------------------------------------------------

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
bool all_floats(Decoder& d, F) {
  return same_type<kSources>(d, Floats(), Widened<F>()) && set_modifiers(d);
}

// The approximations of the hardware are computed in fp64 and rounded once. Quotients and roots
// that are rounded again are the exact ones.
template <class F>
bool approximate(Decoder& d, F) {
  if (d.has("rz") || d.has("rm") || d.has("rp")) d.unknown("a rounding");
  return with_type(Types<float, double>(), d.type(), [&]<class T>() {
    d.lanes<T, T>([](T x) { return canonical(static_cast<T>(F{}(static_cast<double>(x)))); });
    set_modifiers(d);
  });
}

// ---- whole numbers ------------------------------------------------------------------------------

template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, s64, u64>,
                       std::conditional_t<std::is_signed_v<T>, s32, u32>>>;

template <bool kRemainder>
struct Divide {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return kRemainder ? a : static_cast<T>(-1);
    if (b == static_cast<T>(-1) && std::is_signed_v<T>)
      return kRemainder ? T{0} : static_cast<T>(-a);
    return static_cast<T>(kRemainder ? a % b : a / b);
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
  if (d.has("sat") || d.has("cc")) d.unknown("a modifier");
  if (d.has("hi") && !adds)
    return with_type(Integers(), type, [&]<class T>() {
      d.lanes<T, T, T>(
          [](T a, T b) { return static_cast<T>(Wide<T>{a} * Wide<T>{b} >> (8 * sizeof(T))); });
    });
  if (!d.has("lo")) d.unknown("a half");
  if (adds)
    return same_type<3>(d, Integers(), [](auto a, auto b, auto c) { return u64(a) * b + c; });
  return same_type<2>(d, Integers(), [](auto a, auto b) { return u64(a) * b; });
}

// ---- minimum, maximum and signs -----------------------------------------------------------------

using Numbers = Types<u16, s16, u32, s32, u64, s64, float, double>;

template <bool kMax, bool kNan>
struct Extreme {
  template <class T>
  T operator()(T a, T b) const {
    if (a != a || b != b) return !kNan && a == a ? a : !kNan && b == b ? b : canonical(a + b);
    if (a == b) return std::signbit(static_cast<double>(a)) != kMax ? a : b;  // -0 is below +0
    return (a < b) != kMax ? a : b;
  }
};

template <bool kMax, bool kNan>
bool decode_extreme(Decoder& d) {
  if (d.has("xorsign")) d.unknown();
  return same_type<2>(d, Numbers(), Extreme<kMax, kNan>()) && set_modifiers(d);
}

template <class F>
bool decode_sign(Decoder& d, F f) {
  if (d.has("ftz")) d.unknown("a modifier");
  return same_type<1>(d, Numbers(), f);
}

bool decode_function(Decoder& d) {
  const std::string& name = d.name();
  if (name == "rcp") return approximate(d, [](double x) { return 1.0 / x; });
  if (name == "sqrt") return approximate(d, [](double x) { return std::sqrt(x); });
  if (name == "rsqrt") return approximate(d, [](double x) { return 1.0 / std::sqrt(x); });
  if (name == "ex2") return approximate(d, [](double x) { return std::exp2(x); });
  if (name == "lg2") return approximate(d, [](double x) { return std::log2(x); });
  if (name == "tanh") return approximate(d, [](double x) { return std::tanh(x); });
  if (name == "sin") return approximate(d, [](double x) { return std::sin(x); });
  if (name == "cos") return approximate(d, [](double x) { return std::cos(x); });
  return false;
}

}  // namespace

bool decode_arithmetic(Decoder& d) {
  const std::string& name = d.name();
  const std::string type = d.type();
  const bool floating = type[0] == 'f' || type[0] == 'b';
  if (name == "add" || name == "sub" || name == "div") {
    if (!floating && (d.has("sat") || d.has("cc"))) d.unknown("a modifier");
    if (name == "add") {
      if (floating) return all_floats<2>(d, [](auto a, auto b) { return a + b; });
      return same_type<2>(d, Integers(), [](auto a, auto b) { return a + b; });
    }
    if (name == "sub") {
      if (floating) return all_floats<2>(d, [](auto a, auto b) { return a - b; });
      return same_type<2>(d, Integers(), [](auto a, auto b) { return a - b; });
    }
    if (floating) return all_floats<2>(d, [](auto a, auto b) { return a / b; });
    return same_type<2>(d, Integers(), Divide<false>());
  }
  if (name == "fma" || (name == "mad" && floating))
    return all_floats<3>(d, [](auto a, auto b, auto c) { return std::fma(a, b, c); });
  if (name == "mul" && floating) return all_floats<2>(d, [](auto a, auto b) { return a * b; });
  if (name == "mul" || name == "mad") return decode_products(d);
  if (name == "rem") return same_type<2>(d, Integers(), Divide<true>());
  if (name == "min")
    return d.has("NaN") ? decode_extreme<false, true>(d) : decode_extreme<false, false>(d);
  if (name == "max")
    return d.has("NaN") ? decode_extreme<true, true>(d) : decode_extreme<true, false>(d);
  if (name == "neg") return decode_sign(d, [](auto a) { return -a; });
  if (name == "abs")
    return decode_sign(d, [](auto a) {
      if constexpr (std::is_floating_point_v<decltype(a)>) return std::fabs(a);
      return a < 0 ? -a : a;
    });
  return decode_function(d);
}

}  // namespace cudasim
