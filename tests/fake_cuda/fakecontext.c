/* fakecontext.c -- the driver's contexts: which devices have one, and which is a thread's.
 *
 *   cudaSetDevice, retain ─► active[device]       pop ─► what was current before the push
 */
#include "machine.h"

#include <cuda.h>
#include <stdint.h>
#include <string.h>

enum { DEPTH = 8 };

static struct {
    bool active[MAX_DEVICES];
    long retained, made;
} contexts;

static _Thread_local int below[DEPTH], depth;

static CUresult
unlock(CUresult rc)
{
    pthread_mutex_unlock(&gpu.lock);
    return rc;
}

static CUresult
misuse(CUresult rc)
{
    gpu.misuses++;
    return unlock(rc);
}

CUresult
cuDeviceGet(CUdevice *out, int ordinal)
{
    cudaError_t rc = arrive();

    if (rc != cudaSuccess) return unlock((CUresult)rc);
    if (ordinal < 0 || ordinal >= gpu.devices) return unlock(CUDA_ERROR_INVALID_DEVICE);
    *out = ordinal;
    return unlock(CUDA_SUCCESS);
}

CUresult
cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    cudaError_t rc = arrive();

    if (rc != cudaSuccess) return unlock((CUresult)rc);
    *flags = 0;
    *active = contexts.active[device];
    return unlock(CUDA_SUCCESS);
}

CUresult
cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    cudaError_t rc = arrive();

    if (rc != cudaSuccess) return unlock((CUresult)rc);
    contexts.made += !contexts.active[device];
    contexts.active[device] = true;
    contexts.retained++;
    *out = (CUcontext)(uintptr_t)(device + 1);
    return unlock(CUDA_SUCCESS);
}

CUresult
cuDevicePrimaryCtxRelease(CUdevice device)
{
    cudaError_t rc = arrive();

    contexts.retained--; /* also when the call is the one to fail: a later one would not help */
    if (rc != cudaSuccess) return unlock((CUresult)rc);
    return contexts.active[device] ? unlock(CUDA_SUCCESS) : misuse(CUDA_ERROR_INVALID_CONTEXT);
}

CUresult
cuCtxPushCurrent(CUcontext context)
{
    cudaError_t rc = arrive();

    if (rc != cudaSuccess) return unlock((CUresult)rc);
    if (context == NULL || depth == DEPTH) return misuse(CUDA_ERROR_INVALID_CONTEXT);
    below[depth++] = current_context;
    current_context = (int)(uintptr_t)context - 1;
    return unlock(CUDA_SUCCESS);
}

CUresult
cuCtxPopCurrent(CUcontext *out)
{
    cudaError_t rc = arrive();

    if (depth == 0) return misuse(CUDA_ERROR_INVALID_CONTEXT);
    *out = (CUcontext)(uintptr_t)(current_context + 1);
    current_context = below[--depth]; /* also when it is the one to fail */
    return unlock((CUresult)rc);
}

CUresult
cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = capture_mode;
    cudaError_t rc = arrive();

    capture_mode = (enum cudaStreamCaptureMode) * mode;
    if (rc != cudaSuccess && before != cudaStreamCaptureModeRelaxed) capture_mode = before;
    *mode = (CUstreamCaptureMode)before;
    return unlock((CUresult)rc);
}

CUresult
cuMemGetInfo(size_t *left, size_t *all)
{
    cudaError_t rc = arrive_unsafe();
    size_t used;

    if (rc != cudaSuccess) return unlock((CUresult)rc);
    if (current_context < 0) return misuse(CUDA_ERROR_INVALID_CONTEXT);
    *all = gpu.capacity;
    used = (size_t)count_device_page_bytes(current_context) + gpu.taken;
    *left = used < gpu.capacity ? gpu.capacity - used : 0;
    return unlock(CUDA_SUCCESS);
}

void (*context_entry(const char *name))(void)
{
    static const struct {
        const char *name;
        void (*function)(void);
    } entries[] = {
        {"cuDeviceGet", (void (*)(void))cuDeviceGet},
        {"cuDevicePrimaryCtxGetState", (void (*)(void))cuDevicePrimaryCtxGetState},
        {"cuDevicePrimaryCtxRetain", (void (*)(void))cuDevicePrimaryCtxRetain},
        {"cuDevicePrimaryCtxRelease", (void (*)(void))cuDevicePrimaryCtxRelease},
        {"cuCtxPushCurrent", (void (*)(void))cuCtxPushCurrent},
        {"cuCtxPopCurrent", (void (*)(void))cuCtxPopCurrent},
        {"cuThreadExchangeStreamCaptureMode", (void (*)(void))cuThreadExchangeStreamCaptureMode},
        {"cuMemGetInfo", (void (*)(void))cuMemGetInfo},
    };

    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (strcmp(entries[i].name, name) == 0) return entries[i].function;
    return NULL;
}

void
use_device(int device)
{
    contexts.active[device] = true;
}

void
reset_contexts(void)
{
    memset(&contexts, 0, sizeof contexts);
    depth = 0;
}

bool
fake_cuda_has_context(int device)
{
    return contexts.active[device];
}

long
fake_cuda_contexts_made(void)
{
    return contexts.made;
}

long
fake_cuda_retained(void)
{
    return contexts.retained + depth;
}
