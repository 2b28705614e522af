// What products say of the gradients that they wrote in a backward pass, so that the scaler need
// not read those again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>

namespace amp_ext {

// A float that is 0, and an infinity once something is known not to be finite. Each is used once.
struct Flag {
  at::Tensor pool;     // keeps it alive
  c10::Stream stream;  // of its device, on which the pool was cleared and the flag is written
  float* address;
};

// Whether weight gradients are judged by their products, in the whole process; off at first. Turned
// on or off, all verdicts are forgotten.
void judge_gradients(bool on);
bool judges_gradients();
void forget_verdicts();

// While one of these lives, products of this thread that this package's kernels form are asked.
class AskProducts {
 public:
  explicit AskProducts(bool asked);
  AskProducts(const AskProducts&) = delete;
  AskProducts& operator=(const AskProducts&) = delete;
  ~AskProducts();

 private:
  bool before_;
};

// For a kernel that is about to write `result` on the current stream: the flag for its verdict, if
// it is asked for one.
std::optional<Flag> flag_for(const at::Tensor& result);

// After that: the verdict holds as long as nobody else has written to `result`.
void remember_verdict(const at::Tensor& result, const Flag& flag);

// The flag of a gradient that is just what a product has left: the same memory with the same view
// of it, no other tensor on it, not written since as far as its version tells. A verdict is given
// once: it would not show what those who took it have written.
std::optional<Flag> take_verdict(const at::Tensor& grad);

}  // namespace amp_ext
