/* One KV pool, several threads with leases of their own, and one that looks, trims and ends what
 * others held. For ThreadSanitizer as much as for its own checks. */
#include <pthread.h>
#include <stdatomic.h>

#include "core/base/lock.h"
#include "kv/model.h"
#include "os/port/store.h"

enum { WORKERS = 4, POOLS = 10, ROUNDS = 3, HELD = 64 };

typedef struct crowd {
    mt_ledger *ledger;
    mt_kvpool *pool;
    mt_lock lock;
    mt_kvlease *held[HELD]; /* released, and for the watcher to unhold */
    size_t held_count;
    atomic_size_t running, refused;
} crowd;

typedef struct worker {
    crowd *all;
    rng r;
    uint32_t next_id;
} worker;

static const mt_kvconfig config = {.layers = 2,
                                   .heads = 2,
                                   .head_dim = 128,
                                   .elem_bytes = 4,
                                   .max_tokens = 40,
                                   .max_rows = 4,
                                   .layout = MT_KV_HEAD_MAJOR,
                                   .layer_group = 1};

static void
crowd_begin(crowd *c, size_t limit)
{
    mt_store_ops store;

    *c = (crowd){.held_count = 0};
    mt_lock_init(&c->lock);
    CHECK(mt_ledger_new(&mt_alloc_libc, limit, "test", NULL, &c->ledger, NULL) == MT_OK);
    CHECK(mt_store_linux_new(&mt_alloc_libc, &store, NULL) == MT_OK);
    CHECK(mt_kvpool_new(&mt_alloc_libc, &store, c->ledger, "pool", &config, NULL, &c->pool, NULL) ==
          MT_OK);
}

static void
crowd_end(crowd *c)
{
    CHECK(mt_kvpool_check(c->pool));
    mt_kvpool_close(c->pool);
    CHECK(mt_ledger_used(c->ledger) == 0);
    mt_ledger_drop(c->ledger);
    mt_lock_fini(&c->lock);
}

/* ---- a worker ---- */

static bool
refused(worker *w, mt_status st)
{
    CHECK(st == MT_OK || st == MT_ELIMIT);
    if (st != MT_OK) atomic_fetch_add(&w->all->refused, 1);
    return st != MT_OK;
}

/* Ragged: what a row is shorter than the longest shows zeros. */
static void
append(worker *w, mlease *m)
{
    size_t counts[MODEL_ROWS] = {0};
    mt_kvstep step = {.counts = counts};

    for (size_t row = 0; row < m->rows; row++)
        counts[row] = mt_size_min(rng_below(&w->r, 6),
                                  config.max_tokens - mrow_tokens(&m->row[row], config.layers));
    for (size_t layer = 0; layer < config.layers; layer++) {
        if (refused(w, mt_kvlease_room(m->lease, layer, &step, NULL))) return;
        for (size_t row = 0; row < m->rows; row++)
            for (size_t i = 0; i < counts[row]; i++) {
                size_t t = m->row[row].len[layer]++;

                token_write(m->lease, row, layer, t, w->next_id);
                m->row[row].id[layer][t] = w->next_id++;
            }
        mt_kvlease_advance(m->lease, layer, &step);
        layer_agrees(m, layer, mlease_longest(m, layer), false);
    }
}

static void
reorder(worker *w, mlease *m)
{
    size_t index[MODEL_ROWS];

    for (size_t i = 0; i < m->rows; i++)
        index[i] = rng_below(&w->r, m->rows);
    if (refused(w, mt_kvlease_reorder(m->lease, index, m->rows, NULL))) return;
    mlease_reorder(m, index, m->rows);
}

static void
look(worker *w, mlease *m)
{
    for (size_t layer = 0; layer < config.layers; layer++)
        if (!refused(w, mt_kvlease_show(m->lease, layer, mlease_longest(m, layer), NULL)))
            layer_agrees(m, layer, mlease_longest(m, layer), false);
}

