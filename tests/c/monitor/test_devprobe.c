/* Device columns from made-up sources. */
#include <string.h>

#include "kit/check.h"
#include "core/monitor/devprobe.h"
#include "kit/faulty.h"

enum { MS = 1000000 };

typedef struct rig {
    uint64_t now;
    bool used[MT_SAMPLE_DEVICES]; /* the allocator answers */
    bool broken;                  /* the driver does not */
    long asked;                   /* of the driver */
    uint64_t more;                /* that the allocator has reserved since the beginning */
    unsigned mask;                /* what inner was given */
    int closed;
} rig;

static void
inner_read(void *ctx, unsigned mask, mt_sample *out)
{
    rig *r = ctx;

    r->mask = mask;
    mt_sample_clear(out);
    memset(out->device, 0xA5, sizeof out->device);
    out->time_ns = r->now;
    out->rss = 5;
}

static bool
allocator(void *ctx, int device, mt_device_sample *out)
{
    const rig *r = ctx;

    if (!r->used[device]) return false;
    out->allocated = 10 + (uint64_t)device;
    out->allocated_peak = 15 + (uint64_t)device;
    out->reserved = 20 + (uint64_t)device + r->more;
    out->inactive_split = 30 + (uint64_t)device;
    return true;
}

static bool
driver(void *ctx, int device, uint64_t *free, uint64_t *total)
{
    rig *r = ctx;

    CHECK(r->used[device]);
    r->asked++;
    if (r->broken) return false;
    *free = r->now;
    *total = 50 + (uint64_t)device;
    return true;
}

static void
count_close(void *ctx)
{
    ((rig *)ctx)->closed++;
}

static mt_probe_ops
probe_of(rig *r, const mt_alloc *mem, size_t devices)
{
    mt_probe_ops inner = {inner_read, count_close, r}, out;
    mt_devprobe_sources sources = {allocator, driver, count_close, r};

    CHECK(mt_devprobe_new(mem, &inner, &sources, devices, &out, NULL) == MT_OK);
    return out;
}

static bool
is(const mt_device_sample *d, uint64_t allocated, uint64_t reserved, uint64_t split, uint64_t free,
   uint64_t total)
{
    uint64_t peak = allocated == MT_UNKNOWN ? MT_UNKNOWN : allocated + 5;

    return d->allocated == allocated && d->allocated_peak == peak && d->reserved == reserved &&
           d->inactive_split == split && d->free == free && d->total == total;
}

static void
a_device_counts_once_the_program_uses_it(void)
{
    rig r = {.now = 7};
    mt_probe_ops p = probe_of(&r, &mt_alloc_libc, 3);
    mt_sample x;

    p.read(p.ctx, MT_READ_DEVICES | MT_READ_RSS, &x);
    CHECK(r.mask == (MT_READ_DEVICES | MT_READ_RSS) && x.rss == 5 && x.devices == 3);
    for (int i = 0; i < 3; i++)
        CHECK(is(&x.device[i], MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN));
    CHECK(r.asked == 0);
    r.used[1] = true;
    p.read(p.ctx, MT_READ_DEVICES, &x);
    CHECK(is(&x.device[1], 11, 21, 31, 7, 51) && r.asked == 1);
    CHECK(is(&x.device[2], MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN));
    p.read(p.ctx, MT_READ_RSS, &x);
    CHECK(x.devices == 0);
    p.close(p.ctx);
    CHECK(r.closed == 2);
    p.close(NULL);
}

static void
the_driver_is_asked_every_twenty_milliseconds(void)
{
    rig r = {.now = 1000 * (uint64_t)MS, .used = {true, true}};
    mt_probe_ops p = probe_of(&r, &mt_alloc_libc, 2);
    mt_sample x;

    p.read(p.ctx, MT_READ_DEVICES, &x);
    CHECK(r.asked == 2);
    r.now += 20 * MS - 1;
    p.read(p.ctx, MT_READ_DEVICES, &x);
    CHECK(r.asked == 2 && x.device[1].free == 1000 * (uint64_t)MS);
    r.now++;
    r.broken = true;
    p.read(p.ctx, MT_READ_DEVICES, &x);
    CHECK(r.asked == 4 && is(&x.device[0], 10, 20, 30, MT_UNKNOWN, MT_UNKNOWN));
    r.broken = false;
    r.now += 20 * MS;
    p.read(p.ctx, MT_READ_DEVICES, &x);
    CHECK(is(&x.device[0], 10, 20, 30, r.now, 50) && is(&x.device[1], 11, 21, 31, r.now, 51));
    p.close(p.ctx);
}

static void
what_was_reserved_meanwhile_is_not_taken_for_somebody_elses(void)
{
    rig r = {.now = 1000 * (uint64_t)MS, .used = {true}};
    mt_probe_ops p = probe_of(&r, &mt_alloc_libc, 1);
    mt_sample x;

    p.read(p.ctx, MT_READ_DEVICES, &x);
    r.now += 5 * MS;
    r.more = 7;
    p.read(p.ctx, MT_READ_DEVICES, &x);
    CHECK(r.asked == 2 && is(&x.device[0], 10, 27, 30, r.now, 50));
    r.now += 5 * MS;
    p.read(p.ctx, MT_READ_DEVICES, &x);
    CHECK(r.asked == 2);
    p.close(p.ctx);
}

static void
without_memory_nothing_is_taken_over(void)
{
    faulty heap = {.fail_at = 0};
    mt_alloc mem = faulty_alloc(&heap);
    rig r = {.now = 1};
    mt_probe_ops inner = {inner_read, count_close, &r}, out;
    mt_devprobe_sources sources = {allocator, driver, count_close, &r};

    CHECK(mt_devprobe_new(&mem, &inner, &sources, 1, &out, NULL) == MT_ENOMEM && r.closed == 0);
    out = probe_of(&r, &mem, 1);
    out.close(out.ctx);
    CHECK(heap.live == 0 && r.closed == 2);
}

int
main(void)
{
    RUN(a_device_counts_once_the_program_uses_it);
    RUN(the_driver_is_asked_every_twenty_milliseconds);
    RUN(what_was_reserved_meanwhile_is_not_taken_for_somebody_elses);
    RUN(without_memory_nothing_is_taken_over);
    CHECK_DONE();
}
