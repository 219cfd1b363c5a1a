/* leak.c -- how this file works.
 *
 * mt_leak_add takes out of a reading the growth that was declared (undeclared) and gives the rest
 * to two judges. The minima of the whole series, when they have eight blocks more: evaluate() fits
 * three windows of them and gives the signal's floor a grade; a leak has to hold at three
 * evaluations in a row. And, of an exact signal, the newest readings, each few steps: look() asks
 * whether they drift upwards into what was not in use before. grade_of puts both together, fuse()
 * the grades of the signals: it decides which signal speaks, and mt_leak_judge takes the figures
 * from the line that stands for it (line_of). */
#include "leak/leak.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "leak/past.h"
#include "leak/steady.h"

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
    mt_recent recent;
    mt_leak_readings seen;
    /* by the floor */
    bool known;               /* it was evaluated */
    mt_leak_kind floor;       /* its grade, */
    size_t rising;            /* by so many of the newest blocks, */
    bool ended;               /* which rise no longer, */
    bool straight;            /* and on a line that stands for more than the last quarter */
    bool slows;               /* the rise slows down clearly, */
    double slope;             /* to so many bytes a step */
    unsigned lasting, nearly; /* at how many evaluations in a row */
    /* by the newest readings */
    mt_steady steady;
    uint64_t looks;
    int64_t looked;   /* the step of the newest look, */
    int64_t drifting; /* and since which step each look has found a drift */
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
    [MT_LEAK_CHILDREN] = 0x1p20, [MT_LEAK_DEVICE] = 0x1p20, [MT_LEAK_SHM] = 0x1p20,
    [MT_LEAK_RSS] = 0x1p20,
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
        s->recent.count = s->seen.count = s->looks = 0;
        s->floor = MT_LEAK_QUIET;
        s->known = s->ended = s->straight = s->slows = false;
        s->steady = (mt_steady){.certain = false};
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

/* The shortest window that grows into what was not in use before; MT_WINDOWS when none does. */
static size_t
growing_window(const mt_minima *f, const mt_leakfit fit[MT_WINDOWS], mt_leakbar bar)
{
    for (size_t w = MT_WINDOWS; w-- > 0;)
        if (mt_leakfit_growing(&fit[w], bar)) {
            double noise = fit[w].rise / fit[w].snr;
            if (!mt_past_regains(f, f->lows, fit[w].end - noise, fit[w].rise + noise)) return w;
        }
    return MT_WINDOWS;
}

/* Growth that lasts at three evaluations in a row is a leak, at two in a row it is likely one. One
 * evaluation alone says little: of many, one would find something in any series. */
static mt_leak_kind
judge_floor(series *s, const mt_leakfit fit[MT_WINDOWS], double bar, double span)
{
    double length = (double)s->minima.length * stride(s);
    bool lasting = mt_leakfit_lasting(fit, (mt_leakbar){bar, span}, length, 0);
    bool nearly = mt_leakfit_lasting(fit, (mt_leakbar){bar, span * 2 / 3}, length, .25);
    size_t w = growing_window(&s->minima, fit, (mt_leakbar){bar, span});

    s->lasting = lasting ? s->lasting + 1 : 0;
    s->nearly = nearly ? s->nearly + 1 : 0;
    s->rising = fit[w < MT_WINDOWS ? w : 0].blocks;
    s->slows = w < MT_WINDOWS && mt_leakfit_slows(fit, w);
    s->slope = fit[MT_WINDOWS - 1].slope / length;
    if (s->lasting >= 3) return MT_LEAK_LEAK;
    if (w == MT_WINDOWS || s->slows) return MT_LEAK_QUIET;
    return s->nearly >= 2 ? MT_LEAK_LIKELY : MT_LEAK_GROWING;
}

