// Compute roots, reciprocals and the transcendental functions.
//
// The approximations of the hardware are computed in fp64 and rounded once.
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
  d.unknown("a type");
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
  return false;
}

}  // namespace cudasim
