/* sampler.c -- how this file works.
 *
 * The thread (at the end of "one sample") takes a sample, publishes it, writes its row into the
 * record and asks pace.h when to come again: that is sample(). It reads what every sample needs,
 * and of what is expensive at most one value, whose turn it is; the last known value stands for the
 * rest. What other threads ask for lies under one lock, held for a copy, or in atomics. Watermarks
 * that are passed wait as bits for the next step(). */
#include "monitor/sampler.h"

#include <assert.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/lock.h"
#include "monitor/pace.h"

enum {
    ALWAYS = MT_READ_RSS | MT_READ_CGROUP | MT_READ_SYSTEM,
    EXPENSIVE = MT_READ_SWAP | MT_READ_HEAP | MT_READ_CHILDREN | MT_READ_SHM,
    PRESSURE_AGE_NS =
        20000000, /* an average over 10 s; its file is the most expensive of a sample */
    SECOND_NS = 1000000000,
    GROWN = 20, /* children that have grown by more than one part in so many are read again soon */
    ROW_MOST = MT_SAMPLER_HOST + MT_SAMPLER_DEVICE * MT_SAMPLE_DEVICES,
};

static const uint64_t WAITS_NS = 10000000000; /* that a program may go without a step() */

/* The count of steps as samples have seen it: its first and its newest value, and since when. */
typedef struct progress {
    uint64_t first, first_at, last, last_at;
} progress;

struct mt_sampler {
    mt_alloc mem;
    mt_sampler_setup with;
    mt_lock life; /* of start and stop: one at a time */
    mt_lock lock; /* of what follows; taken alone */
    mt_watermarks marks;
    mt_sample latest;
    mt_limit limit;
    uint64_t peak;
    mt_fill swap; /* of the job */
    /* From here on without a lock. */
    _Atomic bool runs;
    _Atomic uint32_t passed;
    _Atomic uint64_t steps, samples, cpu_ns, interval_ns;
    /* The thread's own. */
    mt_pace pace;
    uint64_t pressure_at; /* when it was read */
    uint64_t second_at;   /* when each_second was called */
    progress progress;
    uint64_t waits_since; /* 0: no mark waits for a step() */
    bool told_waiting;
    uint64_t cpu_before; /* of the threads before this one */
    uint64_t cpu_seen;   /* of this one, at the end of its last sample */
};

static bool
is_home(const mt_sampler *s)
{
    return mt_birth_is_here(&s->with.birth);
}

/* --- one sample ------------------------------------------------------------------------------- */

/* Copies the fields that these readings (bits of MT_READ_ that are not in ALWAYS) fill in. */
static void
take_over(mt_sample *to, const mt_sample *from, unsigned what)
{
    if (what & MT_READ_SWAP) to->swap = from->swap;
    if (what & MT_READ_PRESSURE) to->pressure = from->pressure;
    if (what & MT_READ_HEAP) {
        to->heap_used = from->heap_used;
        to->heap_free = from->heap_free;
    }
    if (what & MT_READ_CHILDREN) {
        to->children = from->children;
        to->children_priv = from->children_priv;
        to->children_swap = from->children_swap;
    }
    if (what & MT_READ_SHM) {
        to->shm = from->shm;
        to->shm_mapped = from->shm_mapped;
    }
}

static bool
children_have_changed(const mt_sample *before, const mt_sample *now)
{
    uint64_t most = before->children_priv;

    if (now->children != before->children) return true;
    return mt_is_number(now->children_priv) && mt_is_number(most) &&
           now->children_priv > most + most / GROWN;
}

/* Reads the rare value that is due, if one is, and all of them at the end; returns their bits, and
 * what the reading cost. */
