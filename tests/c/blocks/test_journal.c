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

static mt_journal_birth
within(uint32_t module, mt_journal_birth birth)
{
    birth.module = module;
    return birth;
}

static bool
is_same(mt_journal_kind a, mt_journal_kind b)
{
    return a.category == b.category && a.birth == b.birth && a.is_saved == b.is_saved &&
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

static uint64_t
layer_bytes(const mt_journal_contents *c, mt_journal_kind kind, size_t at)
{
    for (size_t i = 0; i < c->layers_n; i++)
        if (is_same(c->layers[i].kind, kind)) return c->layers[i].bytes[at];
    return 0;
}

/* --- what is told --------------------------------------------------------------------------------- */

/* The stack at the peak is what is told of the peak. */
static void
check_peak_of_layers(const mt_journal_contents *c)
{
    size_t at = 0;

    while (at + 1 < c->stretches_n && c->stretches[at].bytes < c->peak_bytes)
        at++;
    CHECK(c->stretches[at].bytes == c->peak_bytes);
    for (size_t i = 0; i < c->layers_n; i++) {
        uint64_t bytes = c->layers[i].bytes[at];
        for (size_t k = 0; k < c->blocks_n; k++)
            if (is_same(c->blocks[k].kind, c->layers[i].kind)) bytes -= c->blocks[k].bytes;
        for (size_t k = 0; k < c->rest_n; k++)
            if (is_same(c->rest[k].kind, c->layers[i].kind)) bytes -= c->rest[k].bytes;
        CHECK(bytes == 0);
    }
}

/* The pictures in journal.h; of the second one, a stretch for each order. */
static void
check_layers(const mt_journal_contents *c)
{
    mt_journal_kind kinds[] = {{.category = 1},
                               {.birth = MT_PHASE_FORWARD, .is_saved = true},
                               {.birth = MT_PHASE_FORWARD},
                               {.birth = MT_PHASE_BACKWARD}};
    uint64_t bytes[4][7] = {{40, 40, 40, 40, 40, 40, 40},
                            {0, 16, 16, 16, 16, 0, 0},
                            {0, 0, 4, 0, 0, 0, 0},
                            {0, 0, 0, 0, 30, 30, 0}};

    CHECK(c->layers_n == 4);
    for (size_t kind = 0; kind < 4; kind++)
        for (size_t at = 0; at < 7; at++)
            CHECK(layer_bytes(c, kinds[kind], at) == bytes[kind][at]);
}

static void
the_lives_of_a_step_are_told(void)
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
    mt_journal_born(&r.journal, at(2), 16, in(MT_PHASE_FORWARD, 3, mm));            /* 1: B */
    mt_journal_born(&r.journal, at(3), 4, in(MT_PHASE_FORWARD, 3, mm));             /* 2: C */
    mt_journal_died(&r.journal, at(3), MT_PHASE_FORWARD);                           /* 3 */
    mt_journal_born(&r.journal, at(4), 30, within(2, in(MT_PHASE_BACKWARD, 4, 2))); /* 4: D */
    mt_journal_died(&r.journal, at(2), MT_PHASE_BACKWARD);                          /* 5 */
    mt_journal_died(&r.journal, at(4), MT_PHASE_BACKWARD);                          /* 6 */
    mt_journal_died(&r.journal, at(4), MT_PHASE_BACKWARD);                          /* not known */
    mt_journal_died(&r.journal, NULL, MT_PHASE_BACKWARD);
    CHECK(mt_journal_mark(&r.journal, at(1), 40, 1) == MT_MARK_KNOWN);
    CHECK(mt_journal_mark(&r.journal, at(1), 40, 2) == MT_MARK_KNOWN); /* the first mark stays */
    mt_journal_end(&r.journal);
    mt_journal_died(&r.journal, at(1), MT_PHASE_BACKWARD);
    CHECK(mt_journal_mark(&r.journal, at(7), 40, 1) == MT_MARK_LOST);
    CHECK(mt_journal_name_of(&r.journal, "aten::mm") == 0);
    c = read_all(&r);
    CHECK(c.peak_bytes == 86 && c.base_bytes == 40 && c.events == 6 && c.lost == 0);
    CHECK(c.phase == MT_PHASE_BACKWARD && c.site == 4 && c.had_backward);
    CHECK(strcmp(mt_journal_text(&r.journal, c.maker), "aten::m") == 0);
    CHECK(c.blocks_n == 3 && c.rest_n == 0);
    CHECK(c.blocks[0].bytes == 40 && c.blocks[0].kind.category == 1 && c.blocks[0].site == 9);
    CHECK(c.blocks[0].kind.birth == MT_PHASE_BEFORE && c.blocks[0].death == MT_PHASE_BEFORE);
    CHECK(c.blocks[0].address == at(1) && c.blocks[1].address == NULL);
    CHECK(c.blocks[0].module == 0 && c.blocks[1].module == 2);
    CHECK(c.blocks[1].bytes == 30 && c.blocks[1].kind.birth == MT_PHASE_BACKWARD);
    CHECK(!c.blocks[1].kind.is_saved && !c.blocks[1].kind.has_shape);
    CHECK(c.blocks[2].bytes == 16 && c.blocks[2].kind.is_saved && c.blocks[2].maker == mm);
    CHECK(c.blocks[2].kind.birth == MT_PHASE_FORWARD && c.blocks[2].death == MT_PHASE_BACKWARD);
    CHECK(c.stretches_n == 7 && c.stretches[0].bytes == 40 && c.stretches[4].bytes == 86);
    for (size_t i = 0; i < c.stretches_n; i++) {
        CHECK(c.stretches[i].order == i);
        CHECK(c.stretches[i].phase == (i < 4 ? MT_PHASE_FORWARD : MT_PHASE_BACKWARD));
    }
    check_layers(&c);
    check_peak_of_layers(&c);
    mt_journal_contents_drop(&r.journal, &c);
    mt_journal_clear(&r.journal);
    CHECK(mt_journal_read(&r.journal, NOTHING_ALIKE, &c) == MT_JOURNAL_EMPTY);
    CHECK(strcmp(mt_journal_text(&r.journal, mm), "") == 0);
    rig_close(&r);
}

