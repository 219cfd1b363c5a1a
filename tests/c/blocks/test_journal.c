/* The journal of all lives: against a model that looks at every life anew for each question, with an
 * allocator that fails at each call, and from several threads at once. */
#include "kit/check.h"
#include "core/blocks/journal.h"
#include "kit/faulty.h"
#include "kit/rng.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { ADDRESSES = 300, EVENTS = 1500, SEEDS = 40, LIVES = 2 * EVENTS, THREADS = 4, EACH = 20000 };

static const mt_journal_likeness NOTHING_ALIKE = {.of = 0};

static const void *
at(uint64_t n)
{
    return (const void *)(uintptr_t)(0x7F0000000000 + 64 * n);
}

/* Addresses that the table's hash does not spread. */
static const void *
crowded(uint64_t n)
{
    return at(n * n * n * 7919);
}

static mt_journal_birth
in(mt_phase phase, uint32_t site, uint32_t maker)
{
    return (mt_journal_birth){.phase = phase, .site = site, .maker = maker};
}

static bool
is_same(mt_journal_kind a, mt_journal_kind b)
{
    return a.category == b.category && a.birth == b.birth && a.backward == b.backward &&
           a.has_shape == b.has_shape;
}

typedef struct rig {
    mt_live live;
    mt_journal journal;
} rig;

static void
rig_open(rig *r, const mt_alloc *mem, const mt_birth *birth)
{
    mt_live_init(&r->live, mem, birth);
    mt_journal_init(&r->journal, mem, birth);
}

static void
rig_close(rig *r)
{
    mt_journal_fini(&r->journal);
    mt_live_fini(&r->live);
}

static mt_journal_contents
read_all(rig *r)
{
    mt_journal_contents c;

    CHECK(mt_journal_read(&r->journal, NOTHING_ALIKE, &c) == MT_JOURNAL_READ);
    return c;
}

/* --- what is told --------------------------------------------------------------------------------- */

/* The stack at the peak is what is told of the peak. */
static void
check_peak_of_layers(const mt_journal_contents *c)
{
    size_t at = 0;

    while (at + 1 < c->intervals_n && c->intervals[at].bytes < c->peak_bytes)
        at++;
    CHECK(c->intervals[at].bytes == c->peak_bytes);
    for (size_t i = 0; i < c->layers_n; i++) {
        uint64_t bytes = c->layers[i].bytes[at];
        for (size_t k = 0; k < c->blocks_n; k++)
            if (is_same(c->blocks[k].kind, c->layers[i].kind)) bytes -= c->blocks[k].bytes;
        for (size_t k = 0; k < c->rest_n; k++)
            if (is_same(c->rest[k].kind, c->layers[i].kind)) bytes -= c->rest[k].bytes;
        CHECK(bytes == 0);
    }
}

