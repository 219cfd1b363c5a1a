/* device.h -- the few device calls that core makes, as a table.
 *
 * csrc/cuda fills it from the CUDA runtime; tests fill it with a fake whose streams run late and
 * whose n-th call fails. All calls are asynchronous for the host except event_wait and the
 * allocations. A stream or event is the backend's own pointer; stream NULL is the default stream.
 * Every function returns MT_OK, or MT_EDEVICE with the driver's code and the call in *err
 * (MT_ENOMEM where memory ran out). Out-parameters are written on MT_OK only. `*_free` cannot fail
 * and takes NULL. Calls act on `device`, whatever the thread's current device is, and leave that as
 * it was. */
#ifndef MT_PORT_DEVICE_H
#define MT_PORT_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct mt_dev_ops {
    mt_status (*host_alloc)(void *ctx, int device, size_t bytes, void **out,
                            mt_error *err); /* pinned */
    void (*host_free)(void *ctx, int device, void *block);
    mt_status (*dev_alloc)(void *ctx, int device, size_t bytes, void **out, mt_error *err);
    void (*dev_free)(void *ctx, int device, void *block);
    mt_status (*stream_new)(void *ctx, int device, void **out, mt_error *err); /* non-blocking */
    void (*stream_free)(void *ctx, int device, void *stream); /* after its work is done */
    mt_status (*stream_wait)(void *ctx, int device, void *stream, void *event, mt_error *err);
    mt_status (*stream_capturing)(void *ctx, int device, void *stream, bool *out, mt_error *err);
    mt_status (*event_new)(void *ctx, int device, void **out, mt_error *err); /* no timing */
    void (*event_free)(void *ctx, int device, void *event);
    mt_status (*event_record)(void *ctx, int device, void *event, void *stream, mt_error *err);
    mt_status (*event_done)(void *ctx, int device, void *event, bool *out, mt_error *err);
    mt_status (*event_wait)(void *ctx, int device, void *event,
                            mt_error *err); /* blocks the host */
    mt_status (*copy_d2d)(void *ctx, int device, void *dst, const void *src, size_t bytes,
                          void *stream, mt_error *err);
    mt_status (*copy_d2h)(void *ctx, int device, void *dst, const void *src, size_t bytes,
                          void *stream, mt_error *err);
    mt_status (*zero)(void *ctx, int device, void *dst, size_t bytes, void *stream,
                      mt_error *err); /* memset(0) of device memory */
    void *ctx;
} mt_dev_ops;

#endif
