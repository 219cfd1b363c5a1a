/* stage.h -- device buffers on their way to the host, in order, without making anyone wait.
 *
 *   producer's stream  ..kernel |copy|record| kernel..       source -> slot in the device block
 *                                        \                   (now the source may change or go)
 *   side stream                           `->|copy|record|   that slot -> slot in the pinned block
 *                                                       \
 *   host                                                 `-> peek, read, pop
 *
 * A bounded FIFO. Device block and pinned block are the same ring, with the same offsets:
 *
 *           tail         oldest                     an item is contiguous and 256-byte aligned;
 *            v             v                        where the gap at the end is too small, the
 *   [3][3][3][ ][ ][ ][ ][1][1][2][2][gap]          next item begins at 0
 *
 * All memory, events and the side stream are made once, by mt_stage_new. No lock: the caller
 * serialises. The tables are copied; what their ctx points to must outlive the stage. */
#ifndef MT_GATE_STAGE_H
#define MT_GATE_STAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "port/device.h"
#include "base/status.h"

typedef struct mt_stage mt_stage;

typedef struct mt_stage_item {
    const void *host; /* the bytes, in pinned memory, borrowed until mt_stage_pop */
    size_t bytes;
    uint64_t tag[2]; /* as pushed: the stage does not look at it */
} mt_stage_item;

/* Takes capacity_bytes (rounded up to 256) on the device and as much pinned host memory, and one
 * event per item. pre: both sizes > 0. *out is written on MT_OK only.
 * MT_EOVERFLOW, MT_ENOMEM, MT_EDEVICE: nothing was kept. */
mt_status mt_stage_new(const mt_alloc *mem, const mt_dev_ops *dev, int device,
                       size_t capacity_bytes, size_t max_items, mt_stage **out, mt_error *err);

/* Waits for work still in flight, then gives everything back. NULL is ignored. */
void mt_stage_free(mt_stage *s);

/* For a child of fork(), where the device must not be touched: frees the host bookkeeping and makes
 * no device call at all. The device and pinned blocks belong to the parent. NULL is ignored. */
void mt_stage_abandon(mt_stage *s);

/* Appends the bytes that `src` (on this stage's device) will hold when `stream` gets there. Only
 * enqueues work: never waits for the device, unless a call failed. Afterwards src may be written on
 * `stream`, or freed in its order. bytes may be 0 (then src is not read): such an item keeps its
 * place, and 256 bytes.
 *   MT_EAGAIN   full, in bytes or in items: pop, then try again
 *   MT_ELIMIT   more than the capacity: will never fit
 *   MT_EDEVICE  a device call failed; or, with native 0 and the call "append during CUDA graph
 *               capture", the stream is being captured: a copy would be replayed, not made
 *
 * On failure the length, every item and src are as before; src's memory is free for work on
 * `stream`, as after success. A failure after the first copy was enqueued waits for that copy, and
 * where the wait fails as well every later push is MT_EDEVICE. */
mt_status mt_stage_push(mt_stage *s, const void *src, size_t bytes, void *stream,
                        const uint64_t tag[2], mt_error *err);

/* Says whether the oldest item has arrived (*ready) and if so fills *out. With `wait`, blocks until
 * it has, and for no younger item. An empty stage gives MT_OK and false, waiting or not.
 * MT_EDEVICE: neither *out nor *ready was written. */
mt_status mt_stage_peek(mt_stage *s, bool wait, mt_stage_item *out, bool *ready, mt_error *err);

/* Removes the oldest item. pre: the last mt_stage_peek said ready. */
void mt_stage_pop(mt_stage *s);

size_t mt_stage_len(const mt_stage *s); /* items, arrived or not */
size_t
mt_stage_capacity(const mt_stage *s); /* bytes, of the device block and of the pinned block */
int mt_stage_device(const mt_stage *s);

/* The invariants, asserted after each push and pop: items in ring order, aligned, inside the block,
 * not overlapping. */
bool mt_stage_check(const mt_stage *s);

#endif