static void
only_what_happens_between_begin_and_end_is_told(void)
{
    mt_journal_contents c;
    uint32_t mm;
    rig r;

    rig_open(&r, &mt_alloc_libc, NULL);
    CHECK(mt_journal_read(&r.journal, NOTHING_ALIKE, &c) == MT_JOURNAL_EMPTY);
    mt_live_born(&r.live, at(1), 40, 9);
    mt_journal_born(&r.journal, at(9), 1000, in(MT_PHASE_FORWARD, 0, 0)); /* it is off */
    CHECK(mt_journal_begin(&r.journal, &r.live) && mt_journal_is_on(&r.journal));
    mm = mt_journal_name_of(&r.journal, "aten::mm");
    CHECK(mm == 1 && mt_journal_name_of(&r.journal, "aten::mm") == 1);
    CHECK(mt_journal_name_of(&r.journal, "aten::m") == 2);
    mt_journal_born(&r.journal, at(2), 16, in(MT_PHASE_FORWARD, 3, mm));
    mt_journal_died(&r.journal, NULL, MT_PHASE_BACKWARD);
    mt_journal_shape(&r.journal, NULL, 16, 0, 6, NULL, 0);
    mt_journal_end(&r.journal);
    mt_journal_died(&r.journal, at(1), MT_PHASE_BACKWARD);
    CHECK(mt_journal_mark(&r.journal, at(7), 40, 1) == MT_MARK_LOST);
    CHECK(mt_journal_name_of(&r.journal, "aten::mm") == 0);
    c = read_all(&r);
    CHECK(c.peak_bytes == 56 && c.base_bytes == 40 && c.events == 1 && c.lost == 0);
    CHECK(c.blocks_n == 2 && !c.had_backward);
    CHECK(strcmp(mt_journal_text(&r.journal, c.maker), "aten::mm") == 0);
    mt_journal_contents_drop(&r.journal, &c);
    mt_journal_clear(&r.journal);
    CHECK(mt_journal_read(&r.journal, NOTHING_ALIKE, &c) == MT_JOURNAL_EMPTY);
    CHECK(strcmp(mt_journal_text(&r.journal, mm), "") == 0);
    rig_close(&r);
}

static void
many_blocks_are_told_by_sums(void)
{
    enum { MANY = 6000 };
    uint64_t told = 0, rest = 0, count = 0;
    mt_journal_contents c;
    rig r;

    rig_open(&r, &mt_alloc_libc, NULL);
    for (uint64_t n = 1; n <= MANY; n++)
        mt_live_born(&r.live, at(n), n, (uint32_t)n);
    CHECK(mt_journal_begin(&r.journal, &r.live));
    for (uint64_t n = 1; n <= 100; n++)
        CHECK(mt_journal_mark(&r.journal, at(n), n, 1 + n % 2) == MT_MARK_KNOWN);
    c = read_all(&r);
    CHECK(c.blocks_n == MT_JOURNAL_LISTED_MOST && c.rest_n == 3);
    for (size_t i = 0; i < c.blocks_n; i++) {
        CHECK(c.blocks[i].bytes == MANY - i && c.blocks[i].site == MANY - i);
        told += c.blocks[i].bytes;
    }
    for (size_t i = 0; i < c.rest_n; i++) {
        rest += c.rest[i].bytes;
        count += c.rest[i].blocks;
        CHECK(c.rest[i].kind.category == i && c.rest[i].kind.birth == MT_PHASE_BEFORE);
        CHECK(i == 0 || c.rest[i].blocks == 50);
    }
    CHECK(count == MANY - MT_JOURNAL_LISTED_MOST && told + rest == MANY * (MANY + 1) / 2);
    CHECK(c.peak_bytes == told + rest && c.phase == MT_PHASE_BEFORE);
    CHECK(c.layers_n == 3 && c.intervals_n == 1);
    check_peak_of_layers(&c);
    mt_journal_contents_drop(&r.journal, &c);
    rig_close(&r);
}

static void
what_finds_no_room_is_counted(void)
{
    mt_journal_contents c;
    rig r;

    rig_open(&r, &mt_alloc_libc, NULL);
    CHECK(mt_journal_begin(&r.journal, &r.live));
    for (uint64_t n = 0; n < MT_JOURNAL_ENTRIES_MOST + 5; n++) {
        mt_journal_born(&r.journal, at(1), 8, in(MT_PHASE_FORWARD, 0, 0));
        if (n == 0) CHECK(mt_journal_mark(&r.journal, at(1), 8, 1) == MT_MARK_KNOWN);
        mt_journal_died(&r.journal, at(1), MT_PHASE_FORWARD);
    }
    CHECK(mt_journal_mark(&r.journal, at(7), 40, 1) == MT_MARK_LOST);
    c = read_all(&r);
    CHECK(c.lost == 6 && c.peak_bytes == 8 && c.layers_n == 2);
    CHECK(c.intervals_n == MT_JOURNAL_INTERVALS_MOST - 1);
    for (size_t i = 0; i < c.intervals_n; i++) {
        CHECK(c.intervals[i].bytes == 8 && c.layers[0].bytes[i] + c.layers[1].bytes[i] == 8);
        CHECK(i == 0 || c.intervals[i - 1].order < c.intervals[i].order);
    }
    check_peak_of_layers(&c); /* the first of equals */
    mt_journal_contents_drop(&r.journal, &c);
    rig_close(&r);
}

