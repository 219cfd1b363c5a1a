/* stage.c -- how this file works.
 *
 * Items lie in a ring of bytes, the same on the device and in pinned memory. push() makes room,
 * copies the source into the device block on the producer's stream, and lets the side stream wait
 * for that and copy the slot on to pinned memory; an event behind the second copy says that the
 * host has the bytes. peek() asks that event of the oldest item. A push that failed half-way may
 * leave a copy running, and waits for it on the host (wait_for_copy). */
#include "gate/stage.h"

#include <assert.h>

#include "base/size.h"

enum { SLOT_ALIGN = 256 }; /* what device copies like best, and no two items share a cache line */

typedef struct slot {
    size_t offset; /* in both blocks */
    size_t span;   /* bytes taken there: `bytes` rounded up, at least one unit */
    size_t bytes;
    void *copied; /* event on the side stream: the host has the bytes */
    uint64_t tag[2];
} slot;

struct mt_stage {
    mt_alloc mem;
    mt_dev_ops dev;
    int device;
    size_t capacity;
    unsigned char *on_device;
    unsigned char *on_host;
    void *side;  /* stream */
    void *taken; /* event on the producer's stream: the value is in the device block */
    slot *slots; /* ring of max_items */
    size_t max_items;
    size_t head; /* index of the oldest */
    size_t len;
    bool head_arrived;
    size_t tail; /* offset behind the newest item */
    bool lost;   /* a copy that could not be waited for may still write to the device block */
};

static slot *
slot_at(const mt_stage *s, size_t age)
{
    return &s->slots[(s->head + age) % s->max_items];
}

static void
free_bookkeeping(mt_stage *s)
{
    mt_alloc mem = s->mem;

    mem.put(mem.ctx, s->slots, s->max_items * sizeof *s->slots);
    mem.put(mem.ctx, s, sizeof *s);
}

/* Gives back what exists, which for a half-made stage is not everything. */
static void
free_all(mt_stage *s)
{
    const mt_dev_ops *dev = &s->dev;

    for (size_t i = 0; s->slots != NULL && i < s->max_items; i++)
        dev->event_free(dev->ctx, s->device, s->slots[i].copied);
    dev->event_free(dev->ctx, s->device, s->taken);
    dev->stream_free(dev->ctx, s->device, s->side);
    dev->host_free(dev->ctx, s->device, s->on_host);
    dev->dev_free(dev->ctx, s->device, s->on_device);
    free_bookkeeping(s);
}

static mt_status
make_blocks(mt_stage *s, mt_error *err)
{
    const mt_dev_ops *dev = &s->dev;
    void *block = NULL;
    mt_status st;

    if ((st = dev->dev_alloc(dev->ctx, s->device, s->capacity, &block, err)) != MT_OK) return st;
    s->on_device = block;
    if ((st = dev->host_alloc(dev->ctx, s->device, s->capacity, &block, err)) != MT_OK) return st;
    s->on_host = block;
    return MT_OK;
}

static mt_status
make_events(mt_stage *s, mt_error *err)
{
    const mt_dev_ops *dev = &s->dev;
    mt_status st;

    if ((st = dev->stream_new(dev->ctx, s->device, &s->side, err)) != MT_OK) return st;
    if ((st = dev->event_new(dev->ctx, s->device, &s->taken, err)) != MT_OK) return st;
    for (size_t i = 0; i < s->max_items && st == MT_OK; i++)
        st = dev->event_new(dev->ctx, s->device, &s->slots[i].copied, err);
    return st;
}

