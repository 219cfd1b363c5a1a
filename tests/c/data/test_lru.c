/* The entries of a byte cache: order, bytes, refusals, and a random walk beside a model. */
#include <pthread.h>
#include <stdatomic.h>

#include "data/model.h"
#include "kit/rng.h"

static void
evicts_what_was_not_used_for_the_longest_time(void)
{
    rig g;

    rig_begin(&g, 100);
    for (uint64_t i = 0; i < 4; i++)
        CHECK(rig_put(&g, i, 25, SIZE_MAX) == MT_OK);
    rig_touch(&g, 0); /* entry 1 is the newest now */
    CHECK(rig_put(&g, 9, 30, SIZE_MAX) == MT_OK);
    rig_check(&g);
    CHECK(g.n == 3 && g.evicted == 2 && g.lru.bytes == 80);
    CHECK(g.items[0]->id == 4 && g.items[1]->id == 1 && g.items[2]->id == 5);
    rig_end(&g);
}

static void
refuses_what_can_not_fit_and_evicts_nothing_for_it(void)
{
    rig g;

    rig_begin(&g, 100);
    CHECK(mt_member_reserve(g.other, 40, NULL) == MT_OK);
    CHECK(rig_put(&g, 1, 30, SIZE_MAX) == MT_OK && rig_put(&g, 2, 30, SIZE_MAX) == MT_OK);
    CHECK(rig_put(&g, 3, 101, SIZE_MAX) == MT_ELIMIT);
    CHECK(rig_put(&g, 3, 61, SIZE_MAX) == MT_ELIMIT); /* 40 of it are the other part's */
    CHECK(rig_put(&g, 3, SIZE_MAX, SIZE_MAX) == MT_ELIMIT);
    CHECK(rig_put(&g, 3, 61, 0) == MT_ELIMIT);
    rig_check(&g);
    CHECK(g.n == 2 && g.evicted == 0);
    CHECK(rig_put(&g, 3, 60, SIZE_MAX) == MT_OK && g.n == 1);
    mt_member_release(g.other, 40);
    rig_end(&g);
}

static void
an_entry_takes_the_place_of_another(void)
{
    rig g;

    rig_begin(&g, 100);
    for (uint64_t i = 0; i < 3; i++)
        CHECK(rig_put(&g, i, 30, SIZE_MAX) == MT_OK);
    CHECK(rig_put(&g, 0, 10, 0) == MT_OK); /* smaller: gives back */
    CHECK(g.evicted == 0 && g.lru.bytes == 70);
    CHECK(rig_put(&g, 1, 40, 0) == MT_OK); /* larger, and fits */
    CHECK(g.evicted == 0 && g.lru.bytes == 80);
    CHECK(rig_put(&g, 2, 60, 0) == MT_OK); /* larger: one more goes */
    CHECK(g.evicted == 1 && g.n == 2 && g.lru.bytes == 100);
    CHECK(rig_put(&g, 5, 100, 1) == MT_OK); /* the replaced one is not the oldest */
    CHECK(g.n == 1 && g.evicted == 2);
    rig_check(&g);
    rig_end(&g);
}

static void
entries_of_one_hash_are_all_found(void)
{
    rig g;
    size_t n = 0;

    rig_begin(&g, 1000);
    for (int i = 0; i < 20; i++)
        CHECK(rig_put(&g, i % 2 ? 7 : (uint64_t)i << 60, 1, SIZE_MAX) == MT_OK);
    for (const mt_lru_entry *e = mt_lru_first(&g.lru, 7); e != NULL; e = mt_lru_next(e))
        n++;
    CHECK(n == 10 && mt_lru_first(&g.lru, 8) == NULL);
    rig_check(&g);
    rig_end(&g);
}

