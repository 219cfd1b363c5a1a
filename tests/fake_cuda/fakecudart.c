#include "machine.h"

#include <stdlib.h>
#include <string.h>

static _Thread_local cudaError_t last_error;
_Thread_local enum cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

static cudaError_t
unlock_with(cudaError_t rc)
{
    if (rc != cudaSuccess) last_error = rc;
    pthread_mutex_unlock(&gpu.lock);
    return rc;
}

cudaError_t
arrive(void)
{
    pthread_mutex_lock(&gpu.lock);
    gpu.calls++;
    if (gpu.fail_at < 0 || gpu.fail_at-- != 0) return cudaSuccess;
    gpu.faults++;
    return (cudaError_t)gpu.fail_code;
}

cudaError_t
arrive_unsafe(void)
{
    cudaError_t rc = arrive();

    if (rc != cudaSuccess || capture_mode == cudaStreamCaptureModeRelaxed) return rc;
    for (stream *s = next_stream(NULL); s != NULL; s = next_stream(s)) {
        if (!s->capturing) continue;
        gpu.spoiled_captures++;
        return cudaErrorStreamCaptureUnsupported;
    }
    return cudaSuccess;
}

/* The same for calls that enqueue: on a captured stream they would become part of somebody's graph,
 * which nobody here wants. */
static cudaError_t
arrive_on(cudaStream_t on)
{
    cudaError_t rc = arrive();

    if (rc != cudaSuccess || !stream_of(on)->capturing) return rc;
    gpu.spoiled_captures++;
    return cudaErrorStreamCaptureIsolation;
}

cudaError_t
cudaRuntimeGetVersion(int *version)
{
    cudaError_t rc = arrive();

    if (rc == cudaSuccess) *version = CUDART_VERSION;
    return unlock_with(rc);
}

cudaError_t
cudaDriverGetVersion(int *version)
{
    cudaError_t rc = arrive();

    if (rc == cudaSuccess) *version = CUDART_VERSION;
    return unlock_with(rc);
}

cudaError_t
cudaGetDeviceCount(int *count)
{
    cudaError_t rc = arrive();

    if (rc == cudaSuccess) *count = gpu.devices;
    if (rc == cudaSuccess && gpu.devices == 0) rc = cudaErrorNoDevice;
    return unlock_with(rc);
}

cudaError_t
cudaGetDevice(int *device)
{
    cudaError_t rc = arrive();

    if (rc == cudaSuccess) *device = current_device;
    return unlock_with(rc);
}

cudaError_t
cudaSetDevice(int device)
{
    cudaError_t rc = arrive();

    if (rc == cudaSuccess && (device < 0 || device >= gpu.devices)) rc = cudaErrorInvalidDevice;
    if (rc == cudaSuccess) use_device(current_context = current_device = device);
    return unlock_with(rc);
}

const char *
cudaGetErrorString(cudaError_t rc)
{
    switch (rc) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorNotReady:
        return "device not ready";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorLaunchFailure:
        return "unspecified launch failure";
    default:
        return "unrecognized error code";
    }
}

cudaError_t
cudaGetLastError(void)
{
    cudaError_t rc = last_error;

    last_error = cudaSuccess;
    return rc;
}

cudaError_t
cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    cudaError_t rc = arrive();
    enum cudaStreamCaptureMode before = capture_mode;

    if (rc == cudaSuccess) {
        capture_mode = *mode;
        *mode = before;
    }
    return unlock_with(rc);
}

cudaError_t
cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
    cudaError_t rc = arrive_unsafe();

    (void)flags;
    return unlock_with(rc == cudaSuccess ? take_block(out, bytes, true) : rc);
}

cudaError_t
cudaFreeHost(void *base)
{
    cudaError_t rc = arrive_unsafe();

    return unlock_with(rc == cudaSuccess ? drop_block(base, true) : rc);
}

cudaError_t
cudaMalloc(void **out, size_t bytes)
{
    cudaError_t rc = arrive_unsafe();

    return unlock_with(rc == cudaSuccess ? take_block(out, bytes, false) : rc);
}

cudaError_t
cudaFree(void *base)
{
    cudaError_t rc = arrive_unsafe();

    return unlock_with(rc == cudaSuccess ? drop_block(base, false) : rc);
}

cudaError_t
cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    cudaError_t rc = arrive_unsafe();

    if (rc == cudaSuccess && flags != cudaStreamNonBlocking) rc = cudaErrorNotSupported;
    if (rc == cudaSuccess && (*out = make_stream(true)) == NULL) rc = cudaErrorMemoryAllocation;
    return unlock_with(rc);
}

cudaError_t
cudaStreamDestroy(cudaStream_t s)
{
    cudaError_t rc = arrive_unsafe();

    if (rc == cudaSuccess) destroy_stream(s);
    return unlock_with(rc);
}

