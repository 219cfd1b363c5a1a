/* journal.h -- the lives of all blocks in an interval of a program, such as a training step.
 *
 * live.h knows what lives now. A journal keeps, from begin() to end(), one entry for each block that
 * lived at its beginning or was born since, also when the block has died. Births and deaths are
 * numbered in their order, 1, 2, 3 and so on:
 *
 *   order      0   1   2   3   4   5   6   7   8     entry  bytes birth death  born in   backward
 *   block A ───┼───────────────────────────────►       A      40    0     -    before    -
 *   block B        ┣━━━━━━━━━━━━━━━┫                   B      16    1     5    forward   freed it
 *   block C            ┣━━━┫                           C       4    2     3    forward   -
 *   block D                    ┣━━━━━━━┫               D      30    4     6    backward  -
 *              ─── forward ────► backward ───►         in use is the prefix sum of births and deaths;
 *                                                      its peak is 86, at 4: A, B and D were alive
 *
 * The life of a block shows what it was. One that was born in a forward pass and lives when the next
 * backward pass begins was saved for it, if a backward pass frees it. If none does, something else
 * holds it, and it is not known whether it was saved as well. What only a caller knows (that a block is
 * a parameter) is marked while it lives, by its address; an entry keeps its mark when another block
 * gets the address.
 *
 * A read lists the blocks at the peak, and divides the whole time into up to 128 intervals. For each it
 * has the bytes of every kind of blocks at the moment at which most was in use. An interval ends where a
 * phase begins, unless phases change too often. Above, with two orders to an interval:
 *
 *   order      0   1   2   3   4   5   6
 *   interval   └─0─┘   └─1─┘   └─2─┘  └3┘
 *   in use      56      60      86     40   the maxima, and the sums of the layers
 *   layers      40      40      40     40   from before             A
 *               16      16      16      0   forward, freed          B
 *                0       4       0      0   forward                 C
 *                0       0      30      0   backward                D
 *
 * Any thread may report. In a process that was forked from the one that made the journal, reports are
 * ignored. 48 bytes an entry, and 24 to 48 more for each that lives; some 60 ns for each report. */
#ifndef MT_BLOCKS_JOURNAL_H
#define MT_BLOCKS_JOURNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/addrs.h"
#include "base/forks.h"
#include "base/lock.h"
#include "blocks/live.h"

typedef enum mt_phase {
    MT_PHASE_BEFORE = 0, /* before the journal began; for a death: it lives on */
    MT_PHASE_FORWARD = 1,
    MT_PHASE_BACKWARD = 2,
    MT_PHASE_OPTIMIZER = 3,
} mt_phase;

enum {
    MT_JOURNAL_PHASES = 4,
    MT_JOURNAL_CATEGORIES = 6, /* 0: not marked; what the others mean is the caller's */
    MT_JOURNAL_ENTRIES_MOST = 1 << 20,
    MT_JOURNAL_NAMES_MOST = 1 << 12,  /* the first one is none */
    MT_JOURNAL_NAME_BYTES_MOST = 200, /* longer ones are cut */
    MT_JOURNAL_DIMS_MOST = 8,         /* the shape of a tensor with more is not kept */
    MT_JOURNAL_LISTED_MOST = 4096,    /* blocks that a read lists */
    MT_JOURNAL_INTERVALS_MOST = 128,
    MT_JOURNAL_BACKWARDS = 3,
    MT_JOURNAL_KINDS = MT_JOURNAL_CATEGORIES * MT_JOURNAL_PHASES * MT_JOURNAL_BACKWARDS * 2,
};

typedef struct mt_journal_entry mt_journal_entry;

typedef struct mt_journal_name {
    char *text;
    uint32_t hash;
} mt_journal_name;

typedef struct mt_journal {
    const mt_alloc *mem;
    mt_birth birth;      /* all zeros: reports of forked children count as well */
    _Atomic bool is_on;  /* read without the lock */
    mt_lock lock;        /* around all below */
    bool is_begun;       /* there is something to read */
    bool is_in_backward; /* since the last birth in a forward pass, a backward pass was seen */
    mt_journal_entry *entries;
    size_t n, room;
    mt_addrs lives;      /* the entries that live, by address */
    uint32_t *backwards; /* the order after which a backward pass began, each time */
    size_t backwards_n, backwards_room;
    int64_t *sizes; /* of the shapes of all entries, one after the other */
    size_t sizes_n, sizes_room;
    mt_journal_name *names; /* the first one is none */
    uint32_t *name_slots;   /* an open table of names: index, or 0 */
    size_t names_n, names_room;
    _Atomic uint32_t order; /* of what happened last; read without the lock as well */
    uint64_t lost;
} mt_journal;

/* How a block came to be. */
typedef struct mt_journal_birth {
    mt_phase phase;
    uint32_t site;   /* a number of the caller's, 0 for none */
    uint32_t maker;  /* the name of the operator that allocated it, 0 for none */
    uint32_t module; /* the name of the part of the program that it was in, 0 for none */
} mt_journal_birth;

/* What backward passes did to a block. */
typedef enum mt_journal_backward {
    MT_BACKWARD_NONE = 0, /* nothing: not born in a forward pass, or dead when the next one began */
    MT_BACKWARD_FREED = 1,
    MT_BACKWARD_OUTLIVED = 2, /* it was alive when the next one began, and none has freed it */
} mt_journal_backward;

/* What a block was, as far as its life and its mark show. */
typedef struct mt_journal_kind {
    uint32_t category;
    mt_phase birth;
    mt_journal_backward backward;
    bool has_shape; /* a tensor has shown what it is */
} mt_journal_kind;

