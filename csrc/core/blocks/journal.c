/* journal.c -- how this file works.
 *
 * Entries are in the order in which they were made and never move; a table leads from an address to
 * the entry that lives there. Nothing is added up while reports come: an entry has its
 * two numbers of order, and a read makes the prefix sum of all of them. So what is marked late counts
 * from the begin, and the peak, its moment and the blocks alive come from the same numbers. */
#include "blocks/journal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAME_SLOTS = 2 * MT_JOURNAL_NAMES_MOST,
    HAS_SHAPE = 1, /* bits of `is` */
};

struct mt_journal_entry {
    uint64_t address, bytes;
    uint32_t birth, death; /* orders; birth 0: lived at the begin, death 0: lives */
    uint32_t site, maker, module;
    uint32_t shape; /* where its sizes begin */
    int16_t dtype;
    uint8_t birth_phase, death_phase, category, dims, is;
};

/* Which entry lives at an address. */
typedef struct life {
    uint64_t address;
    uint64_t entry; /* 1 + its index */
} life;

void
mt_journal_init(mt_journal *j, const mt_alloc *mem, const mt_home *home)
{
    *j = (mt_journal){.mem = mem, .home = home};
    mt_addrs_init(&j->lives, mem, sizeof(life));
    mt_lock_init(&j->lock);
}

/* False in a forked child, where the lock is not to be touched. */
static bool
is_home(const mt_journal *j)
{
    return j->home == NULL || atomic_load_explicit(j->home, memory_order_relaxed) != 0;
}

static void
put(const mt_journal *j, void *block, size_t bytes)
{
    if (block != NULL) j->mem->put(j->mem->ctx, block, bytes);
}

/* --- names --------------------------------------------------------------------------------------- */

static void
drop_names(mt_journal *j)
{
    for (size_t i = 1; i < j->names_n; i++)
        put(j, j->names[i].text, strlen(j->names[i].text) + 1);
    put(j, j->names, j->names_room * sizeof *j->names);
    put(j, j->name_slots, NAME_SLOTS * sizeof *j->name_slots);
    j->names = NULL;
    j->name_slots = NULL;
    j->names_n = j->names_room = 0;
}

static uint32_t
hash_of_text(const char *text, size_t n)
{
    uint32_t h = UINT32_C(2166136261);

    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)text[i]) * UINT32_C(16777619);
    return h;
}

static bool
make_room_for_name(mt_journal *j)
{
    mt_journal_name *names;

    if (j->names_n >= MT_JOURNAL_NAMES_MOST) return false;
    names = mt_alloc_grown(j->mem, j->names, &j->names_room, j->names_n + 2, sizeof *names);
    if (names == NULL) return false;
    j->names = names;
    if (j->names_n == 0) j->names_n = 1;
    if (j->name_slots == NULL)
        j->name_slots = mt_alloc_zeroed(j->mem, NAME_SLOTS, sizeof *j->name_slots);
    return j->name_slots != NULL;
}

/* pre: the text is not there, and `at` is the free slot for it, or there is no table yet. */
static uint32_t
add_name(mt_journal *j, const char *text, size_t n, uint32_t hash, size_t at)
{
    char *copy;

    if (!make_room_for_name(j)) return 0;
    if ((copy = j->mem->get(j->mem->ctx, n + 1)) == NULL) return 0;
    memcpy(copy, text, n);
    copy[n] = '\0';
    j->names[j->names_n] = (mt_journal_name){copy, hash};
    j->name_slots[at] = (uint32_t)j->names_n;
    return (uint32_t)j->names_n++;
}

static uint32_t
name_of(mt_journal *j, const char *text)
{
    const char *end = memchr(text, '\0', MT_JOURNAL_NAME_BYTES_MOST);
    size_t n = end == NULL ? MT_JOURNAL_NAME_BYTES_MOST : (size_t)(end - text);
    uint32_t hash = hash_of_text(text, n), found;
    size_t at = hash & (NAME_SLOTS - 1);

    for (; j->name_slots != NULL && (found = j->name_slots[at]) != 0;
         at = (at + 1) & (NAME_SLOTS - 1)) {
        const mt_journal_name *name = &j->names[found];
        if (name->hash == hash && strncmp(name->text, text, n) == 0 && name->text[n] == '\0')
            return found;
    }
    return add_name(j, text, n, hash, at);
}

