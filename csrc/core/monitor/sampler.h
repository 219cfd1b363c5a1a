/* sampler.h -- watches memory from a thread of its own, while the program trains.
 *
 *   ticker ──► thread: probe ──► row ──► record          (run.mem)
 *                            ├─► latest, peak, limit ──► any thread, by a lock held for a copy
 *                            └─► marks ──► passed ─────► step(): a bit each, and an event
 *   step() ──► steps ────────────────► row
 *
 * What limits memory, and what counts as used, is limit.h's to say.
 *
 * Once started, nothing is allocated. A probe reading that fails leaves its columns unknown; the
 * thread itself cannot fail. In a forked child there is no thread, and all calls do nothing; free
 * then leaves probe, ticker and locks alone, which the thread may have been using
 * when the process was forked: their memory and descriptors are the child's until it ends. */
#ifndef MT_MONITOR_SAMPLER_H
#define MT_MONITOR_SAMPLER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/forks.h"
#include "base/alloc.h"
#include "base/gauge.h"
#include "monitor/fill.h"
#include "monitor/limit.h"
#include "monitor/watermark.h"
#include "port/probe.h"
#include "record/writer.h"
#include "base/status.h"
#include "port/thread.h"

/* The columns of a row. Those of the devices come behind the host's: allocated, reserved, free and
 * total of each. memtools/_monitor/run.py gives them their names in a record. */
enum {
    MT_ROW_STEPS,
    MT_ROW_RSS,
    MT_ROW_PRIVATE,
    MT_ROW_SWAP,
    MT_ROW_CGROUP_USED,
    MT_ROW_CGROUP_LIMIT,
    MT_ROW_AVAILABLE,
    MT_ROW_PRESSURE,
    MT_ROW_HEAP_USED,
    MT_ROW_CHILDREN, /* how many */
    MT_ROW_CHILDREN_PRIVATE,
    MT_ROW_PROCESS, /* rss, each page counted once */
    MT_ROW_JOB,     /* that of the process, its descendants and their shared memory */
    MT_ROW_SHM,     /* the job's shared memory */
    MT_SAMPLER_HOST,
    MT_SAMPLER_DEVICE = 4
};

typedef struct mt_sampler_setup {
    mt_probe_ops probe;        /* taken over, as the ticker is; used by the thread only */
    mt_ticker_ops ticker;      /* on failure they stay the caller's */
    mt_record *record;         /* NULL: none. Borrowed, with one column for each value of a row */
    mt_birth birth;            /* in a child that was forked since there is no thread */
    mt_gauge *mapped_again;    /* borrowed: what rss counts more than once; NULL: nothing */
    void (*each_second)(void); /* called by the thread, at a sample; NULL: nothing */
    uint64_t interval_ns;      /* > 0 */
    uint64_t limit;            /* bytes; MT_UNLIMITED: none is given */
    size_t devices;            /* at most MT_SAMPLE_DEVICES */
} mt_sampler_setup;

typedef struct mt_sampler mt_sampler;

/* Of one moment. In a forked child it does not run, limit and peak are unknown, and the counts are
 * the parent's. */
typedef struct mt_sampler_figures {
    bool runs;
    mt_limit limit;       /* by the last sample */
    uint64_t peak;        /* the highest limit.used of all; MT_UNKNOWN before the first */
    uint64_t steps;       /* counted by mt_sampler_step */
    uint64_t samples;     /* taken */
    uint64_t cpu_ns;      /* that the thread used of a processor for them */
    uint64_t interval_ns; /* that it keeps now */
} mt_sampler_figures;

/* Reads the limits once. *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_sampler_new(const mt_alloc *mem, const mt_sampler_setup *setup, mt_sampler **out,
                         mt_error *err);
/* Stops it first. NULL is ignored. */
void mt_sampler_free(mt_sampler *s);

/* Starts the thread, which takes a sample at once. After stop it may be started again.
 * MT_EAGAIN when the system gives no thread (call is set), when it runs already or in a forked
 * child (call is NULL, detail says which). */
mt_status mt_sampler_start(mt_sampler *s, mt_error *err);
/* Takes a last sample and ends the thread; nothing where none runs. Waits for a reading that is
 * under way, never for the interval. */
void mt_sampler_stop(mt_sampler *s);

/* Counts n steps, and returns the marks passed since the last call. */
uint32_t mt_sampler_step(mt_sampler *s, uint64_t n);

/* A watermark's number (see watermark.h), or -1 when there are MT_WATERMARKS; false when it is
 * none. `of` is MT_MARK_HOST, or MT_MARK_DEVICE + i for a device i < devices, of which counts what
 * is allocated and what others have of it (mt_device_used). */
int mt_sampler_watch(mt_sampler *s, unsigned char of, double fraction);
bool mt_sampler_unwatch(mt_sampler *s, unsigned mark);
/* Bytes that were in use when the mark was passed last: by the time of the step() that reports it
 * they may be free again. 0: it was not passed, or there is no such mark. */
uint64_t mt_sampler_passed_at(mt_sampler *s, unsigned mark);

/* By how much the job's swap rose in the last half minute; false where it does not for certain. */
bool mt_sampler_swap_rise(mt_sampler *s, mt_fill_reading *out);
/* The last sample; a value that is read rarely is the last one read. False before the first. */
bool mt_sampler_latest(mt_sampler *s, mt_sample *out);
mt_sampler_figures mt_sampler_read(mt_sampler *s);

#endif
