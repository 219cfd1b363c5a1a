/* A sampler with made-up memory and a made-up clock: what it reads when, what it records, limits,
 * watermarks, costs, and what is left of it in a forked child. */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "monitor/rig.h"
#include "core/record/writer.h"
#include "kit/recordview.h"
#include "os/base/forks.h"

enum { GIB = 1 << 30, COLUMNS = MT_SAMPLER_HOST + 2 * MT_SAMPLER_DEVICE };

static int
bit(unsigned what)
{
    return __builtin_ctz(what);
}

/* --- what is read when ------------------------------------------------------------------------ */

static void
samples_keep_the_interval_and_what_is_expensive_is_read_rarely(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);

    setup.devices = 1;
    rig_open(&r, &setup);
    CHECK(r.reads[0] == 1 && r.reads[bit(MT_READ_CHILDREN)] == 1); /* before there is a thread */
    CHECK(!mt_sampler_read(r.s).runs && mt_sampler_read(r.s).samples == 0);
    rig_run(&r, 100);
    CHECK(mt_sampler_read(r.s).samples == 102 && r.reads[0] == 103 && r.reads[1] == 103);
    CHECK(r.reads[3] == 103 && r.reads[bit(MT_READ_DEVICES)] == 102);
    CHECK(r.reads[bit(MT_READ_PRESSURE)] == 1 + 51); /* every 20 ms */
    for (int i = 0; i < 60; i++)
        CHECK(r.asked[i] == (uint64_t)(1010 + 10 * i) * RIG_MS);
    CHECK(r.reads[bit(MT_READ_SWAP)] == 13 &&
          r.reads[bit(MT_READ_HEAP)] == 12); /* and at the end */
    CHECK(r.reads[bit(MT_READ_CHILDREN)] == 7);
    CHECK(mt_sampler_read(r.s).interval_ns == 10 * RIG_MS);
    rig_free(&r);
}

/* What grows in children after their newest reading is in the last one. */
static void
the_last_sample_has_what_is_read_rarely(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    mt_sample x;

    r.cost[bit(MT_READ_CHILDREN)] = r.cost[bit(MT_READ_SHM)] = 100 * (uint64_t)RIG_MS;
    r.now.children = 1;
    rig_open(&r, &setup);
    rig_run(&r, 100);
    r.now.children_priv = 70, r.now.shm = 80, r.now.heap_used = 90;
    rig_run(&r, 0);
    CHECK(mt_sampler_latest(r.s, &x));
    CHECK(x.children_priv == 70 && x.shm == 80 && x.heap_used == 90);
    rig_free(&r);
}

static uint64_t grows_by; /* a sample */

static void
grow_children(rig *r)
{
    r->now.children_priv += grows_by;
}

/* How often children are read in 1,000 samples of 10 ms. */
static long
readings_of_children(uint64_t cost, uint64_t weighing, uint64_t grown)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    long reads;

    grows_by = grown;
    r.each = grow_children;
    r.now.children = 2, r.now.children_priv = 1000;
    r.now.weighing_ns = weighing;
    r.cost[bit(MT_READ_CHILDREN)] = cost + weighing;
    rig_open(&r, &setup);
    rig_run(&r, 1000);
    reads = r.reads[bit(MT_READ_CHILDREN)];
    rig_free(&r);
    return reads;
}

/* To find out what a fork has alone takes many times as long as the rest, and has its own allowance:
 * the next reading does not wait for it. */
static void
children_are_read_as_often_where_they_are_weighed(void)
{
    CHECK(readings_of_children(RIG_MS, 0, 0) == 12); /* each second, before and at the end */
    CHECK(readings_of_children(RIG_MS, 20 * RIG_MS, 0) == 12);
}

static void
children_that_grow_are_read_again_soon(void)
{
    CHECK(readings_of_children(RIG_MS, 0, 0) == 12);
    CHECK(readings_of_children(RIG_MS, 0, 1000) > 30); /* by more than 5 % each time, at first */
}

static int times_told;

static void
count_second(void)
{
    times_told++;
}

