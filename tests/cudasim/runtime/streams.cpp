// Streams as queues of operations: these run when they are issued, as late as the program allows,
// or at random. Events are positions in a queue.
#include <algorithm>

#include "runtime.h"

namespace fake_cuda {
namespace {

constexpr int kRunOneIn = 3;  // in a random order, the chance that another operation runs

auto& streams = *new std::deque<Stream>;  // streams stay: events refer to them
bool is_running = false;

void step(Stream& stream) {
  const bool was_running = is_running;
  is_running = true;
  const bool last = stream.queue.front()();
  is_running = was_running;
  if (!last) return;
  discard(std::make_shared<Step>(std::move(stream.queue.front())));
  stream.queue.pop_front();
  ++stream.finished;
}

std::vector<Stream*> busy_streams() {
  std::vector<Stream*> busy;
  for (Stream& stream : streams)
    if (!stream.queue.empty()) busy.push_back(&stream);
  return busy;
}

void run_some() {
  while (random(kRunOneIn) == 0) {
    const std::vector<Stream*> busy = busy_streams();
    if (busy.empty()) return;
    step(*busy[random(busy.size())]);
  }
}

bool is_done(const CUevent_st& event) {
  return !event.stream || event.stream->finished >= event.at;
}

cudaError_t check_event(const CUevent_st& event, const char* call) {
  if (event.capture) return refuse(cudaErrorCapturedEvent, "%s of a captured event", call);
  return check_captures(call);
}

}  // namespace

Stream* find_stream(cudaStream_t handle) {
  static auto& defaults = *new std::vector<Stream*>(settings().devices);
  if (handle == cudaStreamPerThread) return nullptr;
  if (handle && handle != cudaStreamLegacy) return handle->destroyed ? nullptr : handle;
  Stream*& stream = defaults[current_device];
  if (!stream) {
    stream = &streams.emplace_back();
    stream->device = current_device;
  }
  return stream;
}

void run_until(Stream& stream, int64_t at) {
  while (stream.finished < at) step(stream);
}

// Runs streams by turns, so that streams without waits for each other meet.
void run_all() {
  while (true) {
    std::vector<Stream*> busy = busy_streams();
    if (busy.empty()) return;
    if (settings().order == Order::random) std::ranges::shuffle(busy, settings().generator);
    for (Stream* stream : busy)
      if (!stream->queue.empty()) step(*stream);  // another one may have waited for it
  }
}

void enqueue_steps(Stream& stream, Step step) {
  stream.queue.push_back(std::move(step));
  ++stream.issued;
  if (is_running) return;  // an operation that issues others
  if (settings().order == Order::now) run_until(stream, stream.issued);
  if (settings().order == Order::random) run_some();
}

cudaError_t enqueue(Stream& stream, const char* kind, const std::string& name,
                    std::function<void()> run) {
  if (lost_context != cudaSuccess) return done(lost_context);
  if (const auto& capture = stream.capture) {
    if (capture->invalid)
      return refuse(cudaErrorStreamCaptureInvalidated, "%s in an invalid capture", name.c_str());
    capture->nodes.push_back({name, std::move(run), stream.last});
    stream.last = {capture->nodes.size() - 1};
    return cudaSuccess;
  }
  record(kind, name);
  enqueue_steps(stream, [run = std::move(run)] {
    run();
    return true;
  });
  return done(lost_context);
}

}  // namespace fake_cuda

using namespace fake_cuda;

CUDA(cudaStreamCreateWithPriority)(cudaStream_t* stream, unsigned flags, int priority) {
  FAKE_CUDA_LOCK;
  if (flags != cudaStreamNonBlocking)
    return refuse(cudaErrorNotSupported, "a stream that waits for the default one");
  Stream& made = streams.emplace_back();
  made.device = current_device;
  made.priority = priority;
  *stream = &made;
  return cudaSuccess;
}