cudaError_t
cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *out)
{
    cudaError_t rc = arrive();

    if (rc == cudaSuccess)
        *out =
            stream_of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return unlock_with(rc);
}

cudaError_t
cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    cudaError_t rc = arrive_on(s);

    (void)flags;
    if (rc == cudaSuccess) wait_for(e, stream_of(s));
    return unlock_with(rc);
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    cudaError_t rc = arrive_unsafe();

    (void)flags;
    if (rc == cudaSuccess && (*out = make_event()) == NULL) rc = cudaErrorMemoryAllocation;
    return unlock_with(rc);
}

cudaError_t
cudaEventDestroy(cudaEvent_t e)
{
    cudaError_t rc = arrive_unsafe();

    if (rc == cudaSuccess) free_event(e);
    return unlock_with(rc);
}

cudaError_t
cudaEventRecord(cudaEvent_t e, cudaStream_t on)
{
    cudaError_t rc = arrive_on(on);

    return unlock_with(rc == cudaSuccess ? record(e, stream_of(on)) : rc);
}

cudaError_t
cudaEventQuery(cudaEvent_t e)
{
    cudaError_t rc = arrive_unsafe();

    if (rc == cudaSuccess && e->mark != NULL && !e->mark->reached) rc = cudaErrorNotReady;
    return unlock_with(rc);
}

/* Keeps the calling thread waiting as long as the test holds. The lock is given up meanwhile. */
static void
stay_held(void)
{
    gpu.held++;
    pthread_cond_broadcast(&gpu.held_changed);
    while (gpu.hold)
        pthread_cond_wait(&gpu.held_changed, &gpu.lock);
    gpu.held--;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t e)
{
    cudaError_t rc = arrive_unsafe();

    if (rc == cudaSuccess) {
        gpu.host_syncs++;
        stay_held();
        reach_event(e);
    }
    return unlock_with(rc);
}

static void
enqueue_write(void *dst, const void *src, size_t bytes, cudaStream_t on)
{
    void *copy = malloc(bytes);

    if (copy == NULL) abort();
    memcpy(copy, src, bytes);
    enqueue(stream_of(on), (op){.kind = OP_WRITE, .dst = dst, .src = copy, .bytes = bytes});
}

cudaError_t
cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t on)
{
    cudaError_t rc = arrive_on(on);

    if (rc != cudaSuccess || bytes == 0) return unlock_with(rc);
    if (kind == cudaMemcpyHostToDevice) { /* from memory that is not pinned: read at once */
        enqueue_write(dst, src, bytes, on);
        return unlock_with(cudaSuccess);
    }
    if (kind != cudaMemcpyDeviceToDevice && kind != cudaMemcpyDeviceToHost)
        return unlock_with(cudaErrorInvalidMemcpyDirection);
    if (kind == cudaMemcpyDeviceToHost && !is_pinned(dst, bytes)) gpu.host_syncs++;
    enqueue(stream_of(on), (op){.kind = OP_COPY, .dst = dst, .src = src, .bytes = bytes});
    return unlock_with(cudaSuccess);
}

cudaError_t
cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t on)
{
    cudaError_t rc = arrive_on(on);

    if (rc != cudaSuccess || bytes == 0) return unlock_with(rc);
    if (value != 0) return unlock_with(cudaErrorNotSupported);
    enqueue(stream_of(on), (op){.kind = OP_ZERO, .dst = dst, .bytes = bytes});
    return unlock_with(cudaSuccess);
}

/* ---- controls ---- */

void
fake_cuda_hold(bool hold)
{
    pthread_mutex_lock(&gpu.lock);
    gpu.hold = hold;
    pthread_cond_broadcast(&gpu.held_changed);
    pthread_mutex_unlock(&gpu.lock);
}

void
fake_cuda_await_held(int n)
{
    pthread_mutex_lock(&gpu.lock);
    while (gpu.held < n)
        pthread_cond_wait(&gpu.held_changed, &gpu.lock);
    pthread_mutex_unlock(&gpu.lock);
}

void
fake_cuda_reset(void)
{
    pthread_mutex_lock(&gpu.lock);
    gpu.hold = false;
    pthread_cond_broadcast(&gpu.held_changed);
    gpu.devices = 2;
    gpu.eager = false;
    gpu.dice = 0;
    gpu.fail_at = -1;
    gpu.calls = gpu.faults = gpu.host_syncs = gpu.busy_frees = gpu.spoiled_captures = 0;
    gpu.misuses = 0;
    gpu.granularity = FAKE_GRANULARITY;
    gpu.capacity = SIZE_MAX;
    gpu.taken = 0;
    reset_driver();
    reset_contexts();
    for (stream *s = next_stream(NULL); s != NULL; s = next_stream(s))
        s->capturing = false;
    current_device = 0;
    current_context = -1;
    last_error = cudaSuccess;
    capture_mode = cudaStreamCaptureModeGlobal;
    pthread_mutex_unlock(&gpu.lock);
}