mt_status
mt_stage_new(const mt_alloc *mem, const mt_dev_ops *dev, int device, size_t capacity_bytes,
             size_t max_items, mt_stage **out, mt_error *err)
{
    size_t capacity, bytes;
    mt_stage *s;
    mt_status st;

    assert(capacity_bytes > 0 && max_items > 0);
    if (!mt_size_align_up(capacity_bytes, SLOT_ALIGN, &capacity) ||
        !mt_size_mul(max_items, sizeof *s->slots, &bytes))
        return mt_fail(err, MT_EOVERFLOW, "mt_stage_new", 0);
    if ((s = mt_alloc_zeroed(mem, 1, sizeof *s)) == NULL)
        return mt_fail(err, MT_ENOMEM, "mt_stage_new", 0);
    s->mem = *mem;
    s->dev = *dev;
    s->device = device;
    s->capacity = capacity;
    s->max_items = max_items;

    st = MT_ENOMEM;
    if ((s->slots = mt_alloc_zeroed(mem, max_items, sizeof *s->slots)) == NULL)
        mt_fail(err, st, "mt_stage_new", 0);
    else if ((st = make_blocks(s, err)) == MT_OK)
        st = make_events(s, err);
    if (st != MT_OK) {
        free_all(s);
        return st;
    }
    *out = s;
    return MT_OK;
}

/* Waits until nothing on the device can touch the blocks any more. A call here fails only where the
 * device is lost, and then nothing runs on it: no result changes what has to be done next. */
static void
drain(mt_stage *s)
{
    const mt_dev_ops *dev = &s->dev;

    /* The side stream waits for every snapshot whose push succeeded, so its end is theirs too. The
     * newest item's event is not enough: a failed push may have put a copy behind it. */
    dev->event_record(dev->ctx, s->device, s->taken, s->side, NULL);
    dev->event_wait(dev->ctx, s->device, s->taken, NULL);
}

void
mt_stage_free(mt_stage *s)
{
    if (s == NULL) return;
    drain(s);
    free_all(s);
}

void
mt_stage_abandon(mt_stage *s)
{
    if (s != NULL) free_bookkeeping(s);
}

/* Finds `span` contiguous free bytes, in ring order; false when there are none now. */
static bool
place(const mt_stage *s, size_t span, size_t *offset)
{
    size_t begin = 0, end = s->capacity;

    if (s->len > 0) {
        size_t oldest = slot_at(s, 0)->offset;

        begin = s->tail;
        if (s->tail <= oldest) {
            end = oldest;
        } else if (end - begin < span) { /* the gap at the end is too small */
            begin = 0;
            end = oldest;
        }
    }
    if (end - begin < span) return false;
    *offset = begin;
    return true;
}

static mt_status
refuse_capture(const mt_stage *s, void *stream, mt_error *err)
{
    const mt_dev_ops *dev = &s->dev;
    bool capturing = false;
    mt_status st = dev->stream_capturing(dev->ctx, s->device, stream, &capturing, err);

    if (st != MT_OK) return st;
    return capturing ? mt_fail(err, MT_EDEVICE, "append during CUDA graph capture", 0) : MT_OK;
}

/* The first copy of a push that failed later will run, and could overwrite what the next push puts
 * into the same place. The second, if it will, is ordered by the side stream. */
static void
wait_for_copy(mt_stage *s, void *stream)
{
    const mt_dev_ops *dev = &s->dev;

    s->lost = dev->event_record(dev->ctx, s->device, s->taken, stream, NULL) != MT_OK ||
              dev->event_wait(dev->ctx, s->device, s->taken, NULL) != MT_OK;
}

/* Enqueues source -> device block on the producer's stream and device block -> host block on the
 * side stream. `taken` is recorded again by every push: a wait means the record before it. */
static mt_status
enqueue(mt_stage *s, const slot *to, const void *src, void *stream, mt_error *err)
{
    const mt_dev_ops *dev = &s->dev;
    unsigned char *device_slot = s->on_device + to->offset;
    mt_status st = MT_OK;

    if (to->bytes > 0)
        st = dev->copy_d2d(dev->ctx, s->device, device_slot, src, to->bytes, stream, err);
    if (st != MT_OK) return st;
    st = dev->event_record(dev->ctx, s->device, s->taken, stream, err);
    if (st == MT_OK) st = dev->stream_wait(dev->ctx, s->device, s->side, s->taken, err);
    if (st == MT_OK && to->bytes > 0)
        st = dev->copy_d2h(dev->ctx, s->device, s->on_host + to->offset, device_slot, to->bytes,
                           s->side, err);
    if (st == MT_OK) st = dev->event_record(dev->ctx, s->device, to->copied, s->side, err);
    if (st != MT_OK) wait_for_copy(s, stream);
    return st;
}

