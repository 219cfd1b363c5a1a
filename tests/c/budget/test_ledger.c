/* mt_ledger, by one thread: figures against a dumb model, who is asked and in which order, reports,
 * references, and every allocation failing in turn. */
#include "budget/rig.h"

#include <string.h>

#include "kit/faulty.h"
#include "kit/rng.h"

typedef struct memory {
    faulty fault;
    mt_alloc mem;
} memory;

static void
memory_begin(memory *m)
{
    m->fault = (faulty){.fail_at = -1};
    m->mem = faulty_alloc(&m->fault);
}

static mt_member *
join(mt_ledger *ledger, const char *name)
{
    mt_member *member;

    CHECK(mt_ledger_join(ledger, name, 0, NULL, &member, NULL) == MT_OK);
    return member;
}

static void
members_and_suballocations_keep_their_ledgers(void)
{
    mt_ledger *root, *sub;
    mt_member *member;
    memory m;

    memory_begin(&m);
    root = make_ledger(&m.mem, 100, "root", NULL);
    sub = make_ledger(&mt_alloc_libc, 50, "sub", root); /* its memory is the tree's all the same */
    member = join(sub, "a");
    mt_ledger_drop(root);
    CHECK(mt_ledger_hold(sub) == sub);
    mt_ledger_drop(sub);
    mt_ledger_drop(sub);
    CHECK(mt_member_reserve(member, 50, NULL) == MT_OK);
    CHECK(mt_ledger_used(mt_ledger_parent(mt_member_ledger(member))) == 50);
    mt_ledger_leave(member);
    CHECK(m.fault.live == 0);
    mt_ledger_leave(NULL);
    mt_ledger_drop(NULL);
}

/* ---- against a model ---- */

enum { LEDGERS = 5, MEMBERS = 8, STEPS = 4000 };

/* What every ledger and member is, in the dumbest way; sums are made anew each time. */
typedef struct dumb {
    mt_ledger *ledger[LEDGERS];
    int parent[LEDGERS]; /* -1: none */
    size_t limit[LEDGERS], peak[LEDGERS];
    mt_member *member[MEMBERS];
    int home[MEMBERS];
    size_t reserved[MEMBERS];
    rng r;
} dumb;

static bool
lies_in(const dumb *d, int ledger, int in)
{
    while (ledger != in && ledger >= 0)
        ledger = d->parent[ledger];
    return ledger == in;
}

static size_t
dumb_used(const dumb *d, int ledger)
{
    size_t sum = 0;

    for (int i = 0; i < MEMBERS; i++)
        if (d->member[i] != NULL && lies_in(d, d->home[i], ledger)) sum += d->reserved[i];
    return sum;
}

static size_t
dumb_available(const dumb *d, int ledger)
{
    size_t least = SIZE_MAX;

    for (; ledger >= 0; ledger = d->parent[ledger])
        least = mt_size_min(least, d->limit[ledger] - dumb_used(d, ledger));
    return least;
}

/* The innermost ledger that has no room for it; -1: all have. */
static int
dumb_refusing(const dumb *d, int ledger, size_t bytes)
{
    while (ledger >= 0 && bytes <= d->limit[ledger] - dumb_used(d, ledger))
        ledger = d->parent[ledger];
    return ledger;
}

static void
dumb_reserve(dumb *d, int i, size_t bytes)
{
    int no = dumb_refusing(d, d->home[i], bytes);
    mt_error err = {0};

    if (mt_member_reserve(d->member[i], bytes, &err) == MT_OK) {
        CHECK(no < 0);
        d->reserved[i] += bytes;
        for (int l = d->home[i]; l >= 0; l = d->parent[l])
            d->peak[l] = mt_size_max(d->peak[l], dumb_used(d, l));
    } else {
        CHECK(no >= 0 && err.status == MT_ELIMIT && err.asked == bytes);
        CHECK(err.used == dumb_used(d, no) && err.limit == d->limit[no]);
    }
}

static void
dumb_begin(dumb *d, const mt_alloc *mem, uint64_t seed)
{
    *d = (dumb){.r = rng_seeded(seed)};
    for (int i = 0; i < LEDGERS; i++) {
        d->parent[i] = i == 0 ? -1 : (int)rng_below(&d->r, (size_t)i);
        d->limit[i] = rng_below(&d->r, 4) == 0 ? SIZE_MAX : 200 + rng_below(&d->r, 800);
        d->ledger[i] = make_ledger(mem, d->limit[i], "x", i == 0 ? NULL : d->ledger[d->parent[i]]);
    }
}

