// A replacement for NVIDIA's management library of machines with a driver. When memory is short,
// torch asks it for the processes on a device. torch.cuda finds no function here to count devices,
// and asks the CUDA runtime.
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