static void
the_outermost_operator_of_a_birth_tells_its_shape(void)
{
    int64_t sizes[] = {2, 3, 4}, many[9] = {1, 1, 1, 1, 1, 1, 1, 1, 96};
    mt_journal_contents c;
    uint32_t linear, addmm, t;
    rig r;

    rig_open(&r, &mt_alloc_libc, NULL);
    mt_live_born(&r.live, at(8), 96, 0);
    CHECK(mt_journal_begin(&r.journal, &r.live));
    mt_journal_born(&r.journal, at(4), 16, in(MT_PHASE_FORWARD, 0, 0));
    CHECK((linear = mt_journal_order(&r.journal)) == 1);
    mt_journal_born(&r.journal, at(2), 4, in(MT_PHASE_FORWARD, 0, 0));
    addmm = mt_journal_order(&r.journal);
    mt_journal_born(&r.journal, at(1), 97, in(MT_PHASE_FORWARD, 0, 0));
    mt_journal_shape(&r.journal, at(1), 95, addmm, 1, sizes, 3);
    mt_journal_shape(&r.journal, at(1), 97, addmm, 2, sizes, 3);
    t = mt_journal_order(&r.journal);
    mt_journal_shape(&r.journal, at(1), 97, t, 3, sizes + 1, 2); /* a view */
    mt_journal_shape(&r.journal, at(1), 97, linear, 4, sizes + 1, 1);
    mt_journal_shape(&r.journal, at(1), 97, linear, 5, many, 9);
    mt_journal_shape(&r.journal, at(1), 97, linear, 6, many, 8);
    mt_journal_shape(&r.journal, at(1), 97, linear, 7, many + 1, 8);
    mt_journal_shape(&r.journal, at(2), 4, linear, 5, NULL, 0);
    mt_journal_shape(&r.journal, at(8), 96, 0, 6, sizes, 3); /* from before the recording */
    mt_journal_shape(&r.journal, at(4), 16, linear, 6, sizes, 3);
    mt_journal_shape(&r.journal, at(3), 4, 0, 6, sizes, 3);
    mt_journal_shape(&r.journal, NULL, 4, 0, 6, sizes, 3);
    CHECK(r.journal.sizes_n == 3 + 1 + 8);
    c = read_all(&r);
    CHECK(c.blocks[0].kind.has_shape && c.blocks[0].dims == 8 && c.blocks[0].dtype == 7);
    CHECK(memcmp(c.blocks[0].sizes, many + 1, 8 * sizeof *many) == 0);
    CHECK(!c.blocks[1].kind.has_shape && c.blocks[1].bytes == 96);
    CHECK(!c.blocks[2].kind.has_shape && c.blocks[2].bytes == 16);
    CHECK(c.blocks[3].kind.has_shape && c.blocks[3].dims == 0 && c.blocks[3].dtype == 5);
    mt_journal_contents_drop(&r.journal, &c);
    rig_close(&r);
}