/* Half of them through the hands of the watcher. */
static void
let_go(worker *w, mt_kvlease *lease)
{
    crowd *c = w->all;
    bool give = false;

    mt_lock_take(&c->lock);
    if (rng_below(&w->r, 2) && c->held_count < HELD) {
        mt_kvlease_hold(lease);
        c->held[c->held_count++] = lease;
        give = true;
    }
    if (give) mt_kvlease_release(lease); /* before the watcher can take it */
    mt_lock_give(&c->lock);
    if (!give) mt_kvlease_release(lease);
}

static void
one_group(worker *w)
{
    static const size_t one = 1;
    mlease prompt = {.rows = 1 + rng_below(&w->r, 2)}, group = {.rows = 2 * prompt.rows};

    prompt.max_rows = prompt.rows;
    group.max_rows = group.rows;
    if (refused(w, mt_kvpool_acquire(w->all->pool, prompt.rows, 8, &prompt.lease, NULL))) return;
    for (int i = 0; i < 4; i++)
        append(w, &prompt);
    if (!refused(w, mt_kvlease_fork(prompt.lease, 2, 20, &group.lease, NULL))) {
        for (size_t row = 0; row < group.rows; row++)
            group.row[row] = prompt.row[row / 2];
        append(w, &prompt);
        for (int i = 0; i < 4; i++) {
            append(w, &group);
            reorder(w, &group);
            look(w, &group);
        }
        let_go(w, group.lease);
    }
    for (int i = 0; i < 3; i++)
        look(w, &prompt); /* from the second on, all is ready */
    mt_kvlease_crop(prompt.lease, (const size_t[MODEL_ROWS]){one, one});
    let_go(w, prompt.lease);
}

static void *
work(void *ctx)
{
    worker *w = ctx;

    for (int i = 0; i < ROUNDS; i++)
        one_group(w);
    atomic_fetch_sub(&w->all->running, 1);
    return NULL;
}

/* ---- the watcher ---- */

static void
unhold_all(crowd *c)
{
    mt_kvlease *mine[HELD];
    size_t n;

    mt_lock_take(&c->lock);
    n = c->held_count;
    memcpy(mine, c->held, n * sizeof *mine);
    c->held_count = 0;
    mt_lock_give(&c->lock);
    while (n > 0)
        mt_kvlease_unhold(mine[--n]);
}

static void
watch(crowd *c)
{
    mt_kvstats s;

    while (atomic_load(&c->running) > 0) {
        mt_kvpool_stats(c->pool, &s);
        CHECK(s.physical_bytes <= s.live_bytes + s.idle_bytes);
        CHECK(s.reserved_bytes <= mt_ledger_limit(c->ledger));
        (void)mt_kvpool_would_fit(c->pool, 2, 20, 8);
        (void)mt_kvpool_trim(c->pool, s.live_bytes);
        CHECK(mt_kvpool_use_stream(c->pool, NULL, NULL) == MT_OK);
        unhold_all(c);
    }
    unhold_all(c);
}

/* How often the budget refused. */
static size_t
a_crowd_works(size_t limit)
{
    static crowd c;
    static worker w[WORKERS];
    pthread_t thread[WORKERS];

    crowd_begin(&c, limit);
    atomic_store(&c.running, WORKERS);
    for (size_t i = 0; i < WORKERS; i++) {
        w[i] = (worker){.all = &c, .r = rng_seeded(i), .next_id = (uint32_t)i << 24 | 1};
        CHECK(pthread_create(&thread[i], NULL, work, &w[i]) == 0);
    }
    watch(&c);
    for (size_t i = 0; i < WORKERS; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
    crowd_end(&c);
    return atomic_load(&c.refused);
}

static void
threads_with_leases_of_their_own_do_not_meet(void)
{
    for (int i = 0; i < POOLS; i++) /* each grows while it is used */
        CHECK(a_crowd_works(SIZE_MAX) == 0);
}

static void
threads_that_share_too_small_a_budget_do_not_meet_either(void)
{
    a_crowd_works((size_t)24 *
                  32768); /* blocks of 8 tokens: 2 layers x K and V x 2 heads x 4 KiB */
}

int
main(void)
{
    RUN(threads_with_leases_of_their_own_do_not_meet);
    RUN(threads_that_share_too_small_a_budget_do_not_meet_either);
    CHECK_DONE();
}