static void
each_second_is_told_of_once(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);

    setup.each_second = count_second;
    rig_open(&r, &setup);
    CHECK(times_told == 0);
    rig_run(&r, 298);
    CHECK(r.asked[0] == 1010 * (uint64_t)RIG_MS && times_told == 3); /* at 1.00, 2.00 and 3.00 s */
    rig_free(&r);
}

/* A second costs what it costs, whatever each reading takes. */
static void
takes_at_most(double share, uint64_t interval_ns, uint64_t used, uint64_t cost, uint64_t rare_cost)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, interval_ns);

    r.cost[0] = r.wake = cost;
    r.cost[bit(MT_READ_SWAP)] = r.cost[bit(MT_READ_HEAP)] = rare_cost;
    r.cost[bit(MT_READ_CHILDREN)] = r.cost[bit(MT_READ_SHM)] = rare_cost;
    r.now.cgroup_used = used;
    r.now.cgroup_limit = 1000;
    rig_open(&r, &setup);
    rig_run(&r, 20000);
    CHECK((double)mt_sampler_read(r.s).cpu_ns <
          share * (double)(r.ns - 1000 * (uint64_t)RIG_MS) + 4 * (double)rare_cost);
    CHECK(mt_sampler_read(r.s).cpu_ns == r.cpu);
    rig_free(&r);
}

static void
it_never_takes_much_of_a_processor(void)
{
    static const uint64_t costs[] = {1000, 100 * 1000, 5 * RIG_MS, 100 * (uint64_t)RIG_MS};

    for (int k = 0; k < 4; k++)
        for (int plain = 0; plain < 3; plain++) {
            takes_at_most(0.01, 10 * RIG_MS, 0, costs[plain], costs[k]);
            takes_at_most(0.01, 100 * RIG_MS, 750, costs[plain], costs[k]);
            takes_at_most(0.055, RIG_MS, 1000, costs[plain], costs[k]); /* at the limit */
        }
}

static void
costs_add_up_over_threads(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);

    r.cost[0] = 1000;
    rig_open(&r, &setup);
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).samples == 2 && mt_sampler_read(r.s).cpu_ns == 2000);
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).samples == 4 && mt_sampler_read(r.s).cpu_ns == 4000);
    rig_free(&r);
}

/* Woken up late for the first time: no burst follows. */
static void
hang(rig *r)
{
    r->late = r->asks == 3 ? 3600ull * 1000 * RIG_MS : 0;
}

static void
a_stopped_process_owes_no_samples(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);

    r.each = hang;
    rig_open(&r, &setup);
    rig_run(&r, 8);
    CHECK(mt_sampler_read(r.s).samples == 10);
    CHECK(r.asked[3] == 1040 * (uint64_t)RIG_MS);
    for (int i = 5; i < 8; i++)
        CHECK(r.asked[i] - r.asked[i - 1] == 10 * RIG_MS);
    rig_free(&r);
}

/* --- what it knows ---------------------------------------------------------------------------- */

static void
the_lowest_limit_counts_and_what_is_used_follows_from_it(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    mt_limit at;

    rig_open(&r, &setup);
    rig_run(&r, 0);
    at = mt_sampler_read(r.s).limit;
    CHECK(at.bytes == MT_UNKNOWN && at.used == MT_UNKNOWN && strcmp(at.from, "") == 0);
    CHECK(mt_sampler_read(r.s).peak == MT_UNKNOWN);
    r.now.total = 1000;
    r.now.available = 400;
    rig_run(&r, 0);
    at = mt_sampler_read(r.s).limit;
    CHECK(at.bytes == 1000 && at.used == 600 && strcmp(at.from, "machine") == 0);
    r.now.available = 2000; /* nonsense */
    r.now.cgroup_limit = MT_UNLIMITED;
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).limit.used == MT_UNKNOWN &&
          mt_sampler_read(r.s).limit.bytes == 1000);
    r.now.cgroup_limit = 900; /* at run time */
    r.now.rss = 50;
    rig_run(&r, 0);
    at = mt_sampler_read(r.s).limit;
    CHECK(at.bytes == 900 && at.used == 50 && strcmp(at.from, "cgroup") == 0);
    r.now.cgroup_used = 300;
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).limit.used == 300 && mt_sampler_read(r.s).peak == 600);
    rig_free(&r);
}