static void
evaluate(series *s, double bar, double span)
{
    mt_leakfit fit[MT_WINDOWS];

    s->known = true;
    if (mt_leakfit_may_rise(&s->minima, bar)) {
        fit_all(s, fit);
        s->floor = judge_floor(s, fit, bar, span);
        s->straight = mt_leakfit_straight(fit) < MT_WINDOWS - 1;
    } else {
        s->floor = MT_LEAK_QUIET;
        s->slows = false;
        s->lasting = s->nearly = 0;
    }
}

/* --- the newest readings --------------------------------------------------------------------- */

static const double PAUSES = 1.5, LEAK_PAUSES = 3; /* as long as any before: then it is the end */
static const double LEAST_DRIFT = 1. / 64; /* of the bar: what counts as a drift of few readings */
static const double FASTER = 2;            /* than a rise that slows down: it is another one */
enum { LOOK_EVERY = 8, LOOK_LATER = 16, FIRST_LOOKS = 16, GOES_ON_STEPS = 64 }; /* steps */

/* Whether a drift takes memory that was not in use before. */
static bool
is_new(const series *s)
{
    const mt_steady *drift = &s->steady;

    return !mt_past_regains(&s->minima, s->minima.highs, drift->end, drift->rise) &&
           !mt_past_regains(&s->minima, s->minima.lows, drift->end, drift->rise);
}

static void
look(series *s, int64_t step, double bar)
{
    bool before = s->steady.certain;

    s->looked = step;
    mt_steady_look(&s->recent, bar * LEAST_DRIFT, s->looks++, &s->steady);
    if (s->steady.certain && !is_new(s)) s->steady.certain = false;
    if (!before) s->drifting = s->steady.since;
}

/* What the newest readings say of an exact signal. A warm-up that dies away drifts for long, ever
 * slower: that is told by the floor. */
static mt_leak_kind
drift_of(const series *s)
{
    if (!s->steady.certain || (s->slows && s->steady.slope < FASTER * s->slope))
        return MT_LEAK_QUIET;
    return s->steady.until - s->drifting >= GOES_ON_STEPS ? MT_LEAK_GROWING : MT_LEAK_SUSPECT;
}

/* What the floor says now. */
static mt_leak_kind
floor_of(const series *s)
{
    if (s->ended) return MT_LEAK_QUIET;
    return s->floor;
}

static mt_leak_kind
grade_of(const series *s)
{
    mt_leak_kind drift = drift_of(s);

    return drift > floor_of(s) ? drift : floor_of(s);
}

bool
mt_leak_add(mt_leak *leak, mt_leak_signal signal, int64_t step, uint64_t bytes)
{
    series *s = &leak->of[signal];
    double y = (double)bytes, bar = leak->bar[signal];
    int64_t before = s->seen.count == 0 ? 0 : s->seen.last - s->seen.first;
    uint64_t filling = s->minima.count;
    bool changed;

    assert(signal < MT_LEAK_SIGNALS);
    if (bytes == UINT64_MAX) return false;
    assert(s->seen.count == 0 || step > s->seen.last);
    if (s->seen.count++ == 0) s->seen.first = s->looked = step;
    s->seen.last = step;
    s->seen.bytes = y;
    changed = (before < MT_LEAK_STEPS && step - s->seen.first >= MT_LEAK_STEPS) ||
              (before < MT_LEAK_QUIET_STEPS && step - s->seen.first >= MT_LEAK_QUIET_STEPS);
    if (leak->growths > 0) y = undeclared(leak, signal, step, y);
    if (mt_minima_add(&s->minima, y)) {
        evaluate(s, bar, leak->span);
        changed = true;
    }
    if (s->minima.count <= filling && s->floor > MT_LEAK_QUIET) {
        double longer = s->floor == MT_LEAK_LEAK ? LEAK_PAUSES : PAUSES;
        s->ended = mt_past_ended(&s->minima, s->rising, longer);
        changed = true;
    }
    if (signal == MT_LEAK_RSS) return changed;
    mt_recent_add(&s->recent, step, y);
    if (step - s->looked < (s->looks < FIRST_LOOKS ? LOOK_EVERY : LOOK_LATER)) return changed;
    look(s, step, bar);
    return true;
}