static void
phases_that_change_too_often_share_intervals(void)
{
    enum { TURNS = 5000 };
    mt_journal_contents c;
    rig r;

    for (uint64_t turns = 32; turns <= TURNS; turns = turns == 33 ? TURNS : turns + 1) {
        rig_open(&r, &mt_alloc_libc, NULL);
        CHECK(mt_journal_begin(&r.journal, &r.live));
        for (uint64_t i = 0; i < turns; i++) {
            for (uint64_t n = 1; n <= 30; n++)
                mt_journal_born(&r.journal, at(n), n, in(MT_PHASE_FORWARD, 0, 0));
            mt_journal_born(&r.journal, at(31), 1000, in(MT_PHASE_BACKWARD, 0, 0));
        }
        c = read_all(&r);
        CHECK(c.intervals_n > MT_JOURNAL_INTERVALS_MOST / 2);
        CHECK(c.intervals_n <= MT_JOURNAL_INTERVALS_MOST);
        for (size_t i = 0, turn = 0; i < c.intervals_n && turns == 32; i++) {
            bool is_backward = c.intervals[i].phase == MT_PHASE_BACKWARD;
            turn += is_backward;
            CHECK(!is_backward || c.intervals[i - 1].phase == MT_PHASE_FORWARD);
            CHECK(i + 1 < c.intervals_n || turn == turns);
        }
        check_peak_of_layers(&c);
        mt_journal_contents_drop(&r.journal, &c);
        rig_close(&r);
    }
}

static void
names_are_many_and_long(void)
{
    char text[400];
    rig r;

    rig_open(&r, &mt_alloc_libc, NULL);
    CHECK(mt_journal_begin(&r.journal, &r.live));
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    CHECK(mt_journal_name_of(&r.journal, text) == 1);
    CHECK(strlen(mt_journal_text(&r.journal, 1)) == MT_JOURNAL_NAME_BYTES_MOST);
    CHECK(mt_journal_name_of(&r.journal, text + 1) == 1);
    CHECK(mt_journal_name_of(&r.journal, "") == 2);
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t i = 3; i < MT_JOURNAL_NAMES_MOST + 9; i++) {
            snprintf(text, sizeof text, "aten::operator_%u", i);
            CHECK(mt_journal_name_of(&r.journal, text) == (i < MT_JOURNAL_NAMES_MOST ? i : 0));
        }
    CHECK(strcmp(mt_journal_text(&r.journal, 77), "aten::operator_77") == 0);
    CHECK(strcmp(mt_journal_text(&r.journal, 0), "") == 0);
    CHECK(strcmp(mt_journal_text(&r.journal, 1 << 20), "") == 0);
    rig_close(&r);
}

/* --- any order of reports ------------------------------------------------------------------------- */

typedef struct life {
    uint64_t address, bytes; /* those from before the first event differ in size */
    uint32_t birth, death, category, site;
    mt_phase born, died;
    bool met_backward, has_shape;
    int dtype, dims;
    int64_t sizes[MT_JOURNAL_DIMS_MOST];
    mt_journal_kind kind; /* as a read with some likeness tells it */
} life;

typedef struct model {
    life lives[LIVES];
    mt_phase phases[1 + LIVES]; /* of each order */
    uint32_t first;             /* the order of the first birth */
    size_t n;
    size_t sizes_n; /* of all shapes */
    uint32_t order;
    bool is_in_backward, had_backward;
} model;

