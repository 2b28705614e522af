// Ops that regions run in another type than torch's autocast would.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace amp_ext {

// Why autocast cannot be told in which type to run the op; "" if it can. `name` has its namespace.
std::string why_not_listable(const std::string& name);

// The names of all ops of torch's that may be listed, without the namespace.
std::vector<std::string> listable_ops();

// The innermost region of a thread that has lists; by number, with those of the outer ones.
struct OpListRegion {
  int64_t lists = 0;
  const void* under = nullptr;  // the node of the autograd graph during which it was entered
};

// From here on, this thread's regions run `fp32_ops` in float32 and `low_ops` in the type of the
// region. Others stay as they were. Returns what is to be left to.
OpListRegion enter_op_lists(const std::vector<std::string>& low_ops,
                            const std::vector<std::string>& fp32_ops);
void leave_op_lists(const OpListRegion& outer);

// Changes overrides of torch's autocast kernels, which the kernels of listed ops hand on to.
void while_unlisted(const std::function<void()>& change);

}  // namespace amp_ext