uint32_t
mt_journal_name_of(mt_journal *j, const char *text)
{
    uint32_t found = 0;

    if (!is_home(j) || !mt_journal_is_on(j)) return 0;
    mt_lock_take(&j->lock);
    if (mt_journal_is_on(j)) found = name_of(j, text);
    mt_lock_give(&j->lock);
    return found;
}

const char *
mt_journal_text(mt_journal *j, uint32_t name)
{
    const char *text = "";

    if (!is_home(j)) return text;
    mt_lock_take(&j->lock);
    if (name > 0 && name < j->names_n) text = j->names[name].text;
    mt_lock_give(&j->lock);
    return text;
}

/* --- entries that live --------------------------------------------------------------------------- */

/* The entry that lives at the address, or NULL. */
static mt_journal_entry *
find(const mt_journal *j, uint64_t address)
{
    const life *l = mt_addrs_find(&j->lives, address);

    return l == NULL ? NULL : &j->entries[l->entry - 1];
}

/* False where there is no room. pre: nothing lives at its address. */
static bool
add(mt_journal *j, mt_journal_entry entry)
{
    mt_journal_entry *entries;
    life *l;

    if (j->n >= MT_JOURNAL_ENTRIES_MOST) return false;
    entries = mt_alloc_grown(j->mem, j->entries, &j->room, j->n + 1, sizeof *entries);
    if (entries == NULL) return false;
    j->entries = entries;
    if ((l = mt_addrs_add(&j->lives, entry.address)) == NULL) return false;
    assert(l->entry == 0);
    entries[j->n++] = entry;
    l->entry = j->n;
    return true;
}

/* --- begin and end ------------------------------------------------------------------------------- */

static void
forget(mt_journal *j)
{
    drop_names(j);
    mt_addrs_drop(&j->lives);
    put(j, j->entries, j->room * sizeof *j->entries);
    put(j, j->sizes, j->sizes_room * sizeof *j->sizes);
    put(j, j->backwards, j->backwards_room * sizeof *j->backwards);
    j->entries = NULL;
    j->sizes = NULL;
    j->backwards = NULL;
    j->n = j->room = j->sizes_n = j->sizes_room = j->backwards_n = j->backwards_room = 0;
    j->is_begun = j->is_in_backward = false;
    j->order = 0;
    j->lost = 0;
}

void
mt_journal_fini(mt_journal *j)
{
    forget(j);
    mt_lock_fini(&j->lock);
}

static bool
add_all(mt_journal *j, const mt_block *blocks, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!add(j, (mt_journal_entry){.address = blocks[i].address,
                                       .bytes = blocks[i].bytes,
                                       .site = blocks[i].site}))
            return false;
    return true;
}

/* Adds what lives now. The copy is asked for again until it holds all that lives. */
static bool
add_living(mt_journal *j, mt_live *live)
{
    size_t n = 0, room = 0;
    mt_block *blocks = NULL;
    bool is_added;

    while ((n = mt_live_copy(live, blocks, room)) > room) {
        put(j, blocks, room * sizeof *blocks);
        room = n + n / 8;
        if ((blocks = mt_alloc_zeroed(j->mem, room, sizeof *blocks)) == NULL) return false;
    }
    is_added = add_all(j, blocks, n);
    put(j, blocks, room * sizeof *blocks);
    return is_added;
}

bool
mt_journal_begin(mt_journal *j, mt_live *live)
{
    bool is_begun = false;

    if (!is_home(j)) return false;
    mt_lock_take(&j->lock);
    forget(j);
    /* First on, and then what lives: a block that is not in the copy is reported after it. */
    atomic_store(&j->is_on, true);
    is_begun = j->is_begun = add_living(j, live);
    if (!is_begun) {
        atomic_store(&j->is_on, false);
        forget(j);
    }
    mt_lock_give(&j->lock);
    return is_begun;
}

void
mt_journal_end(mt_journal *j)
{
    if (!is_home(j)) return;
    mt_lock_take(&j->lock);
    atomic_store(&j->is_on, false);
    mt_addrs_drop(&j->lives);
    mt_lock_give(&j->lock);
}

void
mt_journal_clear(mt_journal *j)
{
    if (!is_home(j)) return;
    mt_lock_take(&j->lock);
    atomic_store(&j->is_on, false);
    forget(j);
    mt_lock_give(&j->lock);
}

/* --- reports ------------------------------------------------------------------------------------- */

/* Notes that a backward pass begins, where what happens now is the first of one. Without memory the
 * next report tries again. */
