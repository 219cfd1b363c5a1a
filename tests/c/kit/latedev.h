/* latedev.h -- the smallest device for tests of core: streams that run late, and an n-th call that
 * fails.
 *
 *   [copy][mark 1][copy][write][mark 2]   one queue for all streams, run in the order of enqueuing,
 *    done ^                               which is always legal; so a stream waits for nothing
 *
 * What depends on another order between streams is tested with tests/fake_cuda. One instance, since
 * a test of a stage needs no more. */
#ifndef MT_TESTS_KIT_LATEDEV_H
#define MT_TESTS_KIT_LATEDEV_H

#include <stdint.h>

#include "core/port/device.h"
#include "kit/faulty.h"

enum { LATE_MAX_BLOCKS = 64, LATE_MAX_QUEUE = 4096 };

typedef struct late_op {
    void *dst;
    const void *src; /* NULL: free dst */
    size_t bytes;
    int owns_src;
} late_op;

static struct {
    faulty faults; /* of calls; live counts blocks, streams and events */
    late_op queue[LATE_MAX_QUEUE];
    size_t count, done;
    long syncs;
    void *capturing;
    void *blocks[LATE_MAX_BLOCKS]; /* so that those of an abandoned stage stay reachable */
} late = {.faults = {.fail_at = -1}};

static mt_status
late_call(const char *call, mt_error *err)
{
    return faulty_fails(&late.faults) ? mt_fail(err, MT_EDEVICE, call, 999) : MT_OK;
}

static size_t
late_run(size_t n)
{
    size_t ran = 0;

    for (; ran < n && late.done < late.count; ran++) {
        late_op *op = &late.queue[late.done++];

        if (op->src != NULL)
            memmove(op->dst, op->src, op->bytes);
        else if (op->dst != NULL)
            free(memset(op->dst, 0x5A, op->bytes));
        if (op->owns_src) free((void *)(uintptr_t)op->src);
    }
    return ran;
}

static void
late_enqueue(late_op op)
{
    if (late.count == LATE_MAX_QUEUE) abort(); /* late_reset between cases keeps it short */
    late.queue[late.count++] = op;
}

static void
late_reset(void)
{
    late_run(SIZE_MAX);
    late.count = late.done = 0;
    late.faults.fail_at = -1;
    late.capturing = NULL;
}

static void
late_write(void *dst, const void *src, size_t bytes, void *stream)
{
    void *copy = malloc(bytes + 1);

    (void)stream;
    if (copy == NULL) abort();
    late_enqueue((late_op){dst, memcpy(copy, src, bytes), bytes, 1});
}

static void
late_free_later(void *block, size_t bytes, void *stream)
{
    (void)stream;
    late_enqueue((late_op){block, NULL, bytes, 0});
}

static mt_status
late_alloc(void *ctx, int device, size_t bytes, void **out, mt_error *err)
{
    mt_status st = late_call("late_alloc", err);
    size_t i = 0;

    (void)ctx;
    (void)device;
    if (st != MT_OK) return st;
    while (i < LATE_MAX_BLOCKS && late.blocks[i] != NULL)
        i++;
    if (i == LATE_MAX_BLOCKS ||
        (late.blocks[i] = aligned_alloc(256, (bytes + 255) / 256 * 256)) == NULL)
        abort();
    *out = memset(late.blocks[i], 0xA5, bytes);
    late.faults.live++;
    return MT_OK;
}

static void
late_free(void *ctx, int device, void *block)
{
    (void)ctx;
    (void)device;
    for (size_t i = 0; block != NULL && i < LATE_MAX_BLOCKS; i++) {
        if (late.blocks[i] != block) continue;
        late.blocks[i] = NULL;
        late.faults.live--;
        free(block);
        return;
    }
}

/* A stream is any address of its own; an event holds the length of the queue at its record. */
static mt_status
late_handle(void *ctx, int device, void **out, mt_error *err)
{
    mt_status st = late_alloc(ctx, device, sizeof(size_t), out, err);

    if (st == MT_OK) memset(*out, 0, sizeof(size_t));
    return st;
}

static mt_status
late_stream_wait(void *ctx, int device, void *stream, void *event, mt_error *err)
{
    (void)ctx;
    (void)device;
    (void)stream;
    (void)event;
    return late_call("late_stream_wait", err);
}

static mt_status
late_stream_capturing(void *ctx, int device, void *stream, bool *out, mt_error *err)
{
    mt_status st = late_call("late_stream_capturing", err);

    (void)ctx;
    (void)device;
    if (st == MT_OK) *out = stream != NULL && stream == late.capturing;
    return st;
}

static mt_status
late_event_record(void *ctx, int device, void *event, void *stream, mt_error *err)
{
    mt_status st = late_call("late_event_record", err);

    (void)ctx;
    (void)device;
    (void)stream;
    if (st != MT_OK) return st;
    late_enqueue((late_op){NULL, NULL, 0, 0});
    memcpy(event, &late.count, sizeof late.count);
    return MT_OK;
}

static mt_status
late_event_done(void *ctx, int device, void *event, bool *out, mt_error *err)
{
    mt_status st = late_call("late_event_done", err);
    size_t at;

    (void)ctx;
    (void)device;
    memcpy(&at, event, sizeof at);
    if (st == MT_OK) *out = late.done >= at;
    return st;
}

static mt_status
late_event_wait(void *ctx, int device, void *event, mt_error *err)
{
    mt_status st = late_call("late_event_wait", err);
    size_t at;

    (void)ctx;
    (void)device;
    if (st != MT_OK) return st;
    late.syncs++;
    memcpy(&at, event, sizeof at);
    if (at > late.done) late_run(at - late.done);
    return MT_OK;
}

static mt_status
late_copy(void *ctx, int device, void *dst, const void *src, size_t bytes, void *stream,
          mt_error *err)
{
    mt_status st = late_call("late_copy", err);

    (void)ctx;
    (void)device;
    (void)stream;
    if (st == MT_OK) late_enqueue((late_op){dst, src, bytes, 0});
    return st;
}

static const mt_dev_ops late_dev = {
    .host_alloc = late_alloc,
    .host_free = late_free,
    .dev_alloc = late_alloc,
    .dev_free = late_free,
    .stream_new = late_handle,
    .stream_free = late_free,
    .stream_wait = late_stream_wait,
    .stream_capturing = late_stream_capturing,
    .event_new = late_handle,
    .event_free = late_free,
    .event_record = late_event_record,
    .event_done = late_event_done,
    .event_wait = late_event_wait,
    .copy_d2d = late_copy,
    .copy_d2h = late_copy,
};

#endif
