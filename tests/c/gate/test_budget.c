/* A gate history whose memory is reserved in a ledger that it shares with others. */
#include "gate/rig.h"
#include "budget/rig.h"

enum { STEP = 64 << 10, ROW = 2 * 4 }; /* what is reserved at a time; two float32 gates */

static const mt_gatehist_config plain = {.max_entries = 100,
                                         .max_bytes = 4 << 20,
                                         .dtype = MT_DTYPE_SAME,
                                         .top_k = 1,
                                         .statistics = true};

static size_t
reserved(mt_ledger *ledger, const char *name)
{
    mt_holder line[8];
    size_t n = mt_ledger_report(ledger, line, 8), sum = 0;

    for (size_t i = 0; i < n && i < 8; i++)
        if (strcmp(line[i].name, name) == 0) sum += line[i].reserved;
    return sum;
}

/* A history in a ledger of so many bytes; plain but for that. */
static void
begin_in(rig *g, mt_ledger *ledger, size_t max_entries, size_t max_bytes, mt_trim trim)
{
    mt_gatehist_config config = plain;

    config.max_entries = max_entries;
    config.max_bytes = max_bytes;
    config.trim = trim;
    config.statistics = false;
    config.ledger = ledger;
    rig_prepare(g, 1);
    CHECK(mt_gatehist_new(&g->mem, &g->vm, &config, &g->h, NULL) == MT_OK);
}

static void
end_in(rig *g, mt_ledger *ledger)
{
    mt_gatehist_free(g->h);
    CHECK(g->fault.live == 0 && reserved(ledger, "GateHistory") == 0);
}

/* Rows that say which they are. */
static mt_status
push_rows(mt_gatehist *h, size_t rows, float value, mt_error *err)
{
    float *gates = calloc(rows, ROW);
    mt_rows view = mt_rows_packed(gates, MT_F32, rows, 2);
    mt_status st;

    CHECK(gates != NULL);
    for (size_t i = 0; i < 2 * rows; i++)
        gates[i] = value;
    st = mt_gatehist_push(h, &view, err);
    CHECK(mt_gatehist_check(h));
    free(gates);
    return st;
}

static float
value_of(const mt_gatehist *h, size_t i)
{
    size_t n = 2 * mt_gatehist_shape(h, i).rows;
    float *gates = malloc(n * sizeof *gates + 1), value;

    CHECK(gates != NULL && n > 0);
    mt_gatehist_copy(h, i, gates);
    value = gates[0];
    for (size_t k = 0; k < n; k++)
        CHECK(gates[k] == value);
    free(gates);
    return value;
}

/* ---- as long as there is room ---- */

static void
memory_is_reserved_in_steps_before_it_is_used(void)
{
    mt_ledger *ledger = make_ledger(&mt_alloc_libc, 10 * STEP, "x", NULL);
    rig g;

    begin_in(&g, ledger, 1000, 2 * STEP + 100, MT_TRIM_OLDEST);
    CHECK(mt_ledger_used(ledger) == 0);
    CHECK(push_rows(g.h, 1, 1, NULL) == MT_OK && mt_ledger_used(ledger) == STEP);
    CHECK(push_rows(g.h, STEP / ROW - 1, 2, NULL) == MT_OK && mt_ledger_used(ledger) == STEP);
    CHECK(push_rows(g.h, 1, 3, NULL) == MT_OK && mt_ledger_used(ledger) == 2 * STEP);
    CHECK(push_rows(g.h, STEP / ROW, 4, NULL) == MT_OK);
    CHECK(mt_ledger_used(ledger) == 2 * STEP + 100); /* never more than max_bytes */
    CHECK(mt_gatehist_len(g.h) == 4);
    CHECK(push_rows(g.h, 20, 5, NULL) == MT_OK && mt_gatehist_len(g.h) == 3);
    end_in(&g, ledger);
    CHECK(mt_ledger_peak(ledger) == 2 * STEP + 100);
    mt_ledger_drop(ledger);
}

