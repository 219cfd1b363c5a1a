/* The leak test: what is quiet, what grows, what leaks, and in how many steps that ends. */
#include "core/leak/leak.h"

#include <math.h>
#include <string.h>

#include "kit/check.h"
#include "kit/faulty.h"
#include "kit/rng.h"

enum { KIB = 1024, MIB = 1024 * 1024 };
static const double BASE = 1e9;

typedef double (*series_fn)(rng *r, int64_t t);

static mt_leak *
detector(double span, double bar)
{
    mt_leak_options options = {.span = span};
    mt_leak *leak;

    for (size_t i = 0; i < MT_LEAK_SIGNALS; i++)
        options.bar[i] = bar;
    CHECK(mt_leak_new(&mt_alloc_libc, &options, &leak, NULL) == MT_OK);
    return leak;
}

/* Adds f(from..to - 1) and returns the highest kind there was. */
static mt_leak_kind
feed(mt_leak *leak, mt_leak_signal signal, series_fn f, int64_t from, int64_t to)
{
    rng r = rng_seeded((uint64_t)signal + 7);
    mt_leak_kind most = MT_LEAK_EARLY;

    for (int64_t t = from; t < to; t++) {
        if (!mt_leak_add(leak, signal, t, (uint64_t)(BASE + f(&r, t)))) continue;
        if (mt_leak_kind_now(leak) > most) most = mt_leak_kind_now(leak);
    }
    return most;
}

/* --- series ---------------------------------------------------------------------------------- */

static double
noise(rng *r, double size)
{
    return size * (rng_unit(r) + rng_unit(r) + rng_unit(r) - 1.5);
}

static double
flat(rng *r, int64_t t)
{
    (void)t;
    return noise(r, MIB);
}

static double
ramp(rng *r, int64_t t)
{
    return 16. * KIB * (double)t + noise(r, 64 * KIB);
}

static double
clean_ramp(rng *r, int64_t t)
{
    (void)r;
    return 1e4 * (double)t;
}

static double
steep(rng *r, int64_t t)
{
    return 64. * KIB * (double)t + noise(r, 64 * KIB);
}

static double
warm(rng *r, int64_t t)
{
    return 300. * MIB * (1 - exp(-(double)t / 900)) + noise(r, MIB);
}

static double
saw(rng *r, int64_t t)
{
    return 100. * MIB * (double)(t % 90) / 90 + noise(r, MIB);
}

static double
step_up(rng *r, int64_t t)
{
    return (t > 3000) * 200. * MIB + noise(r, MIB);
}

static double
filled(rng *r, int64_t t)
{
    return 64. * KIB * (double)(t < 1500 ? t : 1500) + noise(r, 64 * KIB);
}

static double
late(rng *r, int64_t t)
{
    return (t > 3000) * 32. * KIB * (double)(t - 3000) + noise(r, 256 * KIB);
}

/* 6 MiB a step on a device whose batches differ in length. */
static double
device_leak(rng *r, int64_t t)
{
    return 6. * MIB * (double)t + 12. * MIB * rng_unit(r);
}

/* 1 KiB a step in bytes in use, next to what a step keeps. */
static double
trickle(rng *r, int64_t t)
{
    return 1. * KIB * (double)t + noise(r, 2 * KIB);
}

/* Garbage that is collected every 200 steps. */
static double
collected(rng *r, int64_t t)
{
    return 64. * KIB * (double)(t % 200) + noise(r, 16 * KIB);
}

static double
one_jump(rng *r, int64_t t)
{
    return (t > 40) * 64. * MIB + noise(r, MIB);
}

/* 1 MiB a step until step 300. */
static double
warms_up(rng *r, int64_t t)
{
    return 1. * MIB * (double)(t < 300 ? t : 300) + noise(r, 256 * KIB);
}

static double
sinks_then_fills(rng *r, int64_t t)
{
    return 400. * MIB - 100. * MIB * (t > 500) + ramp(r, t > 500 ? t - 500 : 0);
}

static double
logarithm(rng *r, int64_t t)
{
    return 50. * MIB * log1p((double)t / 100) + noise(r, 64 * KIB);
}

/* --- one signal ------------------------------------------------------------------------------ */

static mt_leak_kind
most_of(series_fn f, int64_t n, mt_leak_kind *at_end)
{
    mt_leak *leak = detector(0, 0);
    mt_leak_kind most = feed(leak, MT_LEAK_HEAP, f, 0, n);

    *at_end = mt_leak_kind_now(leak);
    mt_leak_free(leak);
    return most;
}

