/* leak.h -- does this program leak? One answer from several series of memory readings.
 *
 *                                               ┌─► minima.h ─► fit.h, past.h ─► by the floor: noise
 *   bytes of a signal ─► less declared growth ──┤                                of any size, slowly
 *                                               └─► steady.h, past.h ────► by the newest readings of
 *                                                                an exact signal: in 16 to 32 steps
 *   heap ──┐ bytes in use: exact             early    too few steps to say anything
 *   python │                                 quiet    it does not grow, or no longer
 *   tensors   ─► the highest grade decides   fragmentation   only rss grows, what is in use does not
 *   children                                 suspect  it grew at the same point of 16 to 32 steps
 *   device │                                 growing  and goes on; a warm-up may do so, too
 *   shm ───┘                                 likely   and has not clearly slowed down
 *   rss ───────► bytes resident: noisy,      leak     and does not slow down, 3 times in a row
 *                may grow without a leak and faster than one
 *
 * Four numbers out of a library of 4,800 leak-free series show what a grade is worth; they are in
 * docs/guides/leaks.md. Constant memory (26 KiB), one allocation, no history; a sample costs some
 * nanoseconds and an evaluation some microseconds, 40 of them in 8,000 samples; a look at the
 * newest readings some hundred nanoseconds, each 8 steps and later each 16. Steps are all that
 * counts, never time. No lock: the caller serialises. */
#ifndef MT_LEAK_LEAK_H
#define MT_LEAK_LEAK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "leak/forecast.h"
#include "base/status.h"

typedef struct mt_leak mt_leak;

typedef enum mt_leak_signal {
    MT_LEAK_HEAP,     /* malloc's bytes in use */
    MT_LEAK_PYTHON,   /* the interpreter's own blocks, which are not in the heap's figure */
    MT_LEAK_TENSORS,  /* bytes of live tensors */
    MT_LEAK_CHILDREN, /* private bytes of child processes */
    MT_LEAK_DEVICE,   /* bytes allocated on the device */
    MT_LEAK_SHM,      /* bytes of shared memory of the job */
    MT_LEAK_RSS,      /* resident bytes: the only one that is not exact */
    MT_LEAK_NONE,
    MT_LEAK_SIGNALS = MT_LEAK_NONE,
} mt_leak_signal;
/* Steps that the readings have to cover before growth can be said, and before it can be said that
 * there is none: the first word about growth takes up to 32 of them. */
enum { MT_LEAK_GROWTHS = 8, MT_LEAK_STEPS = 16, MT_LEAK_QUIET_STEPS = 32 };

/* One ladder, from the least certain on: whoever compares two of them compares these numbers. */
typedef enum mt_leak_kind {
    MT_LEAK_EARLY, /* the readings cover fewer than MT_LEAK_QUIET_STEPS steps, and show no growth */
    MT_LEAK_QUIET,
    MT_LEAK_FILLS, /* never by readings alone: a census found that what grows has a bound */
    MT_LEAK_FRAGMENTATION,
    MT_LEAK_SUSPECT,
    MT_LEAK_GROWING,
    MT_LEAK_LIKELY,
    MT_LEAK_LEAK,
} mt_leak_kind;

/* How sure it is that what grows is a leak. High: the straightest of lines, or two exact signals.
 */
typedef enum mt_leak_trust {
    MT_TRUST_NONE, /* below suspect */
    MT_TRUST_LOW,  /* suspect, growing */
    MT_TRUST_FAIR, /* likely */
    MT_TRUST_GOOD, /* leak */
    MT_TRUST_HIGH,
} mt_leak_trust;

typedef struct mt_leak_options {
    double span;                 /* steps that a window must cover; 0 for 1500 */
    double bar[MT_LEAK_SIGNALS]; /* bytes that count as a rise; 0 for 1 MiB of rss, children,
                                  * device and shm, .5 of python, .25 of heap and tensors */
} mt_leak_options;

typedef struct mt_leak_verdict {
    mt_leak_kind kind;
    mt_leak_signal signal; /* the one that decided; MT_LEAK_NONE when early or
                            * quiet */
    mt_leak_trust trust;
    double rate, error; /* of that signal, bytes a step; rate - error to rate + error */
    double shape;       /* 1: as fast late as early; below .8: it slows down */
    double rss_rate;    /* what it costs, bytes a step; NAN when rss is not known */
    int64_t since;      /* the step at which the growth began, as far as the series shows it */
} mt_leak_verdict;

/* Growth that is meant: a buffer that fills. */
typedef struct mt_leak_growth {
    double bytes;          /* at most this much; HUGE_VAL: as much as the rate gives */
    double rate;           /* bytes a step from now on; HUGE_VAL: as fast as it comes */
    int64_t until;         /* the last step of it; INT64_MAX: no end */
    mt_leak_signal signal; /* MT_LEAK_NONE: in each signal */
    char name[48];         /* of the buffer; a second growth of the name changes the first */
} mt_leak_growth;

typedef struct mt_leak_readings {
    uint64_t count;
    int64_t first, last; /* steps; only where there is a reading */
    double bytes;        /* the newest reading, as it was added */
} mt_leak_readings;

/* *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_leak_new(const mt_alloc *mem, const mt_leak_options *options, mt_leak **out,
                      mt_error *err);
void mt_leak_free(mt_leak *leak); /* NULL is ignored */

/* Adds a reading; UINT64_MAX is one that is not known, and is skipped. True when the kind may be
 * another: the series was evaluated, or it is no longer too early. pre: `step` is above that of the signal's last reading. */
bool mt_leak_add(mt_leak *leak, mt_leak_signal signal, int64_t step, uint64_t bytes);
/* The readings of a signal since the last reset. */
mt_leak_readings mt_leak_seen(const mt_leak *leak, mt_leak_signal signal);
/* Steps from the first to the newest reading, of the signal that was read longest. Below
 * MT_LEAK_STEPS it is too early to say anything, below MT_LEAK_QUIET_STEPS that nothing grows. */
int64_t mt_leak_steps(const mt_leak *leak);

/* Declares growth from the next reading on: it is taken out of the readings before anything looks
 * at them, no more of it than the series really grows. MT_ELIMIT: eight others are declared. */
mt_status mt_leak_expect(mt_leak *leak, const mt_leak_growth *growth, mt_error *err);

/* Another phase of the program begins: forgets all readings. What was declared stays, with what of
 * it has come. */
void mt_leak_reset(mt_leak *leak);

/* The kind alone; some nanoseconds. */
mt_leak_kind mt_leak_kind_now(const mt_leak *leak);
/* Everything; some microseconds. */
void mt_leak_judge(const mt_leak *leak, mt_leak_verdict *out);

/* Steps until the signal reaches `limit` bytes, with what is declared and still to come. False
 * before its readings cover MT_LEAK_STEPS steps. */
bool mt_leak_forecast(const mt_leak *leak, mt_leak_signal signal, double limit, mt_forecast *out);

#endif
