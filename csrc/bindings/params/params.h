// Collects the parameters of an optimizer, in the order of its groups.
#pragma once

#include <pybind11/pybind11.h>

#include <span>
#include <vector>

namespace amp_ext {

// Keeps the parameters alive.
class Params {
 public:
  explicit Params(pybind11::handle param_groups) {
    for (const pybind11::handle group : param_groups) {
      const pybind11::object params = group[pybind11::str("params")];
      // A copy of the group's list: the group's own may change.
      auto list = pybind11::reinterpret_steal<pybind11::object>(PySequence_List(params.ptr()));
      if (!list) throw pybind11::error_already_set();
      PyObject** const objects = PySequence_Fast_ITEMS(list.ptr());
      const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(list.ptr()));
      groups_.push_back({std::move(list), all_.size(), n});
      all_.insert(all_.end(), objects, objects + n);
    }
  }

  size_t groups() const { return groups_.size(); }
  std::span<PyObject* const> all() const { return all_; }
  // The index of a group's first parameter in all().
  size_t first(size_t group) const { return groups_[group].first; }
  size_t size(size_t group) const { return groups_[group].count; }

 private:
  struct Group {
    pybind11::object list;
    size_t first, count;
  };

  std::vector<Group> groups_;
  std::vector<PyObject*> all_;
};

}  // namespace amp_ext