static bool
is_alive(const life *l, uint32_t order)
{
    return l->birth <= order && (l->death == 0 || l->death > order);
}

static life *
model_at(model *m, uint64_t address)
{
    for (size_t i = 0; i < m->n; i++)
        if (m->lives[i].address == address && m->lives[i].death == 0) return &m->lives[i];
    return NULL;
}

static void
model_phase(model *m, mt_phase phase, bool is_birth)
{
    if (is_birth && phase == MT_PHASE_FORWARD) m->is_in_backward = false;
    if (phase != MT_PHASE_BACKWARD || m->is_in_backward) return;
    m->is_in_backward = m->had_backward = true;
    for (size_t i = 0; i < m->n; i++)
        if (m->lives[i].death == 0 && m->lives[i].born == MT_PHASE_FORWARD)
            m->lives[i].met_backward = true;
}

static void
model_die(model *m, uint64_t address, mt_phase phase)
{
    life *l = model_at(m, address);

    if (l == NULL) return;
    l->death = ++m->order;
    l->died = phase;
    m->phases[m->order] = m->phases[m->order - 1];
    if (m->phases[m->order] == MT_PHASE_OPTIMIZER && phase == MT_PHASE_FORWARD)
        m->phases[m->order] = MT_PHASE_BEFORE;
}

static void
model_add(model *m, life l)
{
    CHECK(m->n < LIVES);
    if (l.birth != 0) m->phases[l.birth] = l.born;
    if (m->first == 0) m->first = l.birth;
    m->lives[m->n++] = l;
}

static uint64_t
model_in_use(const model *m, uint32_t order)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < m->n; i++)
        if (is_alive(&m->lives[i], order)) sum += m->lives[i].bytes;
    return sum;
}

/* Of a gradient's size, born in a backward pass and not let go of there: it counts as one. */
static void
model_kinds(model *m, mt_journal_likeness like)
{
    for (size_t i = 0; i < m->n; i++) {
        life *l = &m->lives[i];
        l->kind = (mt_journal_kind){l->category, l->born, MT_BACKWARD_NONE, l->has_shape};
        if (l->met_backward)
            l->kind.backward =
                l->died == MT_PHASE_BACKWARD ? MT_BACKWARD_FREED : MT_BACKWARD_OUTLIVED;
        if (like.of == 0 || l->category != 0 || l->born != MT_PHASE_BACKWARD ||
            l->died == MT_PHASE_BACKWARD)
            continue;
        for (size_t k = 0; k < m->n; k++)
            if (m->lives[k].category == like.of && m->lives[k].bytes == l->bytes)
                l->kind.category = like.as;
    }
}

/* A birth's module says which life it is. */
static void
check_block(const model *m, const mt_journal_block *block, uint32_t peak_at)
{
    const life *l = m->lives;

    if (block->module > 0)
        l += block->module - 1;
    else
        while (l->birth > 0 || l->bytes != block->bytes)
            CHECK(++l < m->lives + m->n);
    CHECK(l->bytes == block->bytes && is_alive(l, peak_at) && is_same(block->kind, l->kind));
    CHECK(l->died == block->death && l->site == block->site);
    CHECK(block->maker == (l->birth > 0 ? l->site + 10 : 0));
    CHECK(block->address == (l->death == 0 ? crowded(l->address) : NULL));
    CHECK(block->dtype == l->dtype && block->dims == l->dims);
    CHECK(memcmp(block->sizes, l->sizes, sizeof l->sizes) == 0);
}

static mt_phase
model_phase_at(const model *m, uint64_t order)
{
    return m->phases[order < m->first ? m->first : order];
}