static void
what_does_not_leak_is_not_called_a_leak(void)
{
    mt_leak_kind end;

    CHECK(most_of(flat, 20000, &end) == MT_LEAK_QUIET && end == MT_LEAK_QUIET);
    CHECK(most_of(warm, 20000, &end) < MT_LEAK_LEAK && end == MT_LEAK_QUIET);
    CHECK(most_of(saw, 20000, &end) < MT_LEAK_LIKELY && end == MT_LEAK_QUIET);
    CHECK(most_of(step_up, 20000, &end) < MT_LEAK_LIKELY && end == MT_LEAK_QUIET);
    CHECK(most_of(filled, 20000, &end) < MT_LEAK_LEAK && end == MT_LEAK_QUIET);
    CHECK(most_of(logarithm, 20000, &end) == MT_LEAK_LIKELY && end >= MT_LEAK_GROWING);
}

static int64_t
first_step(series_fn f, int64_t n, mt_leak_kind kind)
{
    mt_leak *leak = detector(0, 0);
    rng r = rng_seeded(3);
    int64_t t = 0;

    for (; t < n; t++) {
        mt_leak_add(leak, MT_LEAK_TENSORS, t, (uint64_t)(BASE + f(&r, t)));
        if (mt_leak_kind_now(leak) == kind) break;
    }
    mt_leak_free(leak);
    return t;
}

static void
a_leak_is_seen_growing_then_likely_then_called_one(void)
{
    CHECK(first_step(ramp, 8000, MT_LEAK_LIKELY) == 1535); /* the second after 1000 / .75 */
    CHECK(first_step(ramp, 8000, MT_LEAK_LEAK) == 2559);   /* the third after 1500 / .75 */
    CHECK(first_step(late, 8000, MT_LEAK_LEAK) > 3500);
    CHECK(first_step(late, 8000, MT_LEAK_LEAK) < 8000);
}

/* --- few readings ---------------------------------------------------------------------------- */

/* The kind after readings of f at each of the steps. */
static mt_leak_kind
after(series_fn f, mt_leak_signal signal, const int64_t *steps, size_t n)
{
    mt_leak *leak = detector(0, 0);
    rng r = rng_seeded(3);
    mt_leak_kind kind;

    for (size_t i = 0; i < n; i++)
        mt_leak_add(leak, signal, steps[i], (uint64_t)(BASE + f(&r, steps[i])));
    kind = mt_leak_kind_now(leak);
    mt_leak_free(leak);
    return kind;
}

static void
nothing_is_said_before_sixteen_steps_and_quiet_not_before_32(void)
{
    int64_t steps[33];

    for (size_t i = 0; i < 33; i++)
        steps[i] = 1000 + (int64_t)i;
    CHECK(after(flat, MT_LEAK_HEAP, steps, 0) == MT_LEAK_EARLY);
    CHECK(after(steep, MT_LEAK_HEAP, steps, 16) == MT_LEAK_EARLY);
    CHECK(after(steep, MT_LEAK_HEAP, steps, 17) == MT_LEAK_SUSPECT);
    CHECK(after(flat, MT_LEAK_HEAP, steps, 32) == MT_LEAK_EARLY);
    CHECK(after(flat, MT_LEAK_HEAP, steps, 33) == MT_LEAK_QUIET);
}

static void
a_few_looks_are_enough_for_exact_growth(void)
{
    static const int64_t looks[] = {16, 24, 32, 48, 64, 96, 128, 192};

    for (mt_leak_signal signal = MT_LEAK_HEAP; signal <= MT_LEAK_SHM; signal++) {
        CHECK(after(clean_ramp, signal, looks, 2) == MT_LEAK_EARLY);
        CHECK(after(clean_ramp, signal, looks, 3) == MT_LEAK_EARLY); /* 3 points prove nothing */
        CHECK(after(clean_ramp, signal, looks, 5) == MT_LEAK_SUSPECT);
        CHECK(after(clean_ramp, signal, looks, 6) == MT_LEAK_GROWING);
        CHECK(after(flat, signal, looks, 8) == MT_LEAK_QUIET);
    }
    CHECK(after(clean_ramp, MT_LEAK_RSS, looks, 8) == MT_LEAK_QUIET); /* it is not exact */
}

