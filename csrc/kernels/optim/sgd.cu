#include "backend.h"

namespace amp_ext {

Status cuda::CudaBackend::sgd(const SgdArgs&, Services&) const { return Status::not_built; }

}  // namespace amp_ext