/* What the layers tell of an interval is what the model has at its moment, by kinds. */
static void
check_interval(const mt_journal_contents *c, const model *m, size_t at)
{
    const mt_journal_interval *interval = &c->intervals[at];
    uint64_t sum = 0, left[MT_JOURNAL_KINDS];

    for (size_t i = 0; i < c->layers_n; i++)
        sum += left[i] = c->layers[i].bytes[at];
    CHECK(sum == interval->bytes && sum == model_in_use(m, (uint32_t)interval->order));
    CHECK(interval->phase == model_phase_at(m, interval->order));
    for (size_t k = 0; k < m->n; k++) {
        const life *l = &m->lives[k];
        for (size_t i = 0; i < c->layers_n && is_alive(l, (uint32_t)interval->order); i++)
            if (is_same(c->layers[i].kind, l->kind)) left[i] -= l->bytes;
    }
    for (size_t i = 0; i < c->layers_n; i++)
        CHECK(left[i] == 0);
}

/* Between the moments of two intervals nothing is higher than the higher one, and each time that a
 * phase begins, an interval does. */
static void
check_intervals(const mt_journal_contents *c, const model *m)
{
    size_t next = 0, phases = 0;
    bool has_interval = true;

    CHECK(c->intervals_n <= MT_JOURNAL_INTERVALS_MOST);
    CHECK(m->order < 100 || c->intervals_n > MT_JOURNAL_INTERVALS_MOST / 2);
    for (size_t at = 0; at < c->intervals_n; at++)
        check_interval(c, m, at);
    for (uint32_t order = 0; order <= m->order; order++) {
        uint64_t most = 0;
        bool begins = order > 0 && model_phase_at(m, order) != model_phase_at(m, order - 1);
        phases += order == 0 || begins;
        CHECK(!begins || has_interval);
        has_interval = has_interval && !begins;
        if (next < c->intervals_n && c->intervals[next].order == order) {
            next++;
            has_interval = true;
        }
        if (next > 0) most = c->intervals[next - 1].bytes;
        if (next < c->intervals_n && c->intervals[next].bytes > most)
            most = c->intervals[next].bytes;
        CHECK(model_in_use(m, order) <= most);
    }
    CHECK(next == c->intervals_n && has_interval && phases <= MT_JOURNAL_INTERVALS_MOST / 2);
}

/* The last of the largest births, of those that live, in the phase of the peak and since the last
 * thousandth of it came. */
static void
check_moment(const mt_journal_contents *c, const model *m, uint32_t peak_at)
{
    uint32_t since = peak_at;
    const life *largest = NULL;

    while (since > 0 && model_phase_at(m, since) == model_phase_at(m, peak_at) &&
           model_in_use(m, since) >= c->peak_bytes - c->peak_bytes / 1000)
        since--;
    for (size_t i = 0; i < m->n; i++) {
        const life *l = &m->lives[i];
        if (l->birth <= since || !is_alive(l, peak_at)) continue;
        if (largest == NULL || l->bytes >= largest->bytes) largest = l;
    }
    CHECK(c->phase == (largest != NULL ? largest->born : MT_PHASE_BEFORE));
    CHECK(c->site == (largest != NULL ? largest->site : 0));
    CHECK(c->maker == (largest != NULL ? largest->site + 10 : 0));
}

static void
check_model(rig *r, model *m, mt_journal_likeness like)
{
    mt_journal_contents c;
    uint64_t peak = 0, told = 0;
    uint32_t peak_at = 0;
    size_t alive = 0;

    CHECK(mt_journal_read(&r->journal, like, &c) == MT_JOURNAL_READ);
    CHECK(r->journal.sizes_n == m->sizes_n && mt_journal_order(&r->journal) == m->order);
    model_kinds(m, like);
    for (uint32_t order = 0; order <= m->order; order++) {
        uint64_t in_use = model_in_use(m, order);
        if (order == 0 || in_use > peak) peak_at = order;
        if (in_use > peak) peak = in_use;
    }
    CHECK(c.peak_bytes == peak && c.base_bytes == model_in_use(m, 0) && c.events == m->order);
    for (size_t i = 0; i < c.blocks_n; i++) {
        check_block(m, &c.blocks[i], peak_at);
        CHECK(i == 0 || c.blocks[i].bytes <= c.blocks[i - 1].bytes);
        told += c.blocks[i].bytes;
    }
    for (size_t i = 0; i < m->n; i++)
        alive += is_alive(&m->lives[i], peak_at);
    CHECK(told == peak && alive == c.blocks_n && c.lost == 0);
    CHECK(c.had_backward == m->had_backward);
    check_moment(&c, m, peak_at);
    check_intervals(&c, m);
    check_peak_of_layers(&c);
    mt_journal_contents_drop(&r->journal, &c);
}