/* 10,000 in use, and then births of some bytes each by sites 1, 2, 3 and so on. */
static mt_journal_contents
after_births(const uint64_t *bytes, const mt_phase *phases, size_t n)
{
    mt_journal_contents c;
    rig r;

    rig_open(&r, &mt_alloc_libc, NULL);
    mt_live_born(&r.live, at(1), 10000, 0);
    CHECK(mt_journal_begin(&r.journal, &r.live));
    for (uint32_t i = 0; i < n; i++)
        mt_journal_born(&r.journal, at(2 + i), (size_t)bytes[i], in(phases[i], 1 + i, 0));
    c = read_all(&r);
    mt_journal_contents_drop(&r.journal, &c);
    rig_close(&r);
    return c;
}

static void
the_moment_is_that_of_the_largest_birth_of_the_last_thousandth(void)
{
    mt_phase step[] = {MT_PHASE_OPTIMIZER, MT_PHASE_OPTIMIZER, MT_PHASE_OPTIMIZER,
                       MT_PHASE_OPTIMIZER};
    mt_phase mixed[] = {MT_PHASE_FORWARD, MT_PHASE_BACKWARD};

    CHECK(after_births((uint64_t[]){2000, 500, 4, 4}, step, 4).site == 2);
    CHECK(after_births((uint64_t[]){2000, 4, 4, 4}, step, 4).site == 1);
    CHECK(after_births((uint64_t[]){2000, 500, 4, 8}, step, 4).site == 2);
    CHECK(after_births((uint64_t[]){2000, 500, 15, 4}, step, 4).site == 3); /* 500 was before it */
    CHECK(after_births((uint64_t[]){5, 5}, step, 2).site == 2);
    CHECK(after_births((uint64_t[]){2000, 4}, mixed, 2).site == 2);
    CHECK(after_births((uint64_t[]){2000, 4}, mixed, 2).phase == MT_PHASE_BACKWARD);
    CHECK(after_births(NULL, NULL, 0).phase == MT_PHASE_BEFORE);
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
    CHECK(c.layers_n == 3 && c.stretches_n == 1);
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
    CHECK(c.stretches_n == MT_JOURNAL_STRETCHES_MOST - 1);
    for (size_t i = 0; i < c.stretches_n; i++) {
        CHECK(c.stretches[i].bytes == 8 && c.layers[0].bytes[i] + c.layers[1].bytes[i] == 8);
        CHECK(i == 0 || c.stretches[i - 1].order < c.stretches[i].order);
    }
    check_peak_of_layers(&c); /* the first of equals */
    mt_journal_contents_drop(&r.journal, &c);
    rig_close(&r);
}

static void
phases_that_change_too_often_share_stretches(void)
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
        CHECK(c.stretches_n > MT_JOURNAL_STRETCHES_MOST / 2);
        CHECK(c.stretches_n <= MT_JOURNAL_STRETCHES_MOST);
        for (size_t i = 0, turn = 0; i < c.stretches_n && turns == 32; i++) {
            bool is_backward = c.stretches[i].phase == MT_PHASE_BACKWARD;
            turn += is_backward;
            CHECK(!is_backward || c.stretches[i - 1].phase == MT_PHASE_FORWARD);
            CHECK(i + 1 < c.stretches_n || turn == turns);
        }
        check_peak_of_layers(&c);
        mt_journal_contents_drop(&r.journal, &c);
        rig_close(&r);
    }
}

