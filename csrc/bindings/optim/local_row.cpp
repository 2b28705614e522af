#include "optim/local_row.h"

#include <torch/csrc/autograd/python_variable.h>

#include "checks/dtensor.h"
#include "optim/served.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

PyObject* local_state(PyObject* object, const Spread& spread) {
  if (!object || !is_dtensor(object) || !(spread_of(object) == spread)) return nullptr;
  return local_of(object);
}

}  // namespace

const char* localize(PyObject* param, const std::vector<state::Name>& needed, ParamRow& row,
                     StateObjects& objects, bool& is_placed) {
  const Spread spread = spread_of(param);
  if (spread.has_partial()) return "is a DTensor that is a sum over processes (Partial)";
  const py::object grad = py::handle(param).attr("grad");
  const char* const other_grad = "is a DTensor whose gradient is not a DTensor on the same mesh";
  if (!is_dtensor(grad.ptr())) return other_grad;
  const Spread of_grad = spread_of(grad.ptr());
  is_placed = of_grad == spread;
  if (!is_placed && !of_grad.mesh.equal(spread.mesh)) return other_grad;
  row.dtensor = &THPVariable_Unpack(param);
  row.grad = &THPVariable_Unpack(local_of(grad.ptr()));
  for (size_t i = 0; i < needed.size(); ++i) {
    if (needed[i] == state::autocast_copy && row.param->scalar_type() == at::kFloat)
      return "is a DTensor, whose local tensor autocast does not use: leave out autocast_copies";
    if (needed[i] != state::step) objects[i] = local_state(objects[i], spread);
  }
  return nullptr;
}

}  // namespace amp_ext
