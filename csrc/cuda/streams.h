/* streams.h -- the streams that one user of a device works on: one after the other, and all
 * together.
 *
 *   use(A)  [k][k]──event──┐
 *   use(B)                 └─►[k][k]──event──┐          what comes on B runs after what was on A
 *   use(A)          [k]                      └─►[k]
 *   wait            host ◄── A, B                       also for [k], which A got behind our back
 *
 * A stream that is being captured into a CUDA graph takes no part: nothing may wait for it or be
 * enqueued on it for our sake. What was on it before the capture counts as done (torch.cuda.graph
 * synchronises before it begins). Not thread-safe. */
#ifndef MT_CUDA_STREAMS_H
#define MT_CUDA_STREAMS_H

#include <stdbool.h>

#include "core/base/alloc.h"
#include "core/port/device.h"

typedef struct mt_custream mt_custream;

typedef struct mt_custreams {
    mt_alloc mem;
    const mt_dev_ops *dev;
    int device;
    void *now;         /* the stream in use; at first the default one */
    void *last;        /* the one that the next is to be ordered behind: `now`, unless captured */
    mt_custream *seen; /* all that were in use; they must live as long as this does */
    void *event;
} mt_custreams;

/* Call fini, whatever it returns. MT_ENOMEM; MT_EDEVICE. */
mt_status mt_custreams_init(mt_custreams *s, const mt_alloc *mem, const mt_dev_ops *dev, int device,
                            mt_error *err);
/* Waits for nothing. With `forked` no call of the device is made. */
void mt_custreams_fini(mt_custreams *s, bool forked);

/* Makes `stream` the one in use. On failure the one before stays. */
mt_status mt_custreams_use(mt_custreams *s, void *stream, mt_error *err);

/* Whether work may be enqueued on the stream in use: MT_EDEVICE, native 0, while it is captured. */
mt_status mt_custreams_ready(mt_custreams *s, mt_error *err);

/* Blocks the host until everything enqueued so far on any of them is done. */
mt_status mt_custreams_wait(mt_custreams *s, mt_error *err);

#endif