static void
a_given_limit_counts_the_process_and_its_children(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    mt_limit at;

    setup.limit = 800;
    r.now.cgroup_limit = 800; /* of two that are the same, the given one */
    r.now.cgroup_used = 700;
    r.now.rss = 100;
    rig_open(&r, &setup);
    at = mt_sampler_read(r.s).limit;
    CHECK(at.bytes == 800 && at.used == 100 && strcmp(at.from, "given") == 0);
    r.now.children = 2;
    r.now.children_priv = 30;
    rig_run(&r, 5); /* the children's turn */
    CHECK(mt_sampler_read(r.s).limit.used == 130 && mt_sampler_read(r.s).peak == 130);
    r.now.rss = 20;
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).limit.used == 50 && mt_sampler_read(r.s).peak == 130);
    rig_free(&r);
}

/* What is swapped out is the job's still; its swap rises by 3 a second, 30 steps. */
static void
fill_swap(rig *r)
{
    r->now.swap = r->ns / (RIG_MS * (uint64_t)1000);
    r->now.children_swap = 2 * r->now.swap;
    mt_sampler_step(r->s, 1);
}

static void
what_is_swapped_out_is_used_and_its_rise_is_reported(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 100 * RIG_MS);
    mt_fill_reading rise;

    setup.limit = 800;
    r.now.rss = 100;
    rig_open(&r, &setup);
    CHECK(!mt_sampler_swap_rise(r.s, &rise));
    r.each = fill_swap;
    rig_run(&r, 200); /* 20 seconds */
    CHECK(mt_sampler_read(r.s).limit.used == 100 + 3 * 21);
    CHECK(mt_sampler_swap_rise(r.s, &rise));
    CHECK(rise.steps == 10 * rise.time_ns / (RIG_MS * (uint64_t)1000));
    CHECK(rise.bytes >= 3 * rise.steps / 10 - 3 && rise.bytes <= 3 * rise.steps / 10 + 3);
    r.each = NULL;
    rig_run(&r, 300);
    CHECK(!mt_sampler_swap_rise(r.s, &rise));
    rig_free(&r);
}

/* A generation with many forks of one prompt: each page stands in rss once for each row. */
static void
what_is_mapped_again_is_not_used(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    mt_gauge again = {0};
    mt_sample x;

    setup.limit = 1000;
    setup.mapped_again = &again;
    r.now.rss = 300;
    rig_open(&r, &setup);
    CHECK(mt_sampler_watch(r.s, MT_MARK_HOST, 0.9) == 0);
    rig_run(&r, 0);
    mt_gauge_add(&again, 950);
    r.now.rss = 1250;
    rig_run(&r, 0);
    CHECK(mt_sampler_step(r.s, 1) == 0);
    CHECK(mt_sampler_read(r.s).limit.used == 300 && mt_sampler_read(r.s).peak == 300);
    CHECK(mt_sampler_latest(r.s, &x) && x.rss == 1250 && x.mapped_again == 950);
    mt_gauge_subtract(&again, 900); /* now the program itself has them */
    rig_run(&r, 0);
    CHECK(mt_sampler_step(r.s, 1) == 1 && mt_sampler_read(r.s).peak == 1200);
    r.now.cgroup_limit = 500; /* whose usage the kernel counts once */
    r.now.cgroup_used = 400;
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).limit.used == 400);
    r.now.cgroup_used = MT_UNKNOWN;
    mt_gauge_add(&again, 4950); /* of which little was touched */
    mt_gauge_add_once(&again, 30);
    r.now.rss = 400;
    r.now.priv = 300;
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).limit.used == 330); /* the pools' own pages, and what is private */
    mt_gauge_add_once(&again, 90);
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).limit.used == 400); /* not all of the pools' pages are mapped here */
    r.now.priv = 500;                              /* the two are not read at once */
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).limit.used == 400);
    r.now.rss = MT_UNKNOWN;
    rig_run(&r, 0);
    CHECK(mt_sampler_read(r.s).limit.used == MT_UNKNOWN);
    rig_free(&r);
}

