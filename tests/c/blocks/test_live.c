/* The table of the blocks that live: against a model that keeps all of them in a list, with an
 * allocator that fails at each call, and from several threads at once. */
#include "kit/check.h"
#include "core/blocks/live.h"
#include "kit/faulty.h"
#include "kit/rng.h"

#include <pthread.h>
#include <string.h>

enum { ADDRESSES = 3000, ROUNDS = 60000, SITES = 9, THREADS = 4, EACH = 20000 };

static const void *
at(uint64_t n)
{
    return (const void *)(uintptr_t)(0x7F0000000000 + 64 * n);
}

static void
what_is_born_and_died_is_counted(void)
{
    mt_live live;
    mt_live_figures f;

    mt_live_init(&live, &mt_alloc_libc, NULL);
    mt_live_born(&live, at(1), 100, 3);
    mt_live_born(&live, at(2), 50, 3);
    mt_live_died(&live, at(1));
    mt_live_died(&live, at(1));
    mt_live_died(&live, at(77));
    mt_live_died(&live, NULL);
    mt_live_born(&live, at(2), 70, 4); /* has died unseen */
    f = mt_live_read(&live);
    CHECK(f.in_use == 70 && f.peak == 150 && f.blocks == 1);
    CHECK(mt_live_highest(&live).peak == 150 && mt_live_highest(&live).peak == 70);
    CHECK(f.missed == 0);
    CHECK(mt_live_at(&live, at(2)).site == 4 && mt_live_at(&live, at(2)).bytes == 70);
    CHECK(mt_live_at(&live, at(1)).address == 0 && mt_live_at(&live, NULL).address == 0);
    mt_live_clear(&live);
    f = mt_live_read(&live);
    CHECK(f.in_use == 0 && f.peak == 0 && live.blocks.slots == NULL);
    mt_live_died(&live, at(2)); /* from before: not known any more */
    CHECK(mt_live_read(&live).in_use == 0);
    mt_live_fini(&live);
}

static void
survivors_are_told_by_site_and_generation(void)
{
    mt_live_sum sums[3] = {{0, 0}};
    mt_live live;

    mt_live_init(&live, &mt_alloc_libc, NULL);
    mt_live_born(&live, at(1), 1000, 1);
    CHECK(mt_live_turn(&live) == 2);
    mt_live_born(&live, at(2), 10, 1);
    mt_live_born(&live, at(3), 20, 2);
    mt_live_born(&live, at(4), 40, 2);
    mt_live_born(&live, at(5), 80, 7); /* a site that is not asked for */
    CHECK(mt_live_turn(&live) == 3);
    mt_live_born(&live, at(6), 160, 1);
    mt_live_died(&live, at(4));
    mt_live_sum_sites(&live, 2, 2, sums, 3);
    CHECK(sums[0].blocks == 0 && sums[1].bytes == 10 && sums[1].blocks == 1);
    CHECK(sums[2].bytes == 20 && sums[2].blocks == 1);
    mt_live_sum_sites(&live, 1, 3, sums, 3); /* adds to what is there */
    CHECK(sums[1].bytes == 10 + 1170 && sums[1].blocks == 1 + 3);
    mt_live_clear(&live);
    CHECK(mt_live_turn(&live) == 4);
    mt_live_fini(&live);
}

typedef struct model {
    uint64_t bytes[ADDRESSES];
    uint32_t site[ADDRESSES], generation[ADDRESSES];
    uint64_t in_use, peak, blocks;
} model;

static void
model_drop(model *m, size_t n)
{
    m->in_use -= m->bytes[n];
    m->blocks -= m->bytes[n] > 0;
    m->bytes[n] = 0;
}

static void
check_model(mt_live *live, const model *m, uint32_t generation)
{
    mt_live_sum sums[SITES] = {{0, 0}}, want[SITES] = {{0, 0}};
    mt_live_figures f = mt_live_read(live);

    CHECK(f.in_use == m->in_use && f.peak == m->peak && f.blocks == m->blocks);
    mt_live_sum_sites(live, generation / 2, generation - 1, sums, SITES);
    for (size_t i = 0; i < ADDRESSES; i++) {
        mt_block block = mt_live_at(live, at(i + 1));
        CHECK(block.bytes == m->bytes[i] && (block.address != 0) == (m->bytes[i] > 0));
        if (m->bytes[i] == 0 || m->generation[i] < generation / 2) continue;
        if (m->generation[i] >= generation) continue;
        want[m->site[i]].bytes += m->bytes[i];
        want[m->site[i]].blocks++;
    }
    CHECK(memcmp(sums, want, sizeof want) == 0);
}

