// What this folder has to do with Python.
#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds what amp_ext/tune.py and amp_ext/_table.py need to the module.
void bind_tune(pybind11::module_& m);

// While it exists, this thread has the GIL and may call Python, which torch.compile does not trace.
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