static void
the_first_word_comes_within_64_steps(void)
{
    CHECK(first_step(device_leak, 64, MT_LEAK_SUSPECT) <= 24);
    CHECK(first_step(trickle, 65, MT_LEAK_SUSPECT) <= 64);
    CHECK(first_step(steep, 65, MT_LEAK_SUSPECT) <= 24);
    CHECK(first_step(ramp, 65, MT_LEAK_SUSPECT) <= 32);
    CHECK(first_step(ramp, 8000, MT_LEAK_GROWING) <= 72);
}

/* The highest kind that f has after step `from`. */
static mt_leak_kind
most_after(series_fn f, int64_t from, int64_t to)
{
    mt_leak *leak = detector(0, 0);
    rng r = rng_seeded(3);
    mt_leak_kind most = MT_LEAK_EARLY;

    for (int64_t t = 0; t < to; t++) {
        mt_leak_add(leak, MT_LEAK_HEAP, t, (uint64_t)(BASE + f(&r, t)));
        if (t >= from && mt_leak_kind_now(leak) > most) most = mt_leak_kind_now(leak);
    }
    mt_leak_free(leak);
    return most;
}

static void
what_is_taken_back_is_no_growth(void)
{
    CHECK(most_after(collected, 0, 200) == MT_LEAK_GROWING); /* nobody knows better yet */
    CHECK(most_after(collected, 216, 8000) == MT_LEAK_QUIET);
}

static void
a_jump_is_no_growth(void)
{
    CHECK(most_after(one_jump, 0, 8000) == MT_LEAK_QUIET);
}

static void
a_warm_up_that_is_over_is_quiet_within_64_steps(void)
{
    CHECK(most_after(warms_up, 0, 300) == MT_LEAK_GROWING);
    CHECK(most_after(warms_up, 364, 8000) == MT_LEAK_QUIET);
}

static void
a_late_leak_is_told_with_its_own_rate_and_start(void)
{
    mt_leak *leak = detector(0, 0);
    mt_leak_verdict v;
    mt_forecast f;

    feed(leak, MT_LEAK_HEAP, late, 0, 3064); /* 32 KiB a step since 3,000, under 256 KiB of noise */
    mt_leak_judge(leak, &v);
    CHECK(v.kind == MT_LEAK_SUSPECT && v.trust == MT_TRUST_LOW);
    CHECK(fabs(v.rate / (32 * KIB) - 1) < .2 && v.error < .6 * v.rate);
    CHECK(v.since >= 2984 && v.since <= 3016);
    CHECK(mt_leak_forecast(leak, MT_LEAK_HEAP, BASE + 64. * MIB, &f));
    CHECK(f.lo < 1984 && 1984 < f.hi && f.hi < 4 * f.lo); /* it is full at step 5,048 */
    mt_leak_free(leak);
}

static void
forty_evaluations_in_eight_thousand_samples(void)
{
    mt_leak *leak = detector(0, 0);
    int evaluated = 0;

    for (int64_t t = 0; t < 8000;
         t++) { /* of the only signal whose newest readings prove nothing */
        bool now = mt_leak_add(leak, MT_LEAK_RSS, t, 5);
        CHECK(t != 254 || evaluated == 2); /* it was no longer too early, for a yes and for a no */
        CHECK(t != 255 || now);
        evaluated += now;
    }
    CHECK(evaluated == 42);
    mt_leak_free(leak);
}

static void
the_floor_is_the_least_and_greatest_of_each_block(void)
{
    static double y[20000];
    mt_minima f;
    rng r = rng_seeded(5);

    mt_minima_reset(&f);
    for (size_t n = 0; n < 20000; n++) {
        y[n] = rng_unit(&r) - .5;
        mt_minima_add(&f, y[n]);
        CHECK(f.n < MT_MINIMA_BLOCKS && f.n * f.length + f.count == n + 1);
        CHECK(f.length == MT_MINIMA_LENGTH || f.n >= MT_MINIMA_FIRST);
        if (n % 500 != 0) continue;
        for (size_t b = 0; b < f.n; b++) {
            double low = 1, high = -1;
            for (size_t i = b * f.length; i < (b + 1) * f.length; i++) {
                low = fmin(low, y[i]);
                high = fmax(high, y[i]);
            }
            CHECK(f.lows[b] == low && f.highs[b] == high);
        }
    }
}