static void
any_order_of_reports_is_as_in_the_model(void)
{
    static model m;
    rng r = rng_seeded(7);
    uint32_t generation = 1;
    mt_live live;

    mt_live_init(&live, &mt_alloc_libc, NULL);
    for (size_t i = 0; i < ROUNDS; i++) {
        /* Grows in the first half, and shrinks in the second. */
        size_t n = rng_below(&r, ADDRESSES);
        bool is_birth = rng_below(&r, 100) < (i < ROUNDS / 2 ? 70 : 30);
        if (is_birth || m.bytes[n] > 0) model_drop(&m, n);
        if (is_birth) {
            m.bytes[n] = 1 + rng_below(&r, 5000);
            m.site[n] = (uint32_t)rng_below(&r, SITES);
            m.generation[n] = generation;
            m.in_use += m.bytes[n];
            m.blocks++;
            if (m.in_use > m.peak) m.peak = m.in_use;
            mt_live_born(&live, at(n + 1), m.bytes[n], m.site[n]);
        } else {
            mt_live_died(&live, at(n + 1));
        }
        if (i % 997 == 0) CHECK((generation = mt_live_turn(&live)) > 1);
        if (i % 6007 == 0) check_model(&live, &m, generation);
    }
    check_model(&live, &m, generation);
    mt_live_fini(&live);
}

static void
without_memory_what_is_missed_is_counted(void)
{
    for (long fail_at = 0; fail_at < 4; fail_at++) {
        faulty f = {.fail_at = fail_at};
        mt_alloc mem = faulty_alloc(&f);
        mt_live_figures figures;
        mt_live live;

        mt_live_init(&live, &mem, NULL);
        for (uint64_t n = 1; n <= 4000; n++)
            mt_live_born(&live, at(n), 8, 1);
        figures = mt_live_read(&live);
        CHECK(figures.missed == 4000 - figures.blocks);
        CHECK(figures.in_use == 8 * figures.blocks);
        CHECK((figures.missed > 0) == (fail_at < 4 && figures.blocks < 4000));
        CHECK(figures.missed > 0); /* one birth at least finds no room; a later one may again */
        for (uint64_t n = 1; n <= 4000; n++)
            mt_live_died(&live, at(n));
        CHECK(mt_live_read(&live).in_use == 0 && mt_live_read(&live).blocks == 0);
        mt_live_fini(&live);
        CHECK(f.live == 0);
    }
}

static void
a_forked_child_reports_nothing(void)
{
    mt_forks forks = 3;
    mt_live live;

    mt_live_init(&live, &mt_alloc_libc, &(mt_birth){&forks, 3});
    mt_live_born(&live, at(1), 100, 1);
    mt_lock_take(&live.lock); /* another thread of the parent, at the fork */
    forks = 4;
    mt_live_born(&live, at(2), 100, 1);
    mt_live_died(&live, at(1));
    mt_live_clear(&live);
    CHECK(mt_live_turn(&live) == 0 && mt_live_read(&live).in_use == 0);
    CHECK(mt_live_at(&live, at(1)).address == 0);
    forks = 3;
    mt_lock_give(&live.lock);
    CHECK(mt_live_read(&live).in_use == 100);
    mt_live_fini(&live);
}

typedef struct worker {
    mt_live *live;
    uint64_t first;
} worker;

static void *
report(void *arg)
{
    const worker *w = arg;

    for (uint64_t n = 0; n < EACH; n++) {
        mt_live_born(w->live, at(w->first + n % 500), 16, 1);
        if (n % 3 == 0) mt_live_died(w->live, at(w->first + n % 500));
        if (n % 1000 == 0) (void)mt_live_turn(w->live);
    }
    for (uint64_t n = 0; n < 500; n++)
        mt_live_died(w->live, at(w->first + n));
    return NULL;
}

static void
threads_report_at_the_same_time(void)
{
    pthread_t threads[THREADS];
    worker workers[THREADS];
    mt_live_figures f;
    mt_live live;

    mt_live_init(&live, &mt_alloc_libc, NULL);
    for (size_t i = 0; i < THREADS; i++) {
        workers[i] = (worker){&live, 1 + i * 1000};
        CHECK(pthread_create(&threads[i], NULL, report, &workers[i]) == 0);
    }
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    f = mt_live_read(&live);
    CHECK(f.in_use == 0 && f.blocks == 0 && f.missed == 0);
    CHECK(f.peak <= (uint64_t)THREADS * 500 * 16 && f.peak >= 500 * 16 / 2);
    mt_live_fini(&live);
}

int
main(void)
{
    RUN(what_is_born_and_died_is_counted);
    RUN(survivors_are_told_by_site_and_generation);
    RUN(any_order_of_reports_is_as_in_the_model);
    RUN(without_memory_what_is_missed_is_counted);
    RUN(a_forked_child_reports_nothing);
    RUN(threads_report_at_the_same_time);
    CHECK_DONE();
}
