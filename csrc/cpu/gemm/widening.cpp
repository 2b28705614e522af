#include "gemm/large.h"

namespace amp_ext::cpu {

Widening::Widening(const GemmArgs& g, int64_t rows, int64_t columns)
    : k_(g.k),
      rows_(rows),
      columns_(columns),
      depth_(block_extent(g.k, std::max(rows, columns))),
      a_(g.a),
      b_(g.b) {}

void Widening::multiply(const Part& part, float* workspace, const Host& host) {
  for (int64_t p = 0; p < k_; p += depth_) {
    const Range depth{p, std::min(depth_, k_ - p)};
    const Block& left = a_.block(part.matrix, part.rows, depth, workspace, host);
    const Block& right =
        b_.block(part.matrix, depth, part.columns, workspace + rows_ * depth_, host);
    host.library_gemm({left.data, right.data, part.c, part.rows.size, part.columns.size, depth.size,
                       left.ld, right.ld, part.ldc, left.transposed, right.transposed,
                       part.adds || p > 0});
  }
}

}  // namespace amp_ext::cpu