/* A block that lived at the peak. */
typedef struct mt_journal_block {
    const void *address; /* NULL where it has died since */
    uint64_t bytes;
    mt_journal_kind kind;
    uint32_t site, maker, module;
    mt_phase death;
    /* Of its shape, where it has one; dtype is a number of the caller's. */
    int dtype, dims;
    int64_t sizes[MT_JOURNAL_DIMS_MOST];
} mt_journal_block;

/* The blocks of one kind at the peak that are not listed. */
typedef struct mt_journal_rest {
    mt_journal_kind kind;
    uint64_t bytes, blocks;
} mt_journal_rest;

/* Births and deaths that follow each other: the most that was in use, and when. */
typedef struct mt_journal_interval {
    uint64_t order, bytes;
    mt_phase phase; /* 0: nothing was born, or after an optimizer's step */
} mt_journal_interval;

/* All blocks of one kind: their bytes at the moments of the intervals. */
typedef struct mt_journal_layer {
    mt_journal_kind kind;
    uint64_t bytes[MT_JOURNAL_INTERVALS_MOST];
} mt_journal_layer;

typedef struct mt_journal_contents {
    uint64_t peak_bytes, base_bytes; /* the base is what was in use at the begin */
    /* Of the birth that made the peak: the largest one, the last of equals, of those in the same phase
     * that brought the last thousandth. phase 0: the peak was the begin. */
    mt_phase phase;
    uint32_t maker, site;
    bool had_backward;
    uint64_t lost; /* births that found no room: if there are any, all figures may be too low */
    uint64_t events;
    mt_journal_block *blocks; /* that lived at the peak, the largest first */
    size_t blocks_n;
    mt_journal_rest rest[MT_JOURNAL_KINDS];
    size_t rest_n;
    mt_journal_interval intervals[MT_JOURNAL_INTERVALS_MOST];
    size_t intervals_n;
    mt_journal_layer layers[MT_JOURNAL_KINDS];
    size_t layers_n;
} mt_journal_contents;

void mt_journal_init(mt_journal *journal, const mt_alloc *mem, const mt_birth *birth);
/* pre: no thread reports any more. */
void mt_journal_fini(mt_journal *journal);

/* Forgets what it has and begins again, with the blocks that live now. A block that is born meanwhile
 * is either among them, or reported afterwards. False without memory, or if more blocks live than it
 * can hold; then it is off and empty. */
bool mt_journal_begin(mt_journal *journal, mt_live *live);

/* Ignores reports from now on. What it has can be read until it begins again or is cleared. */
void mt_journal_end(mt_journal *journal);

/* Forgets all and gives its memory back. */
void mt_journal_clear(mt_journal *journal);

/* Whether it takes reports. Takes no lock, so that callers may check it before they make a report. */
static inline bool
mt_journal_is_on(const mt_journal *journal)
{
    return atomic_load_explicit(&journal->is_on, memory_order_relaxed);
}

/* A block was given out, and the table of the blocks that live knows of it. One that is known at this
 * address has died unseen. address is not NULL. */
void mt_journal_born(mt_journal *journal, const void *address, size_t bytes,
                     mt_journal_birth birth);

/* A block goes back, in a phase of the thread that gives it back: to be reported before it does. One
 * that is not known is ignored. */
void mt_journal_died(mt_journal *journal, const void *address, mt_phase phase);

/* The number of a name, the same for the same text, from 1 on; 0 without memory, with too many names,
 * and while it is off. */
uint32_t mt_journal_name_of(mt_journal *journal, const char *text);

/* The text of a name, until the journal begins again or is cleared; "" for 0. */
const char *mt_journal_text(mt_journal *journal, uint32_t name);

/* The order of the newest event. Takes no lock. */
static inline uint32_t
mt_journal_order(const mt_journal *journal)
{
    return atomic_load_explicit(&journal->order, memory_order_relaxed);
}

/* An operator, which began after the order `since`, has made a tensor that is all of the block at this
 * address: its shape is the block's, if that was born within the operator and is of these bytes. So
 * the outermost operator in which a block was born gives its shape, and later views do not. `sizes` has
 * `dims` items. */
void mt_journal_shape(mt_journal *journal, const void *address, size_t bytes, uint32_t since,
                      int dtype, const int64_t *sizes, int dims);

typedef enum mt_journal_mark_result {
    MT_MARK_KNOWN,
    MT_MARK_OLDER, /* a block that was not reported: it counts as living all the time */
    MT_MARK_LOST,  /* the same, but there was no room for it, or the journal is off */
} mt_journal_mark_result;

/* Marks the block that lives at this address, if it has no mark yet. pre: address is not NULL, and
 * 0 < category < MT_JOURNAL_CATEGORIES. */
mt_journal_mark_result mt_journal_mark(mt_journal *journal, const void *address, size_t bytes,
                                       uint32_t category);

typedef enum mt_journal_read_result {
    MT_JOURNAL_READ,
    MT_JOURNAL_EMPTY, /* it has not begun since it was cleared */
    MT_JOURNAL_NO_MEMORY,
} mt_journal_read_result;

/* A block without a mark that was born in a backward pass, outlived it and is as large as one that is
 * marked `of` counts as marked `as`: a parameter's gradient that was released before the caller could
 * mark it. `of` 0: none does. */
typedef struct mt_journal_likeness {
    uint32_t of, as;
} mt_journal_likeness;

/* Reads what lived at the peak and over the whole time. *out is empty unless it was read. It is large
 * (some 150 KiB). */
mt_journal_read_result mt_journal_read(mt_journal *journal, mt_journal_likeness likeness,
                                       mt_journal_contents *out);

/* Frees the contents of a read. */
void mt_journal_contents_drop(const mt_journal *journal, mt_journal_contents *contents);

#endif
