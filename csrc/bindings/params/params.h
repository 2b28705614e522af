// Collects the parameters of an optimizer, in the order of its groups.
#pragma once

#include <pybind11/pybind11.h>

#include <span>
#include <vector>

namespace amp_ext {

// Borrows the parameters from the lists of the groups, and keeps the lists alive.
class Params {
 public:
  Params() = default;
  explicit Params(pybind11::handle param_groups);

  size_t groups() const { return groups_.size(); }
  std::span<PyObject* const> all() const { return all_; }
  // The index of a group's first parameter in all().
  size_t first(size_t group) const { return groups_[group].first; }
  size_t size(size_t group) const { return groups_[group].count; }

  // References to all parameters.
  std::vector<pybind11::object> owners() const;

 private:
  struct Group {
    pybind11::object list;  // a list or tuple
    size_t first, count;
  };

  std::vector<Group> groups_;
  std::vector<PyObject*> all_;
};

}  // namespace amp_ext
