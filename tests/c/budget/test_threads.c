/* mt_ledger, by several threads at once; also run under the thread sanitiser. */
#define _POSIX_C_SOURCE 200809L
#include "budget/rig.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/base/forks.h"
#include "kit/rng.h"

enum { THREADS = 4, ROUNDS = 3000, FORKS = 30, DEEP = 40 };

static void
run_threads(void *(*body)(void *), void *each, size_t size)
{
    pthread_t thread[THREADS];

    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&thread[i], NULL, body, (char *)each + i * size) == 0);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
}

/* ---- everything at once ---- */

typedef struct worker {
    mt_ledger *root, *home; /* home is a suballocation, or the root */
    uint64_t seed;
    size_t reserved, refused;
} worker;

/* Takes memory as a part does: what does not fit is asked for from the others, then tried again. */
static void
take_memory(worker *w, part *p, size_t bytes)
{
    bool took = mt_member_reserve(p->member, bytes, NULL) == MT_OK;

    if (!took && mt_ledger_reclaim(w->home, p->member, bytes) > 0)
        took = mt_member_reserve(p->member, bytes, NULL) == MT_OK;
    w->reserved += took;
    w->refused += !took;
    if (!took) return;
    mt_lock_take(&p->lock); /* all of it can go at once */
    p->idle += bytes;
    mt_lock_give(&p->lock);
}

/* The lines are of one moment: their sum never passes the limit. */
static void
look(worker *w)
{
    mt_holder line[2 * THREADS];
    size_t n = mt_ledger_report(w->root, line, 2 * THREADS), sum = 0;

    CHECK(n <= 2 * THREADS);
    for (size_t i = 0; i < n; i++)
        if (line[i].depth == 0) sum += line[i].reserved;
    CHECK(sum <= mt_ledger_limit(w->root) && mt_ledger_used(w->root) <= mt_ledger_limit(w->root));
    CHECK(mt_ledger_available(w->home) <= mt_ledger_limit(w->home));
}

static void *
work(void *arg)
{
    worker *w = arg;
    rng r = rng_seeded(w->seed);
    part p;

    part_join(&p, w->home, "part", (int)(w->seed % 3));
    for (int round = 0; round < ROUNDS; round++) {
        switch (rng_below(&r, 8)) {
        case 0:
            part_leave(&p);
            part_join(&p, w->home, "part", (int)(w->seed % 3));
            break;
        case 1:
            part_give_back(&p, rng_below(&r, 200));
            break;
        case 2:
            look(w);
            break;
        default:
            take_memory(w, &p, rng_below(&r, 300));
            break;
        }
    }
    part_leave(&p);
    return NULL;
}

static void
many_threads_stay_within_every_limit(void)
{
    mt_ledger *root = make_ledger(&mt_alloc_libc, 1000, "root", NULL);
    mt_ledger *sub = make_ledger(&mt_alloc_libc, 600, "sub", root);
    worker w[THREADS];
    size_t reserved = 0, refused = 0;

    for (size_t i = 0; i < THREADS; i++)
        w[i] = (worker){.root = root, .home = i % 2 == 0 ? root : sub, .seed = i};
    run_threads(work, w, sizeof *w);
    for (size_t i = 0; i < THREADS; i++) {
        reserved += w[i].reserved;
        refused += w[i].refused;
    }
    CHECK(reserved > 1000 && refused > 0); /* it did get tight */
    CHECK(mt_ledger_used(root) == 0 && mt_ledger_used(sub) == 0);
    CHECK(mt_ledger_peak(root) <= 1000 && mt_ledger_peak(sub) <= 600);
    mt_ledger_drop(sub);
    mt_ledger_drop(root);
}