static unsigned
read_rare(mt_sampler *s, mt_sample *x, uint64_t now, bool is_last, uint64_t *cost)
{
    const mt_ticker_ops *t = &s->with.ticker;
    unsigned what = is_last ? EXPENSIVE : mt_pace_due(&s->pace, now);
    uint64_t before, own;
    mt_sample one;
    bool changed;

    *cost = 0;
    if (what == 0) return 0;
    before = t->cpu_ns(t->ctx);
    s->with.probe.read(s->with.probe.ctx, is_last ? what | MT_READ_LAST : what, &one);
    changed = (what & MT_READ_CHILDREN) && children_have_changed(x, &one);
    take_over(x, &one, what);
    *cost = t->cpu_ns(t->ctx) - before;
    own = mt_u64_min(one.weighing_ns, *cost);
    if (!is_last) mt_pace_rare(&s->pace, what, now, *cost - own, changed);
    return what;
}

/* Writes a row to the record. A rare value stands in it only where this very sample read it. */
static void
sampler_write_row(mt_sampler *s, const mt_sample *x, unsigned fresh)
{
    uint64_t row[ROW_MOST] = {0}, *to = row + MT_SAMPLER_HOST;
    mt_sample sparse;

    if (s->with.record == NULL) return;
    mt_sample_clear(&sparse);
    take_over(&sparse, x, fresh);
    row[MT_ROW_STEPS] = s->steps;
    row[MT_ROW_RSS] = x->rss;
    row[MT_ROW_PRIVATE] = x->priv;
    row[MT_ROW_SWAP] = sparse.swap;
    row[MT_ROW_CGROUP_USED] = x->cgroup_used;
    row[MT_ROW_CGROUP_LIMIT] = mt_is_number(x->cgroup_limit) ? x->cgroup_limit : MT_UNKNOWN;
    row[MT_ROW_AVAILABLE] = x->available;
    row[MT_ROW_PRESSURE] = x->pressure;
    row[MT_ROW_HEAP_USED] = sparse.heap_used;
    row[MT_ROW_CHILDREN] = sparse.children;
    row[MT_ROW_CHILDREN_PRIVATE] = sparse.children_priv;
    row[MT_ROW_PROCESS] = mt_sample_process(x);
    row[MT_ROW_JOB] = mt_sample_job(x);
    row[MT_ROW_SHM] = sparse.shm;
    for (size_t i = 0; i < s->with.devices; i++) {
        const mt_device_sample *d = &x->device[i];
        bool known = i < x->devices;
        *to++ = known ? d->allocated : MT_UNKNOWN;
        *to++ = known ? d->reserved : MT_UNKNOWN;
        *to++ = known ? d->free : MT_UNKNOWN;
        *to++ = known ? d->total : MT_UNKNOWN;
    }
    mt_record_append(s->with.record, x->time_ns, row);
}

/* What is used of the memory that a mark is of, and how much there is of it. */
static mt_limit
limit_of_mark(const mt_sample *x, const mt_limit *host, unsigned char of)
{
    const mt_device_sample *d;

    if (of == MT_MARK_HOST) return *host;
    d = &x->device[of - MT_MARK_DEVICE];
    return (mt_limit){d->total, mt_device_used(d), "cuda"};
}

static uint32_t
sampler_look(mt_sampler *s, const mt_limit *limit, unsigned char of)
{
    bool known = mt_is_number(limit->bytes) && mt_is_number(limit->used) && limit->bytes > 0;

    return known ? mt_watermarks_look(&s->marks, of, limit->used, limit->bytes) : 0;
}

/* Puts a sample and its limit where other threads read them; returns the watermarks that it passes,
 * and a copy of all of them. */
