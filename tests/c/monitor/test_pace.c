/* When to look next: the interval near the limit, what is expensive, the share of a processor, and time
 * that was lost. */
#include "kit/check.h"
#include "core/monitor/pace.h"
#include "core/port/probe.h"

enum { MS = 1000000, GIB = 1 << 30 };

static uint64_t
wait_at(uint64_t interval, uint64_t cost, uint64_t used, uint64_t limit)
{
    mt_pace p;

    mt_pace_init(&p, interval, 5);
    CHECK(mt_pace_next(&p, 6, cost, used, limit) == 5 + p.wait_ns);
    return p.wait_ns;
}

static void
the_interval_shrinks_in_the_last_quarter(void)
{
    CHECK(wait_at(100 * MS, 0, MT_UNKNOWN, 1000) == 100 * MS);
    CHECK(wait_at(100 * MS, 0, 999, MT_UNKNOWN) == 100 * MS);
    CHECK(wait_at(100 * MS, 0, 0, 1000) == 100 * MS);
    CHECK(wait_at(100 * MS, 0, 750, 1000) == 100 * MS);
    CHECK(wait_at(100 * MS, 0, 875, 1000) == 50 * MS);
    CHECK(wait_at(100 * MS, 0, 975, 1000) / MS == 10);
    CHECK(wait_at(100 * MS, 0, 1000, 1000) == MS);
    CHECK(wait_at(100 * MS, 0, 5000, 1000) == MS);
    CHECK(wait_at(100 * MS, 0, 5000, 0) == MS);
    CHECK(wait_at(MS / 2, 0, 5000, 1000) == MS / 2); /* never longer than asked for */
}

/* 1 GiB is left and memory rises by 64 MiB in 10 ms: 160 ms, in which there are 16 looks. */
static void
memory_that_rises_fast_is_looked_at_often(void)
{
    uint64_t used = GIB, limit = 2ull * GIB + 64 * (1 << 20);
    mt_pace p;

    mt_pace_init(&p, 100 * MS, 0);
    mt_pace_next(&p, 0, 0, used, limit);
    CHECK(p.wait_ns == 100 * MS);
    mt_pace_next(&p, 10 * MS, 0, used + 64 * (1 << 20), limit);
    CHECK(p.wait_ns == 10 * MS);
    mt_pace_next(&p, 20 * MS, 0, used + 64 * (1 << 20), limit); /* not any more */
    CHECK(p.wait_ns == 100 * MS);
    mt_pace_next(&p, 30 * MS, 0, used, limit); /* falls */
    CHECK(p.wait_ns == 100 * MS);
    mt_pace_next(&p, 30 * MS, 0, used + 5, limit); /* in no time */
    CHECK(p.wait_ns == 100 * MS);
    mt_pace_next(&p, 40 * MS, 0, MT_UNKNOWN, limit);
    mt_pace_next(&p, 50 * MS, 0, used, limit); /* from where is not known */
    CHECK(p.wait_ns == 100 * MS);
}

/* 0.5 % of one, and 3.3 % near the limit or for a short interval. */
static void
samples_take_a_small_share_of_a_processor(void)
{
    mt_pace p;

    CHECK(wait_at(10 * MS, MS / 20, 0, 1000) == 10 * MS);
    CHECK(wait_at(10 * MS, MS, 0, 1000) == 200 * MS);
    CHECK(wait_at(100 * MS, MS, 0, 1000) == 200 * MS);
    CHECK(wait_at(10 * MS, MS, 750, 1000) == 200 * MS);
    CHECK(wait_at(10 * MS, MS / 5, 751, 1000) == 10 * MS - 40000); /* where nearness begins */
    CHECK(wait_at(10 * MS, MS, 1000, 1000) == 30 * MS);            /* at the limit */
    CHECK(wait_at(10 * MS, MS, MT_UNKNOWN, 1000) == 200 * MS);
    CHECK(wait_at(4 * MS, MS, 0, 1000) == 80 * MS);
    CHECK(wait_at(3 * MS / 2, MS, 0, 1000) == 30 * MS && wait_at(MS, MS, 0, 1000) == 30 * MS);
    mt_pace_init(&p, 10 * MS, 0);
    mt_pace_next(&p, 0, MS / 50, 0, 1000);
    mt_pace_next(&p, 0, 9 * MS / 50, 0, 1000); /* one that was expensive counts by an eighth */
    CHECK(p.cost_ns == MS / 25 && p.wait_ns == 10 * MS);
    for (int i = 0; i < 100; i++)
        mt_pace_next(&p, 0, MS, 0, 1000);
    CHECK(p.wait_ns > 199 * MS);
}

