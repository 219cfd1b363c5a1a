/* Peaks of intervals that nest and overlap, against the series itself; rows, tokens, faults. */
#include <pthread.h>
#include <string.h>

#include "kit/check.h"
#include "core/monitor/phase.h"
#include "core/port/probe.h"
#include "kit/faulty.h"
#include "kit/rng.h"

/* A memory that is set by hand, and its mark. */
typedef struct memory {
    uint64_t bytes, shared, high, clock;
    bool can_reset, can_read;
    int closed;
    mt_gauge again;
} memory;

static void
set(memory *m, uint64_t bytes)
{
    m->bytes = bytes;
    if (bytes > m->high) m->high = bytes;
}

static bool
sim_reset(void *ctx)
{
    memory *m = ctx;

    if (m->can_reset) m->high = m->bytes;
    return m->can_reset;
}

static uint64_t
sim_high(void *ctx, uint64_t known)
{
    if (((memory *)ctx)->can_read && ((memory *)ctx)->high <= known) return 0;
    return ((memory *)ctx)->can_read ? ((memory *)ctx)->high : MT_UNKNOWN;
}

static uint64_t
sim_now(void *ctx, uint64_t *shared)
{
    *shared = ((memory *)ctx)->shared;
    return ((memory *)ctx)->can_read ? ((memory *)ctx)->bytes : MT_UNKNOWN;
}

static uint64_t
sim_time(void *ctx)
{
    return __atomic_add_fetch(&((memory *)ctx)->clock, 10, __ATOMIC_RELAXED);
}

static void
sim_close(void *ctx)
{
    ((memory *)ctx)->closed++;
}

static mt_peaks *
peaks_over(memory *m, const mt_alloc *mem)
{
    mt_mark_ops ops = {sim_reset, sim_high, sim_now, sim_time, sim_close, m, &m->again};
    mt_peaks *peaks = NULL;

    *m = (memory){
        .bytes = 100, .shared = UINT64_MAX, .high = 900, .can_reset = true, .can_read = true};
    return mt_peaks_new(mem, &ops, &peaks, NULL) == MT_OK ? peaks : NULL;
}

static mt_phases *
phases_over(memory *m, size_t rows)
{
    mt_peaks *peaks = peaks_over(m, &mt_alloc_libc);
    mt_phases *phases;

    CHECK(mt_phases_new(&mt_alloc_libc, peaks, rows, &phases, NULL) == MT_OK);
    mt_peaks_drop(peaks);
    return phases;
}

static uint64_t
enter(mt_phases *ph, const char *name)
{
    uint64_t token = 0;

    CHECK(mt_phases_enter(ph, name, strlen(name), false, &token, NULL) == MT_OK && token != 0);
    return token;
}

static mt_phase_seen
leave(mt_phases *ph, uint64_t token)
{
    mt_phase_seen seen;

    CHECK(mt_phases_leave(ph, token, &seen, NULL) == MT_OK);
    return seen;
}

static void
an_outer_peak_is_the_most_of_its_inner_ones_and_its_own_stretches(void)
{
    memory m;
    mt_phases *ph = phases_over(&m, 8);
    uint64_t outer = enter(ph, "outer"), inner;

    set(&m, 500), set(&m, 200);
    inner = enter(ph, "inner");
    set(&m, 300), set(&m, 150);
    CHECK(leave(ph, inner).peak == 300);
    CHECK(leave(ph, outer).peak == 500);
    outer = enter(ph, "outer");
    inner = enter(ph, "inner");
    set(&m, 700), set(&m, 50);
    CHECK(leave(ph, inner).peak == 700);
    inner = enter(ph, "inner");
    set(&m, 60);
    CHECK(leave(ph, inner).peak == 60);
    CHECK(leave(ph, outer).peak == 700);
    mt_phases_free(ph);
    CHECK(m.closed == 1);
}