static void
the_latest_sample_keeps_what_is_read_rarely(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, RIG_MS);
    mt_sample x;

    r.now.rss = 1;
    r.now.pressure = 7;
    r.now.swap = 2;
    r.now.heap_used = 3;
    r.now.heap_free = 4;
    r.now.children = 5;
    r.now.children_priv = 6;
    rig_open(&r, &setup);
    CHECK(!mt_sampler_latest(r.s, &x));
    rig_run(&r, 9);
    CHECK(mt_sampler_latest(r.s, &x));
    CHECK(x.rss == 1 && x.swap == 2 && x.heap_used == 3 && x.heap_free == 4);
    CHECK(x.children == 5 && x.children_priv == 6 && x.time_ns == r.ns && x.pressure == 7);
    r.now.pressure = 8;
    rig_run(&r, 5);
    CHECK(mt_sampler_latest(r.s, &x) && x.pressure == 7);
    rig_run(&r, 5);
    CHECK(mt_sampler_latest(r.s, &x) && x.pressure == 8);
    r.now.heap_used = MT_UNKNOWN; /* cannot be read any more: not an old value for ever */
    rig_run(&r, 200);
    CHECK(mt_sampler_latest(r.s, &x) && x.heap_used == MT_UNKNOWN && x.heap_free == 4);
    rig_free(&r);
}

/* --- watermarks ------------------------------------------------------------------------------- */

static void
a_mark_reaches_the_next_step_once(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);

    r.now.cgroup_limit = 100;
    r.now.cgroup_used = 10;
    rig_open(&r, &setup);
    CHECK(mt_sampler_watch(r.s, MT_MARK_HOST, 0.5) == 0 &&
          mt_sampler_watch(r.s, MT_MARK_HOST, 0.9) == 1);
    rig_run(&r, 0);
    CHECK(mt_sampler_step(r.s, 1) == 0);
    r.now.cgroup_used = 60;
    rig_run(&r, 3);
    r.now.cgroup_used = 95;
    rig_run(&r, 3);
    CHECK(mt_sampler_step(r.s, 2) == 3 && mt_sampler_step(r.s, 1) == 0);
    CHECK(mt_sampler_read(r.s).steps == 4);
    CHECK(mt_sampler_watch(r.s, MT_MARK_HOST, 0.1) == 2);
    rig_run(&r, 0);
    CHECK(mt_sampler_unwatch(r.s, 2) && !mt_sampler_unwatch(r.s, 2));
    CHECK(mt_sampler_step(r.s, 1) == 0); /* nobody waits for it any more */
    CHECK(mt_sampler_watch(r.s, MT_MARK_HOST, 0.1) == 2);
    r.now.cgroup_limit = 0; /* nothing to be a part of */
    rig_run(&r, 0);
    r.now.cgroup_limit = MT_UNKNOWN;
    rig_run(&r, 0);
    CHECK(mt_sampler_step(r.s, 1) == 0);
    for (int i = 3; i < 32; i++)
        CHECK(mt_sampler_watch(r.s, MT_MARK_HOST, 0.1) == i);
    CHECK(mt_sampler_watch(r.s, MT_MARK_HOST, 0.1) == -1);
    rig_free(&r);
}

/* allocated, its peak, reserved, inactive_split, free, total: see mt_device_sample. */
static mt_device_sample
device_with(uint64_t allocated, uint64_t others)
{
    return (mt_device_sample){.allocated = allocated,
                              .reserved = allocated + 5,
                              .free = 100 - allocated - 5 - others,
                              .total = 100};
}