static void
readings_that_are_not_known_are_skipped(void)
{
    mt_leak *leak = detector(0, 0);

    CHECK(mt_leak_seen(leak, MT_LEAK_RSS).count == 0);
    for (int64_t t = 0; t < 5000; t++) {
        CHECK(!mt_leak_add(leak, MT_LEAK_HEAP, t, UINT64_MAX));
        mt_leak_add(leak, MT_LEAK_RSS, t, t % 2 ? UINT64_MAX : 100);
    }
    CHECK(mt_leak_seen(leak, MT_LEAK_HEAP).count == 0);
    CHECK(mt_leak_seen(leak, MT_LEAK_RSS).count == 2500);
    CHECK(mt_leak_seen(leak, MT_LEAK_RSS).bytes == 100);
    CHECK(mt_leak_seen(leak, MT_LEAK_RSS).last == 4998);
    CHECK(mt_leak_kind_now(leak) == MT_LEAK_QUIET);
    mt_leak_free(leak);
}

static void
span_counts_steps_and_the_rate_is_per_step(void)
{
    mt_leak *leak = detector(0, 0);
    mt_leak_verdict v;

    for (int64_t t = 0; t < 4000; t += 10) /* 400 readings of 10 steps each */
        mt_leak_add(leak, MT_LEAK_HEAP, t, (uint64_t)(t * 5000));
    mt_leak_judge(leak, &v);
    CHECK(v.kind == MT_LEAK_LEAK && v.signal == MT_LEAK_HEAP && v.trust == MT_TRUST_HIGH);
    CHECK(fabs(v.rate - 5000) < 1 && v.since == 0 && isnan(v.rss_rate));
    mt_leak_free(leak);
}

static void
bar_and_span_are_what_the_caller_says(void)
{
    mt_leak *high = detector(0, 1e9), *wide = detector(6000, 0);

    CHECK(feed(high, MT_LEAK_HEAP, ramp, 0, 8000) == MT_LEAK_QUIET);
    CHECK(feed(wide, MT_LEAK_HEAP, ramp, 0, 8000) < MT_LEAK_LEAK);
    CHECK(feed(wide, MT_LEAK_HEAP, ramp, 8000, 20000) == MT_LEAK_LEAK);
    mt_leak_free(high);
    mt_leak_free(wide);
}

static void
a_reset_forgets_the_readings(void)
{
    mt_leak *leak = detector(0, 0);
    mt_forecast f;

    CHECK(feed(leak, MT_LEAK_HEAP, ramp, 0, 4000) == MT_LEAK_LEAK);
    mt_leak_reset(leak);
    CHECK(mt_leak_kind_now(leak) == MT_LEAK_EARLY && mt_leak_steps(leak) == 0);
    CHECK(mt_leak_seen(leak, MT_LEAK_HEAP).count == 0);
    CHECK(!mt_leak_forecast(leak, MT_LEAK_HEAP, 1e12, &f));
    CHECK(feed(leak, MT_LEAK_HEAP, flat, 0, 4000) == MT_LEAK_QUIET); /* steps begin again, too */
    mt_leak_free(leak);
}

static void
a_reset_forgets_how_often_in_a_row(void)
{
    mt_leak *leak = detector(100, 0);

    CHECK(feed(leak, MT_LEAK_HEAP, ramp, 0, 4000) == MT_LEAK_LEAK);
    mt_leak_reset(leak);
    CHECK(feed(leak, MT_LEAK_RSS, ramp, 0, 256) == MT_LEAK_GROWING); /* one evaluation */
    mt_leak_free(leak);
}

/* --- several signals ------------------------------------------------------------------------- */

static mt_leak_verdict
fused(series_fn heap, series_fn tensors, series_fn rss, int64_t n)
{
    mt_leak *leak = detector(0, 0);
    mt_leak_verdict v;

    if (heap) feed(leak, MT_LEAK_HEAP, heap, 0, n);
    if (tensors) feed(leak, MT_LEAK_TENSORS, tensors, 0, n);
    if (rss) feed(leak, MT_LEAK_RSS, rss, 0, n);
    mt_leak_judge(leak, &v);
    CHECK(v.kind == mt_leak_kind_now(leak));
    mt_leak_free(leak);
    return v;
}

