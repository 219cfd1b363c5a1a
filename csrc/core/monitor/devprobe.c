#include "monitor/devprobe.h"

#include <assert.h>

enum { DRIVER_AGE_NS = 20000000 };

typedef struct devprobe {
    mt_alloc mem;
    mt_probe_ops inner;
    mt_devprobe_sources sources;
    size_t devices;
    uint64_t free[MT_SAMPLE_DEVICES], total[MT_SAMPLE_DEVICES];
    uint64_t asked_at[MT_SAMPLE_DEVICES]; /* 0: never */
    uint64_t reserved[MT_SAMPLE_DEVICES]; /* when the driver was asked */
} devprobe;

static bool
is_old(const devprobe *p, size_t i, uint64_t now, const mt_device_sample *d)
{
    return p->asked_at[i] == 0 || now - p->asked_at[i] >= DRIVER_AGE_NS ||
           p->reserved[i] != d->reserved;
}

/* The driver's two, of now or of a moment ago. */
static void
add_driver(devprobe *p, size_t i, uint64_t now, mt_device_sample *out)
{
    const mt_devprobe_sources *from = &p->sources;

    if (is_old(p, i, now, out)) {
        p->asked_at[i] = now;
        p->reserved[i] = out->reserved;
        if (!from->driver(from->ctx, (int)i, &p->free[i], &p->total[i]))
            p->free[i] = p->total[i] = MT_UNKNOWN;
    }
    out->free = p->free[i];
    out->total = p->total[i];
}

static void
read_device(devprobe *p, size_t i, uint64_t now, mt_device_sample *out)
{
    *out =
        (mt_device_sample){MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN};
    if (p->sources.allocator(p->sources.ctx, (int)i, out)) add_driver(p, i, now, out);
}

static void
devprobe_read_all(void *ctx, unsigned mask, mt_sample *out)
{
    devprobe *p = ctx;

    p->inner.read(p->inner.ctx, mask, out);
    if (!(mask & MT_READ_DEVICES)) return;
    for (size_t i = 0; i < p->devices; i++)
        read_device(p, i, out->time_ns, &out->device[i]);
    out->devices = p->devices;
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