static void
a_device_counts_what_is_allocated_and_what_others_have(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);

    setup.devices = 2;
    r.now.cgroup_limit = r.now.cgroup_used = 100; /* the host is full all the time */
    rig_open(&r, &setup);
    CHECK(mt_sampler_watch(r.s, MT_MARK_DEVICE, 0.5) == 0);
    CHECK(mt_sampler_watch(r.s, MT_MARK_DEVICE + 1, 0.5) == 1);
    rig_run(&r, 1); /* no device answers */
    r.now.devices = 2;
    r.now.device[0] = device_with(49, 0);
    r.now.device[1] = device_with(49, 0);
    rig_run(&r, 1);
    CHECK(mt_sampler_step(r.s, 1) == 0); /* what is reserved and free counts for nobody */
    r.now.device[1] = device_with(49, 1);
    rig_run(&r, 1);
    CHECK(mt_sampler_step(r.s, 1) == 2);
    r.now.device[0] = device_with(60, 0);
    rig_run(&r, 1);
    r.now.device[0] = device_with(20, 0); /* it is free again before the step ends */
    rig_run(&r, 1);
    CHECK(mt_sampler_step(r.s, 1) == 1);
    CHECK(mt_sampler_passed_at(r.s, 0) == 60 && mt_sampler_passed_at(r.s, 1) == 50);
    CHECK(mt_sampler_passed_at(r.s, 2) == 0 && mt_sampler_passed_at(r.s, 32) == 0);
    for (int i = 0; i < 4; i++) { /* one figure is not known */
        uint64_t *figure[] = {&r.now.device[1].allocated, &r.now.device[1].reserved,
                              &r.now.device[1].free, &r.now.device[1].total};
        r.now.device[1] = device_with(10, 0);
        rig_run(&r, 1);
        r.now.device[1] = device_with(90, 0);
        *figure[i] = MT_UNKNOWN;
        rig_run(&r, 1);
        CHECK(mt_sampler_step(r.s, 1) == 0);
    }
    r.now.device[1] = (mt_device_sample){.allocated = 40, .reserved = 70, .free = 60, .total = 100};
    rig_run(&r, 1);
    CHECK(mt_sampler_step(r.s, 1) == 0); /* two counters that do not fit: others have nothing */
    rig_free(&r);
}

/* --- the record ------------------------------------------------------------------------------- */

typedef struct notes {
    mt_record r;
    size_t bytes;
    uint64_t *region;
} notes;

static void
notes_open(notes *n, size_t columns)
{
    mt_record_column names[COLUMNS];
    mt_record_start start = {.wall_ns = 5, .clock_ns = 6, .pid = 7, .page_bytes = 4096};
    mt_record_size size = {.series = {columns, 64, 32}, .events = 8, .phases = 2};

    memset(names, 0, sizeof names);
    for (size_t c = 0; c < columns; c++)
        names[c].name[0] = (char)('A' + c);
    n->bytes = mt_record_parts_of(&size).end;
    n->region = malloc(n->bytes);
    mt_record_init(&n->r, n->region, &size, names, &start, &(mt_birth){0});
}

static const uint64_t *
row(const notes *n, uint64_t k)
{
    const uint64_t *words = view_row(n->region, k);

    CHECK(words != NULL);
    return words + 1;
}

static void
count_step(rig *r)
{
    mt_sampler_step(r->s, 10);
}