/* Suballocations come and go while others ask and report. */
static void *
nest(void *arg)
{
    worker *w = arg;

    for (int round = 0; round < ROUNDS / 4; round++) {
        mt_ledger *sub = make_ledger(&mt_alloc_libc, 100, "nested", w->root);
        part p;
        part_join(&p, sub, "part", 0);
        mt_ledger_drop(sub); /* the part keeps it */
        if (mt_member_reserve(p.member, 50, NULL) == MT_OK) part_give_back(&p, 0);
        look(w);
        mt_ledger_reclaim(w->root, p.member, 100);
        part_leave(&p);
    }
    return NULL;
}

static void
suballocations_come_and_go(void)
{
    mt_ledger *root = make_ledger(&mt_alloc_libc, 120, "root", NULL);
    worker w[THREADS];

    for (size_t i = 0; i < THREADS; i++)
        w[i] = (worker){.root = root, .home = root};
    run_threads(nest, w, sizeof *w);
    CHECK(mt_ledger_used(root) == 0 && mt_ledger_report(root, NULL, 0) == 0);
    mt_ledger_drop(root);
}

/* ---- waiting ---- */

typedef struct waiter {
    mt_ledger *ledger;
    mt_member *member;
    uint64_t ticket;
    int number;
    int *served; /* how many were, written by whoever is first */
} waiter;

static void *
wait_for_all_of_it(void *arg)
{
    waiter *w = arg;

    for (;;) {
        uint64_t seen = mt_ledger_changes(w->ledger);
        if (mt_ledger_is_first(w->ledger, w->ticket) &&
            mt_member_reserve(w->member, 10, NULL) == MT_OK)
            break;
        CHECK(mt_ledger_wait(w->ledger, seen, UINT64_MAX));
    }
    CHECK(*w->served == w->number);
    *w->served += 1; /* the reservation is the lock: the limit is 10 */
    mt_ledger_quit(w->ledger, w->ticket);
    mt_member_release(w->member, 10);
    return NULL;
}

static void
those_who_wait_are_served_in_order(void)
{
    for (int round = 0; round < 50; round++) {
        mt_ledger *ledger = make_ledger(&mt_alloc_libc, 10, "x", NULL);
        pthread_t thread[THREADS];
        waiter w[THREADS];
        mt_member *holder;
        int served = 0;

        CHECK(mt_ledger_join(ledger, "holder", 0, NULL, &holder, NULL) == MT_OK);
        CHECK(mt_member_reserve(holder, 10, NULL) == MT_OK);
        for (int i = 0; i < THREADS; i++) {
            w[i] = (waiter){.ledger = ledger, .number = i, .served = &served};
            w[i].ticket = mt_ledger_enter(ledger);
            CHECK(mt_ledger_join(ledger, "waiter", 0, NULL, &w[i].member, NULL) == MT_OK);
        }
        for (int i = THREADS; i-- > 0;) /* the last in the queue starts first */
            CHECK(pthread_create(&thread[i], NULL, wait_for_all_of_it, &w[i]) == 0);
        mt_member_release(holder, 10);
        for (int i = 0; i < THREADS; i++) {
            CHECK(pthread_join(thread[i], NULL) == 0);
            mt_ledger_leave(w[i].member);
        }
        CHECK(served == THREADS);
        mt_ledger_leave(holder);
        mt_ledger_drop(ledger);
    }
}

/* ---- leaving while one is asked ---- */

typedef struct slow {
    mt_member *member;
    _Atomic int asked, go, done;
} slow;

static size_t
slow_give_back(void *ctx, size_t bytes)
{
    slow *s = ctx;

    (void)bytes;
    s->asked = 1;
    while (!s->go)
        sched_yield();
    for (int i = 0; i < 20; i++)
        sched_yield(); /* time for a leave that does not wait to be over */
    s->done = 1;
    return 0;
}

static void *
reclaim_from_slow(void *arg)
{
    mt_ledger_reclaim(arg, NULL, 1);
    return NULL;
}