/* An operator that began at some time shows a tensor: the outermost one since the birth stays. */
static void
one_shape(rig *r, model *m, rng *g, uint64_t address, life *l)
{
    uint32_t since = (uint32_t)rng_below(g, (size_t)m->order + 1);
    uint64_t bytes = l != NULL && rng_below(g, 4) > 0 ? l->bytes : 1;
    int dims = (int)rng_below(g, MT_JOURNAL_DIMS_MOST + 2), dtype = (int)rng_below(g, 9);
    int64_t sizes[MT_JOURNAL_DIMS_MOST + 1];

    if (l != NULL && l->birth > 0 && rng_below(g, 4) > 0)
        since = l->birth - (uint32_t)rng_below(g, 2);
    for (int i = 0; i <= MT_JOURNAL_DIMS_MOST; i++)
        sizes[i] = (int64_t)rng_next(g);
    mt_journal_shape(&r->journal, crowded(address), (size_t)bytes, since, dtype, sizes, dims);
    if (l == NULL || l->birth <= since || bytes != l->bytes || dims > MT_JOURNAL_DIMS_MOST) return;
    if (!l->has_shape || l->dims != dims) m->sizes_n += (size_t)dims;
    l->has_shape = true;
    l->dtype = dtype;
    l->dims = dims;
    memset(l->sizes, 0, sizeof l->sizes);
    memcpy(l->sizes, sizes, (size_t)dims * sizeof *sizes);
}

static void
one_event(rig *r, model *m, rng *g, uint64_t i)
{
    uint64_t address = 1 + rng_below(g, ADDRESSES), what = rng_below(g, 100);
    mt_phase phase = (mt_phase)(1 + (i / 97) % 3);
    uint32_t category = 1 + (uint32_t)rng_below(g, MT_JOURNAL_CATEGORIES - 2); /* never the last */
    uint64_t bytes = LIVES * rng_below(g, rng_below(g, 2) ? 1 << 20 : 1 << 8) + m->n;
    bool grows = (i / 400) % 2 == 0;
    life *l = model_at(m, address);

    if (what < 10) {
        CHECK(mt_journal_mark(&r->journal, crowded(address), (size_t)bytes, category) ==
              (l == NULL ? MT_MARK_OLDER : MT_MARK_KNOWN));
        if (l == NULL)
            model_add(m, (life){.address = address, .bytes = bytes, .category = category});
        else if (l->category == 0)
            l->category = category;
    } else if (what < 20) {
        one_shape(r, m, g, address, l);
    } else if (what < (grows ? 80U : 45U)) {
        mt_journal_birth birth = {phase, category, category + 10, (uint32_t)m->n + 1};
        if (m->n > 0 && rng_below(g, 3) == 0) bytes = m->lives[rng_below(g, m->n)].bytes;
        mt_journal_born(&r->journal, crowded(address), (size_t)bytes, birth);
        model_phase(m, phase, true);
        model_die(m, address, phase);
        model_add(m, (life){.address = address,
                            .bytes = bytes,
                            .birth = ++m->order,
                            .site = category,
                            .born = phase});
    } else {
        mt_journal_died(&r->journal, crowded(address), phase);
        if (l == NULL) return;
        model_phase(m, phase, false);
        model_die(m, address, phase);
    }
}