static void
a_row_has_the_columns_in_their_order(void)
{
    static const uint64_t wanted[COLUMNS] = {
        0, 11, 2,          13, 14, MT_UNKNOWN, 16, 17,         MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN,
        7, 65, MT_UNKNOWN, 21, 22, 23,         24, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN};
    rig r = rig_new();
    mt_gauge again = {4, 4, 5};
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    notes n;

    notes_open(&n, COLUMNS);
    setup.record = &n.r;
    setup.devices = 2;
    setup.mapped_again = &again;
    r.now.rss = 11, r.now.priv = 2, r.now.swap = 13, r.now.cgroup_used = 14;
    r.now.cgroup_limit = MT_UNLIMITED, r.now.available = 16, r.now.pressure = 17;
    r.now.heap_used = 18, r.now.children = 19, r.now.children_priv = 20;
    r.now.shm = 30, r.now.shm_mapped = 9;
    r.now.devices = 1; /* of two: the other one is not there yet */
    r.now.device[0] = (mt_device_sample){21, 99, 22, 23, 24, 25};
    r.now.device[1] = (mt_device_sample){1, 1, 1, 1, 1, 1};
    r.each = count_step;
    rig_open(&r, &setup);
    rig_run(&r, 3);
    CHECK(view_samples(n.region) == 5);
    CHECK(memcmp(row(&n, 0), wanted, sizeof wanted) == 0);
    CHECK(row(&n, 0)[-1] == 1000 * (uint64_t)RIG_MS && row(&n, 2)[-1] == 1020 * (uint64_t)RIG_MS);
    CHECK(row(&n, 1)[0] == 10 && row(&n, 4)[0] == 40);
    CHECK(row(&n, 1)[3] == MT_UNKNOWN && row(&n, 1)[8] == 18 && row(&n, 1)[9] == MT_UNKNOWN);
    CHECK(row(&n, 2)[8] == MT_UNKNOWN && row(&n, 2)[9] == 19 && row(&n, 2)[10] == 20);
    CHECK(row(&n, 3)[8] == MT_UNKNOWN && row(&n, 3)[9] == MT_UNKNOWN && row(&n, 3)[13] == 30);
    r.now.cgroup_limit = 15;
    rig_run(&r, 0);
    mt_record_close(&n.r, 1); /* what comes now is lost, and nothing else happens */
    rig_run(&r, 1);
    CHECK(view_samples(n.region) == 7);
    CHECK(row(&n, 6)[5] == 15 && mt_sampler_read(r.s).samples == 10);
    rig_free(&r);
    free(n.region);
}

static void
a_mark_is_an_event_of_the_record(void)
{
    static const char fields[] =
        "{\"what\":\"passed\",\"fraction\":0.875,\"used_bytes\":1992294400,"
        "\"limit_bytes\":2147483648,\"source\":\"cgroup\"}";
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    const uint64_t *event;
    const char *body;
    size_t bytes;
    notes n;

    notes_open(&n, MT_SAMPLER_HOST);
    setup.record = &n.r;
    r.now.cgroup_limit = 2048ull << 20;
    r.now.cgroup_used = 1900ull << 20;
    rig_open(&r, &setup);
    CHECK(mt_sampler_watch(r.s, MT_MARK_HOST, 0.99) == 0 &&
          mt_sampler_watch(r.s, MT_MARK_HOST, 0.875) == 1);
    mt_sampler_step(r.s, 7);
    rig_run(&r, 2);
    CHECK((event = view_event(n.region, 0)) != NULL && view_event(n.region, 1) == NULL);
    CHECK(event[1] == 1000 * (uint64_t)RIG_MS && event[2] == 0 && event[3] == 7);
    CHECK(strcmp((const char *)(event + MT_EVENT_KIND), "pressure") == 0);
    body = view_body(event, &bytes);
    CHECK((event[MT_EVENT_FORM] & MT_EVENT_IS_PAYLOAD) != 0);
    CHECK(bytes == strlen(fields) && memcmp(body, fields, bytes) == 0);
    rig_free(&r);
    free(n.region);
}

static void
a_mark_of_a_device_is_written_with_its_name(void)
{
    const char *fields = "{\"what\":\"passed\",\"fraction\":0.900,\"used_bytes\":95,"
                         "\"limit_bytes\":100,\"source\":\"cuda:1\"}";
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    const uint64_t *event;
    const char *body;
    size_t bytes;
    notes n;

    notes_open(&n, COLUMNS);
    setup.record = &n.r;
    setup.devices = r.now.devices = 2;
    r.now.device[0] = device_with(20, 0);
    r.now.device[1] = device_with(80, 15);
    rig_open(&r, &setup);
    CHECK(mt_sampler_watch(r.s, MT_MARK_DEVICE + 1, 0.9) == 0);
    rig_run(&r, 2);
    CHECK((event = view_event(n.region, 0)) != NULL && view_event(n.region, 1) == NULL);
    body = view_body(event, &bytes);
    CHECK(bytes == strlen(fields) && memcmp(body, fields, bytes) == 0);
    rig_free(&r);
    free(n.region);
}

