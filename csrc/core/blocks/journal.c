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
mt_journal_init(mt_journal *j, const mt_alloc *mem, const mt_birth *birth)
{
    *j = (mt_journal){.mem = mem, .birth = birth == NULL ? (mt_birth){NULL, 0} : *birth};
    mt_addrs_init(&j->lives, mem, sizeof(life));
    mt_lock_init(&j->lock);
}

static void
journal_put(const mt_journal *j, void *block, size_t bytes)
{
    if (block != NULL) j->mem->put(j->mem->ctx, block, bytes);
}

/* --- names --------------------------------------------------------------------------------------- */

static void
drop_names(mt_journal *j)
{
    for (size_t i = 1; i < j->names_n; i++)
        journal_put(j, j->names[i].text, strlen(j->names[i].text) + 1);
    journal_put(j, j->names, j->names_room * sizeof *j->names);
    journal_put(j, j->name_slots, NAME_SLOTS * sizeof *j->name_slots);
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

    if (!mt_birth_is_here(&j->birth) || !mt_journal_is_on(j)) return 0;
    mt_lock_take(&j->lock);
    if (mt_journal_is_on(j)) found = name_of(j, text);
    mt_lock_give(&j->lock);
    return found;
}

const char *
mt_journal_text(mt_journal *j, uint32_t name)
{
    const char *text = "";

    if (!mt_birth_is_here(&j->birth)) return text;
    mt_lock_take(&j->lock);
    if (name > 0 && name < j->names_n) text = j->names[name].text;
    mt_lock_give(&j->lock);
    return text;
}

/* --- entries that live --------------------------------------------------------------------------- */

/* The entry that lives at the address, or NULL. */
static mt_journal_entry *
journal_find(const mt_journal *j, uint64_t address)
{
    const life *l = mt_addrs_find(&j->lives, address);

    return l == NULL ? NULL : &j->entries[l->entry - 1];
}

/* False where there is no room. pre: nothing lives at its address. */
static bool
journal_add(mt_journal *j, mt_journal_entry entry)
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
journal_forget(mt_journal *j)
{
    drop_names(j);
    mt_addrs_drop(&j->lives);
    journal_put(j, j->entries, j->room * sizeof *j->entries);
    journal_put(j, j->sizes, j->sizes_room * sizeof *j->sizes);
    journal_put(j, j->backwards, j->backwards_room * sizeof *j->backwards);
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
    journal_forget(j);
    mt_lock_fini(&j->lock);
}

static bool
journal_add_all(mt_journal *j, const mt_block *blocks, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!journal_add(j, (mt_journal_entry){.address = blocks[i].address,
                                               .bytes = blocks[i].bytes,
                                               .site = blocks[i].site}))
            return false;
    return true;
}

/* Adds the blocks that live now. Copies again until the copy holds all of them. */
static bool
add_living(mt_journal *j, mt_live *live)
{
    size_t n = 0, room = 0;
    mt_block *blocks = NULL;
    bool is_added;

    while ((n = mt_live_copy(live, blocks, room)) > room) {
        journal_put(j, blocks, room * sizeof *blocks);
        room = n + n / 8;
        if ((blocks = mt_alloc_zeroed(j->mem, room, sizeof *blocks)) == NULL) return false;
    }
    is_added = journal_add_all(j, blocks, n);
    journal_put(j, blocks, room * sizeof *blocks);
    return is_added;
}

bool
mt_journal_begin(mt_journal *j, mt_live *live)
{
    bool is_begun = false;

    if (!mt_birth_is_here(&j->birth)) return false;
    mt_lock_take(&j->lock);
    journal_forget(j);
    /* First on, and then what lives: a block that is not in the copy is reported after it. */
    atomic_store(&j->is_on, true);
    is_begun = j->is_begun = add_living(j, live);
    if (!is_begun) {
        atomic_store(&j->is_on, false);
        journal_forget(j);
    }
    mt_lock_give(&j->lock);
    return is_begun;
}

void
mt_journal_end(mt_journal *j)
{
    if (!mt_birth_is_here(&j->birth)) return;
    mt_lock_take(&j->lock);
    atomic_store(&j->is_on, false);
    mt_addrs_drop(&j->lives);
    mt_lock_give(&j->lock);
}

