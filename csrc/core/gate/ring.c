#include "gate/ring.h"

#include <assert.h>
#include <string.h>

#include "base/size.h"

mt_status
mt_ring_init(mt_ring *r, const mt_vmem_ops *vm, size_t max_entries, size_t capacity, mt_error *err)
{
    size_t slot_bytes, total;
    void *block;
    mt_status st;

    assert(max_entries > 0 && capacity > 0);
    *r = (mt_ring){0};
    if (!mt_size_mul(max_entries, sizeof(mt_slot), &slot_bytes) ||
        !mt_size_align_up(slot_bytes, 64, &slot_bytes) ||
        !mt_size_add(slot_bytes, capacity, &total))
        return mt_fail(err, MT_EOVERFLOW, "mt_ring_init", 0);
    if ((st = vm->reserve(vm->ctx, total, &block, err)) != MT_OK) return st;
    *r = (mt_ring){.vm = vm,
                   .slots = block,
                   .base = (unsigned char *)block + slot_bytes,
                   .reserved = total,
                   .capacity = capacity,
                   .bound = capacity,
                   .max_entries = max_entries};
    return MT_OK;
}

void
mt_ring_fini(mt_ring *r)
{
    if (r->vm != NULL) r->vm->release(r->vm->ctx, r->slots, r->reserved);
    *r = (mt_ring){0};
}

static inline size_t
slot_index(const mt_ring *r, size_t i)
{
    size_t at = r->first + i;

    return at < r->max_entries ? at : at - r->max_entries;
}

const mt_slot *
mt_ring_slot(const mt_ring *r, size_t i)
{
    assert(i < r->len);
    return &r->slots[slot_index(r, i)];
}

/* Grows the circle while it is wrapped: the part from head on moves up to the new end. */
static void
grow_wrapped(mt_ring *r, size_t need)
{
    size_t roomy = r->extent + r->extent / 2;
    size_t grown = mt_size_min(r->bound, mt_size_max(need, roomy)), up = grown - r->extent;

    assert(need > r->extent && need <= grown);
    memmove(r->base + r->head + up, r->base + r->head, r->extent - r->head);
    for (size_t i = 0; i < r->len; i++) {
        mt_slot *slot = &r->slots[slot_index(r, i)];
        if (slot->at >= r->head) slot->at += up;
    }
    r->head += up;
    r->extent = grown;
}

static void
ring_make_room(mt_ring *r, size_t bytes)
{
    size_t need = r->bytes + bytes;

    if (r->bytes == 0) r->head = 0; /* start over where the pages are warm */
    if (need <= r->extent) return;
    if (r->head + r->bytes > r->extent) /* it is wrapped */
        grow_wrapped(r, need);
    else
        r->extent = mt_size_min(r->bound, r->head + need);
}

uint64_t
mt_ring_claim(mt_ring *r, mt_slot slot)
{
    assert(r->len < r->max_entries && slot.bytes <= r->bound - r->bytes);
    ring_make_room(r, slot.bytes);
    assert(r->bytes + slot.bytes <= r->extent && r->extent <= r->bound);
    slot.at = r->head + r->bytes;
    if (slot.at >= r->extent) slot.at -= r->extent;
    r->slots[slot_index(r, r->len)] = slot;
    r->len++;
    r->bytes += slot.bytes;
    return r->seq++;
}

void
mt_ring_drop(mt_ring *r, size_t n)
{
    assert(n <= r->len);
    for (size_t i = 0; i < n; i++) {
        const mt_slot *slot = mt_ring_slot(r, i);
        r->bytes -= slot->bytes;
        r->head += slot->bytes;
        if (r->head >= r->extent && r->extent > 0) r->head -= r->extent;
    }
    r->first = slot_index(r, n);
    r->len -= n;
}

void
mt_ring_vacate(mt_ring *r)
{
    mt_ring_drop(r, r->len);
    if (r->extent > 0) r->vm->forget(r->vm->ctx, r->base, r->extent);
    r->extent = 0;
    r->head = 0;
}

/* Splits [from, from + n) of an entry at the end of the circle: *n1 bytes at the result, the rest
 * at base. */
static unsigned char *
split(const mt_ring *r, const mt_slot *slot, size_t from, size_t n, size_t *n1)
{
    size_t at = slot->at + from;

    if (at >= r->extent) at -= r->extent;
    *n1 = mt_size_min(n, r->extent - at);
    return r->base + at;
}

void
mt_ring_write(mt_ring *r, const mt_slot *slot, size_t from, const void *src, size_t n)
{
    size_t n1;
    unsigned char *dst;

    assert(from <= slot->bytes && n <= slot->bytes - from);
    if (n == 0 || from + n > slot->bytes) return; /* no caller's fault reaches other memory */
    dst = split(r, slot, from, n, &n1);
    memcpy(dst, src, n1);
    if (n1 < n) memcpy(r->base, (const unsigned char *)src + n1, n - n1);
}

void
mt_ring_read(const mt_ring *r, const mt_slot *slot, size_t from, void *dst, size_t n)
{
    size_t n1;
    const unsigned char *src;

    assert(from + n <= slot->bytes);
    if (n == 0) return;
    src = split(r, slot, from, n, &n1);
    memcpy(dst, src, n1);
    if (n1 < n) memcpy((unsigned char *)dst + n1, r->base, n - n1);
}

unsigned char *
mt_ring_direct(const mt_ring *r, const mt_slot *slot)
{
    assert(slot->at <= r->extent);
    return slot->at + slot->bytes <= r->extent ? r->base + slot->at : NULL;
}

bool
mt_ring_check(const mt_ring *r)
{
    size_t at = r->head, sum = 0;

    if (r->len > r->max_entries || r->bytes > r->capacity) return false;
    if (r->bound > r->capacity || r->extent > r->bound) return false;
    if (r->bytes > r->extent || r->head > r->extent) return false;
    for (size_t i = 0; i < r->len; i++) {
        const mt_slot *slot = mt_ring_slot(r, i);
        if (slot->bytes > 0 && slot->at != at) return false;
        sum += slot->bytes;
        at += slot->bytes;
        if (at >= r->extent) at -= r->extent;
    }
    return sum == r->bytes;
}