static void
clearing_gives_back(void)
{
    mt_ledger *ledger = make_ledger(&mt_alloc_libc, 10 * STEP, "x", NULL);
    rig g;

    begin_in(&g, ledger, 1000, 4 * STEP, MT_TRIM_OLDEST);
    CHECK(push_rows(g.h, 3 * STEP / ROW, 1, NULL) == MT_OK);
    mt_gatehist_clear(g.h);
    CHECK(mt_gatehist_check(g.h) && mt_gatehist_extent(g.h) == 0 && mt_gatehist_len(g.h) == 0);
    CHECK(mt_ledger_used(ledger) == 0 && g.fault.forgotten == 3 * STEP);
    CHECK(push_rows(g.h, 5, 2, NULL) == MT_OK && value_of(g.h, 0) == 2);
    CHECK(mt_ledger_used(ledger) == STEP);
    end_in(&g, ledger);
    mt_ledger_drop(ledger);
}

/* ---- when there is none ---- */

static void
what_the_ledger_refuses_is_trimmed(void)
{
    for (int trim = 0; trim < 2; trim++) {
        mt_ledger *ledger = make_ledger(&mt_alloc_libc, 8 * STEP, "x", NULL);
        part other;
        rig g;

        part_join(&other, ledger, "other", 0);
        part_take(&other, 4 * STEP, 0);
        begin_in(&g, ledger, 1000, 8 * STEP, (mt_trim)trim);
        for (int i = 0; i < 8; i++)
            CHECK(push_rows(g.h, STEP / 2 / ROW, (float)i, NULL) == MT_OK);
        CHECK(mt_gatehist_len(g.h) == 8 && mt_ledger_available(ledger) == 0);
        CHECK(push_rows(g.h, STEP / 2 / ROW, 8, NULL) == MT_OK);
        CHECK(mt_gatehist_len(g.h) == (trim == MT_TRIM_HALF ? 4 : 8)); /* of 4 steps, not of 8 */
        CHECK(value_of(g.h, mt_gatehist_len(g.h) - 1) == 8);
        mt_member_release(other.member, 4 * STEP); /* room: it grows on */
        for (int i = 0; i < 10; i++)
            CHECK(push_rows(g.h, STEP / 2 / ROW, (float)i, NULL) == MT_OK);
        CHECK(mt_gatehist_len(g.h) == (trim == MT_TRIM_HALF ? 14 : 16));
        part_leave(&other);
        end_in(&g, ledger);
        mt_ledger_drop(ledger);
    }
}

/* What an owner does after MT_EAGAIN; so many rows must be what is lacking. */
static size_t
ask(rig *g, mt_ledger *ledger, size_t rows)
{
    mt_gatehist_lack lack = mt_gatehist_lacks(g->h);
    size_t given = mt_ledger_reclaim(ledger, NULL, lack.bytes);

    CHECK(lack.bytes == rows * ROW);
    mt_gatehist_asked(g->h, lack);
    return given;
}

/* admit asks nobody: it says what it lacks, and takes what there is the second time. */
static void
an_owner_may_ask_the_others_itself(void)
{
    mt_ledger *ledger = make_ledger(&mt_alloc_libc, 100 * ROW, "x", NULL);
    mt_gatehist_config config = plain;
    mt_error err = {0};
    part other;
    rig g;

    config.ledger = ledger;
    config.owner_asks = true;
    rig_prepare(&g, 1);
    CHECK(mt_gatehist_new(&g.mem, &g.vm, &config, &g.h, NULL) == MT_OK);
    part_join(&other, ledger, "other", 0);
    part_take(&other, 90 * ROW, 30 * ROW);
    CHECK(push_rows(g.h, 30, 1, &err) == MT_EAGAIN && other.asked == 0);
    CHECK(push_rows(g.h, 30, 1, &err) == MT_EAGAIN); /* also for a second one, until they were */
    CHECK(ask(&g, ledger, 30) == 20 * ROW);
    CHECK(push_rows(g.h, 30, 1, NULL) == MT_OK && mt_gatehist_len(g.h) == 1);
    CHECK(push_rows(g.h, 20, 2, &err) == MT_EAGAIN && ask(&g, ledger, 20) == 10 * ROW);
    CHECK(push_rows(g.h, 20, 2, &err) == MT_EAGAIN && ask(&g, ledger, 20) == 0); /* too little */
    CHECK(push_rows(g.h, 20, 2, NULL) == MT_OK && mt_gatehist_len(g.h) == 1); /* trimmed for it */
    CHECK(push_rows(g.h, 50, 3, &err) == MT_ELIMIT && value_of(g.h, 0) == 2);
    mt_ledger_notify(ledger);
    CHECK(push_rows(g.h, 50, 3, &err) == MT_EAGAIN && ask(&g, ledger, 40) == 0);
    CHECK(push_rows(g.h, 50, 3, &err) == MT_ELIMIT && value_of(g.h, 0) == 2);
    part_leave(&other);
    end_in(&g, ledger);
    mt_ledger_drop(ledger);
}