static size_t
events_about_waiting(const notes *n, unsigned seconds)
{
    const uint64_t *event;
    size_t found = 0, bytes;
    char fields[64];
    int wanted =
        snprintf(fields, sizeof fields, "{\"what\":\"not heard\",\"seconds\":%u}", seconds);

    for (uint64_t i = 0; (event = view_event(n->region, i)) != NULL; i++) {
        const char *body = view_body(event, &bytes);
        if (memcmp(body, fields, 12) != 0) continue;
        CHECK(memcmp(body, fields, (size_t)wanted) == 0);
        found++;
    }
    return found;
}

static void
a_mark_that_no_step_asks_for_is_written_once(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 100 * RIG_MS);
    notes n;

    notes_open(&n, MT_SAMPLER_HOST);
    setup.record = &n.r;
    r.now.cgroup_limit = 1000;
    r.now.cgroup_used = 100;
    rig_open(&r, &setup);
    CHECK(mt_sampler_watch(r.s, MT_MARK_HOST, 0.5) == 0);
    rig_run(&r, 200); /* 20 s in which nothing waits */
    r.now.cgroup_used = 600;
    rig_run(&r, 50);
    CHECK(mt_sampler_step(r.s, 1) == 1); /* in time */
    r.now.cgroup_used = 100;
    rig_run(&r, 2);
    r.now.cgroup_used = 600;
    rig_run(&r, 80);
    CHECK(events_about_waiting(&n, 10) == 0);
    rig_run(&r, 40);
    CHECK(events_about_waiting(&n, 10) == 1);
    rig_run(&r, 300);
    CHECK(events_about_waiting(&n, 10) == 1);
    rig_free(&r);
    free(n.region);
}

/* The start of 50 s is no step. */
static void
a_mark_waits_as_long_as_steps_usually_take(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 100 * RIG_MS);
    notes n;

    notes_open(&n, MT_SAMPLER_HOST);
    setup.record = &n.r;
    r.now.cgroup_limit = 1000;
    r.now.cgroup_used = 100;
    rig_open(&r, &setup);
    CHECK(mt_sampler_watch(r.s, MT_MARK_HOST, 0.5) == 0);
    rig_run(&r, 500);
    for (int i = 0; i < 4; i++) {
        mt_sampler_step(r.s, 2); /* as 15 s each, and then 30 */
        rig_run(&r, 300);
    }
    mt_sampler_step(r.s, 1);
    rig_run(&r, 600);
    mt_sampler_step(r.s, 1); /* 180 s for 8 steps: 22.5 each, so 45 are waited for */
    rig_run(&r, 10);
    r.now.cgroup_used = 600;
    rig_run(&r, 440);
    CHECK(events_about_waiting(&n, 45) == 0);
    rig_run(&r, 30);
    CHECK(events_about_waiting(&n, 45) == 1);
    rig_run(&r, 900);
    CHECK(events_about_waiting(&n, 45) == 1);
    rig_free(&r);
    free(n.region);
}

/* --- life ------------------------------------------------------------------------------------- */

static void
a_start_that_fails_can_be_tried_again(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    mt_error err;

    rig_open(&r, &setup);
    r.fails = 1;
    CHECK(mt_sampler_start(r.s, &err) == MT_EAGAIN && err.native == 11 && err.call != NULL);
    CHECK(!mt_sampler_read(r.s).runs);
    mt_sampler_stop(r.s);
    r.fails = 0;
    CHECK(mt_sampler_start(r.s, &err) == MT_OK && mt_sampler_read(r.s).runs);
    CHECK(mt_sampler_start(r.s, &err) == MT_EAGAIN && strstr(err.detail, "runs already"));
    CHECK(mt_sampler_start(r.s, NULL) == MT_EAGAIN && mt_sampler_read(r.s).runs);
    mt_sampler_stop(r.s);
    CHECK(!mt_sampler_read(r.s).runs);
    rig_free(&r);
}

