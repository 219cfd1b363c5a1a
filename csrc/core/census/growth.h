/* growth.h -- what only ever gained between the looks at a heap.
 *
 * Each look shows what it reached: a thing with its length (entries of a container, bytes of a
 * buffer, nodes of a graph) and the bytes below it. A thing is known again by its address, or by its
 * place in the program if it is made again each time (`rows = rows + [x]`):
 *
 *              rows of one look                                      watches: what ever gained
 *   key            length   bytes  watch                             step  16   32   48   64
 *   at 0x7f10        320   98,304    2 ─────────────────────────► 2: length 80  160  240  320
 *   at 0x7f44          6    1,200    -                             rises 3, never shorter
 *   place 91c2..     320   98,304    2    (the same, by its place)
 *
 * The rows of the look before are kept until the next one ends, which replaces them: 32 bytes for
 * each key, and 48 to 96 with the slots that find them. A watch begins when a thing is longer than
 * in the row of the look before. A thing that gets shorter begins again, and its peak is kept.
 * mt_growth_judge() decides which watches are named. Not thread-safe. */
#ifndef MT_CENSUS_GROWTH_H
#define MT_CENSUS_GROWTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/index.h"
#include "base/status.h"

#define MT_GROWTH_NONE UINT32_MAX

/* From so many bytes on, a thing that the look before does not know by its address is kept by its
 * place as well: one that gains a KiB a step has them after four steps. */
enum { MT_GROWTH_LEAST_BYTES = 4096 };

/* Points of one watch at most; then every second one goes. At least 8. */
enum { MT_GROWTH_POINTS = 24 };

/* For so many steps it has to gain faster than before, to be said to do so. */
enum { MT_GROWTH_SETTLED = 128 };

typedef struct mt_growth_thing {
    uint64_t address; /* 0: it has none that lasts, such as a buffer that is made again */
    uint64_t place;   /* a hash of the way to it; 0: none */
    uint64_t length;  /* 0: it is empty */
    uint64_t bytes;   /* its own and those below it */
    bool single; /* one buffer, which has to rise once more than a container before it is named */
    bool known_empty; /* it is known from now on, though it is empty: its first entry is a gain */
} mt_growth_thing;

typedef struct mt_growth_point {
    uint64_t step, length, bytes;
} mt_growth_point;

typedef struct mt_growth_watch {
    mt_growth_point *points;
    size_t points_n, points_cap;
    uint64_t address_key, place_key; /* of its rows; 0: none */
    uint64_t peak;                   /* the largest length it ever fell from; 0: it never fell */
    uint64_t look;                   /* the last one that it was seen in; 0: this watch is free */
    uint64_t begin, end;             /* of a single buffer: see mt_growth_sign(); 0: not known */
    uint32_t rises;                  /* looks at which it was longer than at the one before */
    bool single;
} mt_growth_watch;

typedef struct mt_growth_row {
    uint64_t key; /* of an address or a place; 0: there is none */
    uint64_t length, bytes;
    uint32_t watch; /* MT_GROWTH_NONE: it never gained */
} mt_growth_row;

typedef struct mt_growth_rows {
    mt_growth_row *at;
    mt_index index; /* of the rows */
    size_t n, cap;
} mt_growth_rows;

typedef struct mt_growth {
    const mt_alloc *mem;
    mt_growth_rows last, now; /* now: empty between two looks */
    mt_growth_watch *watches;
    size_t watches_n, watches_cap;
    uint32_t unused;          /* a watch that is free, or MT_GROWTH_NONE */
    uint64_t looks;           /* ended ones, and the one that runs */
    uint64_t step, last_step; /* of this look, and of the rows in `last` */
} mt_growth;

/* What is known of one that gained, for those who judge it by its bytes. */
typedef struct mt_growth_gain {
    /* Steps: from the last point before the first rise, or from where it came to be as fast as it is,
     * to the newest. */
    uint64_t since, until;
    uint64_t length, bytes; /* how many more between the two */
    uint64_t now;           /* the newest length */
    uint32_t rises;
    bool fell;  /* it was shorter once, and is now longer than its peak */
    bool slows; /* against rule 3 it fills: the gain is that of the later half */
} mt_growth_gain;

/* Takes no memory yet. */
void mt_growth_init(mt_growth *g, const mt_alloc *mem);
void mt_growth_fini(mt_growth *g);

/* Begins a look. pre: the step comes after that of the look before. */
void mt_growth_begin(mt_growth *g, uint64_t step);

/* Shows a thing; *watch is its watch, or MT_GROWTH_NONE. MT_ENOMEM: the look has to be given up. */
mt_status mt_growth_see(mt_growth *g, const mt_growth_thing *thing, uint32_t *watch, mt_error *err);

/* Notes what a single buffer begins and ends with, as hashes of some bytes. A buffer that only ever
 * grows keeps its contents (`all = concatenate((all, new))`). If both hashes differ from those of the
 * look before, it is another buffer in the same place, such as a longer batch, and its series begins
 * again. */
void mt_growth_sign(mt_growth *g, uint32_t watch, uint64_t begin, uint64_t end);

/* Ends a look: its rows replace those before, and watches of things that it did not show are freed.
 * After a look that was cut, which left things out, they are kept. MT_ENOMEM: as given up. */
mt_status mt_growth_end(mt_growth *g, bool cut, mt_error *err);

/* Gives a look up: all is as it was before, but for points that it has added. */
void mt_growth_give_up(mt_growth *g);

/* The row of an address in the look before, or NULL. */
const mt_growth_row *mt_growth_known(const mt_growth *g, uint64_t address);

/* Whether a watch only ever gained and goes on gaining, by the rules of the recipe:
 *   1. three points; it never got shorter in them, and rose at two looks (a single buffer: three);
 *   2. one that fell before is longer than 1.25 x its peak;
 *   3. its gain a step in the later half of them is at least half of the mean: it does not fill.
 * With `may_fill` the third rule does not count, as for a container with a bound: out->slows has it. */
bool mt_growth_judge(const mt_growth *g, uint32_t watch, bool may_fill, mt_growth_gain *out);

#endif
