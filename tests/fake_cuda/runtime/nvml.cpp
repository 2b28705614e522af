// In the place of NVIDIA's management library, which a machine with a driver has. torch asks it for
// the processes on a device when memory is short; torch.cuda, which finds no function to count
// devices here, asks the CUDA runtime.
#define NVML(name) extern "C" __attribute__((visibility("default"))) int name

namespace {
constexpr int kNotSupported = 3;
}

NVML(nvmlInit_v2)() { return 0; }
NVML(nvmlDeviceGetHandleByPciBusId_v2)(const char*, void** device) {
  *device = nullptr;
  return 0;
}
NVML(nvmlDeviceGetComputeRunningProcesses)(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
NVML(nvmlDeviceGetNvLinkRemoteDeviceType)() { return kNotSupported; }
NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2)() { return kNotSupported; }
NVML(nvmlSystemGetCudaDriverVersion_v2)() { return kNotSupported; }