void
mt_journal_clear(mt_journal *j)
{
    if (!mt_birth_is_here(&j->birth)) return;
    mt_lock_take(&j->lock);
    atomic_store(&j->is_on, false);
    journal_forget(j);
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
    if (!journal_add(j, (mt_journal_entry){.address = address,
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
    if (!mt_birth_is_here(&j->birth) || !mt_journal_is_on(j)) return;
    mt_lock_take(&j->lock);
    if (mt_journal_is_on(j)) bear(j, (uint64_t)(uintptr_t)address, bytes, birth);
    mt_lock_give(&j->lock);
}

void
mt_journal_died(mt_journal *j, const void *address, mt_phase phase)
{
    uint64_t key = (uint64_t)(uintptr_t)address;

    if (key == 0 || !mt_birth_is_here(&j->birth) || !mt_journal_is_on(j)) return;
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
    if (!mt_birth_is_here(&j->birth) || !mt_journal_is_on(j)) return;
    mt_lock_take(&j->lock);
    entry = mt_journal_is_on(j) ? journal_find(j, key) : NULL;
    if (entry != NULL && entry->birth > since && entry->bytes == bytes)
        take_shape(j, entry, dtype, sizes, dims);
    mt_lock_give(&j->lock);
}

static mt_journal_mark_result
mark(mt_journal *j, uint64_t address, size_t bytes, uint32_t category)
{
    mt_journal_entry *entry = journal_find(j, address);

    if (entry != NULL) {
        if (entry->category == 0) entry->category = (uint8_t)category;
        return MT_MARK_KNOWN;
    }
    return journal_add(j, (mt_journal_entry){.address = address,
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
    if (!mt_birth_is_here(&j->birth)) return result;
    mt_lock_take(&j->lock);
    if (mt_journal_is_on(j)) {
        result = mark(j, (uint64_t)(uintptr_t)address, bytes, category);
        if (result == MT_MARK_LOST) j->lost++;
    }
    mt_lock_give(&j->lock);
    return result;
}

/* --- reading ------------------------------------------------------------------------------------- */

/* What happened at one order. */
typedef struct change {
    int64_t bytes;
    mt_phase phase; /* in which it was born, or what was born last */
    uint16_t interval;
    bool is_outside; /* it died neither in a backward pass nor in an optimizer's step */
} change;

/* What a read works with. */
typedef struct reading {
    const mt_journal *journal;
    change *changes; /* by order */
    uint64_t changes_n;
    uint64_t *alike; /* the sizes of what is marked so, ascending */
    size_t alike_n;
    uint32_t like; /* what they make of a block */
} reading;

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
        changes[e->death].is_outside = e->death_phase == MT_PHASE_FORWARD;
    }
    return changes;
}

/* --- what a block was ---------------------------------------------------------------------------- */

static int
by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

/* False without memory. */
static bool
find_alike(reading *r, mt_journal_likeness likeness)
{
    const mt_journal *j = r->journal;

    if (likeness.of == 0) return true;
    for (size_t i = 0; i < j->n; i++)
        r->alike_n += j->entries[i].category == likeness.of;
    if (r->alike_n == 0) return true;
    r->like = likeness.as;
    if ((r->alike = mt_alloc_zeroed(j->mem, r->alike_n, sizeof *r->alike)) == NULL) return false;
    for (size_t i = 0, n = 0; i < j->n; i++)
        if (j->entries[i].category == likeness.of) r->alike[n++] = j->entries[i].bytes;
    qsort(r->alike, r->alike_n, sizeof *r->alike, by_size);
    return true;
}

static mt_journal_backward
backward_of(const mt_journal *j, const mt_journal_entry *e)
{
    size_t low = 0, high = j->backwards_n;

    if (e->birth_phase != MT_PHASE_FORWARD) return MT_BACKWARD_NONE;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (j->backwards[middle] < e->birth)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == j->backwards_n || (e->death != 0 && e->death <= j->backwards[low]))
        return MT_BACKWARD_NONE; /* it died before the next backward pass began */
    return e->death_phase == MT_PHASE_BACKWARD ? MT_BACKWARD_FREED : MT_BACKWARD_OUTLIVED;
}

static mt_journal_kind
kind_of(const reading *r, const mt_journal_entry *e)
{
    mt_journal_kind kind = {.category = e->category,
                            .birth = (mt_phase)e->birth_phase,
                            .backward = backward_of(r->journal, e),
                            .has_shape = (e->is & HAS_SHAPE) != 0};

    if (kind.category == 0 && kind.birth == MT_PHASE_BACKWARD &&
        e->death_phase != MT_PHASE_BACKWARD && r->alike_n > 0 &&
        bsearch(&e->bytes, r->alike, r->alike_n, sizeof *r->alike, by_size) != NULL)
        kind.category = r->like;
    return kind;
}

/* Its place in a table of all kinds. */
static size_t
number_of(mt_journal_kind kind)
{
    size_t number = kind.category * MT_JOURNAL_PHASES + kind.birth;

    return (number * MT_JOURNAL_BACKWARDS + kind.backward) * 2 + kind.has_shape;
}

/* --- intervals and their layers ------------------------------------------------------------------ */

/* A phase begins with a birth: what dies between two may be let go of anywhere, and belongs to the one
 * before. An optimizer's step ends with the first that dies outside of it; what is let go of then, to
 * the next birth, is of none. Returns how often one begins. */
static uint64_t
fill_phases(reading *r)
{
    mt_phase now = MT_PHASE_BEFORE;
    uint64_t begins = 0;

    for (uint64_t at = 0; at < r->changes_n && now == MT_PHASE_BEFORE; at++)
        now = r->changes[at].phase;
    for (uint64_t at = 0; at < r->changes_n; at++) {
        change *one = &r->changes[at];
        bool is_after = now == MT_PHASE_OPTIMIZER && one->is_outside;
        if (one->phase == MT_PHASE_BEFORE) one->phase = is_after ? MT_PHASE_BEFORE : now;
        begins += at == 0 || one->phase != now;
        now = one->phase;
    }
    return begins;
}

/* Base, peak and intervals; each order learns its interval. Returns the order of the peak. */
static uint32_t
sum_up(reading *r, mt_journal_contents *out)
{
    uint64_t phases = fill_phases(r), most = MT_JOURNAL_INTERVALS_MOST, each, left = 0, in_use = 0;
    bool is_by_phase = phases <= most / 2;
    mt_journal_interval *interval = NULL;
    uint32_t peak_at = 0;

    if (is_by_phase) most -= phases; /* each has a shorter one at its end */
    each = (r->changes_n + most - 1) / most;
    for (uint64_t at = 0; at < r->changes_n; at++, left--) {
        change *now = &r->changes[at];
        bool begins = at > 0 && now->phase != r->changes[at - 1].phase;
        in_use += (uint64_t)now->bytes;
        if (left == 0 || (is_by_phase && begins)) {
            assert(out->intervals_n < MT_JOURNAL_INTERVALS_MOST);
            interval = &out->intervals[out->intervals_n++];
            *interval = (mt_journal_interval){at, in_use, now->phase};
            left = each;
        }
        if (in_use > interval->bytes) *interval = (mt_journal_interval){at, in_use, now->phase};
        now->interval = (uint16_t)(out->intervals_n - 1);
        if (at == 0) out->base_bytes = out->peak_bytes = in_use;
        if (in_use <= out->peak_bytes) continue;
        out->peak_bytes = in_use;
        peak_at = (uint32_t)at;
    }
    return peak_at;
}

/* The first interval whose moment is at this order or later; there may be none. */
static size_t
interval_from(const reading *r, const mt_journal_contents *c, uint32_t order)
{
    size_t at = r->changes[order].interval;

    return c->intervals[at].order < order ? at + 1 : at;
}

/* The layers are sums of what is born and dies from one moment to the next: so a life costs two
 * additions, however long it is. */
static void
lay(const reading *r, mt_journal_contents *out)
{
    const mt_journal *j = r->journal;

    for (size_t i = 0; i < j->n; i++) {
        const mt_journal_entry *e = &j->entries[i];
        size_t from = interval_from(r, out, e->birth), to = out->intervals_n;
        mt_journal_kind kind = kind_of(r, e);
        mt_journal_layer *layer = &out->layers[number_of(kind)];
        if (e->death != 0) to = interval_from(r, out, e->death);
        if (from == to) continue; /* it came and went between two moments */
        layer->kind = kind;
        layer->bytes[from] += e->bytes;
        if (to < out->intervals_n) layer->bytes[to] -= e->bytes;
    }
    for (size_t i = 0; i < MT_JOURNAL_KINDS; i++) {
        mt_journal_layer *layer = &out->layers[i];
        uint64_t most = layer->bytes[0];
        for (size_t at = 1; at < out->intervals_n; at++) {
            layer->bytes[at] += layer->bytes[at - 1];
            if (layer->bytes[at] > most) most = layer->bytes[at];
        }
        if (most == 0) continue;
        if (layer != &out->layers[out->layers_n]) out->layers[out->layers_n] = *layer;
        out->layers_n++;
    }
}

/* --- what lived at the peak ---------------------------------------------------------------------- */

static int
journal_by_bytes(const void *a, const void *b)
{
    const mt_journal_entry *x = *(const mt_journal_entry *const *)a;
    const mt_journal_entry *y = *(const mt_journal_entry *const *)b;

    if (x->bytes != y->bytes) return x->bytes < y->bytes ? 1 : -1;
    return x < y ? -1 : x > y;
}

static void
tell_block(const reading *r, const mt_journal_entry *e, mt_journal_block *out)
{
    *out = (mt_journal_block){.address = e->death == 0 ? (const void *)(uintptr_t)e->address : NULL,
                              .bytes = e->bytes,
                              .kind = kind_of(r, e),
                              .site = e->site,
                              .maker = e->maker,
                              .module = e->module,
                              .death = (mt_phase)e->death_phase,
                              .dtype = e->dtype,
                              .dims = e->dims};
    if (e->dims > 0) memcpy(out->sizes, r->journal->sizes + e->shape, e->dims * sizeof *out->sizes);
}

/* pre: the sum of its kind is at this place of the table of all kinds. */
static void
add_to_rest(const reading *r, const mt_journal_entry *e, mt_journal_rest *kinds)
{
    mt_journal_kind kind = kind_of(r, e);
    mt_journal_rest *rest = &kinds[number_of(kind)];

    rest->kind = kind;
    rest->bytes += e->bytes;
    rest->blocks++;
}

static void
journal_tell_all(const reading *r, const mt_journal_entry *const *alive, size_t n,
                 mt_journal_contents *out)
{
    for (size_t i = 0; i < n; i++) {
        if (i < out->blocks_n)
            tell_block(r, alive[i], &out->blocks[i]);
        else
            add_to_rest(r, alive[i], out->rest);
    }
    for (size_t i = 0; i < MT_JOURNAL_KINDS; i++)
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
tell_peak(const reading *r, uint32_t peak_at, mt_journal_contents *out)
{
    const mt_journal *j = r->journal;
    const mt_journal_entry **alive;
    size_t n;

    if (j->n == 0) return true;
    alive = (const mt_journal_entry **)mt_alloc_zeroed(j->mem, j->n, sizeof *alive);
    if (alive == NULL) return false;
    n = alive_at(j, peak_at, alive);
    out->blocks_n = n < MT_JOURNAL_LISTED_MOST ? n : MT_JOURNAL_LISTED_MOST;
    tell_moment(alive, n, rise_of(r->changes, peak_at, out->peak_bytes), out);
    qsort((void *)alive, n, sizeof *alive, journal_by_bytes);
    if (out->blocks_n > 0)
        out->blocks = mt_alloc_zeroed(j->mem, out->blocks_n, sizeof *out->blocks);
    if (out->blocks != NULL) journal_tell_all(r, alive, n, out);
    journal_put(j, (void *)alive, j->n * sizeof *alive);
    return out->blocks != NULL || out->blocks_n == 0;
}

/* False without memory. */
static bool
journal_read_all(const mt_journal *j, mt_journal_likeness likeness, mt_journal_contents *out)
{
    reading r = {.journal = j, .changes = changes_of(j), .changes_n = (uint64_t)j->order + 1};
    bool is_read = false;

    if (r.changes != NULL && find_alike(&r, likeness)) {
        is_read = tell_peak(&r, sum_up(&r, out), out);
        if (is_read) lay(&r, out);
    }
    journal_put(j, r.alike, r.alike_n * sizeof *r.alike);
    journal_put(j, r.changes, r.changes_n * sizeof *r.changes);
    return is_read;
}

mt_journal_read_result
mt_journal_read(mt_journal *j, mt_journal_likeness likeness, mt_journal_contents *out)
{
    mt_journal_read_result result = MT_JOURNAL_EMPTY;

    memset(out, 0, sizeof *out);
    if (!mt_birth_is_here(&j->birth)) return result;
    mt_lock_take(&j->lock);
    if (j->is_begun) {
        out->had_backward = j->backwards_n > 0;
        out->lost = j->lost;
        out->events = j->order;
        result = journal_read_all(j, likeness, out) ? MT_JOURNAL_READ : MT_JOURNAL_NO_MEMORY;
    }
    mt_lock_give(&j->lock);
    return result;
}

void
mt_journal_contents_drop(const mt_journal *j, mt_journal_contents *contents)
{
    journal_put(j, contents->blocks, contents->blocks_n * sizeof *contents->blocks);
    contents->blocks = NULL;
    contents->blocks_n = 0;
}