static void
see_phase(mt_journal *j, mt_phase phase, bool is_birth)
{
    uint32_t *backwards;

    if (is_birth && phase == MT_PHASE_FORWARD) j->is_in_backward = false;
    if (phase != MT_PHASE_BACKWARD || j->is_in_backward) return;
    backwards = mt_alloc_grown(j->mem, j->backwards, &j->backwards_room, j->backwards_n + 1,
                               sizeof *backwards);
    if (backwards == NULL) return;
    j->backwards = backwards;
    backwards[j->backwards_n++] = j->order;
    j->is_in_backward = true;
}

/* Ends the life at this address, if there is one. */
static void
end_life(mt_journal *j, uint64_t address, mt_phase phase)
{
    life *l = mt_addrs_find(&j->lives, address);

    if (l == NULL) return;
    see_phase(j, phase, false);
    j->entries[l->entry - 1].death = ++j->order;
    j->entries[l->entry - 1].death_phase = (uint8_t)phase;
    mt_addrs_remove(&j->lives, l);
}

static void
bear(mt_journal *j, uint64_t address, size_t bytes, mt_journal_birth birth)
{
    see_phase(j, birth.phase, true);
    end_life(j, address, birth.phase); /* of one that has died unseen */
    j->order++;
    if (!add(j, (mt_journal_entry){.address = address,
                                   .bytes = bytes,
                                   .birth = j->order,
                                   .site = birth.site,
                                   .maker = birth.maker,
                                   .module = birth.module,
                                   .birth_phase = (uint8_t)birth.phase}))
        j->lost++;
}

void
mt_journal_born(mt_journal *j, const void *address, size_t bytes, mt_journal_birth birth)
{
    assert(address != NULL);
    if (!is_home(j) || !mt_journal_is_on(j)) return;
    mt_lock_take(&j->lock);
    if (mt_journal_is_on(j)) bear(j, (uint64_t)(uintptr_t)address, bytes, birth);
    mt_lock_give(&j->lock);
}

void
mt_journal_died(mt_journal *j, const void *address, mt_phase phase)
{
    uint64_t key = (uint64_t)(uintptr_t)address;

    if (key == 0 || !is_home(j) || !mt_journal_is_on(j)) return;
    mt_lock_take(&j->lock);
    if (mt_journal_is_on(j)) end_life(j, key, phase);
    mt_lock_give(&j->lock);
}

/* In the place of the one it had, if that had as many sizes. */
static void
take_shape(mt_journal *j, mt_journal_entry *entry, int dtype, const int64_t *shape, int dims)
{
    bool has_place = (entry->is & HAS_SHAPE) != 0 && entry->dims == dims;
    size_t at = has_place ? entry->shape : j->sizes_n;
    int64_t *sizes;

    if (dims > 0) {
        sizes = mt_alloc_grown(j->mem, j->sizes, &j->sizes_room, at + (size_t)dims, sizeof *sizes);
        if (sizes == NULL) return;
        j->sizes = sizes;
        memcpy(sizes + at, shape, (size_t)dims * sizeof *sizes);
    }
    entry->shape = (uint32_t)at;
    entry->dtype = (int16_t)dtype;
    entry->dims = (uint8_t)dims;
    entry->is |= HAS_SHAPE;
    if (!has_place) j->sizes_n += (size_t)dims;
}

void
mt_journal_shape(mt_journal *j, const void *address, size_t bytes, uint32_t since, int dtype,
                 const int64_t *sizes, int dims)
{
    uint64_t key = (uint64_t)(uintptr_t)address;
    mt_journal_entry *entry;

    if (key == 0 || dims < 0 || dims > MT_JOURNAL_DIMS_MOST) return;
    if (!is_home(j) || !mt_journal_is_on(j)) return;
    mt_lock_take(&j->lock);
    entry = mt_journal_is_on(j) ? find(j, key) : NULL;
    if (entry != NULL && entry->birth > since && entry->bytes == bytes)
        take_shape(j, entry, dtype, sizes, dims);
    mt_lock_give(&j->lock);
}

static mt_journal_mark_result
mark(mt_journal *j, uint64_t address, size_t bytes, uint32_t category)
{
    mt_journal_entry *entry = find(j, address);

    if (entry != NULL) {
        if (entry->category == 0) entry->category = (uint8_t)category;
        return MT_MARK_KNOWN;
    }
    return add(j, (mt_journal_entry){.address = address,
                                     .bytes = bytes,
                                     .category = (uint8_t)category})
               ? MT_MARK_OLDER
               : MT_MARK_LOST;
}