static void
a_record_that_finds_no_room_is_refused_after_asking(void)
{
    mt_ledger *ledger = make_ledger(&mt_alloc_libc, 100 * ROW, "x", NULL);
    mt_error err = {0};
    part other;
    rig g;

    part_join(&other, ledger, "other", 0);
    part_take(&other, 90 * ROW, 30 * ROW);
    begin_in(&g, ledger, 1000, 100 * ROW, MT_TRIM_HALF);
    CHECK(push_rows(g.h, 41, 1, &err) == MT_ELIMIT);
    CHECK(err.asked == 41 * ROW && err.used == 60 * ROW && err.limit == 100 * ROW);
    CHECK(other.asked == 1 && other.idle == 0);
    CHECK(mt_gatehist_len(g.h) == 0 && mt_gatehist_appended(g.h) == 0);
    CHECK(push_rows(g.h, 40, 2, &err) == MT_OK && mt_ledger_available(ledger) == 0);
    CHECK(push_rows(g.h, 41, 3, &err) == MT_ELIMIT && err.asked <= 100 * ROW);
    CHECK(mt_gatehist_len(g.h) == 1 && value_of(g.h, 0) == 2);
    CHECK(push_rows(g.h, 101, 4, &err) == MT_ELIMIT); /* its own limit */
    CHECK(err.asked == 101 * ROW && err.limit == 100 * ROW);
    part_leave(&other);
    end_in(&g, ledger);
    mt_ledger_drop(ledger);
}

static void
nobody_is_asked_again_before_something_changed(void)
{
    mt_ledger *ledger = make_ledger(&mt_alloc_libc, 100 * ROW, "x", NULL);
    part other;
    rig g;

    part_join(&other, ledger, "other", 0);
    part_take(&other, 50 * ROW, 0);
    begin_in(&g, ledger, 1000, 100 * ROW, MT_TRIM_OLDEST);
    for (int i = 0; i < 20; i++)
        CHECK(push_rows(g.h, 10, (float)i, NULL) == MT_OK);
    CHECK(mt_gatehist_len(g.h) == 5 && other.asked == 1);
    other.idle = 25 * ROW; /* says nothing of it: not asked */
    CHECK(push_rows(g.h, 10, 20, NULL) == MT_OK && other.asked == 1);
    mt_ledger_notify(ledger);
    CHECK(push_rows(g.h, 10, 21, NULL) == MT_OK && other.asked == 2 && other.idle == 15 * ROW);
    CHECK(mt_gatehist_len(g.h) == 6 && mt_gatehist_bytes(g.h) == 60 * ROW);
    part_leave(&other);
    end_in(&g, ledger);
    mt_ledger_drop(ledger);
}