static void
a_gradient_that_was_let_go_of_counts_as_one(void)
{
    mt_journal_likeness like = {.of = 1, .as = 2};
    mt_journal_contents c;
    rig r;

    rig_open(&r, &mt_alloc_libc, NULL);
    for (uint64_t n = 1; n <= 3; n++)
        mt_live_born(&r.live, at(n), 100 * (4 - n), 0);
    CHECK(mt_journal_begin(&r.journal, &r.live));
    for (uint64_t n = 1; n <= 2; n++)
        CHECK(mt_journal_mark(&r.journal, at(n), 0, 1) == MT_MARK_KNOWN);
    for (uint64_t n = 10; n < 14; n++) /* 10: alike, 11: of a size unlike, 12: dies too early */
        mt_journal_born(&r.journal, at(n), n == 11 ? 100 : 200, in(MT_PHASE_BACKWARD, 0, 0));
    CHECK(mt_journal_mark(&r.journal, at(13), 200, 3) == MT_MARK_KNOWN);
    mt_journal_born(&r.journal, at(14), 200, in(MT_PHASE_FORWARD, 0, 0));
    mt_journal_died(&r.journal, at(12), MT_PHASE_BACKWARD);
    mt_journal_died(&r.journal, at(10), MT_PHASE_FORWARD);
    CHECK(mt_journal_read(&r.journal, like, &c) == MT_JOURNAL_READ);
    CHECK(c.blocks_n == 8 && layer_bytes(&c, (mt_journal_kind){.category = 1}, 0) == 500);
    for (size_t i = 0, gradients = 0; i < c.blocks_n; i++) {
        gradients += c.blocks[i].kind.category == 2;
        CHECK(i + 1 < c.blocks_n || gradients == 1);
    }
    for (size_t i = 0; i < c.stretches_n; i++) {
        mt_journal_kind gradient = {.category = 2, .birth = MT_PHASE_BACKWARD};
        CHECK(layer_bytes(&c, gradient, i) == (i >= 1 && i < 7 ? 200 : 0));
    }
    check_peak_of_layers(&c);
    mt_journal_contents_drop(&r.journal, &c);
    c = read_all(&r); /* it has got no mark by that */
    for (size_t i = 0; i < c.blocks_n; i++)
        CHECK(c.blocks[i].kind.category != 2);
    mt_journal_contents_drop(&r.journal, &c);
    like.of = 5; /* no block is marked so */
    CHECK(mt_journal_read(&r.journal, like, &c) == MT_JOURNAL_READ);
    mt_journal_contents_drop(&r.journal, &c);
    rig_close(&r);
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
    uint64_t address, bytes; /* no two lives are of the same size */
    uint32_t birth, death, category, site;
    mt_phase born, died;
    bool is_saved;
} life;