mt_journal_mark_result
mt_journal_mark(mt_journal *j, const void *address, size_t bytes, uint32_t category)
{
    mt_journal_mark_result result = MT_MARK_LOST;

    assert(address != NULL && category > 0 && category < MT_JOURNAL_CATEGORIES);
    if (!is_home(j)) return result;
    mt_lock_take(&j->lock);
    if (mt_journal_is_on(j)) {
        result = mark(j, (uint64_t)(uintptr_t)address, bytes, category);
        if (result == MT_MARK_LOST) j->lost++;
    }
    mt_lock_give(&j->lock);
    return result;
}

/* --- what lived at the peak ---------------------------------------------------------------------- */

/* What happened at one order. */
typedef struct change {
    int64_t bytes;
    mt_phase phase;
} change;

static change *
changes_of(const mt_journal *j)
{
    change *changes = mt_alloc_zeroed(j->mem, (size_t)j->order + 1, sizeof *changes);

    for (size_t i = 0; changes != NULL && i < j->n; i++) {
        const mt_journal_entry *e = &j->entries[i];
        changes[e->birth].bytes += (int64_t)e->bytes;
        changes[e->birth].phase = (mt_phase)e->birth_phase;
        if (e->death == 0) continue;
        changes[e->death].bytes -= (int64_t)e->bytes;
        changes[e->death].phase = (mt_phase)e->death_phase;
    }
    return changes;
}

/* Base, peak and curve; returns the order of the peak. */
static uint32_t
sum_up(const mt_journal *j, const change *changes, mt_journal_contents *out)
{
    uint64_t points = (uint64_t)j->order + 1;
    uint64_t stretches = points < MT_JOURNAL_CURVE_MOST ? points : MT_JOURNAL_CURVE_MOST;
    uint64_t in_use = 0;
    uint32_t peak_at = 0;

    for (uint64_t at = 0; at < points; at++) {
        size_t stretch = (size_t)(at * stretches / points);
        mt_journal_point *point = &out->curve[stretch];
        in_use += (uint64_t)changes[at].bytes;
        if (at == 0) out->base_bytes = out->peak_bytes = in_use;
        if (stretch >= out->curve_n || in_use > point->bytes)
            *point = (mt_journal_point){at, in_use, changes[at].phase};
        out->curve_n = stretch + 1;
        if (in_use <= out->peak_bytes) continue;
        out->peak_bytes = in_use;
        peak_at = (uint32_t)at;
    }
    return peak_at;
}

/* Whether a block lived from its birth in a forward pass until the next backward pass began. */
static bool
is_saved(const mt_journal *j, const mt_journal_entry *e)
{
    size_t low = 0, high = j->backwards_n;

    if (e->birth_phase != MT_PHASE_FORWARD) return false;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (j->backwards[middle] < e->birth)
            low = middle + 1;
        else
            high = middle;
    }
    return low < j->backwards_n && (e->death == 0 || e->death > j->backwards[low]);
}

static int
by_bytes(const void *a, const void *b)
{
    const mt_journal_entry *x = *(const mt_journal_entry *const *)a;
    const mt_journal_entry *y = *(const mt_journal_entry *const *)b;

    if (x->bytes != y->bytes) return x->bytes < y->bytes ? 1 : -1;
    return x < y ? -1 : x > y;
}

static void
tell_block(const mt_journal *j, const mt_journal_entry *e, mt_journal_block *out)
{
    *out = (mt_journal_block){.address = e->death == 0 ? (const void *)(uintptr_t)e->address : NULL,
                              .bytes = e->bytes,
                              .category = e->category,
                              .site = e->site,
                              .maker = e->maker,
                              .module = e->module,
                              .birth = (mt_phase)e->birth_phase,
                              .death = (mt_phase)e->death_phase,
                              .is_saved = is_saved(j, e),
                              .has_shape = (e->is & HAS_SHAPE) != 0,
                              .dtype = e->dtype,
                              .dims = e->dims};
    if (e->dims > 0) memcpy(out->sizes, j->sizes + e->shape, e->dims * sizeof *out->sizes);
}

/* pre: the sum of its kind is at this place of the table of all kinds. */
static void
add_to_rest(const mt_journal *j, const mt_journal_entry *e, mt_journal_rest *kinds)
{
    bool saved = is_saved(j, e);
    mt_journal_rest *rest = &kinds[(e->category * MT_JOURNAL_PHASES + e->birth_phase) * 2 + saved];

    rest->bytes += e->bytes;
    rest->blocks++;
    rest->category = e->category;
    rest->birth = (mt_phase)e->birth_phase;
    rest->is_saved = saved;
}