static void
leaving_waits_for_the_answer(void)
{
    for (int round = 0; round < 50; round++) {
        mt_ledger *ledger = make_ledger(&mt_alloc_libc, 10, "x", NULL);
        slow s = {.asked = 0};
        mt_member_ops ops = {.give_back = slow_give_back, .ctx = &s};
        pthread_t thread;

        CHECK(mt_ledger_join(ledger, "slow", 0, &ops, &s.member, NULL) == MT_OK);
        CHECK(mt_member_reserve(s.member, 10, NULL) == MT_OK);
        CHECK(pthread_create(&thread, NULL, reclaim_from_slow, ledger) == 0);
        while (!s.asked)
            sched_yield();
        s.go = 1;
        mt_ledger_leave(s.member);
        CHECK(s.done);
        CHECK(pthread_join(thread, NULL) == 0);
        mt_ledger_drop(ledger);
    }
}

/* ---- fork ---- */

typedef struct sleeper {
    mt_ledger *ledger;
    _Atomic int rounds, stop;
} sleeper;

static void *
sleep_on(void *arg)
{
    sleeper *s = arg;

    while (!s->stop) {
        uint64_t seen = mt_ledger_changes(s->ledger);
        s->rounds++;
        if (!s->stop) mt_ledger_wait(s->ledger, seen, UINT64_MAX);
    }
    return NULL;
}

/* In the child the thread that waits does not exist, but the condition still counts it. */
static void
a_child_of_fork_can_free_what_the_parent_waits_on(void)
{
    sleeper s = {.ledger = make_ledger(&mt_alloc_libc, 10, "x", NULL)};
    pthread_t thread;
    mt_member *member;

    CHECK(mt_ledger_join(s.ledger, "m", 0, NULL, &member, NULL) == MT_OK);
    CHECK(mt_member_reserve(member, 10, NULL) == MT_OK);
    CHECK(pthread_create(&thread, NULL, sleep_on, &s) == 0);
    for (int round = 1; round <= 10; round++) {
        pid_t child;
        int status;

        while (s.rounds < round)
            sched_yield();
        for (int i = 0; i < 100; i++) /* it is about to wait, and mostly does by now */
            sched_yield();
        if ((child = fork()) == 0) {
            alarm(20);
            mt_member_release(member, 5);
            mt_ledger_leave(member);
            mt_ledger_drop(s.ledger);
            _exit(0);
        }
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        mt_ledger_notify(s.ledger);
    }
    s.stop = 1;
    mt_ledger_notify(s.ledger);
    CHECK(pthread_join(thread, NULL) == 0);
    mt_ledger_leave(member);
    mt_ledger_drop(s.ledger);
}

typedef struct forker {
    part p;
    mt_ledger *ledger, *sub;
    mt_member *m, *busy; /* what the thread reserves and releases that runs beside a fork */
    size_t children;
    _Atomic bool running, enough;
} forker;

/* What a child of this process does with everything here; the parent's exit status is its. */
static void
use_in_child(const forker *f)
{
    size_t busy = mt_member_reserved(f->busy);
    mt_holder lines[8];
    mt_member *own;

    alarm(20); /* ends a child that waits for ever */
    CHECK(mt_ledger_used(f->ledger) == 40 + busy && mt_ledger_used(f->sub) == 30);
    CHECK(mt_ledger_is_first(f->ledger, mt_ledger_enter(f->ledger)));
    CHECK(mt_ledger_reclaim(f->ledger, NULL, 100) == 0 && f->p.asked == 1);
    CHECK(mt_ledger_report(f->ledger, lines, 8) == 4 + DEEP && lines[0].idle == 0);
    CHECK(mt_ledger_join(f->sub, "own", 0, NULL, &own, NULL) == MT_OK);
    CHECK(mt_member_reserve(own, 5, NULL) == MT_OK);
    CHECK(mt_member_reserve(own, 60, NULL) == MT_ELIMIT);
    mt_member_release(f->m, 10);
    CHECK(mt_ledger_used(f->ledger) == 35 + busy);
    CHECK(!mt_ledger_wait(f->ledger, mt_ledger_changes(f->ledger), 1));
    mt_ledger_leave(own);
    mt_ledger_leave(f->m);
    _exit(0);
}