static void
any_order_of_reports_is_as_in_the_model(void)
{
    static model m;

    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        rng g = rng_seeded(seed + 1);
        rig r;
        m = (model){.n = 0};
        rig_open(&r, &mt_alloc_libc, NULL);
        for (uint64_t n = 1; n < 50 * (seed % 3); n++) {
            mt_live_born(&r.live, crowded(n), (size_t)(LIVES * (n + (1 << 20)) + m.n), 7);
            model_add(&m, (life){.address = n, .bytes = LIVES * (n + (1 << 20)) + m.n, .site = 7});
        }
        CHECK(mt_journal_begin(&r.journal, &r.live));
        for (uint64_t i = 0; i < EVENTS; i++)
            one_event(&r, &m, &g, i);
        check_model(&r, &m, NOTHING_ALIKE);
        for (uint32_t of = 1; of < MT_JOURNAL_CATEGORIES; of += 4)
            check_model(&r, &m, (mt_journal_likeness){.of = of, .as = 2});
        rig_close(&r);
    }
}

/* --- no memory, forked children, threads ------------------------------------------------------------------- */

/* Whatever fails, the numbers of what was heard are right, and all memory goes back. Returns whether a
 * call failed. */
static bool
survives(long fail_at)
{
    faulty f = {.fail_at = fail_at};
    mt_alloc mem = faulty_alloc(&f);
    int64_t sizes[2] = {2, 4};
    mt_journal_contents c;
    mt_journal_read_result result;
    rig r;

    mt_live_init(&r.live, &mt_alloc_libc, NULL);
    mt_journal_init(&r.journal, &mem, NULL);
    for (uint64_t n = 1; n <= 20; n++)
        mt_live_born(&r.live, at(n), 8, 1);
    if (mt_journal_begin(&r.journal, &r.live)) {
        for (uint64_t n = 21; n <= 2000; n++) {
            uint32_t name = mt_journal_name_of(&r.journal, n % 2 == 0 ? "a" : "b");
            mt_phase phase = n % 100 < 50 ? MT_PHASE_FORWARD : MT_PHASE_BACKWARD;
            mt_journal_born(&r.journal, at(n), 8, in(phase, 1, name));
            mt_journal_shape(&r.journal, at(n), 8, 0, 1, sizes, 2);
            if (n % 3 == 0) mt_journal_died(&r.journal, at(n), phase);
        }
        (void)mt_journal_mark(&r.journal, at(5000), 8, 1);
        result = mt_journal_read(&r.journal, (mt_journal_likeness){.of = 1, .as = 2}, &c);
        CHECK(result != MT_JOURNAL_EMPTY);
        if (result == MT_JOURNAL_READ) {
            CHECK(c.peak_bytes % 8 == 0 && c.peak_bytes >= 8 * c.blocks_n && c.rest_n == 0);
            CHECK(c.lost > 0 || c.blocks_n == 20 + 1 + 1980 - 660);
            mt_journal_contents_drop(&r.journal, &c);
        }
        mt_journal_end(&r.journal);
    } else {
        CHECK(!mt_journal_is_on(&r.journal) && f.live == 0);
        CHECK(mt_journal_read(&r.journal, NOTHING_ALIKE, &c) == MT_JOURNAL_EMPTY);
    }
    rig_close(&r);
    CHECK(f.live == 0);
    return f.calls > fail_at;
}

static void
without_memory_nothing_is_wrong_and_nothing_stays(void)
{
    long fail_at = 0;

    while (survives(fail_at))
        fail_at++;
    CHECK(fail_at > 20); /* it did allocate */
}

