#include "backend.h"

namespace amp_ext {

Status cuda::CudaBackend::adam(const AdamArgs&, Services&) const { return Status::not_built; }

}  // namespace amp_ext