static void
dumb_step(dumb *d)
{
    int i = (int)rng_below(&d->r, MEMBERS);
    size_t bytes = rng_below(&d->r, 300);

    if (d->member[i] == NULL) {
        d->home[i] = (int)rng_below(&d->r, LEDGERS);
        d->reserved[i] = 0;
        d->member[i] = join(d->ledger[d->home[i]], "m");
    } else if (rng_below(&d->r, 10) == 0) {
        mt_ledger_leave(d->member[i]);
        d->member[i] = NULL;
    } else if (rng_below(&d->r, 2) == 0) {
        dumb_reserve(d, i, rng_below(&d->r, 9) == 0 ? SIZE_MAX - bytes : bytes);
    } else {
        bytes = mt_size_min(bytes, d->reserved[i]);
        mt_member_release(d->member[i], bytes);
        d->reserved[i] -= bytes;
    }
}

/* The members' lines of a report add up at every depth. */
static void
check_report(const dumb *d, int ledger)
{
    mt_holder line[LEDGERS + MEMBERS];
    size_t n = mt_ledger_report(d->ledger[ledger], line, LEDGERS + MEMBERS), sum = 0;

    CHECK(n <= LEDGERS + MEMBERS);
    for (size_t i = 0; i < n; i++) {
        size_t inner = 0;
        for (size_t k = i + 1; k < n && line[k].depth > line[i].depth; k++)
            if (line[k].depth == line[i].depth + 1) inner += line[k].reserved;
        CHECK(inner == (line[i].suballocation ? line[i].reserved : 0));
        CHECK(line[i].peak >= line[i].reserved && line[i].idle == 0);
        if (line[i].depth == 0) sum += line[i].reserved;
    }
    CHECK(sum == dumb_used(d, ledger));
}

static void
figures_are_those_of_a_dumb_model(void)
{
    for (uint64_t seed = 0; seed < 12; seed++) {
        memory m;
        dumb d;

        memory_begin(&m);
        dumb_begin(&d, &m.mem, seed);
        for (int step = 0; step < STEPS; step++) {
            int l = (int)rng_below(&d.r, LEDGERS), i = (int)rng_below(&d.r, MEMBERS);
            dumb_step(&d);
            CHECK(mt_ledger_used(d.ledger[l]) == dumb_used(&d, l));
            CHECK(mt_ledger_available(d.ledger[l]) == dumb_available(&d, l));
            CHECK(mt_ledger_peak(d.ledger[l]) == d.peak[l]);
            if (d.member[i] != NULL) CHECK(mt_member_reserved(d.member[i]) == d.reserved[i]);
            if (step % 16 == 0) check_report(&d, l);
        }
        for (int i = 0; i < LEDGERS; i++)
            mt_ledger_drop(d.ledger[i]);
        for (int i = 0; i < MEMBERS; i++)
            mt_ledger_leave(d.member[i]);
        CHECK(m.fault.live == 0);
    }
}

/* ---- asking the others ---- */

/* root 100 ─┬─ 1 (rank 5)   ─ 2 (rank 0)   ─ sub 60 ─┬─ 3    ─ 5 (rank 0)
 *                                                    └─ 4 */
typedef struct family {
    mt_ledger *root, *sub;
    part p[6]; /* by number */
    int order;
} family;

static void
family_begin(family *f, size_t sub_limit)
{
    static const int rank[] = {0, 5, 0, 0, 0, 0};

    *f = (family){.order = 0};
    f->root = make_ledger(&mt_alloc_libc, 100, "root", NULL);
    for (int i = 1; i <= 5; i++) {
        if (i == 3) f->sub = make_ledger(&mt_alloc_libc, sub_limit, "sub", f->root);
        part_join(&f->p[i], i == 3 || i == 4 ? f->sub : f->root, "part", rank[i]);
        f->p[i].number = i;
        f->p[i].order = &f->order;
        part_take(&f->p[i], 20, 10);
    }
}

static void
family_end(family *f)
{
    for (int i = 1; i <= 5; i++)
        part_leave(&f->p[i]);
    mt_ledger_drop(f->sub);
    CHECK(mt_ledger_used(f->root) == 0);
    mt_ledger_drop(f->root);
}

static void
the_others_are_asked_by_rank_then_by_age(void)
{
    family f;

    family_begin(&f, 60);
    CHECK(mt_ledger_idle(f.root, NULL) == 50 && mt_ledger_idle(f.root, f.p[4].member) == 40);
    CHECK(mt_ledger_idle(f.sub, f.p[1].member) == 20);
    CHECK(mt_ledger_reclaim(f.root, f.p[2].member, 1000) == 40);
    CHECK(f.order == 3451); /* not 2, who asks */
    CHECK(mt_ledger_used(f.root) == 60 && mt_ledger_used(f.sub) == 20);
    CHECK(mt_ledger_reclaim(f.root, f.p[2].member, 1000) == 0);
    family_end(&f);
}

