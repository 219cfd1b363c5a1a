/* leak.c -- how this file works.
 *
 * mt_leak_add takes out of a reading the growth that was declared (undeclared) and adds the rest to
 * the signal's minima. When these have eight blocks more, evaluate() fits three windows of them and
 * gives the signal a grade; a leak has to hold at three evaluations in a row. The answers put the
 * grades of the signals together: fuse() decides which signal speaks, and mt_leak_judge fits it
 * anew for the figures. */
#include "leak/leak.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* What of a declared growth has come in one signal. */
typedef struct share {
    bool begun;
    int64_t since; /* the step of the first reading after it was declared */
    double least;  /* the least reading since then: growth is counted from here */
    double used;   /* the most that was taken out at once */
} share;

typedef struct growth {
    mt_leak_growth says;
    share in[MT_LEAK_SIGNALS];
} growth;

typedef struct series {
    mt_minima minima;
    mt_leak_readings seen;
    mt_leak_kind grade;
    bool known;               /* it was evaluated */
    unsigned lasting, nearly; /* at how many evaluations in a row */
} series;

struct mt_leak {
    const mt_alloc *mem;
    double span, bar[MT_LEAK_SIGNALS];
    series of[MT_LEAK_SIGNALS];
    size_t growths;
    growth growth[MT_LEAK_GROWTHS];
};

/* --- making ---------------------------------------------------------------------------------- */

static const double USUAL_SPAN = 1500;
static const double USUAL_BAR[MT_LEAK_SIGNALS] = {
    [MT_LEAK_HEAP] = 0x1p18,     [MT_LEAK_PYTHON] = 0x1p19, [MT_LEAK_TENSORS] = 0x1p18,
    [MT_LEAK_CHILDREN] = 0x1p20, [MT_LEAK_DEVICE] = 0x1p20, [MT_LEAK_RSS] = 0x1p20,
};

mt_status
mt_leak_new(const mt_alloc *mem, const mt_leak_options *options, mt_leak **out, mt_error *err)
{
    mt_leak *leak = mt_alloc_zeroed(mem, 1, sizeof *leak);

    if (leak == NULL) return mt_fail(err, MT_ENOMEM, "mt_leak_new", 0);
    leak->mem = mem;
    leak->span = options->span > 0 ? options->span : USUAL_SPAN;
    for (size_t i = 0; i < MT_LEAK_SIGNALS; i++)
        leak->bar[i] = options->bar[i] > 0 ? options->bar[i] : USUAL_BAR[i];
    mt_leak_reset(leak);
    *out = leak;
    return MT_OK;
}

void
mt_leak_free(mt_leak *leak)
{
    if (leak != NULL) leak->mem->put(leak->mem->ctx, leak, sizeof *leak);
}

void
mt_leak_reset(mt_leak *leak)
{
    for (size_t i = 0; i < MT_LEAK_SIGNALS; i++) {
        series *s = &leak->of[i];
        mt_minima_reset(&s->minima);
        s->seen.count = 0;
        s->grade = MT_LEAK_QUIET;
        s->known = false;
        s->lasting = s->nearly = 0;
    }
}

/* --- growth that was declared ---------------------------------------------------------------- */

mt_status
mt_leak_expect(mt_leak *leak, const mt_leak_growth *says, mt_error *err)
{
    size_t i = 0;

    while (i < leak->growths && strcmp(leak->growth[i].says.name, says->name) != 0)
        i++;
    if (i == MT_LEAK_GROWTHS) return mt_fail_limit(err, i + 1, i, i);
    if (i == leak->growths) leak->growth[leak->growths++] = (growth){.says = *says};
    leak->growth[i].says = *says;
    return MT_OK;
}

static bool
concerns(const growth *g, mt_leak_signal signal)
{
    return g->says.signal == MT_LEAK_NONE || g->says.signal == signal;
}

/* How many bytes of the growth may have come by `step`. Growth without a rate that is over by then
 * stays at what has come. */
static double
allowed(const growth *g, const share *in, int64_t step)
{
    bool over = step > g->says.until;
    double steps = (double)(over ? g->says.until : step) - (double)in->since;

    if (over && g->says.rate == HUGE_VAL) return in->used;
    return fmax(0, fmin(g->says.bytes, g->says.rate * steps));
}

/* Takes out at most what is allowed, and at most what the series has grown: where it does not grow,
 * or less than declared, it must not seem to sink, which would hide a leak. */
static double
take_out(growth *g, share *in, int64_t step, double y)
{
    double taken;

    if (!in->begun) *in = (share){true, step, y, 0};
    in->least = fmin(in->least, y);
    taken = fmin(y - in->least, allowed(g, in, step));
    in->used = fmax(in->used, taken);
    return y - taken;
}

