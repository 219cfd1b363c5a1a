/* ring.h -- variable-size records in one fixed block, oldest dropped first.
 *
 *    base         head + bytes          head                  extent            capacity
 *     |--- newest ---|      free         |--- oldest ... ------|     untouched      |
 *
 * The records form a circle over [0, extent); one that reaches the end goes on at base. `extent`
 * starts at 0 and grows only when the live bytes do not fit it, so a history that holds 16 MiB of
 * a 64 MiB budget touches 16 MiB. Growing while the circle is wrapped moves the oldest part up;
 * it then grows by half, which keeps the moves O(1) amortised. The owner may set a `bound` below
 * the capacity, for memory that it is not allowed to touch yet; no extent passes it.
 *
 *    slots: [ 7 | 8 | 3 | 4 | 5 | 6 ]       an array of max_entries slots, circular too:
 *                     ^ first               slot i is entry number first + i
 *
 * Entries are numbered from 0 for ever (`seq`). Block and slots are reserved once, by one call;
 * nothing is allocated afterwards. No lock: the caller serialises. */
#ifndef MT_GATE_RING_H
#define MT_GATE_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "port/vmem.h"

typedef struct mt_slot {
    size_t at;    /* offset of the first byte */
    size_t bytes; /* may be 0 */
    uint32_t rows;
    uint32_t dtype; /* the owner's business, as rows is */
} mt_slot;

typedef struct mt_ring {
    const mt_vmem_ops *vm;
    unsigned char *base;
    mt_slot *slots;
    size_t reserved; /* bytes of the one reservation that holds both */
    size_t capacity;
    size_t bound; /* what extent may grow to: the capacity, unless the owner says otherwise */
    size_t extent;
    size_t head;
    size_t bytes; /* live */
    size_t max_entries;
    size_t first; /* slot of the oldest entry */
    size_t len;
    uint64_t seq; /* number of the next entry */
} mt_ring;

/* pre: max_entries > 0, capacity > 0. On failure *r is all zeros, which fini accepts.
 * MT_EOVERFLOW when the sizes do not fit a size_t; MT_ENOMEM. */
mt_status mt_ring_init(mt_ring *r, const mt_vmem_ops *vm, size_t max_entries, size_t capacity,
                       mt_error *err);
void mt_ring_fini(mt_ring *r);

/* Adds an entry of undefined content. pre: len < max_entries, slot.bytes <= bound - bytes.
 * slot.at is ignored. Returns its number. Cannot fail. */
uint64_t mt_ring_claim(mt_ring *r, mt_slot slot);

/* Drops the n oldest entries. pre: n <= len. */
void mt_ring_drop(mt_ring *r, size_t n);

/* Drops all entries and gives the memory behind them back; extent is 0 then. */
void mt_ring_vacate(mt_ring *r);

/* The i-th oldest entry's slot, borrowed until the next claim. pre: i < len. */
const mt_slot *mt_ring_slot(const mt_ring *r, size_t i);

/* Copies n bytes to or from an entry, starting `from` bytes into it. pre: from + n <= bytes. */
void mt_ring_write(mt_ring *r, const mt_slot *slot, size_t from, const void *src, size_t n);
void mt_ring_read(const mt_ring *r, const mt_slot *slot, size_t from, void *dst, size_t n);

/* The entry's bytes where they lie, or NULL when they wrap around the end. */
unsigned char *mt_ring_direct(const mt_ring *r, const mt_slot *slot);

/* True while every invariant holds: slots chain without gaps, sums agree, limits are kept. */
bool mt_ring_check(const mt_ring *r);

#endif
