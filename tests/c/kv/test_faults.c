/* Every operation of a KV pool with each call of the world failing in turn: allocations, mappings,
 * pages, and on the strict store copies. After a failure nothing has changed; in the end it
 * succeeds and does as the model. */
#include "kv/steps.h"

enum { MOST_CALLS = 3000 };

static rng dice;

static size_t
roll(void *ctx, size_t n)
{
    return rng_below(ctx, n);
}

static void
append(rig *g, mlease *m, size_t count)
{
    size_t counts[MODEL_ROWS];

    for (size_t row = 0; row < m->rows; row++)
        counts[row] = count + row; /* ragged */
    for (size_t layer = 0; layer < rig_layers(g); layer++)
        CHECK(rig_update(g, m, layer, counts, false) == MT_OK);
}

/* Lease 0 has three ragged rows that end within a block and share their prompt with lease 1, which
 * wrote on; the pages that lease 2 had are idle, and poisoned. */
static void
set_up(rig *g, const rig_setup *setup)
{
    dice = rng_seeded(1);
    rig_begin(g, setup, roll, &dice);
    CHECK(rig_acquire(g, &g->lease[0], 3, 0) == MT_OK);
    append(g, &g->lease[0], 6);
    CHECK(rig_fork(g, &g->lease[1], &g->lease[0], 1, 0) == MT_OK);
    append(g, &g->lease[1], 1);
    CHECK(rig_acquire(g, &g->lease[2], 1, 0) == MT_OK);
    append(g, &g->lease[2], 9);
    rig_end_of(g, &g->lease[2]);
    rig_look(g, &g->lease[0], 0, 20, false); /* zeros are mapped past the rows */
}

/* ---- the operations; the model follows where they succeed ---- */

static mt_status
op_acquire(rig *g)
{
    return rig_acquire(g, &g->lease[3], 2, 10);
}

static mt_status
op_fork(rig *g)
{
    return rig_fork(g, &g->lease[3], &g->lease[0], 1, 20);
}

static mt_status
op_room(rig *g)
{
    static const size_t counts[MODEL_ROWS] = {5, 1, 7};

    return rig_update(g, &g->lease[0], 1, counts, false);
}

/* Cleans what lies past the shorter rows, in blocks that are shared. */
static mt_status
op_show(rig *g)
{
    mt_status st = mt_kvlease_show(g->lease[0].lease, 1, 20, NULL);

    if (st == MT_OK) layer_agrees(&g->lease[0], 1, 20, true);
    return st;
}

static mt_status
op_reorder(rig *g)
{
    static const size_t ring[] = {2, 0, 1};

    return rig_reorder(g, &g->lease[1], ring, 3);
}

static mt_status
op_reorder_shared(rig *g)
{
    static const size_t same[] = {1, 1, 1};

    return rig_reorder(g, &g->lease[0], same, 3);
}

static mt_status
op_reserve(rig *g)
{
    return rig_reserve(g, &g->lease[0], 18, false);
}

static mt_status
op_expose(rig *g)
{
    return g->store.under.lazy ? rig_expose(g, &g->lease[0]) : MT_OK;
}

static mt_status
op_advance_all(rig *g)
{
    static const size_t counts[MODEL_ROWS] = {9, 1, 4};
    static uint32_t none[MODEL_ROWS][MODEL_LAYERS];

    return rig_advance_all(g, &g->lease[0], counts, none);
}

/* ---- what a failure leaves ---- */

static void
unchanged(rig *g, const mt_kvstats *was)
{
    mt_kvstats is;

    rig_agree(g); /* lengths, rows, payload */
    mt_kvpool_stats(g->pool, &is);
    CHECK(is.live_bytes == was->live_bytes && is.promised_bytes == was->promised_bytes);
    CHECK(is.shared_bytes == was->shared_bytes && is.leases == was->leases);
    CHECK(is.acquired == was->acquired && is.forked == was->forked);
    rig_look_at_all(g, true);
}

static void
each_call_fails(const rig_setup *setup, mt_status (*op)(rig *g))
{
    static rig g;
    mt_kvstats was;
    mt_status st;
    long n = 0;
    bool fired;

    do {
        set_up(&g, setup);
        mt_kvpool_stats(g.pool, &was);
        rig_fail(&g, n++);
        st = op(&g);
        fired = rig_fired(&g);
        rig_fail(&g, -1);
        if (st != MT_OK) {
            CHECK(fired);
            unchanged(&g, &was);
            CHECK(op(&g) == MT_OK);
        }
        rig_look_at_all(&g, true);
        rig_end(&g);
    } while (fired && n < MOST_CALLS);
    CHECK(!fired);
}

static void
every_operation_is_all_or_nothing(void)
{
    static mt_status (*const ops[])(rig *g) = {op_acquire, op_fork,    op_room,
                                               op_show,    op_reorder, op_reorder_shared,
                                               op_reserve, op_expose,  op_advance_all};

    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        for (rig_store store = 0; store < RIG_STORES; store++)
            for (size_t config = 0; store != RIG_FEW_MAPS && config < STEPS_CONFIGS - 1; config++)
                each_call_fails(&(rig_setup){steps_config(config), store, SIZE_MAX}, ops[i]);
}

/* ---- by the device ---- */