static void
without_memory_nothing_is_made(void)
{
    faulty heap = {.fail_at = 0};
    mt_alloc mem = faulty_alloc(&heap);
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);
    mt_sampler *s;
    mt_error err;

    CHECK(mt_sampler_new(&mem, &setup, &s, &err) == MT_ENOMEM && r.closed == 0);
    CHECK(mt_sampler_new(&mem, &setup, &s, &err) == MT_OK && heap.live == 1);
    mt_sampler_free(s);
    CHECK(heap.live == 0 && r.closed == 2);
    mt_sampler_free(NULL);
}

/* All calls of a child do nothing, and end. */
static int
child(rig *r)
{
    mt_error err;
    mt_sample x;

    if (mt_sampler_read(r->s).runs || mt_sampler_latest(r->s, &x)) return 1;
    if (mt_sampler_start(r->s, &err) != MT_EAGAIN) return 2;
    if (strstr(err.detail, "parent") == NULL) return 3;
    mt_sampler_stop(r->s);
    if (mt_sampler_watch(r->s, MT_MARK_HOST, 0.5) != -1 || mt_sampler_unwatch(r->s, 0)) return 4;
    if (mt_sampler_read(r->s).limit.bytes != MT_UNKNOWN || mt_sampler_read(r->s).peak != MT_UNKNOWN)
        return 5;
    mt_sampler_step(r->s, 5);
    if (mt_sampler_read(r->s).steps != 6) return 6;
    mt_sampler_free(r->s);
    return r->closed == 0 ? 0 : 7;
}

static void
fork_now(rig *r)
{
    pid_t pid = fork(); /* with all locks taken that a start takes */
    int status;

    if (pid == 0) _exit(child(r));
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void
a_forked_child_has_none(void)
{
    rig r = rig_new();
    mt_sampler_setup setup = rig_setup(&r, 10 * RIG_MS);

    setup.birth = mt_birth_now();
    r.now.cgroup_limit = 100;
    rig_open(&r, &setup);
    mt_sampler_watch(r.s, MT_MARK_HOST, 0.5);
    mt_sampler_step(r.s, 1);
    r.each = fork_now;
    rig_run(&r, 1);
    CHECK(mt_sampler_read(r.s).steps == 1);
    rig_free(&r);
}

int
main(void)
{
    RUN(samples_keep_the_interval_and_what_is_expensive_is_read_rarely);
    RUN(the_last_sample_has_what_is_read_rarely);
    RUN(children_are_read_as_often_where_they_are_weighed);
    RUN(children_that_grow_are_read_again_soon);
    RUN(each_second_is_told_of_once);
    RUN(it_never_takes_much_of_a_processor);
    RUN(costs_add_up_over_threads);
    RUN(a_stopped_process_owes_no_samples);
    RUN(the_lowest_limit_counts_and_what_is_used_follows_from_it);
    RUN(a_given_limit_counts_the_process_and_its_children);
    RUN(what_is_swapped_out_is_used_and_its_rise_is_reported);
    RUN(what_is_mapped_again_is_not_used);
    RUN(the_latest_sample_keeps_what_is_read_rarely);
    RUN(a_mark_reaches_the_next_step_once);
    RUN(a_device_counts_what_is_allocated_and_what_others_have);
    RUN(a_mark_of_a_device_is_written_with_its_name);
    RUN(a_row_has_the_columns_in_their_order);
    RUN(a_mark_is_an_event_of_the_record);
    RUN(a_mark_that_no_step_asks_for_is_written_once);
    RUN(a_mark_waits_as_long_as_steps_usually_take);
    RUN(a_start_that_fails_can_be_tried_again);
    RUN(without_memory_nothing_is_made);
    RUN(a_forked_child_has_none);
    CHECK_DONE();
}