static uint32_t
publish(mt_sampler *s, const mt_sample *x, const mt_limit *limit, mt_watermarks *marks)
{
    uint32_t passed;

    mt_lock_take(&s->lock);
    s->latest = *x;
    s->limit = *limit;
    if (mt_is_number(limit->used) && (!mt_is_number(s->peak) || s->peak < limit->used))
        s->peak = limit->used;
    mt_fill_add(&s->swap, (mt_fill_reading){x->time_ns, s->steps, mt_sample_job_swap(x)});
    passed = sampler_look(s, limit, MT_MARK_HOST);
    for (size_t i = 0; i < x->devices && i < s->with.devices; i++) {
        unsigned char of = (unsigned char)(MT_MARK_DEVICE + i);
        mt_limit its = limit_of_mark(x, NULL, of);
        passed |= sampler_look(s, &its, of);
    }
    atomic_fetch_or(&s->passed, passed);
    *marks = s->marks;
    mt_lock_give(&s->lock);
    s->samples++;
    return passed;
}

/* Writes an event of the kind "pressure", with its fields as memtools/_record/kinds.py reads them.
 * The thread does it, not step(): a program may be killed before its next step. */
static void
write_event(mt_sampler *s, uint64_t time_ns, const char *fields, int bytes)
{
    mt_record_event e = {.time_ns = time_ns,
                         .step = s->steps,
                         .kind = "pressure",
                         .kind_bytes = 8,
                         .payload = fields,
                         .payload_bytes = (size_t)bytes};

    assert(bytes > 0 && bytes < MT_RECORD_TEXT);
    if (s->with.record != NULL) mt_record_write_event(s->with.record, &e);
}

/* Writes an event for each watermark that is passed. Its fraction is written by whole numbers: a
 * program may have set a decimal comma. A device is named as torch names it, cuda:0. */
static void
write_passed(mt_sampler *s, uint32_t passed, const mt_watermarks *marks, const mt_sample *x,
             const mt_limit *host)
{
    char fields[MT_RECORD_TEXT], device[8] = "";

    for (int i = 0; passed != 0; i++, passed >>= 1) {
        unsigned thousandths = (unsigned)(marks->at[i] * 1000 + 0.5);
        mt_limit limit;
        int n;
        if (!(passed & 1)) continue;
        limit = limit_of_mark(x, host, marks->of[i]);
        if (marks->of[i] != MT_MARK_HOST)
            snprintf(device, sizeof device, ":%u", marks->of[i] - MT_MARK_DEVICE + 0u);
        n = snprintf(fields, sizeof fields,
                     "{\"what\":\"passed\",\"fraction\":%u.%03u,\"used_bytes\":%" PRIu64
                     ",\"limit_bytes\":%" PRIu64 ",\"source\":\"%s%s\"}",
                     thousandths / 1000, thousandths % 1000, limit.used, limit.bytes, limit.from,
                     marks->of[i] == MT_MARK_HOST ? "" : device);
        write_event(s, x->time_ns, fields, n);
    }
}

/* How long the program may go without a step() before that is unusual: twice as long as its steps
 * have taken so far, and at least WAITS_NS. */
static uint64_t
usual_wait_ns(progress *p, uint64_t steps, uint64_t now)
{
    uint64_t twice;

    if (p->first == 0 && steps > 0) *p = (progress){steps, now, steps, now};
    if (p->last != steps) {
        p->last = steps;
        p->last_at = now;
    }
    if (p->last == p->first) return WAITS_NS;
    twice = 2 * ((p->last_at - p->first_at) / (p->last - p->first));
    return twice > WAITS_NS ? twice : WAITS_NS;
}

/* Callbacks and guards act in step(). If a watermark was passed and the program does not call step()
 * for a long time, the record says so, once: the program may be killed before it can. */
static void
write_waiting(mt_sampler *s, uint64_t now)
{
    uint64_t steps = s->steps, most = usual_wait_ns(&s->progress, steps, now);
    char fields[64];
    int n;

    if (atomic_load_explicit(&s->passed, memory_order_relaxed) == 0) {
        s->waits_since = 0;
        return;
    }
    if (s->waits_since == 0) s->waits_since = now;
    if (s->told_waiting || now - s->waits_since < most) return;
    s->told_waiting = true;
    n = snprintf(fields, sizeof fields, "{\"what\":\"not heard\",\"seconds\":%" PRIu64 "}",
                 most / 1000000000);
    write_event(s, now, fields, n);
}