static void
an_entry_of_no_bytes_is_one_as_well(void)
{
    rig g;

    rig_begin(&g, 1);
    for (uint64_t i = 0; i < 100; i++)
        CHECK(rig_put(&g, i, 0, SIZE_MAX) == MT_OK);
    CHECK(rig_put(&g, 200, 1, SIZE_MAX) == MT_OK && g.n == 101 && g.evicted == 0);
    rig_check(&g);
    rig_end(&g);
}

/* What goes through the entries of a hash learns by `changes` that it has to begin anew. */
static void
changes_tell_that_entries_came_or_went(void)
{
    uint64_t seen;
    rig g;

    rig_begin(&g, 100);
    CHECK(rig_put(&g, 1, 40, SIZE_MAX) == MT_OK && rig_put(&g, 1, 40, SIZE_MAX) == MT_OK);
    seen = g.lru.changes;
    rig_touch(&g, 0);
    CHECK(rig_put(&g, 2, 101, SIZE_MAX) == MT_ELIMIT && g.lru.changes == seen);
    CHECK(rig_put(&g, 2, 10, SIZE_MAX) == MT_OK && g.lru.changes > seen);
    seen = g.lru.changes;
    rig_drop(&g, 0);
    CHECK(g.lru.changes > seen);
    seen = g.lru.changes;
    rig_clear(&g);
    CHECK(g.lru.changes > seen);
    rig_end(&g);
}

static void
another_ledger_has_the_newest_that_fit(void)
{
    rig g;

    rig_begin(&g, 100);
    for (uint64_t i = 0; i < 10; i++)
        CHECK(rig_put(&g, i, 10, SIZE_MAX) == MT_OK);
    CHECK(rig_move(&g, 35) == MT_OK);
    CHECK(g.n == 3 && g.items[0]->id == 8 && mt_ledger_used(g.ledger) == 0);
    rig_check(&g);
    CHECK(rig_move(&g, 1000) == MT_OK && g.n == 3);
    CHECK(rig_move(&g, 1) == MT_OK && g.n == 0);
    rig_end(&g);
}

/* Each call of the allocator fails once, and the cache is as it was. */
static void
survives_every_failing_allocation(void)
{
    rig g;
    long failed = 0;

    rig_begin(&g, 1000);
    for (uint64_t i = 0; i < 100; i++) {
        g.faults.fail_at = g.faults.calls;
        if (rig_put(&g, i, 1, SIZE_MAX) != MT_OK) {
            failed++;
            rig_check(&g);
            CHECK(rig_put(&g, i, 1, SIZE_MAX) == MT_OK);
        }
    }
    CHECK(failed == 4 && g.n == 100); /* tables of 16, 32, 64 and 128 */
    rig_check(&g);
    g.faults.fail_at = -1;
    rig_end(&g);
}

static void
random_walk_agrees_with_the_model(void)
{
    rng r = rng_seeded(19);
    rig g;

    rig_begin(&g, 500);
    for (int step = 0; step < 20000; step++) {
        size_t pick = rng_below(&r, 100), at = g.n > 0 ? rng_below(&r, g.n) : 0;
        size_t held = mt_member_reserved(g.other);
        if (pick < 55)
            (void)rig_put(&g, rng_below(&r, 40), rng_below(&r, 120),
                          rng_below(&r, 3) ? SIZE_MAX : at);
        else if (pick < 75 && g.n > 0)
            rig_touch(&g, at);
        else if (pick < 85 && g.n > 0)
            rig_drop(&g, at);
        else if (pick < 90)
            (void)mt_member_reserve(g.other, rng_below(&r, 200), NULL);
        else if (pick < 97)
            mt_member_release(g.other, rng_below(&r, held + 1));
        else if (pick < 98)
            CHECK(rig_move(&g, 1 + rng_below(&r, 600)) == MT_OK);
        else if (pick == 98)
            rig_clear(&g);
        while (g.n > MODEL_MOST - 2)
            rig_drop(&g, 0);
        rig_check(&g);
    }
    mt_member_release(g.other, mt_member_reserved(g.other));
    rig_end(&g);
}

static mt_member *greedy; /* reserves all that there is when the table grows */