/* A process that was stopped for an hour owes no samples. */
static void
what_was_missed_is_left_out(void)
{
    uint64_t hour = 3600003ull * MS; /* and a little, so that it is no multiple of the interval */
    mt_pace p;

    mt_pace_init(&p, 10 * MS, 100 * MS);
    CHECK(mt_pace_next(&p, 101 * MS, 0, MT_UNKNOWN, MT_UNKNOWN) == 110 * MS);
    CHECK(mt_pace_next(&p, 112 * MS, 0, MT_UNKNOWN, MT_UNKNOWN) == 120 * MS); /* no drift */
    CHECK(mt_pace_next(&p, hour, 0, MT_UNKNOWN, MT_UNKNOWN) == hour + 10 * MS);
    CHECK(mt_pace_next(&p, hour + 10 * MS, 0, MT_UNKNOWN, MT_UNKNOWN) == hour + 20 * MS);
    CHECK(mt_pace_next(&p, hour + 30 * MS, 0, MT_UNKNOWN, MT_UNKNOWN) == hour + 40 * MS);
}

static void
what_is_expensive_takes_turns_and_waits_by_its_cost(void)
{
    mt_pace p;
    unsigned seen = 0, what;

    mt_pace_init(&p, 10 * MS, 0);
    for (int i = 0; i < MT_PACE_RARE; i++) {
        what = mt_pace_due(&p, 50 * MS);
        CHECK(what != 0 && !(seen & what));
        seen |= what;
        mt_pace_rare(&p, what, 50 * MS, 0, false);
    }
    CHECK(seen == (MT_READ_SWAP | MT_READ_HEAP | MT_READ_CHILDREN | MT_READ_SHM));
    CHECK(mt_pace_due(&p, 149 * MS) == 0);
    CHECK(mt_pace_due(&p, 150 * MS) == MT_READ_SWAP);
    mt_pace_next(&p, 150 * MS, 0, 1000, 1000); /* at the limit it waits 200 times its cost */
    mt_pace_rare(&p, MT_READ_SWAP, 150 * MS, 2 * MS, false);
    CHECK(mt_pace_due(&p, 150 * MS) == MT_READ_HEAP);
    mt_pace_rare(&p, MT_READ_HEAP, 150 * MS, MS / 2, false);
    CHECK(mt_pace_due(&p, 249 * MS) == 0 && mt_pace_due(&p, 250 * MS) == MT_READ_HEAP);
    mt_pace_rare(&p, MT_READ_HEAP, 250 * MS, MS, false);
    CHECK(mt_pace_due(&p, 250 * MS) == MT_READ_CHILDREN);
    mt_pace_rare(&p, MT_READ_CHILDREN, 250 * MS, MS, false);
    CHECK(mt_pace_due(&p, 250 * MS) == MT_READ_SHM);
    mt_pace_rare(&p, MT_READ_SHM, 250 * MS, 4 * MS, false);
    CHECK(mt_pace_due(&p, 449 * MS) == 0 && mt_pace_due(&p, 450 * MS) == MT_READ_HEAP);
    mt_pace_rare(&p, MT_READ_HEAP, 450 * MS, 5 * MS, false);
    CHECK(mt_pace_due(&p, 450 * MS) == MT_READ_CHILDREN);
    mt_pace_rare(&p, MT_READ_CHILDREN, 450 * MS, MS, false);
    CHECK(mt_pace_due(&p, 549 * MS) == 0 && mt_pace_due(&p, 550 * MS) == MT_READ_SWAP);
    mt_pace_next(&p, 550 * MS, 0, 0, 1000); /* away from it 1,000 times */
    mt_pace_rare(&p, MT_READ_SWAP, 550 * MS, 2 * MS, false);
    mt_pace_rare(&p, MT_READ_CHILDREN, 550 * MS, 60 * MS, false);
    mt_pace_rare(&p, MT_READ_SHM, 550 * MS, 60 * MS, false);
    mt_pace_rare(&p, MT_READ_HEAP, 550 * MS, 60 * MS, false);
    CHECK(mt_pace_due(&p, 2549ull * MS) == 0 && mt_pace_due(&p, 2550ull * MS) == MT_READ_SWAP);
    mt_pace_rare(&p, MT_READ_CHILDREN, 550 * MS, 14 * MS, true); /* more children: 50 times */
    CHECK(mt_pace_due(&p, 1249ull * MS) == 0);
    CHECK(mt_pace_due(&p, 1250ull * MS) == MT_READ_CHILDREN);
}

int
main(void)
{
    RUN(the_interval_shrinks_in_the_last_quarter);
    RUN(memory_that_rises_fast_is_looked_at_often);
    RUN(samples_take_a_small_share_of_a_processor);
    RUN(what_was_missed_is_left_out);
    RUN(what_is_expensive_takes_turns_and_waits_by_its_cost);
    CHECK_DONE();
}
