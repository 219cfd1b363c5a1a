/* devprobe.h -- a probe with device columns: another probe's readings, and what two sources say of
 * each device.
 *
 *   inner.read ──────────────► host columns
 *   allocator(device) ───────► allocated and its peak, reserved,
 *        │ yes                 inactive_split                         each time
 *        └─► driver(device) ─► free, total                              at most 20 ms old, and
 *                                                                       of the same `reserved`
 *
 * What others have of a device is total - free - reserved: after the allocator has given gigabytes
 * back, an older `free` would count them as those of other programs.
 *
 * A device counts only once its allocator answers, which it does where the program itself uses
 * CUDA: the driver is not asked before, so that memtools never initializes CUDA itself. */
#ifndef MT_MONITOR_DEVPROBE_H
#define MT_MONITOR_DEVPROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "port/probe.h"
#include "base/status.h"

typedef struct mt_devprobe_sources {
    /* Fills allocated, allocated_peak, reserved and inactive_split; false where it has none
     * of them. */
    bool (*allocator)(void *ctx, int device, mt_device_sample *out);
    /* False where it cannot be known. */
    bool (*driver)(void *ctx, int device, uint64_t *free, uint64_t *total);
    void (*close)(void *ctx);
    void *ctx;
} mt_devprobe_sources;

/* Takes inner and the sources over; on failure they are still the caller's. pre: devices is at most
 * MT_SAMPLE_DEVICES. *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_devprobe_new(const mt_alloc *mem, const mt_probe_ops *inner,
                          const mt_devprobe_sources *sources, size_t devices, mt_probe_ops *out,
                          mt_error *err);

#endif