CUDA(cudaStreamCreateWithFlags)(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

CUDA(cudaStreamDestroy)(cudaStream_t stream) {
  FAKE_CUDA_LOCK;
  stream->destroyed = true;  // its operations still run
  return cudaSuccess;
}

CUDA(cudaStreamGetPriority)(cudaStream_t handle, int* priority) {
  FAKE_CUDA_STREAM(stream, handle);
  *priority = stream->priority;
  return cudaSuccess;
}

CUDA(cudaStreamSynchronize)(cudaStream_t handle) {
  FAKE_CUDA_STREAM(stream, handle);
  if (stream->capture) return refuse_captured(*stream, "cudaStreamSynchronize");
  FAKE_CUDA_CHECK(check_captures("cudaStreamSynchronize"));
  record("wait", "cudaStreamSynchronize");
  run_until(*stream, stream->issued);
  return done(lost_context);
}

CUDA(cudaDeviceSynchronize)() {
  FAKE_CUDA_LOCK;
  FAKE_CUDA_CHECK(check_device_captures("cudaDeviceSynchronize"));
  record("wait", "cudaDeviceSynchronize");
  run_all();
  return done(lost_context);
}

// A query advances the stream, so that polling ends.
CUDA(cudaStreamQuery)(cudaStream_t handle) {
  FAKE_CUDA_STREAM(stream, handle);
  FAKE_CUDA_CHECK(check_captures("cudaStreamQuery"));
  if (stream->queue.empty()) return done(lost_context);
  step(*stream);
  return cudaErrorNotReady;
}

CUDA(cudaStreamWaitEvent)(cudaStream_t handle, cudaEvent_t event, unsigned) {
  FAKE_CUDA_STREAM(stream, handle);
  if (event->capture) {
    if (stream->capture && stream->capture != event->capture)
      return refuse(cudaErrorStreamCaptureMerge, "two captures meet");
    if (!stream->capture) {
      if (event->capture->streams.empty())
        return refuse(cudaErrorCapturedEvent, "the event of a capture that has ended");
      stream->capture = event->capture;
      stream->capture->streams.push_back(stream);
      stream->last.clear();
    }
    stream->last.insert(event->last.begin(), event->last.end());
    return cudaSuccess;
  }
  if (!event->stream) return cudaSuccess;
  if (stream->capture) {
    stream->capture->invalid = true;
    return refuse(cudaErrorStreamCaptureIsolation, "a capture waits for an event from outside");
  }
  enqueue_steps(*stream, [other = event->stream, at = event->at] {
    run_until(*other, at);
    return true;
  });
  return done(lost_context);
}

CUDA(cudaLaunchHostFunc)(cudaStream_t handle, cudaHostFn_t call, void* data) {
  FAKE_CUDA_STREAM(stream, handle);
  return enqueue(*stream, "host", "cudaLaunchHostFunc", [=] { call(data); });
}

CUDA(cudaEventCreateWithFlags)(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st{.flags = flags};
  return cudaSuccess;
}

CUDA(cudaEventCreate)(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

CUDA(cudaEventDestroy)(cudaEvent_t event) {
  FAKE_CUDA_LOCK;
  delete event;
  return cudaSuccess;
}

CUDA(cudaEventRecordWithFlags)(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  FAKE_CUDA_STREAM(stream, handle);
  if (flags != cudaEventRecordDefault)
    return refuse(cudaErrorNotSupported, "an event that a graph records");
  event->stream = stream;
  event->capture = stream->capture;
  event->last = stream->last;
  if (stream->capture) return cudaSuccess;
  enqueue_steps(*stream, [] { return true; });
  event->at = stream->issued;
  return done(lost_context);
}

CUDA(cudaEventRecord)(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

CUDA(cudaEventQuery)(cudaEvent_t event) {
  FAKE_CUDA_LOCK;
  FAKE_CUDA_CHECK(check_event(*event, "cudaEventQuery"));
  if (is_done(*event)) return done(lost_context);
  step(*event->stream);
  return cudaErrorNotReady;
}

CUDA(cudaEventSynchronize)(cudaEvent_t event) {
  FAKE_CUDA_LOCK;
  FAKE_CUDA_CHECK(check_event(*event, "cudaEventSynchronize"));
  record("wait", "cudaEventSynchronize");
  if (event->stream) run_until(*event->stream, event->at);
  return done(lost_context);
}

// A millisecond for an operation: time is not modelled.
CUDA(cudaEventElapsedTime)(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  FAKE_CUDA_LOCK;
  if (!start->stream || !end->stream || (start->flags | end->flags) & cudaEventDisableTiming)
    return refuse(cudaErrorInvalidResourceHandle, "the time of an event that has none");
  if (!is_done(*start) || !is_done(*end)) return cudaErrorNotReady;
  *milliseconds = static_cast<float>(std::max<int64_t>(end->at - start->at, 1));
  return done(lost_context);
}