static void
count_once(const mt_sampler *s, mt_sample *x)
{
    if (s->with.mapped_again != NULL) mt_sample_count_once(x, s->with.mapped_again);
}

/* Samples and returns when to do it again. The last sample has everything: what is read rarely may
 * be older than what the program did last. */
static uint64_t
sample(mt_sampler *s, bool is_last)
{
    const mt_ticker_ops *t = &s->with.ticker;
    uint64_t now = t->now_ns(t->ctx), rare_cost, cpu, next;
    unsigned mask = ALWAYS | (s->with.devices > 0 ? MT_READ_DEVICES : 0u), fresh;
    mt_sample x;
    mt_limit limit;
    mt_watermarks marks;

    if (now - s->pressure_at >= PRESSURE_AGE_NS) {
        s->pressure_at = now;
        mask |= MT_READ_PRESSURE;
    }
    s->with.probe.read(s->with.probe.ctx, mask, &x);
    count_once(s, &x);
    take_over(&x, &s->latest, EXPENSIVE | (MT_READ_PRESSURE & ~mask)); /* as they were read last */
    fresh = read_rare(s, &x, now, is_last, &rare_cost);
    limit = mt_limit_of(&x, s->with.limit);
    write_passed(s, publish(s, &x, &limit, &marks), &marks, &x, &limit);
    write_waiting(s, now);
    if (s->with.each_second != NULL && now - s->second_at >= SECOND_NS) {
        s->second_at = now;
        s->with.each_second();
    }
    sampler_write_row(s, &x, fresh);
    /* The cost of a sample is all that the thread used since the last one, waking up included, but
     * for what is expensive. */
    cpu = t->cpu_ns(t->ctx);
    next = mt_pace_next(&s->pace, t->now_ns(t->ctx), cpu - s->cpu_seen - rare_cost, limit.used,
                        limit.bytes);
    s->cpu_seen = cpu;
    s->cpu_ns = s->cpu_before + cpu;
    s->interval_ns = s->pace.wait_ns;
    return next;
}

static void
sampler_run(void *arg)
{
    mt_sampler *s = arg;
    const mt_ticker_ops *t = &s->with.ticker;

    s->cpu_before = s->cpu_ns;
    s->cpu_seen = t->cpu_ns(t->ctx);
    mt_pace_init(&s->pace, s->with.interval_ns, t->now_ns(t->ctx));
    while (t->wait(t->ctx, sample(s, false)))
        continue;
    sample(s, true);
}

/* --- life ------------------------------------------------------------------------------------- */

