// Capture of streams into graphs, and their replay: of the operations that the captured edges allow
// to run next, any may.
#include <algorithm>

#include "runtime.h"

struct CUgraph_st {
  std::shared_ptr<const fake_cuda::Nodes> nodes;
};

struct CUgraphExec_st {
  std::shared_ptr<const fake_cuda::Nodes> nodes;
  CUstream_st* stream = nullptr;  // of the last launch; the next one waits for it
  int64_t at = 0;
};

namespace fake_cuda {
namespace {

auto& captures = *new std::vector<std::shared_ptr<Capture>>;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool forbids(const Capture& capture) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == std::this_thread::get_id())
    return capture.mode != cudaStreamCaptureModeRelaxed;
  return thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

template <class Forbids>
cudaError_t end_captures(const char* call, Forbids forbids) {
  bool forbidden = false;
  for (const auto& capture : captures)
    if (forbids(*capture)) capture->invalid = forbidden = true;
  if (!forbidden) return cudaSuccess;
  return refuse(cudaErrorStreamCaptureUnsupported, "%s while a stream is captured", call);
}

// Whether all nodes come before the end of the stream that the capture began with.
bool is_joined(const Capture& capture) {
  std::set<size_t> reached;
  std::vector<size_t> left(capture.origin->last.begin(), capture.origin->last.end());
  while (!left.empty()) {
    const size_t node = left.back();
    left.pop_back();
    if (!reached.insert(node).second) continue;
    const auto& after = capture.nodes[node].after;
    left.insert(left.end(), after.begin(), after.end());
  }
  return reached.size() == capture.nodes.size();
}

struct Replay {
  std::shared_ptr<const Nodes> nodes;
  std::set<size_t> done{};

  // Runs one of the operations that may come next; true if it was the last one.
  bool step() {
    const auto is_done = [&](size_t node) { return done.contains(node); };
    std::vector<size_t> ready;
    for (size_t i = 0; i < nodes->size(); ++i)
      if (!done.contains(i) && std::ranges::all_of((*nodes)[i].after, is_done)) ready.push_back(i);
    if (ready.empty()) return true;
    const size_t chosen = settings().order == Order::now    ? ready.front()
                          : settings().order == Order::late ? ready.back()
                                                            : ready[random(ready.size())];
    (*nodes)[chosen].run();
    done.insert(chosen);
    return done.size() == nodes->size();
  }
};

}  // namespace

cudaError_t check_captures(const char* call) { return end_captures(call, forbids); }

cudaError_t check_device_captures(const char* call) {
  return end_captures(
      call, [](const Capture& capture) { return capture.origin->device == current_device; });
}

cudaError_t refuse_captured(Stream& stream, const char* what) {
  stream.capture->invalid = true;
  return refuse(cudaErrorStreamCaptureUnsupported, "%s on a stream that is captured", what);
}

}  // namespace fake_cuda

using namespace fake_cuda;

CUDA(cudaThreadExchangeStreamCaptureMode)(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

CUDA(cudaStreamBeginCapture)(cudaStream_t stream, cudaStreamCaptureMode mode) {
  FAKE_CUDA_LOCK;
  static unsigned long long ids = 0;
  if (!stream || stream == cudaStreamLegacy)
    return refuse(cudaErrorStreamCaptureUnsupported, "capture of the default stream");
  if (stream->capture) return refuse(cudaErrorIllegalState, "capture of a stream that is captured");
  stream->last.clear();
  stream->capture = captures.emplace_back(std::make_shared<Capture>());
  *stream->capture = {++ids, mode, std::this_thread::get_id(), stream, {stream}, {}};
  return cudaSuccess;
}

CUDA(cudaStreamEndCapture)(cudaStream_t stream, cudaGraph_t* graph) {
  FAKE_CUDA_LOCK;
  *graph = nullptr;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return refuse(cudaErrorIllegalState, "no capture to end");
  if (capture->origin != stream)
    return refuse(cudaErrorStreamCaptureUnmatched, "a capture ends on another stream");
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id())
    return refuse(cudaErrorStreamCaptureWrongThread, "a capture ends on another thread");
  for (Stream* other : capture->streams) other->capture = nullptr;
  capture->streams.clear();
  std::erase(captures, capture);
  const bool joined = is_joined(*capture);
  const auto nodes = std::make_shared<const Nodes>(std::move(capture->nodes));
  discard(nodes);
  if (capture->invalid) return refuse(cudaErrorStreamCaptureInvalidated, "an invalid capture");
  if (!joined) return refuse(cudaErrorStreamCaptureUnjoined, "a captured stream was not joined");
  *graph = new CUgraph_st{nodes};
  return cudaSuccess;
}

CUDA(cudaStreamIsCapturing)(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  FAKE_CUDA_STREAM(stream, handle);
  *status = !stream->capture           ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

CUDA(cudaStreamGetCaptureInfo)(cudaStream_t handle, cudaStreamCaptureStatus* status,
                               unsigned long long* id, cudaGraph_t* graph,
                               const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                               size_t* count) {
  FAKE_CUDA_LOCK;
  FAKE_CUDA_CHECK(cudaStreamIsCapturing(handle, status));
  if (const auto& capture = find_stream(handle)->capture; capture && id) *id = capture->id;
  if (graph) *graph = nullptr;  // edges can be captured, not asked for
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

CUDA(cudaGraphGetNodes)(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return refuse(cudaErrorNotSupported, "the nodes of a graph");
  *count = graph->nodes->size();
  return cudaSuccess;
}

CUDA(cudaGraphInstantiateWithFlags)(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}

CUDA(cudaGraphLaunch)(cudaGraphExec_t exec, cudaStream_t handle) {
  FAKE_CUDA_STREAM(stream, handle);
  if (stream->capture) return refuse_captured(*stream, "cudaGraphLaunch");
  if (lost_context != cudaSuccess) return done(lost_context);
  record("graph", std::to_string(exec->nodes->size()) + " operations");
  const auto replay = std::make_shared<Replay>(Replay{exec->nodes});
  enqueue_steps(*stream, [replay, before = exec->stream, at = exec->at] {
    if (before) run_until(*before, at);
    return replay->step();
  });
  exec->stream = stream;
  exec->at = stream->issued;
  return done(lost_context);
}

CUDA(cudaGraphDestroy)(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

CUDA(cudaGraphExecDestroy)(cudaGraphExec_t exec) {
  FAKE_CUDA_LOCK;
  discard(exec->nodes);  // launches under way keep them
  delete exec;
  return cudaSuccess;
}
