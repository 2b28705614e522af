// Compute roots, reciprocals and the transcendental functions.
//
// The approximations of the hardware are computed in fp64 and rounded once.
#include <cfenv>

#include "arithmetic/lanes.h"

namespace cudasim {
namespace {

template <class F, bool kFlush>
struct Approximation {
  float operator()(float x) const {
    if (kFlush) x = flush(x);
    const float result = canonical(static_cast<float>(F{}(static_cast<double>(x))));
    return kFlush ? flush(result) : result;
  }
};

template <class F>
bool approximate(Decoder& d, F) {
  if (d.type() == "f32")
    return d.has("ftz") ? d.lanes<float, float>(Approximation<F, true>())
                        : d.lanes<float, float>(Approximation<F, false>());
  if (d.type() == "f64") return d.lanes<double, double>([](double x) { return canonical(F{}(x)); });
  return with_type(Halves(), d.type(), [&]<class T>() {
    d.lanes<T, T>([](T x) {
      const auto one = [](auto h) {
        decltype(h) to;
        narrow(F{}(double{widen(h)}), to);
        return to;
      };
      if constexpr (is_pair<T>)
        return T{one(x.low), one(x.high)};
      else
        return one(x);
    });
  });
}

enum Test { finite, infinite, number, notanumber, normal, subnormal };

template <class T>
void testp(Warp& w, const Instruction& it, u32 lanes) {
  u32 bits = 0;
  for (int i = 0; i < kLanes; ++i) {
    const int kind = std::fpclassify(get<T>(w.source(it.rows[0]), i));
    const bool holds = it.kind == finite       ? kind != FP_INFINITE && kind != FP_NAN
                       : it.kind == infinite   ? kind == FP_INFINITE
                       : it.kind == number     ? kind != FP_NAN
                       : it.kind == notanumber ? kind == FP_NAN
                       : it.kind == normal     ? kind == FP_NORMAL || kind == FP_ZERO
                                               : kind == FP_SUBNORMAL;
    bits |= static_cast<u32>(holds) << i;
  }
  w.set_predicate(it.predicates[0], lanes, bits);
}

}  // namespace

bool decode_functions(Decoder& d) {
  const std::string& name = d.name();
  if (d.has("rz") || d.has("rm") || d.has("rp")) {
    if (name == "rcp" || name == "sqrt") d.unknown("a rounding");
    return false;
  }
  // fp32 quotients and roots of fp64 that are rounded again are the exact ones.
  if (name == "rcp") return approximate(d, [](double x) { return 1.0 / x; });
  if (name == "sqrt") return approximate(d, [](double x) { return std::sqrt(x); });
  if (name == "rsqrt") return approximate(d, [](double x) { return 1.0 / std::sqrt(x); });
  if (name == "ex2") return approximate(d, [](double x) { return std::exp2(x); });
  if (name == "lg2") return approximate(d, [](double x) { return std::log2(x); });
  if (name == "tanh") return approximate(d, [](double x) { return std::tanh(x); });
  if (name == "sin") return approximate(d, [](double x) { return std::sin(x); });
  if (name == "cos") return approximate(d, [](double x) { return std::cos(x); });
  if (name != "testp") return false;
  static const char* const tests[] = {"finite",     "infinite", "number",
                                      "notanumber", "normal",   "subnormal"};
  for (int i = 0; i < 6; ++i)
    if (d.has(tests[i])) d.to.kind = i;
  d.set_predicate(0, d.operands.at(0));
  d.to.rows[0] = d.source(d.operands.at(1), d.type() == "f64" ? 64 : 32);
  d.to.run = d.type() == "f64" ? testp<double> : testp<float>;
  return true;
}

}  // namespace cudasim