/* The kernel counts a page for each place that it is mapped to. */
static void
what_is_mapped_again_is_no_peak(void)
{
    memory m;
    mt_phases *ph = phases_over(&m, 8);
    uint64_t token;
    mt_phase_seen seen;

    token = enter(ph, "forks");
    mt_gauge_add(&m.again, 800);
    set(&m, 1000);
    CHECK((seen = leave(ph, token)).peak == 200 && !seen.exact);
    token = enter(ph, "still mapped");
    set(&m, 1300), set(&m, 900);
    CHECK((seen = leave(ph, token)).peak == 500 && !seen.exact);
    token = enter(ph, "some go, others come");
    mt_gauge_subtract(&m.again, 800);
    mt_gauge_add(&m.again, 100);
    set(&m, 950); /* more than what the mark, less all that ever was, would tell */
    CHECK((seen = leave(ph, token)).peak == 850 && !seen.exact);
    token = enter(ph, "all go");
    mt_gauge_subtract(&m.again, 100);
    CHECK((seen = leave(ph, token)).peak == 950 && !seen.exact);
    token = enter(ph, "none");
    set(&m, 990);
    CHECK((seen = leave(ph, token)).peak == 990 && seen.exact);
    token = enter(ph, "mapped and not touched");
    mt_gauge_add(&m.again, 5000);
    mt_gauge_add_once(&m.again, 60);
    m.shared = 200;
    set(&m, 1000);
    CHECK((seen = leave(ph, token)).peak == 860 && !seen.exact);
    mt_gauge_subtract(&m.again, 5000);
    m.shared = UINT64_MAX;
    m.can_reset = false;
    mt_gauge_add(&m.again, 90);
    token = enter(ph, "no mark");
    CHECK((seen = leave(ph, token)).peak == 910 && !seen.exact);
    m.can_read = false;
    token = enter(ph, "nothing to read");
    CHECK((seen = leave(ph, token)).peak == MT_UNKNOWN && !seen.exact);
    mt_phases_free(ph);
}

/* Random beginnings and ends in any order; every peak against the whole series. */
static void
any_overlap_is_exact(void)
{
    enum { MOST = 6 };
    rng r = rng_seeded(7);
    memory m;
    mt_phases *ph = phases_over(&m, 8);
    uint64_t tokens[MOST] = {0}, peaks[MOST];

    for (int step = 0; step < 50000; step++) {
        size_t i = rng_below(&r, MOST);
        uint64_t bytes = rng_below(&r, 1000);
        if (rng_below(&r, 2)) {
            set(&m, bytes);
            for (size_t k = 0; k < MOST; k++)
                if (peaks[k] < bytes) peaks[k] = bytes;
        } else if (tokens[i] == 0) {
            tokens[i] = enter(ph, "x");
            peaks[i] = m.bytes;
        } else {
            mt_phase_seen seen = leave(ph, tokens[i]);
            CHECK(seen.exact && seen.peak == peaks[i]);
            tokens[i] = 0;
        }
    }
    mt_phases_free(ph);
}

static void
without_a_reset_a_peak_is_what_the_ends_saw(void)
{
    memory m;
    mt_phases *ph = phases_over(&m, 8);
    uint64_t a, b;
    mt_phase_seen seen;

    m.can_reset = false;
    a = enter(ph, "a");
    set(&m, 800), set(&m, 200);
    b = enter(ph, "b");
    set(&m, 150);
    seen = leave(ph, b);
    CHECK(!seen.exact && seen.peak == 200);
    seen = leave(ph, a);
    CHECK(!seen.exact && seen.peak == 200);
    m.can_reset = true; /* one that began before stays "at least", and does not see older peaks */
    a = enter(ph, "a");
    set(&m, 400), set(&m, 10);
    m.can_reset = false;
    b = enter(ph, "b");
    CHECK(leave(ph, b).peak == 10 && leave(ph, a).peak == 400);
    m.can_read = false;
    a = enter(ph, "a");
    seen = leave(ph, a);
    CHECK(!seen.exact && seen.peak == MT_UNKNOWN);
    mt_phases_free(ph);
}

static void
a_token_is_good_once(void)
{
    memory m;
    mt_phases *ph = phases_over(&m, 8);
    uint64_t a = enter(ph, "a"), b = enter(ph, "b");
    mt_phase_seen seen;

    leave(ph, a);
    CHECK(mt_phases_leave(ph, a, &seen, NULL) == MT_ESHAPE);
    CHECK(mt_phases_leave(ph, 0, &seen, NULL) == MT_ESHAPE);
    CHECK(mt_phases_leave(ph, b + MT_PHASE_OPEN, &seen, NULL) == MT_ESHAPE);
    CHECK(enter(ph, "c") != a);
    leave(ph, b);
    mt_phases_free(ph);
}

static void
slots_run_out_with_a_refusal_that_changes_nothing(void)
{
    memory m;
    mt_phases *ph = phases_over(&m, 8);
    uint64_t tokens[MT_PHASE_OPEN], more;
    mt_error err;

    for (int i = 0; i < MT_PHASE_OPEN; i++)
        tokens[i] = enter(ph, "a");
    CHECK(mt_phases_enter(ph, "new", 3, false, &more, &err) == MT_ELIMIT);
    CHECK(err.limit == MT_PHASE_OPEN && mt_phases_rows(ph, NULL, 0) == 1);
    leave(ph, tokens[5]);
    enter(ph, "new");
    mt_phases_free(ph); /* with all of them open */
    CHECK(m.closed == 1);
}

