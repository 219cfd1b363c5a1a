/* steps.h -- one operation after another on a gate history and its model, each as `roll` decides. */
#ifndef MT_TESTS_GATE_STEPS_H
#define MT_TESTS_GATE_STEPS_H

#include "gate/rig.h"

enum { STEPS_LATE = 6 };

typedef struct steps {
    rig *g;
    size_t experts; /* until the first entry says how many there are */
    size_t (*roll)(void *ctx,
                   size_t n); /* 0 to n - 1; random numbers in tests, bytes when fuzzing */
    void *ctx;
    tensor late[STEPS_LATE]; /* of entries that were claimed and wait, as those of a device do */
    uint64_t number[STEPS_LATE];
    size_t late_n;
} steps;

static inline size_t
steps_roll(steps *s, size_t n)
{
    return s->roll(s->ctx, n);
}

static inline tensor
steps_tensor(steps *s, size_t rows, size_t experts)
{
    mt_dtype dtype = (mt_dtype)steps_roll(s, MT_DTYPE_COUNT);
    layout how = (layout)steps_roll(s, LAYOUTS);

    return tensor_new(&s->g->r, dtype, steps_roll(s, rows), experts, how);
}

static inline void
steps_push(steps *s, size_t rows, size_t experts)
{
    tensor t = steps_tensor(s, rows, experts);

    rig_push_rows(s->g, &t.rows);
    tensor_free(&t);
}

static inline void
steps_claim(steps *s, size_t experts)
{
    tensor t = steps_tensor(s, 4, experts);
    mt_status want = model_admit(&s->g->m, &t.rows);

    CHECK(mt_gatehist_admit(s->g->h, &t.rows, NULL) == want);
    if (want != MT_OK) {
        tensor_free(&t);
        return;
    }
    s->late[s->late_n] = t;
    s->number[s->late_n] = mt_gatehist_claim(s->g->h, &t.rows);
    CHECK(s->number[s->late_n++] == model_claim(&s->g->m, &t.rows));
}

/* Values arrive in any order. The entry may have been evicted or cleared meanwhile. */
static inline void
steps_fill(steps *s, size_t i)
{
    mt_gatehist_fill(s->g->h, s->number[i], &s->late[i].rows);
    model_fill(&s->g->m, s->number[i], &s->late[i].rows);
    tensor_free(&s->late[i]);
    s->late_n--;
    s->late[i] = s->late[s->late_n];
    s->number[i] = s->number[s->late_n];
}

/* Any slice, forwards or backwards. */
static inline void
steps_slice(steps *s)
{
    size_t len = s->g->m.len, start, step, most;
    bool down;

    if (len == 0 || !model_all_filled(&s->g->m)) return;
    start = steps_roll(s, len);
    step = 1 + steps_roll(s, 4);
    down = steps_roll(s, 2) != 0;
    most = down ? start / step + 1 : (len - start + step - 1) / step;
    rig_slice(s->g, start, down ? -(ptrdiff_t)step : (ptrdiff_t)step, steps_roll(s, most + 1));
}

/* The statistics of the newest entries. */
static inline void
steps_recount(steps *s)
{
    rig *g = s->g;
    size_t n = steps_roll(s, g->m.len + 1);
    model_sums want;
    mt_gatestats got;

    if (g->m.experts == 0 || !model_all_filled(&g->m)) return;
    want = model_recount(&g->m, n);
    mt_gatestats_init(&got, &g->mem, g->m.config.top_k);
    CHECK(mt_gatestats_reserve(&got, g->m.experts, NULL) == MT_OK);
    mt_gatehist_recount(g->h, n, &got);
    sums_agree(&want, &got);
    mt_gatestats_fini(&got);
    model_sums_free(&want);
}

/* A push, a slice or an admit of another width while the n-th allocation fails. */
static inline void
steps_with_a_fault(steps *s, size_t experts)
{
    mt_rows other = mt_rows_packed(NULL, MT_F32, 1, experts + 1);
    size_t pick = steps_roll(s, 3), fail_at = steps_roll(s, 6);
    long live = s->g->fault.live;

    rig_fail(s->g, (long)fail_at);
    if (pick == 0) steps_push(s, 24, experts);
    if (pick == 1) steps_slice(s);
    if (pick == 1) CHECK(s->g->fault.live == live);
    if (pick == 2) (void)mt_gatehist_admit(s->g->h, &other, NULL);
    rig_fail(s->g, -1);
}

static inline void
steps_one(steps *s)
{
    rig *g = s->g;
    size_t pick = steps_roll(s, 40), experts = g->m.appended > 0 ? g->m.experts : s->experts;

    if (pick == 0) {
        mt_gatehist_clear(g->h);
        model_clear(&g->m);
    } else if (pick == 1) {
        mt_gatehist_reset_stats(g->h);
        model_reset_stats(&g->m);
    } else if (pick < 5) {
        steps_slice(s);
    } else if (pick < 7) {
        steps_recount(s);
    } else if (pick < 9) {
        if (model_all_filled(&g->m)) state_round_trips(g, g->h);
    } else if (pick < 11) {
        steps_with_a_fault(s, experts);
    } else if (pick == 11) {
        steps_push(s, 4, 1 + steps_roll(s, 30)); /* most often the wrong width */
    } else if (pick < 17 && s->late_n < STEPS_LATE) {
        steps_claim(s, experts);
    } else if (pick < 24 && s->late_n > 0) {
        steps_fill(s, steps_roll(s, s->late_n));
    } else {
        steps_push(s, pick < 32 ? 4 : 24, experts);
    }
    model_agrees(&g->m, g->h);
}

/* What is late arrives; then both are freed. */
static inline void
steps_end(steps *s)
{
    while (s->late_n > 0)
        steps_fill(s, 0);
    model_agrees(&s->g->m, s->g->h);
    rig_end(s->g);
}

#endif