/* Against a list of what was pushed, while another part takes and gives. */
static void
squeeze(uint64_t seed)
{
    enum { LIMIT = 6 * STEP };
    mt_ledger *ledger = make_ledger(&mt_alloc_libc, LIMIT, "x", NULL);
    size_t rows[400];
    rng r = rng_seeded(seed);
    size_t max_entries = 1 + rng_below(&r, 30), max_bytes = LIMIT - rng_below(&r, 3 * STEP);
    part other;
    rig g;

    part_join(&other, ledger, "other", 0);
    begin_in(&g, ledger, max_entries, max_bytes, (mt_trim)(seed % 2));
    for (size_t n = 0; n < 400;) {
        size_t len = mt_gatehist_len(g.h), bytes = rng_below(&r, 2 * STEP);
        if (rng_below(&r, 3) == 0) {
            if (mt_member_reserve(other.member, bytes, NULL) != MT_OK)
                mt_member_release(other.member, mt_member_reserved(other.member));
            continue;
        }
        if (rng_below(&r, 50) == 0) mt_gatehist_clear(g.h);
        rows[n] = 1 + rng_below(&r, 3000);
        size_t held = reserved(ledger, "GateHistory"), free_bytes = mt_ledger_available(ledger);
        bool full = mt_gatehist_len(g.h) == max_entries;
        bytes = mt_gatehist_bytes(g.h) + rows[n] * ROW;
        if (push_rows(g.h, rows[n], (float)n, NULL) != MT_OK) {
            CHECK(rows[n] * ROW > held + free_bytes);
            continue;
        }
        n++;
        len = mt_gatehist_len(g.h);
        for (size_t i = 0; i < len; i++) {
            CHECK(mt_gatehist_shape(g.h, i).rows == rows[n - len + i]);
            CHECK(value_of(g.h, i) == (float)(n - len + i));
        }
        if (mt_gatehist_bytes(g.h) < bytes) /* something went: for one of three reasons */
            CHECK(full || bytes > held + free_bytes || bytes > max_bytes);
        CHECK(mt_ledger_used(ledger) ==
              reserved(ledger, "GateHistory") + mt_member_reserved(other.member));
    }
    part_leave(&other);
    end_in(&g, ledger);
    mt_ledger_drop(ledger);
}

static void
it_keeps_the_newest_whatever_others_do(void)
{
    for (uint64_t seed = 0; seed < 6; seed++)
        squeeze(seed);
}

/* ---- slices and copies ---- */

static void
every_allocation_fails_in_turn(void)
{
    long failures = 0;

    for (long at = 0;; at++) {
        mt_gatehist_config config = plain;
        mt_gatehist *slice = NULL;
        mt_ledger *ledger;
        mt_status st;
        rig g;

        rig_prepare(&g, 1);
        ledger = make_ledger(&g.mem, 100 * STEP, "x", NULL);
        rig_fail(&g, at);
        config.ledger = ledger;
        st = mt_gatehist_new(&g.mem, &g.vm, &config, &g.h, NULL);
        if (st == MT_OK) st = push_rows(g.h, 10, 1, NULL);
        if (st == MT_OK) st = mt_gatehist_slice(g.h, 0, 1, 1, &slice, NULL);
        CHECK(st == MT_OK || st == MT_ENOMEM);
        failures += st != MT_OK;
        mt_gatehist_free(slice);
        mt_gatehist_free(g.h);
        CHECK(mt_ledger_used(ledger) == 0 && mt_ledger_report(ledger, NULL, 0) == 0);
        mt_ledger_drop(ledger);
        CHECK(g.fault.live == 0);
        if (st == MT_OK) break;
    }
    CHECK(failures == 12); /* twice: history, ring, member, scratch, two of statistics */
}

int
main(void)
{
    RUN(memory_is_reserved_in_steps_before_it_is_used);
    RUN(clearing_gives_back);
    RUN(what_the_ledger_refuses_is_trimmed);
    RUN(an_owner_may_ask_the_others_itself);
    RUN(a_record_that_finds_no_room_is_refused_after_asking);
    RUN(nobody_is_asked_again_before_something_changed);
    RUN(it_keeps_the_newest_whatever_others_do);
    RUN(every_allocation_fails_in_turn);
    CHECK_DONE();
}