static void
exact_signals_decide(void)
{
    mt_leak_verdict v = fused(ramp, NULL, steep, 8000);

    CHECK(v.kind == MT_LEAK_LEAK && v.signal == MT_LEAK_HEAP);
    CHECK(fabs(v.rate / (16 * KIB) - 1) < .02 && fabs(v.rss_rate / (64 * KIB) - 1) < .02);
    v = fused(flat, NULL, steep, 8000);
    CHECK(v.kind == MT_LEAK_FRAGMENTATION && v.signal == MT_LEAK_RSS && v.trust == MT_TRUST_NONE);
    v = fused(flat, ramp, flat, 8000);
    CHECK(v.kind == MT_LEAK_LEAK && v.signal == MT_LEAK_TENSORS);
    v = fused(ramp, steep, NULL, 8000); /* the faster of two that agree */
    CHECK(v.kind == MT_LEAK_LEAK && v.signal == MT_LEAK_TENSORS && v.trust == MT_TRUST_HIGH);
    v = fused(flat, NULL, steep, 1000);
    CHECK(v.kind == MT_LEAK_FRAGMENTATION && v.signal == MT_LEAK_RSS);
    v = fused(flat, flat, flat, 8000);
    CHECK(v.kind == MT_LEAK_QUIET && v.signal == MT_LEAK_NONE && v.rate == 0);
}

static void
rss_decides_where_nobody_watches_the_heap(void)
{
    mt_leak_verdict v = fused(NULL, NULL, steep, 8000);

    CHECK(v.kind == MT_LEAK_LEAK && v.signal == MT_LEAK_RSS);
    v = fused(NULL, flat, steep, 8000); /* tensors alone do not clear the heap */
    CHECK(v.kind == MT_LEAK_LEAK && v.signal == MT_LEAK_RSS);
    v = fused(NULL, logarithm, steep, 1200); /* nor do they when they grow */
    CHECK(v.kind == MT_LEAK_GROWING && v.signal == MT_LEAK_TENSORS);
    v = fused(NULL, warm, NULL, 2500);
    CHECK(v.kind == MT_LEAK_GROWING && v.signal == MT_LEAK_TENSORS);
    v = fused(NULL, warm, NULL, 4000); /* it dies away */
    CHECK(v.kind == MT_LEAK_QUIET);
    v = fused(NULL, warm, steep, 4000);
    CHECK(v.kind == MT_LEAK_LEAK && v.signal == MT_LEAK_RSS);
}

/* --- declared growth ------------------------------------------------------------------------- */

static mt_leak_growth
declared(const char *name, double bytes, double rate, int64_t until, mt_leak_signal signal)
{
    mt_leak_growth g = {bytes, rate, until, signal, ""};

    memcpy(g.name, name, strlen(name) + 1);
    return g;
}

static mt_leak *
expecting(double bytes, double rate, int64_t until, mt_leak_signal signal)
{
    mt_leak *leak = detector(0, 0);
    mt_leak_growth g = declared("buffer", bytes, rate, until, signal);

    CHECK(mt_leak_expect(leak, &g, NULL) == MT_OK);
    return leak;
}

static void
declared_bytes_are_no_leak_until_they_are_passed(void)
{
    mt_leak *leak = expecting(64. * MIB, HUGE_VAL, INT64_MAX, MT_LEAK_NONE);

    CHECK(feed(leak, MT_LEAK_HEAP, ramp, 0, 4000) == MT_LEAK_QUIET);   /* 62.5 MiB */
    CHECK(feed(leak, MT_LEAK_HEAP, ramp, 4000, 9000) == MT_LEAK_LEAK); /* 140 MiB */
    mt_leak_free(leak);
}

static void
declared_growth_counts_from_the_lowest_level(void)
{
    mt_leak *leak = expecting(64. * MIB, HUGE_VAL, INT64_MAX, MT_LEAK_NONE);

    CHECK(feed(leak, MT_LEAK_HEAP, sinks_then_fills, 0, 4000) == MT_LEAK_QUIET);
    CHECK(feed(leak, MT_LEAK_HEAP, sinks_then_fills, 4000, 9000) == MT_LEAK_LEAK); /* 133 MiB */
    mt_leak_free(leak);
}

static void
a_leak_beside_declared_growth_is_seen_at_its_own_rate(void)
{
    mt_leak *leak = expecting(HUGE_VAL, 48. * KIB, INT64_MAX, MT_LEAK_HEAP);
    mt_leak_verdict v;

    CHECK(feed(leak, MT_LEAK_HEAP, steep, 0, 4000) == MT_LEAK_LEAK);
    mt_leak_judge(leak, &v);
    CHECK(fabs(v.rate / (16 * KIB) - 1) < .02);
    mt_leak_free(leak);
}

