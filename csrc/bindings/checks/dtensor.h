// DTensors of torch.distributed, of which each process holds a part.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace amp_ext {

bool is_dtensor(PyObject* object);

// The part of a DTensor that this process holds; waits for one that is still on its way from
// another process. The DTensor keeps it alive.
PyObject* local_of(PyObject* dtensor);

// Where a DTensor's elements are: a mesh of processes, and a placement for each dimension of it.
struct Spread {
  pybind11::object mesh, placements;

  bool operator==(const Spread& other) const;
  // Whether it is a sum over processes that is still to be made.
  bool has_partial() const;
};

Spread spread_of(PyObject* dtensor);

// Gives the gradient of a DTensor, which it has, the DTensor's own placements, by communication
// where it has others: what autograd leaves may be a sum that is still to be made over processes.
// False, and nothing done, for a gradient that is no DTensor on the same mesh, and where the
// DTensor has a Partial placement itself.
bool spread_grad_as_param(PyObject* param);

}  // namespace amp_ext