size_t
fake_cuda_run(size_t n)
{
    size_t ran;

    pthread_mutex_lock(&gpu.lock);
    ran = run_some(n);
    pthread_mutex_unlock(&gpu.lock);
    return ran;
}

size_t
fake_cuda_run_all(void)
{
    return fake_cuda_run(SIZE_MAX);
}

size_t
fake_cuda_run_stream(void *handle, size_t n)
{
    size_t ran;

    pthread_mutex_lock(&gpu.lock);
    ran = run_stream(stream_of(handle), n);
    pthread_mutex_unlock(&gpu.lock);
    return ran;
}

void
fake_cuda_write(void *dst, const void *src, size_t bytes, void *on)
{
    pthread_mutex_lock(&gpu.lock);
    enqueue_write(dst, src, bytes, on);
    pthread_mutex_unlock(&gpu.lock);
}

void
fake_cuda_free_later(void *base, size_t bytes, void *on)
{
    pthread_mutex_lock(&gpu.lock);
    enqueue(stream_of(on), (op){.kind = OP_FREE, .dst = base, .bytes = bytes});
    pthread_mutex_unlock(&gpu.lock);
}

void
fake_cuda_fail_at(long n, int code)
{
    pthread_mutex_lock(&gpu.lock);
    gpu.fail_at = n;
    gpu.fail_code = code;
    pthread_mutex_unlock(&gpu.lock);
}

void
fake_cuda_seed(unsigned seed)
{
    gpu.dice = seed;
}

void
fake_cuda_set_eager(bool eager)
{
    gpu.eager = eager;
}

void
fake_cuda_set_capturing(void *handle, bool capturing)
{
    stream_of(handle)->capturing = capturing;
}

void
fake_cuda_set_devices(int count)
{
    gpu.devices = count < MAX_DEVICES ? count : MAX_DEVICES;
}

void
fake_cuda_set_granularity(size_t bytes)
{
    gpu.granularity = bytes;
}

void
fake_cuda_set_capacity(size_t bytes)
{
    gpu.capacity = bytes;
}

void
fake_cuda_set_taken(size_t bytes)
{
    gpu.taken = bytes;
}

long
fake_cuda_called(const char *name)
{
    long n;

    pthread_mutex_lock(&gpu.lock);
    n = count_calls(name);
    pthread_mutex_unlock(&gpu.lock);
    return n;
}

void
fake_cuda_set_device(int device)
{
    current_device = device;
}

int
fake_cuda_device(void)
{
    return current_device;
}

bool
fake_cuda_relaxed(void)
{
    return capture_mode == cudaStreamCaptureModeRelaxed;
}

void *
fake_cuda_stream(void)
{
    stream *s;

    pthread_mutex_lock(&gpu.lock);
    s = make_stream(false);
    pthread_mutex_unlock(&gpu.lock);
    return s;
}

void
fake_cuda_drop_stream(void *handle)
{
    pthread_mutex_lock(&gpu.lock);
    destroy_stream(handle);
    pthread_mutex_unlock(&gpu.lock);
}

#define GETTER(type, name, value)                                                                  \
    type name(void)                                                                                \
    {                                                                                              \
        type now;                                                                                  \
                                                                                                   \
        pthread_mutex_lock(&gpu.lock);                                                             \
        now = (value);                                                                             \
        pthread_mutex_unlock(&gpu.lock);                                                           \
        return now;                                                                                \
    }

GETTER(long, fake_cuda_live,
       sum_blocks(true, true, false) + gpu.live_streams + count_events() + count_pages() +
           count_maps() + count_ranges())
GETTER(long, fake_cuda_live_blocks, sum_blocks(true, true, false))
GETTER(long, fake_cuda_live_streams, gpu.live_streams)
GETTER(long, fake_cuda_live_events, count_events())
GETTER(long, fake_cuda_live_pages, count_pages())
GETTER(long, fake_cuda_live_maps, count_maps())
GETTER(long, fake_cuda_live_ranges, count_ranges())
GETTER(long, fake_cuda_page_bytes, count_page_bytes())
GETTER(long, fake_cuda_pinned_bytes, sum_blocks(false, true, true))
GETTER(long, fake_cuda_device_bytes, sum_blocks(true, false, true))
GETTER(long, fake_cuda_queued, gpu.queued)
GETTER(int, fake_cuda_last_error, (int)last_error)
GETTER(long, fake_cuda_calls, gpu.calls)
GETTER(long, fake_cuda_faults, gpu.faults)
GETTER(long, fake_cuda_host_syncs, gpu.host_syncs)
GETTER(long, fake_cuda_busy_frees, gpu.busy_frees)
GETTER(long, fake_cuda_spoiled_captures, gpu.spoiled_captures)
GETTER(long, fake_cuda_misuses, gpu.misuses)