/* Row 0 gets a new block for a copy of row 1's last one, so no row is copied over another. */
static void
a_device_that_fails_in_a_reorder_leaves_the_rows_as_they_were(void)
{
    static const size_t counts[MODEL_ROWS] = {4, 6}, last[] = {1, 1};
    static rig g;
    rig_setup setup = {steps_config(0), RIG_STRICT, SIZE_MAX};
    mt_error err = {0};
    mt_status st;
    long n = 0;

    do {
        dice = rng_seeded(1);
        rig_begin(&g, &setup, roll, &dice);
        CHECK(rig_acquire(&g, &g.lease[0], 2, 0) == MT_OK);
        for (size_t layer = 0; layer < 2; layer++)
            CHECK(rig_update(&g, &g.lease[0], layer, counts, false) == MT_OK);
        rig_look_at_all(&g, true);
        rig_fail(&g, n++);
        st = mt_kvlease_reorder(g.lease[0].lease, last, 2, &err);
        rig_fail(&g, -1);
        if (st == MT_OK) mlease_reorder(&g.lease[0], last, 2);
        if (st == MT_OK) memset(g.lease[0].seen, 0, sizeof g.lease[0].seen);
        rig_look_at_all(&g, true);
        rig_end(&g);
    } while (st != MT_OK);
    CHECK(n > 30 && err.status == MT_EDEVICE);
}

/* ---- by the budget ---- */

/* One block more each time, until it suffices: every point at which a budget can refuse. */
static void
each_budget_refuses(mt_status (*op)(rig *g), rig_store store, size_t config)
{
    static rig g;
    rig_setup setup = {.config = steps_config(config), .store = store};
    size_t refusals = 0;
    mt_kvstats was;
    mt_status st;

    set_up(&g, &(rig_setup){setup.config, store, SIZE_MAX});
    mt_kvpool_stats(g.pool, &was);
    setup.limit_blocks = was.peak_bytes / rig_geom(&g)->block_bytes;
    rig_end(&g);
    do {
        set_up(&g, &setup);
        mt_kvpool_stats(g.pool, &was);
        st = op(&g);
        CHECK(st == MT_OK || st == MT_ELIMIT);
        if (st == MT_ELIMIT) {
            unchanged(&g, &was);
            refusals++;
        }
        rig_look_at_all(&g, true);
        rig_end(&g);
        setup.limit_blocks++;
    } while (st == MT_ELIMIT);
    CHECK(refusals < 40);
}

static void
a_refusal_by_the_budget_changes_nothing(void)
{
    static mt_status (*const ops[])(rig *g) = {op_acquire, op_fork,       op_room,
                                               op_show,    op_reorder,    op_reorder_shared,
                                               op_reserve, op_advance_all};

    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        for (size_t config = 0; config < STEPS_CONFIGS - 1; config++) {
            each_budget_refuses(ops[i], RIG_LINUX, config);
            each_budget_refuses(ops[i], RIG_STRICT, config);
        }
}

/* ---- making a pool ---- */

/* The store is the pool's from the call on, whatever becomes of it. */
static void
a_pool_that_is_not_made_leaves_nothing(void)
{
    static faulty_store store;
    faulty faults = {.fail_at = -1};
    mt_alloc mem = faulty_alloc(&faults);
    mt_kvconfig config = steps_config(0);
    mt_ledger *ledger;
    mt_status st;
    long n = 0, before;

    CHECK(mt_ledger_new(&mem, SIZE_MAX, "test", NULL, &ledger, NULL) == MT_OK);
    before = faults.live;
    do {
        mt_store_ops under, ops;
        mt_kvpool *pool = NULL;
        mt_error err = {0};

        CHECK(mt_store_linux_new(&mt_alloc_libc, &under, NULL) == MT_OK);
        ops = faulty_store_over(&store, &under, &faults);
        faults.fail_at = faults.calls + n++;
        st = mt_kvpool_new(&mem, &ops, ledger, "pool", &config, NULL, &pool, &err);
        faults.fail_at = -1;
        CHECK(err.status == st && (st == MT_OK) == (pool != NULL));
        mt_kvpool_close(pool);
        CHECK(!store.open && faults.live == before && mt_ledger_used(ledger) == 0);
    } while (st != MT_OK);
    CHECK(n > 2);
    mt_ledger_drop(ledger);
    CHECK(faults.live == 0);
}

static void
a_geometry_that_does_not_fit_is_refused(void)
{
    static faulty_store store;
    faulty faults = {.fail_at = -1};
    mt_kvconfig config = steps_config(0);
    mt_store_ops under, ops;
    mt_kvpool *pool = NULL;
    mt_ledger *ledger;

    CHECK(mt_ledger_new(&mt_alloc_libc, SIZE_MAX, "test", NULL, &ledger, NULL) == MT_OK);
    CHECK(mt_store_linux_new(&mt_alloc_libc, &under, NULL) == MT_OK);
    ops = faulty_store_over(&store, &under, &faults);
    config.max_tokens = SIZE_MAX / 64;
    CHECK(mt_kvpool_new(&mt_alloc_libc, &ops, ledger, "pool", &config, NULL, &pool, NULL) ==
          MT_EOVERFLOW);
    CHECK(pool == NULL && !store.open);
    mt_ledger_drop(ledger);
}

int
main(void)
{
    RUN(every_operation_is_all_or_nothing);
    RUN(a_device_that_fails_in_a_reorder_leaves_the_rows_as_they_were);
    RUN(a_refusal_by_the_budget_changes_nothing);
    RUN(a_pool_that_is_not_made_leaves_nothing);
    RUN(a_geometry_that_does_not_fit_is_refused);
    CHECK_DONE();
}
