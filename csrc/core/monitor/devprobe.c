#include "monitor/devprobe.h"

#include <assert.h>
#include <string.h>

enum { DRIVER_AGE_NS = 20000000 };

typedef struct devprobe {
    mt_alloc mem;
    mt_probe_ops inner;
    mt_devprobe_sources sources;
    size_t devices;
    uint64_t free[MT_SAMPLE_DEVICES], total[MT_SAMPLE_DEVICES];
    uint64_t asked_at[MT_SAMPLE_DEVICES]; /* 0: never */
    uint64_t reserved[MT_SAMPLE_DEVICES]; /* when the driver was read */
} devprobe;

/* Reads the driver again if its last figures are old, or the allocator has taken or given back
 * memory since. */
static void
devprobe_read_all(void *ctx, unsigned mask, mt_sample *out)
{
    devprobe *p = ctx;

    p->inner.read(p->inner.ctx, mask, out);
    if (!(mask & MT_READ_DEVICES)) return;
    out->devices = p->devices;
    for (size_t i = 0; i < p->devices; i++) {
        mt_device_sample *d = &out->device[i];
        uint64_t now = out->time_ns;

        memset(d, 0xff, sizeof *d); /* MT_UNKNOWN is all ones */
        if (!p->sources.allocator(p->sources.ctx, (int)i, d)) continue;
        if (p->asked_at[i] == 0 || now - p->asked_at[i] >= DRIVER_AGE_NS ||
            p->reserved[i] != d->reserved) {
            p->asked_at[i] = now;
            p->reserved[i] = d->reserved;
            if (!p->sources.driver(p->sources.ctx, (int)i, &p->free[i], &p->total[i]))
                p->free[i] = p->total[i] = MT_UNKNOWN;
        }
        d->free = p->free[i];
        d->total = p->total[i];
    }
}

static void
devprobe_close_all(void *ctx)
{
    devprobe *p = ctx;
    mt_alloc mem;

    if (p == NULL) return;
    p->inner.close(p->inner.ctx);
    p->sources.close(p->sources.ctx);
    mem = p->mem;
    mem.put(mem.ctx, p, sizeof *p);
}

mt_status
mt_devprobe_new(const mt_alloc *mem, const mt_probe_ops *inner, const mt_devprobe_sources *sources,
                size_t devices, mt_probe_ops *out, mt_error *err)
{
    devprobe *p = mt_alloc_zeroed(mem, 1, sizeof *p);

    assert(devices <= MT_SAMPLE_DEVICES);
    if (p == NULL) return mt_fail(err, MT_ENOMEM, "mt_devprobe_new", 0);
    p->mem = *mem;
    p->inner = *inner;
    p->sources = *sources;
    p->devices = devices;
    *out = (mt_probe_ops){devprobe_read_all, devprobe_close_all, p};
    return MT_OK;
}