mt_status
mt_stage_push(mt_stage *s, const void *src, size_t bytes, void *stream, const uint64_t tag[2],
              mt_error *err)
{
    slot next = {.bytes = bytes, .tag = {tag[0], tag[1]}};
    mt_status st;

    if (bytes > s->capacity) return mt_fail_limit(err, bytes, 0, s->capacity);
    if (s->lost) return mt_fail(err, MT_EDEVICE, "append after the device failed", 0);
    if ((st = refuse_capture(s, stream, err)) != MT_OK) return st;
    /* Fits a size_t, because the capacity is such a multiple and not smaller. */
    (void)mt_size_align_up(mt_size_max(bytes, 1), SLOT_ALIGN, &next.span);
    if (s->len == s->max_items || !place(s, next.span, &next.offset))
        return mt_fail(err, MT_EAGAIN, "mt_stage_push", 0);
    next.copied = slot_at(s, s->len)->copied;
    if ((st = enqueue(s, &next, src, stream, err)) != MT_OK) return st;
    *slot_at(s, s->len) = next;
    s->tail = next.offset + next.span;
    s->len++;
    assert(mt_stage_check(s));
    return MT_OK;
}

mt_status
mt_stage_peek(mt_stage *s, bool wait, mt_stage_item *out, bool *ready, mt_error *err)
{
    const mt_dev_ops *dev = &s->dev;
    const slot *oldest = slot_at(s, 0);
    bool arrived = s->head_arrived;
    mt_status st = MT_OK;

    if (s->len > 0 && !arrived) {
        if (!wait)
            st = dev->event_done(dev->ctx, s->device, oldest->copied, &arrived, err);
        else if ((st = dev->event_wait(dev->ctx, s->device, oldest->copied, err)) == MT_OK)
            arrived = true;
    }
    if (st != MT_OK) return st;
    s->head_arrived = arrived;
    *ready = arrived;
    if (arrived)
        *out = (mt_stage_item){.host = s->on_host + oldest->offset,
                               .bytes = oldest->bytes,
                               .tag = {oldest->tag[0], oldest->tag[1]}};
    return MT_OK;
}

void
mt_stage_pop(mt_stage *s)
{
    assert(s->len > 0 && s->head_arrived);
    s->head = (s->head + 1) % s->max_items;
    s->len--;
    s->head_arrived = false;
    assert(mt_stage_check(s));
}

size_t
mt_stage_len(const mt_stage *s)
{
    return s->len;
}

size_t
mt_stage_capacity(const mt_stage *s)
{
    return s->capacity;
}

int
mt_stage_device(const mt_stage *s)
{
    return s->device;
}

static bool
slot_ok(const mt_stage *s, const slot *at)
{
    return at->offset % SLOT_ALIGN == 0 && at->span % SLOT_ALIGN == 0 && at->span > 0 &&
           at->bytes <= at->span && at->span <= s->capacity && at->offset <= s->capacity - at->span;
}

bool
mt_stage_check(const mt_stage *s)
{
    size_t end = 0, wraps = 0;

    if (s->len > s->max_items || s->head >= s->max_items) return false;
    if (s->len == 0) return !s->head_arrived;
    for (size_t age = 0; age < s->len; age++) {
        const slot *at = slot_at(s, age);

        if (!slot_ok(s, at)) return false;
        /* in ring order, or at the start again, once */
        if (age > 0 && at->offset != end && (at->offset != 0 || ++wraps > 1)) return false;
        if (wraps > 0 && at->offset + at->span > slot_at(s, 0)->offset) return false;
        end = at->offset + at->span;
    }
    return s->tail == end;
}