static void
asking_ends_when_there_is_enough(void)
{
    family f;

    family_begin(&f, 60);
    CHECK(mt_ledger_reclaim(f.root, NULL, 25) == 25);
    CHECK(f.order == 234 && f.p[4].idle == 5 && f.p[5].idle == 10);
    CHECK(mt_ledger_reclaim(f.root, NULL, 0) == 0 && f.order == 234);
    CHECK(mt_ledger_available(f.root) == 25);
    family_end(&f);
}

static void
a_suballocation_asks_its_own_members_before_its_parents(void)
{
    family f;

    family_begin(&f, 60);
    CHECK(mt_ledger_reclaim(f.sub, f.p[3].member, 15) == 15);
    CHECK(f.order == 42 && f.p[2].idle == 5);                /* 2 gave the rest */
    CHECK(mt_ledger_reclaim(f.sub, f.p[3].member, 15) == 0); /* there is room now */
    CHECK(f.order == 42);
    CHECK(mt_ledger_reclaim(f.sub, f.p[3].member, 16) == 1);
    CHECK(f.order == 4242 && f.p[3].idle == 10);
    family_end(&f);
}

static void
nobody_is_asked_in_vain(void)
{
    family f;

    family_begin(&f, 45); /* 40 are used: no parent's member can make room for 20 more */
    CHECK(mt_ledger_reclaim(f.sub, f.p[3].member, 20) == 10);
    CHECK(f.order == 4 && mt_ledger_idle(f.root, NULL) == 40);
    CHECK(mt_ledger_reclaim(f.sub, f.p[3].member, 15) == 5); /* here they can, beside the 10 */
    CHECK(f.order == 442);
    CHECK(mt_ledger_available(f.sub) == 15);
    family_end(&f);
}

static void
a_report_names_who_holds_what(void)
{
    static const char *const names[] = {"part", "sub", "part", "part", "part", "part"};
    static const size_t depth[] = {0, 0, 1, 1, 0, 0};
    mt_holder line[6];
    family f;

    family_begin(&f, 60);
    mt_member_release(f.p[3].member, 15); /* its 10 idle bytes are more than it has reserved */
    CHECK(mt_ledger_report(f.root, NULL, 0) == 6);
    CHECK(mt_ledger_report(f.root, line, 6) == 6);
    for (size_t i = 0; i < 6; i++)
        CHECK(strcmp(line[i].name, names[i]) == 0 && line[i].depth == depth[i]);
    CHECK(line[0].reserved == 20 && line[0].idle == 10 && line[0].peak == 20);
    CHECK(line[0].limit == SIZE_MAX && !line[0].suballocation);
    CHECK(line[1].reserved == 25 && line[1].idle == 15 && line[1].peak == 40);
    CHECK(line[1].limit == 60 && line[1].suballocation);
    CHECK(line[2].reserved == 5 && line[2].idle == 5 && line[2].peak == 20);
    memset(line, 0x77, sizeof line);
    CHECK(mt_ledger_report(f.root, line, 2) == 6 && line[1].idle == 15);
    CHECK(line[2].reserved == (size_t)0x7777777777777777u);
    CHECK(mt_ledger_report(f.sub, line, 6) == 2 && line[1].depth == 0);
    family_end(&f);
}

static void
a_long_name_is_cut_between_characters(void)
{
    char name[60];
    mt_ledger *ledger;

    memset(name, 'a', 45);
    strcpy(name + 45, "\xE2\x82\xAC and more"); /* of this character only two bytes fit */
    ledger = make_ledger(&mt_alloc_libc, 1, name, NULL);
    CHECK(strlen(mt_ledger_name(ledger)) == 45);
    CHECK(memcmp(mt_ledger_name(ledger), name, 45) == 0);
    mt_ledger_drop(ledger);
}

/* ---- the queue, by one thread ---- */

static void
the_oldest_ticket_is_first(void)
{
    mt_ledger *ledger = make_ledger(&mt_alloc_libc, 1, "x", NULL);
    uint64_t a = mt_ledger_enter(ledger), b = mt_ledger_enter(ledger), c = mt_ledger_enter(ledger);
    uint64_t seen;

    CHECK(a != 0 && b != 0 && c != 0 && !mt_ledger_is_first(ledger, 0));
    CHECK(mt_ledger_is_first(ledger, a) && !mt_ledger_is_first(ledger, b));
    mt_ledger_quit(ledger, b);
    CHECK(mt_ledger_is_first(ledger, a) && !mt_ledger_is_first(ledger, c));
    seen = mt_ledger_changes(ledger);
    mt_ledger_quit(ledger, a);
    CHECK(mt_ledger_is_first(ledger, c) && mt_ledger_changes(ledger) != seen);
    mt_ledger_quit(ledger, c);
    CHECK(mt_ledger_is_first(ledger, 0));
    mt_ledger_drop(ledger);
}