mt_status
mt_sampler_new(const mt_alloc *mem, const mt_sampler_setup *setup, mt_sampler **out, mt_error *err)
{
    mt_sampler *s = mt_alloc_zeroed(mem, 1, sizeof *s);

    assert(setup->interval_ns > 0 && setup->devices <= MT_SAMPLE_DEVICES);
    if (s == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    s->mem = *mem;
    s->with = *setup;
    mt_lock_init(&s->life);
    mt_lock_init(&s->lock);
    s->peak = MT_UNKNOWN;
    s->interval_ns = setup->interval_ns;
    /* With what is expensive, so that whatever the probe needs memory for, it has when the thread
     * runs. */
    setup->probe.read(setup->probe.ctx, ALWAYS | MT_READ_PRESSURE | EXPENSIVE, &s->latest);
    count_once(s, &s->latest);
    s->limit = mt_limit_of(&s->latest, setup->limit);
    *out = s;
    return MT_OK;
}

static mt_status
sampler_refuse(mt_error *err, const char *detail)
{
    mt_fail(err, MT_EAGAIN, NULL, 0);
    if (err != NULL) err->detail = detail;
    return MT_EAGAIN;
}

mt_status
mt_sampler_start(mt_sampler *s, mt_error *err)
{
    mt_status st;

    if (!is_home(s)) return sampler_refuse(err, "it belongs to the parent process");
    mt_lock_take(&s->life);
    if (s->runs) {
        st = sampler_refuse(err, "it runs already");
    } else {
        s->runs = true;
        st = s->with.ticker.start(s->with.ticker.ctx, sampler_run, s, err);
        if (st != MT_OK) s->runs = false;
    }
    mt_lock_give(&s->life);
    return st;
}

void
mt_sampler_stop(mt_sampler *s)
{
    if (!is_home(s)) return;
    mt_lock_take(&s->life);
    s->with.ticker.stop(s->with.ticker.ctx);
    s->runs = false;
    mt_lock_give(&s->life);
}

void
mt_sampler_free(mt_sampler *s)
{
    mt_alloc mem;

    if (s == NULL) return;
    if (is_home(s)) {
        mt_sampler_stop(s);
        s->with.ticker.close(s->with.ticker.ctx);
        s->with.probe.close(s->with.probe.ctx);
        mt_lock_fini(&s->lock);
        mt_lock_fini(&s->life);
    }
    mem = s->mem;
    mem.put(mem.ctx, s, sizeof *s);
}

/* --- what others ask -------------------------------------------------------------------------- */

/* A plain load unless a mark was passed. */
uint32_t
mt_sampler_step(mt_sampler *s, uint64_t n)
{
    atomic_fetch_add_explicit(&s->steps, n, memory_order_relaxed);
    if (atomic_load_explicit(&s->passed, memory_order_relaxed) == 0) return 0;
    return atomic_exchange(&s->passed, 0);
}

int
mt_sampler_watch(mt_sampler *s, unsigned char of, double fraction)
{
    int mark;

    if (!is_home(s)) return -1;
    assert(of < MT_MARK_DEVICE + s->with.devices);
    mt_lock_take(&s->lock);
    mark = mt_watermarks_add(&s->marks, of, fraction);
    mt_lock_give(&s->lock);
    return mark;
}

bool
mt_sampler_unwatch(mt_sampler *s, unsigned mark)
{
    bool was;

    if (!is_home(s)) return false;
    mt_lock_take(&s->lock);
    was = mt_watermarks_remove(&s->marks, mark);
    if (was) atomic_fetch_and(&s->passed, ~(1u << mark));
    mt_lock_give(&s->lock);
    return was;
}

uint64_t
mt_sampler_passed_at(mt_sampler *s, unsigned mark)
{
    uint64_t used;

    if (!is_home(s) || mark >= MT_WATERMARKS) return 0;
    mt_lock_take(&s->lock);
    used = s->marks.used[mark];
    mt_lock_give(&s->lock);
    return used;
}

bool
mt_sampler_swap_rise(mt_sampler *s, mt_fill_reading *out)
{
    mt_fill swap;

    if (!is_home(s)) return false;
    mt_lock_take(&s->lock);
    swap = s->swap;
    mt_lock_give(&s->lock);
    return mt_fill_rise(&swap, out);
}

bool
mt_sampler_latest(mt_sampler *s, mt_sample *out)
{
    if (!is_home(s) || s->samples == 0) return false;
    mt_lock_take(&s->lock);
    *out = s->latest;
    mt_lock_give(&s->lock);
    return true;
}

mt_sampler_figures
mt_sampler_read(mt_sampler *s)
{
    mt_sampler_figures f = {.limit = {MT_UNKNOWN, MT_UNKNOWN, ""},
                            .peak = MT_UNKNOWN,
                            .steps = s->steps,
                            .samples = s->samples,
                            .cpu_ns = s->cpu_ns,
                            .interval_ns = s->interval_ns};

    if (!is_home(s)) return f;
    f.runs = s->runs;
    mt_lock_take(&s->lock);
    f.limit = s->limit;
    f.peak = s->peak;
    mt_lock_give(&s->lock);
    return f;
}