static void
tell_all(const mt_journal *j, const mt_journal_entry *const *alive, size_t n,
         mt_journal_contents *out)
{
    size_t kinds = sizeof out->rest / sizeof *out->rest;

    for (size_t i = 0; i < n; i++) {
        if (i < out->blocks_n)
            tell_block(j, alive[i], &out->blocks[i]);
        else
            add_to_rest(j, alive[i], out->rest);
    }
    for (size_t i = 0; i < kinds; i++)
        if (out->rest[i].blocks > 0) out->rest[out->rest_n++] = out->rest[i];
}

/* The blocks that lived after this order, in the order of entries; returns how many. */
static size_t
alive_at(const mt_journal *j, uint32_t order, const mt_journal_entry **alive)
{
    size_t n = 0;

    for (size_t i = 0; i < j->n; i++) {
        const mt_journal_entry *e = &j->entries[i];
        if (e->birth <= order && (e->death == 0 || e->death > order)) alive[n++] = e;
    }
    return n;
}

/* Where the last thousandth of the peak begins, within the phase in which it was reached. */
static uint32_t
rise_of(const change *changes, uint32_t peak_at, uint64_t peak_bytes)
{
    uint64_t in_use = peak_bytes;
    uint32_t at = peak_at;

    for (; at > 0 && changes[at].phase == changes[peak_at].phase; at--) {
        if (in_use < peak_bytes - peak_bytes / 1000) break;
        in_use -= (uint64_t)changes[at].bytes;
    }
    return at + 1;
}

/* The largest birth of the rise says what made the peak: the very last one may be of four bytes. */
static void
tell_moment(const mt_journal_entry *const *alive, size_t n, uint32_t rise, mt_journal_contents *out)
{
    const mt_journal_entry *largest = NULL;

    for (size_t i = 0; i < n; i++) {
        if (alive[i]->birth < rise) continue;
        if (largest == NULL || alive[i]->bytes >= largest->bytes) largest = alive[i];
    }
    if (largest == NULL) return; /* the peak is the begin */
    out->phase = (mt_phase)largest->birth_phase;
    out->maker = largest->maker;
    out->site = largest->site;
}

static bool
tell_peak(const mt_journal *j, const change *changes, uint32_t peak_at, mt_journal_contents *out)
{
    const mt_journal_entry **alive;
    size_t n;

    if (j->n == 0) return true;
    alive = (const mt_journal_entry **)mt_alloc_zeroed(j->mem, j->n, sizeof *alive);
    if (alive == NULL) return false;
    n = alive_at(j, peak_at, alive);
    out->blocks_n = n < MT_JOURNAL_TOLD_MOST ? n : MT_JOURNAL_TOLD_MOST;
    tell_moment(alive, n, rise_of(changes, peak_at, out->peak_bytes), out);
    qsort((void *)alive, n, sizeof *alive, by_bytes);
    if (out->blocks_n > 0)
        out->blocks = mt_alloc_zeroed(j->mem, out->blocks_n, sizeof *out->blocks);
    if (out->blocks != NULL) tell_all(j, alive, n, out);
    put(j, (void *)alive, j->n * sizeof *alive);
    return out->blocks != NULL || out->blocks_n == 0;
}

mt_journal_read_result
mt_journal_read(mt_journal *j, mt_journal_contents *out)
{
    mt_journal_read_result result = MT_JOURNAL_EMPTY;
    change *changes;

    memset(out, 0, sizeof *out);
    if (!is_home(j)) return result;
    mt_lock_take(&j->lock);
    if (j->is_begun) {
        result = MT_JOURNAL_NO_MEMORY;
        out->had_backward = j->backwards_n > 0;
        out->lost = j->lost;
        out->events = j->order;
        if ((changes = changes_of(j)) != NULL &&
            tell_peak(j, changes, sum_up(j, changes, out), out))
            result = MT_JOURNAL_READ;
        put(j, changes, ((size_t)j->order + 1) * sizeof *changes);
    }
    mt_lock_give(&j->lock);
    return result;
}

void
mt_journal_contents_drop(const mt_journal *j, mt_journal_contents *contents)
{
    put(j, contents->blocks, contents->blocks_n * sizeof *contents->blocks);
    contents->blocks = NULL;
    contents->blocks_n = 0;
}