mt_leak_readings
mt_leak_seen(const mt_leak *leak, mt_leak_signal signal)
{
    return leak->of[signal].seen;
}

/* Steps from its first reading to the newest. */
static int64_t
steps_of(const series *s)
{
    return s->seen.count == 0 ? 0 : s->seen.last - s->seen.first;
}

int64_t
mt_leak_steps(const mt_leak *leak)
{
    int64_t most = 0;

    for (size_t i = 0; i < MT_LEAK_SIGNALS; i++)
        if (steps_of(&leak->of[i]) > most) most = steps_of(&leak->of[i]);
    return most;
}

/* --- the answer ------------------------------------------------------------------------------ */

/* The highest grade of the signals from..to, and the first that has it; NONE for quiet. */
static mt_leak_kind
highest(const mt_leak *leak, mt_leak_signal from, mt_leak_signal to, mt_leak_signal *which)
{
    mt_leak_kind found = MT_LEAK_QUIET;

    *which = MT_LEAK_NONE;
    for (mt_leak_signal i = from; i <= to; i++) {
        mt_leak_kind grade = grade_of(&leak->of[i]);
        if (grade <= found) continue;
        found = grade;
        *which = i;
    }
    return found;
}

/* Exact signals decide. Where they are quiet and the heap is among them, what rss grows by lies
 * between the blocks in use. Where nobody watches the heap, rss is all there is. */
static mt_leak_kind
fuse(const mt_leak *leak, mt_leak_signal *which)
{
    mt_leak_kind rss = grade_of(&leak->of[MT_LEAK_RSS]);
    mt_leak_kind exact = highest(leak, MT_LEAK_HEAP, MT_LEAK_SHM, which);
    bool heap = steps_of(&leak->of[MT_LEAK_HEAP]) >= MT_LEAK_STEPS;

    if (exact >= MT_LEAK_LIKELY || rss <= MT_LEAK_QUIET || (heap && exact > MT_LEAK_QUIET))
        return exact;
    if (rss <= exact) return exact;
    *which = MT_LEAK_RSS;
    return heap ? MT_LEAK_FRAGMENTATION : rss;
}

/* The same, or that it is too early to say. */
static mt_leak_kind
answer(const mt_leak *leak, mt_leak_signal *which)
{
    mt_leak_kind kind = fuse(leak, which);

    return kind == MT_LEAK_QUIET && mt_leak_steps(leak) < MT_LEAK_QUIET_STEPS ? MT_LEAK_EARLY
                                                                              : kind;
}

mt_leak_kind
mt_leak_kind_now(const mt_leak *leak)
{
    mt_leak_signal which;

    return answer(leak, &which);
}

/* Whether the newest readings speak for a series, and not its floor: where they drift, and the
 * floor has no straight line that grows. */
static bool
by_drift(const series *s)
{
    if (!s->steady.certain) return false;
    return !s->known || floor_of(s) < MT_LEAK_GROWING || !s->straight;
}

/* The line that stands for a signal; false where there is none. */
static bool
line_of(const series *s, mt_line *line)
{
    mt_leakfit fit[MT_WINDOWS];

    if (by_drift(s)) {
        *line = mt_line_of_drift(&s->steady);
        return true;
    }
    if (!s->known) return false;
    fit_all(s, fit);
    *line = mt_line_of_floor(&s->minima, fit, stride(s));
    return true;
}

/* Of the exact signals that have the deciding one's grade, the one that grows fastest. */
static mt_leak_signal
fastest(const mt_leak *leak, mt_leak_signal which)
{
    double most = -HUGE_VAL;
    mt_leak_signal found = which;
    mt_line line;

    for (mt_leak_signal i = MT_LEAK_HEAP; i <= MT_LEAK_SHM; i++) {
        if (grade_of(&leak->of[i]) != grade_of(&leak->of[which])) continue;
        if (!line_of(&leak->of[i], &line) || line.slope <= most) continue;
        most = line.slope;
        found = i;
    }
    return found;
}

