/* Peaks of phases that nest and overlap, and the rows of their names, against the series itself; tokens
 * and faults. */
#include <string.h>

#include "kit/check.h"
#include "core/monitor/phase.h"
#include "core/port/probe.h"
#include "kit/faulty.h"
#include "kit/rng.h"

/* A memory that is set by hand, and its mark. */
typedef struct memory {
    uint64_t bytes, shared, high;
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

static void
sim_close(void *ctx)
{
    ((memory *)ctx)->closed++;
}

static mt_peaks *
peaks_over(memory *m, const mt_alloc *mem)
{
    mt_mark_ops ops = {sim_reset, sim_high, sim_now, sim_close, m, &m->again};
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
    uint64_t token = mt_phases_enter(ph, name, strlen(name));

    CHECK(token != 0);
    return token;
}

static mt_phase_seen
leave(mt_phases *ph, uint64_t token)
{
    mt_phase_seen seen;

    CHECK(mt_phases_leave(ph, token, &seen));
    return seen;
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

/* Random beginnings and ends in any order, by more names than there are rows: every peak against the
 * whole series, and the rows against what was left. */
static void
phases_agree_with_the_series(void)
{
    enum { MOST = 6, NAMES = 5, ROWS = 4 };
    static const char *const names[NAMES] = {"a", "b", "c", "d", "e"};
    static const char *const rows_of[ROWS] = {"a", "b", "c", MT_PHASE_OTHERS};
    uint64_t tokens[MOST] = {0}, peaks[MOST], counts[ROWS] = {0}, highest[ROWS] = {0};
    uint64_t ns[ROWS] = {0};
    mt_phase_row rows[ROWS];
    size_t named[MOST];
    rng r = rng_seeded(7);
    memory m;
    mt_phases *ph = phases_over(&m, ROWS);

    for (size_t i = 0; i < NAMES; i++) /* the rows come in this order */
        ns[i < ROWS ? i : ROWS - 1] += leave(ph, enter(ph, names[i])).ns;
    for (int step = 0; step < 50000; step++) {
        size_t i = rng_below(&r, MOST), row;
        uint64_t bytes = rng_below(&r, 1000);
        if (rng_below(&r, 2)) {
            set(&m, bytes);
            for (size_t k = 0; k < MOST; k++)
                if (peaks[k] < bytes) peaks[k] = bytes;
        } else if (tokens[i] == 0) {
            named[i] = rng_below(&r, NAMES);
            tokens[i] = enter(ph, names[named[i]]);
            peaks[i] = m.bytes;
        } else {
            mt_phase_seen seen = leave(ph, tokens[i]);
            CHECK(seen.exact && seen.peak == peaks[i]);
            tokens[i] = 0;
            row = named[i] < ROWS - 1 ? named[i] : ROWS - 1;
            counts[row]++;
            ns[row] += seen.ns;
            if (highest[row] < seen.peak) highest[row] = seen.peak;
        }
    }
    CHECK(mt_phases_rows(ph, rows, ROWS) == ROWS);
    for (size_t i = 0; i < ROWS; i++) {
        CHECK(strcmp(rows[i].name, rows_of[i]) == 0 && rows[i].peak == highest[i]);
        CHECK(rows[i].count == counts[i] + (i < ROWS - 1 ? 1 : 2) && rows[i].inexact == 0);
        CHECK(rows[i].total_ns == ns[i] && rows[i].most_ns <= ns[i]);
    }
    mt_phases_free(ph);
    CHECK(m.closed == 1);
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
    CHECK(!mt_phases_leave(ph, a, &seen) && !mt_phases_leave(ph, 0, &seen));
    CHECK(!mt_phases_leave(ph, b + MT_PHASE_OPEN, &seen));
    CHECK(enter(ph, "c") != a);
    leave(ph, b);
    mt_phases_free(ph);
}

static void
slots_run_out_with_a_refusal_that_changes_nothing(void)
{
    memory m;
    mt_phases *ph = phases_over(&m, 8);
    uint64_t tokens[MT_PHASE_OPEN];

    for (int i = 0; i < MT_PHASE_OPEN; i++)
        tokens[i] = enter(ph, "a");
    CHECK(mt_phases_enter(ph, "new", 3) == 0 && mt_phases_rows(ph, NULL, 0) == 1);
    leave(ph, tokens[5]);
    enter(ph, "new");
    mt_phases_free(ph); /* with all of them open */
    CHECK(m.closed == 1);
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
    CHECK((token = mt_phases_enter(ph, name, sizeof name)) != 0);
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

int
main(void)
{
    RUN(phases_agree_with_the_series);
    RUN(what_is_mapped_again_is_no_peak);
    RUN(without_a_reset_a_peak_is_what_the_ends_saw);
    RUN(a_token_is_good_once);
    RUN(slots_run_out_with_a_refusal_that_changes_nothing);
    RUN(a_long_name_is_cut_between_characters);
    RUN(every_allocation_may_fail);
    CHECK_DONE();
}