static void
changes_are_those_of_the_whole_tree(void)
{
    mt_ledger *root = make_ledger(&mt_alloc_libc, 9, "root", NULL);
    mt_ledger *sub = make_ledger(&mt_alloc_libc, 9, "sub", root);
    mt_member *r = join(root, "r"), *s = join(sub, "s");
    uint64_t seen = mt_ledger_changes(root);

    CHECK(mt_member_reserve(r, 4, NULL) == MT_OK && mt_member_reserve(s, 4, NULL) == MT_OK);
    CHECK(!mt_ledger_wait(root, seen, 0) && !mt_ledger_wait(sub, seen, 1000));
    mt_member_release(s, 0); /* no change */
    CHECK(!mt_ledger_wait(root, seen, 0));
    mt_member_release(s, 1);
    CHECK(mt_ledger_wait(root, seen, UINT64_MAX) && mt_ledger_wait(sub, seen, 0));
    seen = mt_ledger_changes(root);
    mt_member_release(r, 1);
    CHECK(mt_ledger_wait(sub, seen, UINT64_MAX));
    seen = mt_ledger_changes(root);
    mt_ledger_notify(root);
    CHECK(mt_ledger_wait(sub, seen, UINT64_MAX));
    seen = mt_ledger_changes(root);
    mt_ledger_leave(s); /* with 3 bytes */
    CHECK(mt_ledger_wait(root, seen, UINT64_MAX));
    mt_ledger_leave(r);
    mt_ledger_drop(sub);
    mt_ledger_drop(root);
}

/* ---- allocations fail ---- */

static mt_status
build(const mt_alloc *mem, mt_ledger **root, mt_ledger **sub, mt_member **member)
{
    mt_error err = {0};
    mt_status st = mt_ledger_new(mem, 100, "root", NULL, root, &err);

    if (st == MT_OK) st = mt_ledger_new(mem, 50, "sub", *root, sub, &err);
    if (st == MT_OK) st = mt_ledger_join(*sub, "m", 0, NULL, member, &err);
    CHECK(st == err.status && (st == MT_OK || err.call != NULL));
    return st;
}

static void
every_allocation_fails_in_turn(void)
{
    long failures = 0;

    for (long at = 0;; at++) {
        mt_ledger *root = NULL, *sub = NULL;
        mt_member *member = NULL;
        mt_status st;
        memory m;

        memory_begin(&m);
        m.fault.fail_at = at;
        st = build(&m.mem, &root, &sub, &member);
        CHECK(st == MT_OK || st == MT_ENOMEM);
        failures += st == MT_ENOMEM;
        if (root != NULL) CHECK(mt_ledger_used(root) == 0);
        mt_ledger_leave(member);
        if (root != NULL) CHECK(mt_ledger_report(root, NULL, 0) == (sub != NULL));
        mt_ledger_drop(sub);
        mt_ledger_drop(root);
        CHECK(m.fault.live == 0);
        if (st == MT_OK) break;
    }
    CHECK(failures == 4); /* ledger and tree, suballocation, member */
}

static void
a_queue_without_memory_still_serves(void)
{
    mt_ledger *ledger;
    uint64_t ticket;
    memory m;

    memory_begin(&m);
    ledger = make_ledger(&m.mem, 1, "x", NULL);
    ticket = mt_ledger_enter(ledger);
    m.fault.fail_at = m.fault.calls;
    CHECK(mt_ledger_enter(ledger) == 0);
    CHECK(!mt_ledger_is_first(ledger, 0));
    mt_ledger_quit(ledger, 0);
    CHECK(mt_ledger_is_first(ledger, ticket));
    mt_ledger_quit(ledger, ticket);
    CHECK(mt_ledger_is_first(ledger, 0));
    mt_ledger_drop(ledger);
    CHECK(m.fault.live == 0);
}

int
main(void)
{
    RUN(members_and_suballocations_keep_their_ledgers);
    RUN(figures_are_those_of_a_dumb_model);
    RUN(the_others_are_asked_by_rank_then_by_age);
    RUN(asking_ends_when_there_is_enough);
    RUN(a_suballocation_asks_its_own_members_before_its_parents);
    RUN(nobody_is_asked_in_vain);
    RUN(a_report_names_who_holds_what);
    RUN(a_long_name_is_cut_between_characters);
    RUN(the_oldest_ticket_is_first);
    RUN(changes_are_those_of_the_whole_tree);
    RUN(every_allocation_fails_in_turn);
    RUN(a_queue_without_memory_still_serves);
    CHECK_DONE();
}
