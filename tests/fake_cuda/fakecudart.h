/* fakecudart.h -- a CUDA runtime and driver over host memory, whose streams run when the test says
 * so.
 *
 *   stream A   [copy][record e]              queues; an operation runs only by fake_cuda_run*(), or
 *   stream B   [wait e][copy][record f]      as far as cudaEventSynchronize(f) needs it to
 *
 * libfakecudart.so implements the entry points that csrc/cuda/runtime.c takes, and these controls.
 * A C test opens it by path (fake_cuda_load below); a Python test may ctypes.CDLL the same file.
 * "Device memory" is any host memory, so a test may call a CPU tensor a CUDA one. Events mean what
 * CUDA's do: a wait is for the record before it, whatever is recorded later.
 *
 * The driver's virtual memory is real: a page is a piece of one memfd per device, filled with 0xFF
 * (a NaN) when it is made, and mapping it is mmap, so aliases are aliases and what is not mapped,
 * or not made accessible, ends the process when it is touched. Driver calls want a context.
 *
 * Stream NULL is the current device's default stream: a queue like the others, lazy too. Only
 * non-blocking streams exist, so it synchronises with none. One lock around everything. */
#ifndef MT_TESTS_FAKECUDART_H
#define MT_TESTS_FAKECUDART_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* X(return type, name, parameters) */
#define FAKE_CUDA_CONTROLS(X)                                                                      \
    /* Settings and totals as at load; what is live or queued stays. */                            \
    X(void, fake_cuda_reset, (void))                                                               \
    /* Runs up to n operations and says how many: an idle or stalled machine runs fewer. The */    \
    /* oldest runnable one goes first or, with a seed that is not 0, any stream's, by a fixed */   \
    /* dice. */                                                                                    \
    X(size_t, fake_cuda_run, (size_t n))                                                           \
    X(size_t, fake_cuda_run_all, (void))                                                           \
    X(size_t, fake_cuda_run_stream, (void *stream, size_t n))                                      \
    X(void, fake_cuda_seed, (unsigned seed))                                                       \
    /* Whether everything runs as soon as it is enqueued; false at load. */                        \
    X(void, fake_cuda_set_eager, (bool eager))                                                     \
    /* "Kernels": write these bytes (taken now) to dst; poison and free() a malloc'ed block. */    \
    X(void, fake_cuda_write, (void *dst, const void *src, size_t bytes, void *stream))             \
    X(void, fake_cuda_free_later, (void *block, size_t bytes, void *stream))                       \
    /* The n-th entry-point call from now (0: the next) fails with this code; n < 0: none. */      \
    X(void, fake_cuda_fail_at, (long n, int code))                                                 \
    X(void, fake_cuda_set_capturing, (void *stream, bool capturing))                               \
    /* While true, a thread that waits for an event is kept waiting; await_held returns once n */  \
    /* threads are. */                                                                             \
    X(void, fake_cuda_hold, (bool hold))                                                           \
    X(void, fake_cuda_await_held, (int n))                                                         \
    X(void, fake_cuda_set_devices, (int count))                                                    \
    /* Of pages: FAKE_GRANULARITY and without end, at load. */                                     \
    X(void, fake_cuda_set_granularity, (size_t bytes))                                             \
    X(void, fake_cuda_set_capacity, (size_t bytes_per_device))                                     \
    X(void, fake_cuda_set_taken, (size_t bytes_per_device)) /* by what is not a page */            \
    X(void, fake_cuda_hide, (const char *driver_call))      /* is not found by entry point */      \
    /* The calling thread's current device, and a new stream on it, not counted as calls. */       \
    X(void, fake_cuda_set_device, (int device))                                                    \
    X(int, fake_cuda_device, (void))                                                               \
    X(bool, fake_cuda_relaxed, (void)) /* the calling thread's capture mode */                     \
    X(void *, fake_cuda_stream, (void))                                                            \
    X(void, fake_cuda_drop_stream, (void *stream))                                                 \
    /* Now */                                                                                      \
    X(long, fake_cuda_live, (void)) /* the sum of the next six */                                  \
    X(long, fake_cuda_live_blocks, (void))                                                         \
    X(long, fake_cuda_live_streams, (void)) /* made by cudaStreamCreateWithFlags */                \
    X(long, fake_cuda_live_events, (void))                                                         \
    X(long, fake_cuda_live_pages, (void)) /* released ones too while they are mapped */            \
    X(long, fake_cuda_live_maps, (void))                                                           \
    X(long, fake_cuda_live_ranges, (void)) /* of reserved addresses */                             \
    X(long, fake_cuda_page_bytes, (void))                                                          \
    X(long, fake_cuda_pinned_bytes, (void))                                                        \
    X(long, fake_cuda_device_bytes, (void))                                                        \
    X(long, fake_cuda_queued, (void))                                                              \
    X(bool, fake_cuda_has_context, (int device))                                                   \
    X(long, fake_cuda_retained, (void))  /* contexts, by driver calls, or pushed on this thread */ \
    X(int, fake_cuda_last_error, (void)) /* what cudaGetLastError would say, left there */         \
    /* Since load or reset */                                                                      \
    X(long, fake_cuda_calls, (void))                                                               \
    X(long, fake_cuda_faults, (void))                                                              \
    X(long, fake_cuda_host_syncs, (void))                                                          \
    X(long, fake_cuda_busy_frees, (void))       /* memory, stream freed with work in flight */     \
    X(long, fake_cuda_spoiled_captures, (void)) /* by a call that CUDA forbids during capture */   \
    X(long, fake_cuda_misuses, (void))          /* driver calls that CUDA calls invalid */         \
    X(long, fake_cuda_contexts_made, (void))    /* by a driver call, on a device without one */    \
    X(long, fake_cuda_called, (const char *driver_call))

enum { FAKE_GRANULARITY = 2 << 20 };

#define FAKE_CUDA_DECLARE(type, name, args) type name args;
#define FAKE_CUDA_MEMBER(type, name, args)  type(*name) args;
#define FAKE_CUDA_LOAD(type, name, args)                                                           \
    symbol = dlsym(lib, #name);                                                                    \
    memcpy(&out->name, &symbol, sizeof symbol);                                                    \
    complete = complete && symbol != NULL;

FAKE_CUDA_CONTROLS(FAKE_CUDA_DECLARE)

typedef struct fake_cuda {
    FAKE_CUDA_CONTROLS(FAKE_CUDA_MEMBER)
} fake_cuda;

/* Takes the controls of the library at `path`, which stays loaded; false when there is none. */
static inline bool
fake_cuda_load(const char *path, fake_cuda *out)
{
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL), *symbol;
    bool complete = lib != NULL;

    if (complete) {
        FAKE_CUDA_CONTROLS(FAKE_CUDA_LOAD)
    }
    return complete;
}

#endif
