/* runtime.h -- mt_dev_ops over the CUDA runtime, taken at run time.
 *
 *   torch's process: libcudart.so.13 is there already  --RTLD_NOLOAD-->  the same copy is used
 *   anywhere else:   the loader's search path          --dlopen------->  or a clean MT_EDEVICE
 *
 * Never linked: one build serves machines with and without a GPU. The files
 * here need the CUDA Toolkit's headers; where the build finds none it compiles runtime_absent.c in
 * their place, whose open() fails.
 *
 * Every call makes `device` current and puts the thread's own device back; it skips both where they
 * are the same. Since CUDA 12 that makes a context on the thread's device if it had none: work with
 * the device you use as the current one. A failed call leaves no pending error behind for the next
 * reader of cudaGetLastError. Thread-safe, as the runtime is. */
#ifndef MT_CUDA_RUNTIME_H
#define MT_CUDA_RUNTIME_H

#include <stdbool.h>

#include "core/base/alloc.h"
#include "core/port/device.h"
#include "core/base/status.h"

typedef struct mt_cudart mt_cudart;

/* Opens the library at `path`, or with NULL the first of libcudart.so.13, .12 and libcudart.so
 * that is loaded already, else that can be loaded, and takes its entry points. Touches no device:
 * success does not mean that there is one. *out is written on MT_OK only.
 * MT_ENOMEM; MT_EDEVICE with native 0 and call "dlopen libcudart", or "dlsym " and the entry point
 * that is missing, or, where not built, a sentence that says so. */
mt_status mt_cudart_open(const mt_alloc *mem, const char *path, mt_cudart **out, mt_error *err);

/* pre: nothing made through its table is live. NULL is ignored. */
void mt_cudart_close(mt_cudart *rt);

/* Borrowed until close. */
const mt_dev_ops *mt_cudart_dev_ops(mt_cudart *rt);

/* The versions as CUDA writes them (13000 is 13.0; a driver of 0 is none) and the number of
 * devices. No driver, a driver too old and no device are answers (0 devices), not failures. The
 * three are written on MT_OK only. MT_EDEVICE. */
mt_status mt_cudart_info(mt_cudart *rt, int *runtime_version, int *driver_version, int *devices,
                         mt_error *err);

/* The runtime's sentence for mt_error.native; static text, never NULL. */
const char *mt_cudart_strerror(mt_cudart *rt, int native);

#endif