static void *
get_greedily(void *ctx, size_t bytes)
{
    size_t available = mt_ledger_available(mt_member_ledger(greedy));

    CHECK(mt_member_reserve(greedy, available, NULL) == MT_OK);
    return faulty_get(ctx, bytes);
}

/* Another part takes what there is after put() found that it would suffice: entries that went
 * meanwhile are put back where they were. */
static void
a_refusal_after_evictions_puts_all_back(void)
{
    const size_t olds[] = {SIZE_MAX, 0, 7, 15};
    item refused;

    for (size_t i = 0; i < sizeof olds / sizeof *olds; i++) {
        mt_lru_entry *out = NULL;
        mt_error err;
        rig g;

        rig_begin(&g, 100);
        for (uint64_t hash = 0; hash < 16; hash++)
            CHECK(rig_put(&g, hash, 5, SIZE_MAX) == MT_OK);
        greedy = g.other;
        g.mem.get = get_greedily;
        refused = (item){.entry = {.hash = 99, .bytes = 90}};
        CHECK(mt_lru_put(&g.lru, &refused.entry, olds[i] < g.n ? &g.items[olds[i]]->entry : NULL,
                         &out, &err) == MT_ELIMIT);
        CHECK(out == NULL && mt_member_reserved(g.other) == 20 && err.limit == 100);
        rig_check(&g);
        mt_member_release(g.other, 20);
        rig_end(&g);
    }
}

typedef struct rival {
    mt_member *member;
    atomic_bool stop;
} rival;

/* Reserves and releases nearly all that there is, over and over. */
static void *
compete(void *arg)
{
    rival *other = arg;

    while (!atomic_load(&other->stop))
        if (mt_member_reserve(other->member, 60, NULL) == MT_OK)
            mt_member_release(other->member, 60);
    return NULL;
}

/* The same with a thread, which may come between any two steps. */
static void
a_refusal_in_the_middle_changes_nothing(void)
{
    rival other = {.stop = false};
    rng r = rng_seeded(3);
    pthread_t thread;
    rig g;

    rig_begin(&g, 100);
    other.member = g.other;
    CHECK(pthread_create(&thread, NULL, compete, &other) == 0);
    for (int step = 0; step < 60000; step++) {
        size_t old = g.n > 0 && rng_below(&r, 2) ? rng_below(&r, g.n) : SIZE_MAX;
        size_t entries = g.n, gone;
        item *made = malloc(sizeof *made);
        mt_lru_entry *out = NULL;
        *made = (item){.entry = {.hash = rng_next(&r), .bytes = rng_below(&r, 90)}};
        if (mt_lru_put(&g.lru, &made->entry, old < entries ? &g.items[old]->entry : NULL, &out,
                       NULL) == MT_OK) {
            if (old < entries) model_remove(&g, old);
            gone = rig_free(out) - (old < entries);
            for (size_t i = 0; i < gone; i++, g.evicted++)
                model_remove(&g, 0);
            g.items[g.n++] = made;
        } else {
            CHECK(out == NULL);
            free(made);
        }
        rig_check(&g);
    }
    atomic_store(&other.stop, true);
    pthread_join(thread, NULL);
    rig_end(&g);
}

int
main(void)
{
    RUN(evicts_what_was_not_used_for_the_longest_time);
    RUN(refuses_what_can_not_fit_and_evicts_nothing_for_it);
    RUN(an_entry_takes_the_place_of_another);
    RUN(entries_of_one_hash_are_all_found);
    RUN(an_entry_of_no_bytes_is_one_as_well);
    RUN(changes_tell_that_entries_came_or_went);
    RUN(another_ledger_has_the_newest_that_fit);
    RUN(survives_every_failing_allocation);
    RUN(random_walk_agrees_with_the_model);
    RUN(a_refusal_after_evictions_puts_all_back);
    RUN(a_refusal_in_the_middle_changes_nothing);
    CHECK_DONE();
}