typedef struct model {
    life lives[LIVES];
    mt_phase phases[1 + LIVES]; /* of each order */
    uint32_t first;             /* the order of the first birth */
    size_t n;
    uint32_t order;
    bool is_in_backward;
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
    m->is_in_backward = true;
    for (size_t i = 0; i < m->n; i++)
        if (m->lives[i].death == 0 && m->lives[i].born == MT_PHASE_FORWARD)
            m->lives[i].is_saved = true;
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

static void
check_block(const model *m, const mt_journal_block *block, uint32_t peak_at)
{
    for (size_t i = 0; i < m->n; i++) {
        const life *l = &m->lives[i];
        if (l->bytes != block->bytes) continue;
        CHECK(is_alive(l, peak_at) && l->category == block->kind.category &&
              l->born == block->kind.birth);
        CHECK(l->died == block->death && l->is_saved == block->kind.is_saved &&
              l->site == block->site);
        return;
    }
    CHECK(!"a block that the model does not know");
}

static mt_phase
model_phase_at(const model *m, uint64_t order)
{
    return m->phases[order < m->first ? m->first : order];
}

/* What the layers tell of a stretch is what the model has at its moment, by kinds. */
static void
check_stretch(const mt_journal_contents *c, const model *m, size_t at)
{
    const mt_journal_stretch *stretch = &c->stretches[at];
    uint64_t sum = 0, left[MT_JOURNAL_KINDS];

    for (size_t i = 0; i < c->layers_n; i++)
        sum += left[i] = c->layers[i].bytes[at];
    CHECK(sum == stretch->bytes && sum == model_in_use(m, (uint32_t)stretch->order));
    CHECK(stretch->phase == model_phase_at(m, stretch->order));
    for (size_t k = 0; k < m->n; k++) {
        const life *l = &m->lives[k];
        mt_journal_kind kind = {l->category, l->born, l->is_saved, false};
        for (size_t i = 0; i < c->layers_n && is_alive(l, (uint32_t)stretch->order); i++)
            if (is_same(c->layers[i].kind, kind)) left[i] -= l->bytes;
    }
    for (size_t i = 0; i < c->layers_n; i++)
        CHECK(left[i] == 0);
}

/* Between the moments of two stretches nothing is higher than the higher one, and each time that a
 * phase begins, a stretch does. */
static void
check_stretches(const mt_journal_contents *c, const model *m)
{
    size_t next = 0, phases = 0;
    bool has_stretch = true;

    CHECK(c->stretches_n <= MT_JOURNAL_STRETCHES_MOST);
    CHECK(m->order < 100 || c->stretches_n > MT_JOURNAL_STRETCHES_MOST / 2);
    for (size_t at = 0; at < c->stretches_n; at++)
        check_stretch(c, m, at);
    for (uint32_t order = 0; order <= m->order; order++) {
        uint64_t most = 0;
        bool begins = order > 0 && model_phase_at(m, order) != model_phase_at(m, order - 1);
        phases += order == 0 || begins;
        CHECK(!begins || has_stretch);
        has_stretch = has_stretch && !begins;
        if (next < c->stretches_n && c->stretches[next].order == order) {
            next++;
            has_stretch = true;
        }
        if (next > 0) most = c->stretches[next - 1].bytes;
        if (next < c->stretches_n && c->stretches[next].bytes > most)
            most = c->stretches[next].bytes;
        CHECK(model_in_use(m, order) <= most);
    }
    CHECK(next == c->stretches_n && has_stretch && phases <= MT_JOURNAL_STRETCHES_MOST / 2);
}

static void
check_model(rig *r, const model *m)
{
    mt_journal_contents c = read_all(r);
    uint64_t peak = 0, told = 0;
    uint32_t peak_at = 0;
    size_t alive = 0;

    for (uint32_t order = 0; order <= m->order; order++) {
        uint64_t in_use = model_in_use(m, order);
        if (order == 0 || in_use > peak) peak_at = order;
        if (in_use > peak) peak = in_use;
    }
    CHECK(c.peak_bytes == peak && c.base_bytes == model_in_use(m, 0) && c.events == m->order);
    for (size_t i = 0; i < c.blocks_n; i++) {
        check_block(m, &c.blocks[i], peak_at);
        told += c.blocks[i].bytes;
    }
    for (size_t i = 0; i < m->n; i++)
        alive += is_alive(&m->lives[i], peak_at);
    CHECK(told == peak && alive == c.blocks_n && c.lost == 0);
    check_stretches(&c, m);
    check_peak_of_layers(&c);
    mt_journal_contents_drop(&r->journal, &c);
}

static void
one_event(rig *r, model *m, rng *g, uint64_t i)
{
    uint64_t address = 1 + rng_below(g, ADDRESSES), what = rng_below(g, 100);
    mt_phase phase = (mt_phase)(1 + (i / 97) % 3);
    uint32_t category = 1 + (uint32_t)rng_below(g, MT_JOURNAL_CATEGORIES - 1);
    uint64_t bytes = LIVES * rng_below(g, 1 << 20) + m->n;
    bool grows = (i / 400) % 2 == 0;
    life *l = model_at(m, address);

    if (what < 10) {
        CHECK(mt_journal_mark(&r->journal, crowded(address), (size_t)bytes, category) ==
              (l == NULL ? MT_MARK_OLDER : MT_MARK_KNOWN));
        if (l == NULL)
            model_add(m, (life){.address = address, .bytes = bytes, .category = category});
        else if (l->category == 0)
            l->category = category;
    } else if (what < (grows ? 75U : 35U)) {
        mt_journal_born(&r->journal, crowded(address), (size_t)bytes, in(phase, category, 0));
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
        check_model(&r, &m);
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
    RUN(the_lives_of_a_step_are_told);
    RUN(the_outermost_operator_of_a_birth_tells_its_shape);
    RUN(the_moment_is_that_of_the_largest_birth_of_the_last_thousandth);
    RUN(many_blocks_are_told_by_sums);
    RUN(what_finds_no_room_is_counted);
    RUN(phases_that_change_too_often_share_stretches);
    RUN(a_gradient_that_was_let_go_of_counts_as_one);
    RUN(names_are_many_and_long);
    RUN(any_order_of_reports_is_as_in_the_model);
    RUN(without_memory_nothing_is_wrong_and_nothing_stays);
    RUN(a_forked_child_reports_nothing);
    RUN(threads_report_while_it_begins_and_ends);
    CHECK_DONE();
}
