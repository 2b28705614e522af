// Calls Python from the code of the backends.
#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Gives this thread the GIL while it exists. torch.compile does not trace the thread's Python
// calls.
class UntracedPython {
 public:
  UntracedPython() = default;
  UntracedPython(const UntracedPython&) = delete;
  ~UntracedPython() { set_(before_); }

 private:
  pybind11::gil_scoped_acquire gil_;
  pybind11::object set_ =
      pybind11::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame");
  pybind11::object before_ = set_(pybind11::none());
};

}  // namespace amp_ext