static double
undeclared(mt_leak *leak, mt_leak_signal signal, int64_t step, double y)
{
    for (size_t i = 0; i < leak->growths; i++) {
        growth *g = &leak->growth[i];
        if (concerns(g, signal)) y = take_out(g, &g->in[signal], step, y);
    }
    return y;
}

/* --- readings -------------------------------------------------------------------------------- */

/* Steps from one sample to the next, on average. */
static double
stride(const series *s)
{
    return s->seen.count > 1 ? (double)(s->seen.last - s->seen.first) / (double)(s->seen.count - 1)
                             : 1;
}

static void
fit_all(const series *s, mt_leakfit fit[MT_WINDOWS])
{
    for (size_t w = 0; w < MT_WINDOWS; w++)
        mt_leakfit_window(&s->minima, w, &fit[w]);
}

/* Growth that lasts at three evaluations in a row is a leak, at two in a row it is likely one. One
 * evaluation alone says little: of many, one would find something in any series. */
static mt_leak_kind
grade_of(series *s, const mt_leakfit fit[MT_WINDOWS], double bar, double span)
{
    double length = (double)s->minima.length * stride(s);
    bool lasting = mt_leakfit_lasting(fit, (mt_leakbar){bar, span}, length, 0);
    bool nearly = mt_leakfit_lasting(fit, (mt_leakbar){bar, span * 2 / 3}, length, .25);

    s->lasting = lasting ? s->lasting + 1 : 0;
    s->nearly = nearly ? s->nearly + 1 : 0;
    if (s->lasting >= 3) return MT_LEAK_LEAK;
    if (s->nearly >= 2) return MT_LEAK_LIKELY;
    return mt_leakfit_growing(fit, (mt_leakbar){bar, span}) ? MT_LEAK_GROWING : MT_LEAK_QUIET;
}

static void
evaluate(series *s, double bar, double span)
{
    mt_leakfit fit[MT_WINDOWS];

    s->known = true;
    if (mt_leakfit_may_rise(&s->minima, bar)) {
        fit_all(s, fit);
        s->grade = grade_of(s, fit, bar, span);
    } else {
        s->grade = MT_LEAK_QUIET;
        s->lasting = s->nearly = 0;
    }
}

bool
mt_leak_add(mt_leak *leak, mt_leak_signal signal, int64_t step, uint64_t bytes)
{
    series *s = &leak->of[signal];
    double y = (double)bytes;

    assert(signal < MT_LEAK_SIGNALS);
    if (bytes == UINT64_MAX) return false;
    assert(s->seen.count == 0 || step > s->seen.last);
    if (s->seen.count++ == 0) s->seen.first = step;
    s->seen.last = step;
    s->seen.bytes = y;
    if (leak->growths > 0) y = undeclared(leak, signal, step, y);
    if (!mt_minima_add(&s->minima, y)) return false;
    evaluate(s, leak->bar[signal], leak->span);
    return true;
}

mt_leak_readings
mt_leak_seen(const mt_leak *leak, mt_leak_signal signal)
{
    return leak->of[signal].seen;
}

/* --- the answer ------------------------------------------------------------------------------ */

/* The highest grade of the signals from..to, and the first that has it; NONE for quiet. */
static mt_leak_kind
highest(const mt_leak *leak, mt_leak_signal from, mt_leak_signal to, mt_leak_signal *which)
{
    mt_leak_kind found = MT_LEAK_QUIET;

    *which = MT_LEAK_NONE;
    for (mt_leak_signal i = from; i <= to; i++) {
        if (leak->of[i].grade <= found) continue;
        found = leak->of[i].grade;
        *which = i;
    }
    return found;
}

/* Exact signals decide from likely on. Below that rss may say no more than growing, unless nobody
 * else watches the heap: then it is all there is. */
static mt_leak_kind
fuse(const mt_leak *leak, mt_leak_signal *which)
{
    mt_leak_kind rss = leak->of[MT_LEAK_RSS].grade;
    mt_leak_kind exact = highest(leak, MT_LEAK_HEAP, MT_LEAK_DEVICE, which);

    if (exact >= MT_LEAK_LIKELY || rss == MT_LEAK_QUIET) return exact;
    if (!leak->of[MT_LEAK_HEAP].known && rss > exact) {
        *which = MT_LEAK_RSS;
        return rss;
    }
    if (exact != MT_LEAK_QUIET) return exact;
    *which = MT_LEAK_RSS;
    return rss >= MT_LEAK_LIKELY ? MT_LEAK_FRAGMENTATION : MT_LEAK_GROWING;
}