static void
what_grows_less_than_declared_does_not_sink(void)
{
    mt_leak *leak = expecting(HUGE_VAL, 48. * KIB, INT64_MAX, MT_LEAK_NONE);
    mt_leak_verdict v;

    CHECK(feed(leak, MT_LEAK_RSS, ramp, 0, 4000) == MT_LEAK_QUIET);
    mt_leak_judge(leak, &v);
    CHECK(fabs(v.rss_rate) < 100);
    mt_leak_free(leak);
}

static void
declared_growth_ends_where_it_says(void)
{
    mt_leak *rate = expecting(HUGE_VAL, 20. * KIB, 2000, MT_LEAK_NONE);
    mt_leak *bytes = expecting(1e12, HUGE_VAL, 2000, MT_LEAK_NONE);
    mt_leak *other = expecting(1e12, HUGE_VAL, INT64_MAX, MT_LEAK_RSS);

    CHECK(feed(rate, MT_LEAK_HEAP, ramp, 0, 2000) == MT_LEAK_QUIET);
    CHECK(feed(rate, MT_LEAK_HEAP, ramp, 2000, 8000) == MT_LEAK_LEAK);
    CHECK(feed(bytes, MT_LEAK_HEAP, ramp, 0, 2000) == MT_LEAK_QUIET);
    CHECK(feed(bytes, MT_LEAK_HEAP, ramp, 2000, 8000) == MT_LEAK_LEAK);
    CHECK(feed(other, MT_LEAK_HEAP, ramp, 0, 8000) == MT_LEAK_LEAK);
    mt_leak_free(rate);
    mt_leak_free(bytes);
    mt_leak_free(other);
}

static void
eight_growths_are_kept_and_a_name_is_one(void)
{
    mt_leak *leak = detector(0, 0);
    char name[] = "buffer 0";
    mt_error err;

    for (int i = 0; i < MT_LEAK_GROWTHS; i++, name[7]++) {
        mt_leak_growth g = declared(name, 8. * MIB, HUGE_VAL, INT64_MAX, MT_LEAK_NONE);
        CHECK(mt_leak_expect(leak, &g, &err) == MT_OK && mt_leak_expect(leak, &g, &err) == MT_OK);
    }
    mt_leak_growth ninth = declared(name, 1, HUGE_VAL, INT64_MAX, MT_LEAK_NONE);
    CHECK(mt_leak_expect(leak, &ninth, &err) == MT_ELIMIT && err.limit == MT_LEAK_GROWTHS);
    CHECK(feed(leak, MT_LEAK_HEAP, ramp, 0, 4000) == MT_LEAK_QUIET); /* 62.5 of 8 times 8 MiB */
    mt_leak_free(leak);
}

/* --- forecasts ------------------------------------------------------------------------------- */

static void
a_clean_ramp_is_foretold_to_the_step(void)
{
    mt_leak *leak = detector(0, 0);
    mt_forecast f;

    feed(leak, MT_LEAK_RSS, clean_ramp, 0, 16);
    CHECK(!mt_leak_forecast(leak, MT_LEAK_RSS, 2e9, &f));
    feed(leak, MT_LEAK_RSS, clean_ramp, 16, 10000);
    CHECK(mt_leak_forecast(leak, MT_LEAK_RSS, BASE + 2e8, &f));
    CHECK(f.mid > 9990 && f.mid < 10130); /* within a block of 128 */
    CHECK(f.lo > 8900 && f.lo < 9200 && f.hi > 11000 && f.hi < 11300);
    CHECK(mt_leak_forecast(leak, MT_LEAK_RSS, BASE, &f) && f.lo == 0 && f.mid == 0 && f.hi == 0);
    mt_leak_free(leak);
}

static void
what_does_not_grow_reaches_no_limit(void)
{
    mt_leak *leak = detector(0, 0);
    mt_forecast f;

    for (int64_t t = 0; t < 5000; t++)
        mt_leak_add(leak, MT_LEAK_RSS, t, 1000000);
    CHECK(mt_leak_forecast(leak, MT_LEAK_RSS, 2e6, &f));
    CHECK(f.lo == HUGE_VAL && f.mid == HUGE_VAL && f.hi == HUGE_VAL);
    CHECK(mt_leak_forecast(leak, MT_LEAK_RSS, 1e6, &f) && f.lo == 0 && f.hi == 0);
    mt_leak_free(leak);
}