/* Called with the ledger's turn held: the child inherits it so. */
static size_t
fork_while_asked(void *ctx, size_t bytes)
{
    forker *f = ctx;
    pid_t child;
    int status;

    (void)bytes;
    f->p.asked++;
    if ((child = fork()) == 0) use_in_child(f);
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    f->children++;
    return 0;
}

static void *
reserve_and_release(void *arg)
{
    forker *f = arg;

    while (!f->enough) {
        CHECK(mt_member_reserve(f->busy, 7, NULL) == MT_OK);
        mt_member_release(f->busy, 7);
        f->running = true;
    }
    return NULL;
}

/* A child forked while another thread is somewhere in a reservation, and one forked by a child. */
static void
fork_while_reserving(forker *f)
{
    pthread_t thread;
    pid_t child;
    int status;

    CHECK(pthread_create(&thread, NULL, reserve_and_release, f) == 0);
    while (!f->running)
        sched_yield();
    for (int i = 0; i < FORKS; i++) {
        if ((child = fork()) == 0) {
            alarm(20);
            CHECK(mt_ledger_used(f->ledger) == 40 + mt_member_reserved(f->busy));
            if ((child = fork()) == 0) use_in_child(f);
            CHECK(waitpid(child, &status, 0) == child);
            _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
        }
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    f->enough = true;
    CHECK(pthread_join(thread, NULL) == 0);
}

static void
a_child_of_fork_has_locks_and_sums_of_its_own(void)
{
    forker f = {.children = 0};
    mt_member_ops ops = {.give_back = fork_while_asked, .idle = part_idle, .ctx = &f};
    mt_ledger *deep;
    uint64_t waits;
    mt_birth birth = mt_birth_now();

    f.ledger = make_ledger(&mt_alloc_libc, 80, "root", NULL);
    mt_ledger_notice_forks(f.ledger, &birth);
    f.sub = make_ledger(&mt_alloc_libc, 60, "sub", f.ledger);
    deep = mt_ledger_hold(f.ledger);
    mt_lock_init(&f.p.lock);
    CHECK(mt_ledger_join(f.ledger, "asked", -1, &ops, &f.p.member, NULL) == MT_OK);
    CHECK(mt_ledger_join(f.sub, "m", 0, NULL, &f.m, NULL) == MT_OK);
    for (int i = 0; i < DEEP; i++) { /* a reservation there takes a while */
        mt_ledger *deeper = make_ledger(&mt_alloc_libc, SIZE_MAX, "deep", deep);
        mt_ledger_drop(deep);
        deep = deeper;
    }
    CHECK(mt_ledger_join(deep, "busy", 0, NULL, &f.busy, NULL) == MT_OK);
    mt_ledger_drop(deep);
    CHECK(mt_member_reserve(f.p.member, 10, NULL) == MT_OK);
    CHECK(mt_member_reserve(f.m, 30, NULL) == MT_OK);
    waits = mt_ledger_enter(f.ledger); /* nobody waits before the child */
    CHECK(mt_ledger_reclaim(f.ledger, f.m, 50) == 0 && f.children == 1);
    fork_while_reserving(&f);
    mt_ledger_quit(f.ledger, waits);
    part_leave(&f.p);
    mt_ledger_leave(f.m);
    mt_ledger_leave(f.busy);
    mt_ledger_drop(f.sub);
    mt_ledger_drop(f.ledger);
}

int
main(void)
{
    RUN(many_threads_stay_within_every_limit);
    RUN(suballocations_come_and_go);
    RUN(those_who_wait_are_served_in_order);
    RUN(leaving_waits_for_the_answer);
    RUN(a_child_of_fork_can_free_what_the_parent_waits_on);
    RUN(a_child_of_fork_has_locks_and_sums_of_its_own);
    CHECK_DONE();
}