mt_leak_kind
mt_leak_kind_now(const mt_leak *leak)
{
    mt_leak_signal which;

    return fuse(leak, &which);
}

/* Bytes a step of a signal; false before its first evaluation. */
static bool
rate_of(const mt_leak *leak, mt_leak_signal signal, double *rate)
{
    const series *s = &leak->of[signal];
    mt_leakfit fit[MT_WINDOWS];

    if (!s->known) return false;
    fit_all(s, fit);
    *rate = fit[mt_leakfit_straight(fit)].slope / ((double)s->minima.length * stride(s));
    return true;
}

/* Of the exact signals that have the deciding one's grade, the one that grows fastest. */
static mt_leak_signal
fastest(const mt_leak *leak, mt_leak_signal which)
{
    double rate, most = -HUGE_VAL;
    mt_leak_signal found = which;

    for (mt_leak_signal i = MT_LEAK_HEAP; i <= MT_LEAK_DEVICE; i++) {
        if (leak->of[i].grade != leak->of[which].grade) continue;
        if (!rate_of(leak, i, &rate) || rate <= most) continue;
        most = rate;
        found = i;
    }
    return found;
}

static mt_leak_trust
trust_of(const mt_leak *leak, mt_leak_kind kind, const mt_leakfit fit[MT_WINDOWS])
{
    size_t agree = 0;
    double least = HUGE_VAL;

    if (kind == MT_LEAK_FRAGMENTATION) return MT_TRUST_NONE;
    if (kind != MT_LEAK_LEAK) return kind == MT_LEAK_LIKELY ? MT_TRUST_FAIR : MT_TRUST_LOW;
    for (size_t i = MT_LEAK_HEAP; i <= MT_LEAK_DEVICE; i++)
        agree += leak->of[i].grade >= MT_LEAK_LIKELY;
    for (size_t w = 0; w < MT_WINDOWS; w++)
        least = fmin(least, fit[w].shape);
    return agree > 1 || least >= .95 ? MT_TRUST_HIGH : MT_TRUST_GOOD;
}

void
mt_leak_judge(const mt_leak *leak, mt_leak_verdict *out)
{
    mt_leakfit fit[MT_WINDOWS];
    const series *s;
    double steps;
    size_t w;

    *out = (mt_leak_verdict){.rss_rate = NAN};
    out->kind = fuse(leak, &out->signal);
    rate_of(leak, MT_LEAK_RSS, &out->rss_rate);
    if (out->signal == MT_LEAK_NONE) return;
    if (out->signal != MT_LEAK_RSS) out->signal = fastest(leak, out->signal);
    s = &leak->of[out->signal];
    fit_all(s, fit);
    w = mt_leakfit_straight(fit);
    steps = (double)s->minima.length * stride(s);
    out->trust = trust_of(leak, out->kind, fit);
    out->rate = fit[w].slope / steps;
    out->error = mt_forecast_error(&fit[w]) / steps;
    out->shape = fit[0].shape;
    out->since = s->seen.first + (int64_t)((double)mt_leakfit_onset(&s->minima, fit) * steps);
}

/* Adds a declared growth to the outlook: what was taken out of the readings is in use all the same,
 * and what is still to come fills memory beside the series. */
static void
foresee(const growth *g, mt_leak_signal signal, const series *s, mt_outlook *outlook)
{
    const share *in = &g->in[signal];
    double left = g->says.bytes - in->used, block = (double)s->minima.length * stride(s);

    if (!concerns(g, signal) || !in->begun) return;
    outlook->limit -= in->used;
    if (s->seen.last > g->says.until || left <= 0) return;
    if (g->says.rate == HUGE_VAL) {
        outlook->coming += left;
        return;
    }
    if (g->says.until < INT64_MAX)
        left = fmin(left, g->says.rate * (double)(g->says.until - s->seen.last));
    outlook->rate += g->says.rate * block;
    outlook->rated += left;
}

bool
mt_leak_forecast(const mt_leak *leak, mt_leak_signal signal, double limit, mt_forecast *out)
{
    const series *s = &leak->of[signal];
    mt_outlook outlook = {.limit = limit};
    mt_leakfit fit[MT_WINDOWS];
    double steps = stride(s);

    if (!s->known) return false;
    for (size_t i = 0; i < leak->growths; i++)
        foresee(&leak->growth[i], signal, s, &outlook);
    fit_all(s, fit);
    *out = mt_forecast_samples(&s->minima, fit, &outlook);
    *out = (mt_forecast){out->lo * steps, out->mid * steps, out->hi * steps};
    return true;
}
