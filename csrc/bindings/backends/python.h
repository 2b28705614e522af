// Calls Python from the code of the backends.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds the functions and classes for amp_ext/tune.py to the module.
void bind_tune(pybind11::module_& m);

// Gives this thread the GIL while it exists. torch.compile does not trace the thread's Python
// calls.
class UntracedPython {
 public:
  UntracedPython() = default;
  UntracedPython(const UntracedPython&) = delete;
  ~UntracedPython() { set()(before_); }

 private:
  static const pybind11::object& set() {
    PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<pybind11::object> function;
    return function
        .call_once_and_store_result([] {
          return pybind11::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame");
        })
        .get_stored();
  }

  pybind11::gil_scoped_acquire gil_;
  pybind11::object before_ = set()(pybind11::none());
};

}  // namespace amp_ext