static void
a_forked_child_reports_nothing(void)
{
    mt_journal_contents c;
    mt_forks forks = 3;
    rig r;

    rig_open(&r, &mt_alloc_libc, &(mt_birth){&forks, 3});
    CHECK(mt_journal_begin(&r.journal, &r.live));
    mt_journal_born(&r.journal, at(1), 100, in(MT_PHASE_FORWARD, 0, 0));
    mt_lock_take(&r.journal.lock); /* another thread of the parent, at the fork */
    forks = 4;
    mt_journal_born(&r.journal, at(2), 100, in(MT_PHASE_FORWARD, 0, 0));
    mt_journal_died(&r.journal, at(1), MT_PHASE_FORWARD);
    mt_journal_shape(&r.journal, at(1), 100, 0, 0, NULL, 0);
    CHECK(mt_journal_mark(&r.journal, at(1), 100, 1) == MT_MARK_LOST);
    CHECK(mt_journal_name_of(&r.journal, "a") == 0 && mt_journal_text(&r.journal, 1)[0] == '\0');
    CHECK(mt_journal_read(&r.journal, NOTHING_ALIKE, &c) == MT_JOURNAL_EMPTY);
    CHECK(!mt_journal_begin(&r.journal, &r.live));
    mt_journal_end(&r.journal);
    mt_journal_clear(&r.journal);
    forks = 3;
    mt_lock_give(&r.journal.lock);
    c = read_all(&r);
    CHECK(c.peak_bytes == 100 && c.blocks_n == 1 && c.blocks[0].kind.category == 0);
    mt_journal_contents_drop(&r.journal, &c);
    rig_close(&r);
}

typedef struct worker {
    rig *rig;
    uint64_t first;
} worker;

static void *
report(void *arg)
{
    const worker *w = arg;
    mt_live *live = &w->rig->live;
    mt_journal *journal = &w->rig->journal;

    for (uint64_t n = 0; n < EACH; n++) {
        const void *address = at(w->first + n % 500);
        uint32_t name = mt_journal_name_of(journal, n % 2 == 0 ? "aten::mm" : "aten::add");
        mt_live_died(live, address);
        mt_journal_died(journal, address, MT_PHASE_FORWARD);
        mt_live_born(live, address, 16, 1);
        mt_journal_born(journal, address, 16, in(MT_PHASE_FORWARD, 1, name));
    }
    return NULL;
}

/* Recordings begin and end while threads report. What one has at its end and what lives agree. */
static void
threads_report_while_it_begins_and_ends(void)
{
    pthread_t threads[THREADS];
    worker workers[THREADS];
    mt_journal_contents c;
    rig r;

    rig_open(&r, &mt_alloc_libc, NULL);
    for (size_t i = 0; i < THREADS; i++) {
        workers[i] = (worker){&r, 1 + i * 1000};
        CHECK(pthread_create(&threads[i], NULL, report, &workers[i]) == 0);
    }
    for (int round = 0; round < 20; round++) {
        CHECK(mt_journal_begin(&r.journal, &r.live));
        CHECK(mt_journal_mark(&r.journal, at(9000), 1, 1) == MT_MARK_OLDER);
        c = read_all(&r);
        CHECK(c.peak_bytes >= c.base_bytes && c.peak_bytes <= THREADS * 500 * 16 + 1);
        mt_journal_contents_drop(&r.journal, &c);
        if (round < 19) mt_journal_end(&r.journal);
    }
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(r.journal.lives.n == mt_live_read(&r.live).blocks + 1);
    rig_close(&r);
}

int
main(void)
{
    RUN(only_what_happens_between_begin_and_end_is_told);
    RUN(many_blocks_are_told_by_sums);
    RUN(what_finds_no_room_is_counted);
    RUN(phases_that_change_too_often_share_intervals);
    RUN(names_are_many_and_long);
    RUN(any_order_of_reports_is_as_in_the_model);
    RUN(without_memory_nothing_is_wrong_and_nothing_stays);
    RUN(a_forked_child_reports_nothing);
    RUN(threads_report_while_it_begins_and_ends);
    CHECK_DONE();
}