/* 10,000 bytes a step, all of it declared; 40 MB have come, the limit is 160 MB further. */
static mt_forecast
foretold(double bytes, double rate, int64_t until)
{
    mt_leak *leak = expecting(bytes, rate, until, MT_LEAK_NONE);
    mt_forecast f;

    CHECK(feed(leak, MT_LEAK_RSS, clean_ramp, 0, 4000) == MT_LEAK_QUIET);
    CHECK(mt_leak_forecast(leak, MT_LEAK_RSS, BASE + 2e8, &f));
    mt_leak_free(leak);
    return f;
}

static void
forecasts_count_what_was_declared(void)
{
    mt_forecast f = foretold(HUGE_VAL, 1e4, INT64_MAX); /* it goes on and on */

    CHECK(f.mid > 15900 && f.mid < 16100);
    f = foretold(1e8, 1e4, INT64_MAX); /* it ends below the limit */
    CHECK(f.mid == HUGE_VAL);
    f = foretold(1e9, HUGE_VAL, INT64_MAX); /* more than there is room for */
    CHECK(f.lo == 0 && f.mid == 0 && f.hi == HUGE_VAL);
    f = foretold(HUGE_VAL, 1e4, 9000);
    CHECK(f.mid == HUGE_VAL);
    f = foretold(HUGE_VAL, 1e4, 30000); /* the limit comes before the end */
    CHECK(f.mid > 15900 && f.mid < 16100);
    f = foretold(1e9, 1e4, INT64_MAX);
    CHECK(f.mid > 15900 && f.mid < 16100);
}

/* --- creation -------------------------------------------------------------------------------- */

static void
creation_fails_cleanly_and_nothing_is_allocated_later(void)
{
    faulty f = {.fail_at = 0};
    mt_alloc mem = faulty_alloc(&f);
    mt_leak_options options = {.span = 0};
    mt_leak *leak = NULL;
    mt_error err = {0};

    CHECK(mt_leak_new(&mem, &options, &leak, &err) == MT_ENOMEM && leak == NULL);
    CHECK(err.status == MT_ENOMEM && f.live == 0);
    f.fail_at = -1;
    CHECK(mt_leak_new(&mem, &options, &leak, &err) == MT_OK && f.live == 1 && f.calls == 2);
    CHECK(feed(leak, MT_LEAK_HEAP, ramp, 0, 8000) == MT_LEAK_LEAK && f.calls == 2);
    mt_leak_free(leak);
    mt_leak_free(NULL);
    CHECK(f.live == 0);
}

int
main(void)
{
    RUN(what_does_not_leak_is_not_called_a_leak);
    RUN(a_leak_is_seen_growing_then_likely_then_called_one);
    RUN(nothing_is_said_before_sixteen_steps_and_quiet_not_before_32);
    RUN(a_few_looks_are_enough_for_exact_growth);
    RUN(the_first_word_comes_within_64_steps);
    RUN(what_is_taken_back_is_no_growth);
    RUN(a_jump_is_no_growth);
    RUN(a_warm_up_that_is_over_is_quiet_within_64_steps);
    RUN(a_late_leak_is_told_with_its_own_rate_and_start);
    RUN(forty_evaluations_in_eight_thousand_samples);
    RUN(the_floor_is_the_least_and_greatest_of_each_block);
    RUN(readings_that_are_not_known_are_skipped);
    RUN(span_counts_steps_and_the_rate_is_per_step);
    RUN(bar_and_span_are_what_the_caller_says);
    RUN(a_reset_forgets_the_readings);
    RUN(a_reset_forgets_how_often_in_a_row);
    RUN(exact_signals_decide);
    RUN(rss_decides_where_nobody_watches_the_heap);
    RUN(declared_bytes_are_no_leak_until_they_are_passed);
    RUN(declared_growth_counts_from_the_lowest_level);
    RUN(a_leak_beside_declared_growth_is_seen_at_its_own_rate);
    RUN(what_grows_less_than_declared_does_not_sink);
    RUN(declared_growth_ends_where_it_says);
    RUN(eight_growths_are_kept_and_a_name_is_one);
    RUN(a_clean_ramp_is_foretold_to_the_step);
    RUN(what_does_not_grow_reaches_no_limit);
    RUN(forecasts_count_what_was_declared);
    RUN(creation_fails_cleanly_and_nothing_is_allocated_later);
    CHECK_DONE();
}