static mt_leak_trust
trust_of(const mt_leak *leak, mt_leak_kind kind, const series *s)
{
    mt_leakfit fit[MT_WINDOWS];
    size_t agree = 0;
    double least = HUGE_VAL;

    if (kind < MT_LEAK_SUSPECT) return MT_TRUST_NONE;
    if (kind != MT_LEAK_LEAK) return kind == MT_LEAK_LIKELY ? MT_TRUST_FAIR : MT_TRUST_LOW;
    for (size_t i = MT_LEAK_HEAP; i <= MT_LEAK_SHM; i++)
        agree += grade_of(&leak->of[i]) >= MT_LEAK_LIKELY;
    fit_all(s, fit);
    for (size_t w = 0; w < MT_WINDOWS; w++)
        least = fmin(least, fit[w].shape);
    return agree > 1 || least >= .95 ? MT_TRUST_HIGH : MT_TRUST_GOOD;
}

/* Where the growth of a series began, and how much faster it is late than early. */
static void
begun(const series *s, mt_leak_verdict *out)
{
    mt_leakfit fit[MT_WINDOWS];
    double block = (double)s->minima.length * stride(s);

    if (by_drift(s)) {
        out->since = s->drifting < s->steady.since ? s->drifting : s->steady.since;
        out->shape = s->steady.shape;
        return;
    }
    fit_all(s, fit);
    out->since = s->seen.first + (int64_t)((double)mt_leakfit_onset(&s->minima, fit) * block);
    out->shape = fit[0].shape;
}

void
mt_leak_judge(const mt_leak *leak, mt_leak_verdict *out)
{
    const series *s;
    mt_line line;

    *out = (mt_leak_verdict){.rss_rate = NAN};
    out->kind = answer(leak, &out->signal);
    if (line_of(&leak->of[MT_LEAK_RSS], &line)) out->rss_rate = line.slope;
    if (out->signal == MT_LEAK_NONE) return;
    if (out->signal != MT_LEAK_RSS) out->signal = fastest(leak, out->signal);
    s = &leak->of[out->signal];
    line_of(s, &line); /* what grows has one */
    out->trust = trust_of(leak, out->kind, s);
    out->rate = line.slope;
    out->error = line.error;
    begun(s, out);
}

/* Adds a declared growth to the outlook: what was taken out of the readings is in use all the same,
 * and what is still to come fills memory beside the series. */
static void
foresee(const growth *g, mt_leak_signal signal, const series *s, mt_outlook *outlook)
{
    const share *in = &g->in[signal];
    double left = g->says.bytes - in->used;

    if (!concerns(g, signal) || !in->begun) return;
    outlook->limit -= in->used;
    if (s->seen.last > g->says.until || left <= 0) return;
    if (g->says.rate == HUGE_VAL) {
        outlook->coming += left;
        return;
    }
    if (g->says.until < INT64_MAX)
        left = fmin(left, g->says.rate * (double)(g->says.until - s->seen.last));
    outlook->rate += g->says.rate;
    outlook->rated += left;
}

bool
mt_leak_forecast(const mt_leak *leak, mt_leak_signal signal, double limit, mt_forecast *out)
{
    const series *s = &leak->of[signal];
    mt_outlook outlook = {.limit = limit};
    mt_line line;

    if (steps_of(s) < MT_LEAK_STEPS) return false;
    if (!line_of(s, &line)) line = mt_line_flat(s->seen.bytes);
    for (size_t i = 0; i < leak->growths; i++)
        foresee(&leak->growth[i], signal, s, &outlook);
    *out = mt_forecast_steps(&line, &outlook);
    return true;
}