static void
names_beyond_the_rows_share_the_last(void)
{
    static const char *const names[] = {"a", "b", "c", "d", "b", "c"};
    mt_phase_row rows[3];
    memory m;
    mt_phases *ph = phases_over(&m, 3);

    for (int i = 0; i < 6; i++) {
        uint64_t token = enter(ph, names[i]);
        set(&m, (uint64_t)(100 * i + 100)), set(&m, 1);
        leave(ph, token);
    }
    CHECK(mt_phases_rows(ph, rows, 3) == 3);
    CHECK(strcmp(rows[0].name, "a") == 0 && rows[0].count == 1 && rows[0].peak == 100);
    CHECK(strcmp(rows[1].name, "b") == 0 && rows[1].count == 2 && rows[1].peak == 500);
    CHECK(strcmp(rows[2].name, MT_PHASE_OTHERS) == 0 && rows[2].count == 3);
    CHECK(rows[2].peak == 600 && rows[2].open == 0);
    mt_phases_free(ph);
}

static void
rows_add_up_and_ends_are_read_when_asked_for(void)
{
    mt_phase_row row;
    mt_phase_seen seen;
    memory m;
    mt_phases *ph = phases_over(&m, 8);
    uint64_t token;

    CHECK(mt_phases_enter(ph, "a", 1, true, &token, NULL) == MT_OK);
    set(&m, 250), set(&m, 120);
    seen = leave(ph, token);
    CHECK(seen.entry == 100 && seen.exit == 120 && seen.peak == 250 && seen.ns == 10);
    seen = leave(ph, enter(ph, "a"));
    CHECK(seen.entry == MT_UNKNOWN && seen.exit == MT_UNKNOWN);
    m.can_reset = false;
    leave(ph, enter(ph, "a"));
    CHECK(mt_phases_rows(ph, &row, 1) == 1 && row.count == 3 && row.total_ns == 30);
    CHECK(row.most_ns == 10 && row.peak == 250 && row.most_rise == 150 && row.inexact == 1);
    mt_phases_free(ph);
}

static void
a_long_name_is_cut_between_characters(void)
{
    char name[100], current[MT_PHASE_NAME];
    memory m;
    mt_phases *ph = phases_over(&m, 8);
    uint64_t token;

    CHECK(!mt_phases_current(ph, current));
    memset(name, 'x', sizeof name);
    memcpy(name + MT_PHASE_NAME - 2, "\xC3\xA4", 2);
    CHECK(mt_phases_enter(ph, name, sizeof name, false, &token, NULL) == MT_OK);
    CHECK(mt_phases_current(ph, current) && strlen(current) == MT_PHASE_NAME - 2);
    leave(ph, token);
    mt_phases_free(ph);
}

static void
every_allocation_may_fail(void)
{
    for (long at = 0; at < 2; at++) {
        faulty fault = {.fail_at = at};
        mt_alloc mem = faulty_alloc(&fault);
        mt_phases *ph = NULL;
        memory m;
        mt_peaks *peaks = peaks_over(&m, &mem);
        CHECK((peaks == NULL) == (at == 0));
        if (peaks != NULL) CHECK(mt_phases_new(&mem, peaks, 4, &ph, NULL) == MT_ENOMEM);
        if (peaks != NULL) CHECK(mt_phases_new(&mem, peaks, SIZE_MAX / 8, &ph, NULL) != MT_OK);
        mt_peaks_drop(peaks);
        CHECK(ph == NULL && fault.live == 0 && m.closed == 1);
    }
    mt_peaks_drop(NULL);
    mt_phases_free(NULL);
}

static void *
enters_and_leaves(void *arg)
{
    for (int i = 0; i < 2000; i++) {
        uint64_t token = enter(arg, i % 2 ? "a" : "b");
        if (i % 3) leave(arg, enter(arg, "c"));
        leave(arg, token);
    }
    return NULL;
}

static void
threads_may_overlap(void)
{
    pthread_t threads[4];
    mt_phase_row rows[4];
    uint64_t left = 0;
    memory m;
    mt_phases *ph = phases_over(&m, 8);

    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, enters_and_leaves, ph) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK(mt_phases_rows(ph, rows, 4) == 3);
    for (int i = 0; i < 3; i++)
        left += rows[i].count + 1000000 * rows[i].open;
    CHECK(left == 4 * (2000 + 1333));
    mt_phases_free(ph);
}

int
main(void)
{
    RUN(an_outer_peak_is_the_most_of_its_inner_ones_and_its_own_stretches);
    RUN(what_is_mapped_again_is_no_peak);
    RUN(any_overlap_is_exact);
    RUN(without_a_reset_a_peak_is_what_the_ends_saw);
    RUN(a_token_is_good_once);
    RUN(slots_run_out_with_a_refusal_that_changes_nothing);
    RUN(names_beyond_the_rows_share_the_last);
    RUN(rows_add_up_and_ends_are_read_when_asked_for);
    RUN(a_long_name_is_cut_between_characters);
    RUN(every_allocation_may_fail);
    RUN(threads_may_overlap);
    CHECK_DONE();
}
