// The part of the CUDA runtime that launchers call, and the options and counters for Python.
#include "simt.h"

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = simt::options.multiprocessors;
  return cudaSuccess;
}

extern "C" {

void simt_set_options(uint64_t seed, int resident_blocks, int multiprocessors) {
  simt::options = {seed, resident_blocks, multiprocessors};
}

const char* simt_report() { return simt::report(); }

void simt_counters(simt::Counters* result) { *result = simt::counters; }

}  // extern "C"
