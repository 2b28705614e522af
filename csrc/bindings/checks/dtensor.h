// Reads DTensors of torch.distributed. Each process holds a part of a DTensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace amp_ext {

bool is_dtensor(PyObject* object);

// Returns the local tensor of a DTensor; the DTensor keeps it alive. Waits for a local tensor that
// is still on its way from another process.
PyObject* local_of(PyObject* dtensor);

// The mesh of processes of a DTensor, and its placement for each dimension of the mesh.
struct Sharding {
  pybind11::object mesh, placements;

  bool operator==(const Sharding& other) const;
  // Returns whether the DTensor is a sum over processes that is still to be made.
  bool has_partial() const;
};

Sharding sharding_of(PyObject* dtensor);

// Redistributes the gradient of a DTensor to the DTensor's placements: autograd may leave a sum
// that is still to be made over processes. Returns false, and does nothing, for a gradient that is
// no DTensor on the same mesh.
bool redistribute_grad(PyObject* param);

}  // namespace amp_ext
