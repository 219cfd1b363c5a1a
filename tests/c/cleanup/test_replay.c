/* A policy over a run, and over the record of it: the same decisions, each time. */
#include "kit/check.h"
#include "core/cleanup/policy.h"
#include "core/record/writer.h"
#include "core/record/reader.h"
#include "core/monitor/sampler.h"
#include "kit/rng.h"

enum { ROWS = 2000, COLUMNS = MT_SAMPLER_HOST + MT_SAMPLER_DEVICE, DECISIONS = 20000 };

#define MIB (1ull << 20)
#define GIB (1ull << 30)

static const unsigned char home = 1;
static const mt_record_column columns[COLUMNS] = {
    {"step", "count", ""},        {"rss", "B", ""},
    {"private", "B", ""},         {"swap", "B", ""},
    {"cgroup_used", "B", ""},     {"cgroup_limit", "B", ""},
    {"available", "B", ""},       {"pressure", "%", ""},
    {"heap_used", "B", ""},       {"children", "", ""},
    {"children_p", "B", ""},      {"process", "B", ""},
    {"cuda0_allocated", "B", ""}, {"cuda0_reserved", "B", ""},
    {"cuda0_free", "B", ""},      {"cuda0_total", "B", ""}};

typedef struct decision {
    uint64_t tick;
    unsigned mask, why;
} decision;

typedef struct log {
    decision at[DECISIONS];
    size_t n;
} log;

/* --- a run ------------------------------------------------------------------------------------ */

/* Memory that rises and falls, as a function of what went before. */
static void
next_row(rng *r, uint64_t row[COLUMNS])
{
    row[0] += rng_below(r, 40);
    row[1] = GIB + rng_below(r, 9) * GIB;
    row[4] = row[11] = row[1];
    row[5] = 10 * GIB;
    row[6] = rng_below(r, 8) == 0 ? MT_UNKNOWN : 4 * GIB;
    row[12] = rng_below(r, 10) * GIB;
    row[13] = row[12] + rng_below(r, 31) * GIB;
    row[15] = 40 * GIB;
    row[14] = row[15] - row[13];
}

static void *
record_of_a_run(mt_record *r, const mt_record_size *size)
{
    void *region = malloc(mt_record_parts_of(size).end);
    mt_record_start start = {.wall_ns = 1, .clock_ns = 1, .page_bytes = 4096, .command = ""};
    uint64_t row[COLUMNS] = {0};
    rng random = rng_seeded(7);

    CHECK(region != NULL);
    mt_record_init(r, region, size, columns, &start, &home);
    for (uint64_t k = 0; k < ROWS; k++) {
        next_row(&random, row);
        CHECK(mt_record_append(r, 1000000000 + 20000000 * k, row));
    }
    return region;
}

/* --- the policy over it ----------------------------------------------------------------------- */

static mt_sample
sample_of(const uint64_t *row)
{
    mt_sample x;

    mt_sample_clear(&x);
    x.rss = row[1];
    x.cgroup_used = row[4];
    x.cgroup_limit = row[5];
    x.available = row[6];
    x.devices = 1;
    x.device[0] = (mt_device_sample){row[12], MT_UNKNOWN, row[13], row[14], row[15], MT_UNKNOWN};
    return x;
}

/* Whatever is asked for is done, and frees what follows from the tick. */
static void
act(mt_policy *p, unsigned mask, uint64_t now, const mt_sample *x, log *to)
{
    for (unsigned a = 0; a < MT_POLICY_ACTIONS; a++) {
        uint64_t freed = p->ticks[0] / 500 % 2 * GIB;
        mt_policy_result did = {3000000, 2 * GIB, 2 * GIB - freed, 10 * GIB, 0, 0, 0};
        mt_policy_level level = mt_policy_level_of(x);

        if (!(mask >> a & 1)) continue;
        CHECK(to->n < DECISIONS);
        to->at[to->n++] = (decision){p->ticks[0], 1u << a, p->action[a].why};
        mt_policy_done(p, a, now, &did, &level);
    }
}

static void
advance(mt_policy *p, uint64_t step, uint64_t now, const mt_sample *x, log *to)
{
    while (p->ticks[0] < step) {
        unsigned reads, mask;

        if (!mt_policy_tick(p, 0)) continue;
        reads = mt_policy_reads(p, 0, now);
        mask = mt_policy_decide(p, 0, now, reads != 0 ? x : NULL, mt_limit_of(x, MT_UNLIMITED));
        act(p, mask, now, x, to);
    }
}

static void
begin(mt_policy *p, uint64_t every)
{
    mt_policy_setup with = {.pressure = 0.85, .max_cost = 0.003};

    mt_policy_init(p, &with, 1000000000);
    mt_policy_rule_set(p, 0, &(mt_policy_rule){.every = {every}, .triggers = 3});
    mt_policy_rule_set(p, 2, &(mt_policy_rule){.every = {7}, .triggers = 14, .later = true});
}

static void
run_over_rows(log *to)
{
    uint64_t row[COLUMNS] = {0};
    rng random = rng_seeded(7);
    mt_policy p;

    to->n = 0;
    begin(&p, 100);
    for (uint64_t k = 0; k < ROWS; k++) {
        mt_sample x;

        next_row(&random, row);
        x = sample_of(row);
        advance(&p, row[0], 1000000000 + 20000000 * k, &x, to);
    }
}

static void
run_over_record(const mt_recordview *v, uint64_t every, log *to)
{
    mt_policy p;

    to->n = 0;
    begin(&p, every);
    for (uint64_t k = v->rows_from; k < v->rows_end; k++) {
        const uint64_t *row = mt_series_row(&v->series, k);
        mt_sample x;

        CHECK(row != NULL);
        x = sample_of(row + 1);
        advance(&p, row[1], row[0], &x, to);
    }
}

static bool
is_same(const log *a, const log *b)
{
    bool same = a->n == b->n;

    for (size_t i = 0; same && i < a->n; i++)
        same = a->at[i].tick == b->at[i].tick && a->at[i].mask == b->at[i].mask &&
               a->at[i].why == b->at[i].why;
    return same;
}

static void
a_record_gives_the_decisions_of_its_run(void)
{
    static log live, again, once_more;
    mt_record_size size = {.series = {COLUMNS, ROWS, 64}, .events = 4, .phases = 4};
    mt_record r;
    void *region = record_of_a_run(&r, &size);
    unsigned why = 0;
    mt_recordview view;

    CHECK(mt_record_open(&view, region, mt_record_parts_of(&size).end, NULL) == MT_OK);
    run_over_rows(&live);
    run_over_record(&view, 100, &again);
    run_over_record(&view, 100, &once_more);
    CHECK(is_same(&live, &again) && is_same(&again, &once_more));
    for (size_t i = 0; i < live.n; i++)
        why |= live.at[i].why;
    CHECK(live.n > 100);
    CHECK(why ==
          (MT_WHEN_DUE | MT_WHEN_HOST_PRESSURE | MT_WHEN_DEVICE_PRESSURE | MT_WHEN_IDLE_CACHE));
    run_over_record(&view, 101, &again); /* another policy decides otherwise */
    CHECK(!is_same(&live, &again));
    mt_record_fini(&r);
    free(region);
}

int
main(void)
{
    RUN(a_record_gives_the_decisions_of_its_run);
    CHECK_DONE();
}
