/* device.c -- how this file works.
 *
 * Tensors that lie on a CUDA device are recorded without waiting for it.
 *
 *   append():  admit ─► stage.push: copies enqueued ─► claim: the entry has its place and number
 *   later:     stage.peek: this copy is done? ─► fill: record and statistics ─► stage.pop
 *
 * Every append fills what has arrived by then; a read waits for just what it reads, with the GIL
 * released. history.h says what the GIL guards and what self->lock guards. */
#include "py/gate/history.h"

#include <assert.h>

#include "py/base/errors.h"

enum { STAGE_BYTES = 8 << 20, STAGE_ITEMS = 1024 };

/* pre: the lock was made in this process: notice_fork and has_lock see to that. */
static void
lock_stage(GateHistory *self)
{
    if (PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) return;
    Py_BEGIN_ALLOW_THREADS;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    Py_END_ALLOW_THREADS;
}

static void
unlock_stage(GateHistory *self)
{
    PyThread_release_lock(self->lock);
}

static bool
has_lock(GateHistory *self)
{
    if (self->lock != NULL) return true;
    self->birth = mt_birth_now();
    self->lock = PyThread_allocate_lock();
    if (self->lock == NULL) PyErr_NoMemory();
    return self->lock != NULL;
}

/* Frees the stage after its copies are done, which may take a while. pre: locked. */
static void
free_stage(GateHistory *self)
{
    mt_stage *stage = self->stage;

    self->stage = NULL;
    Py_BEGIN_ALLOW_THREADS;
    mt_stage_free(stage);
    Py_END_ALLOW_THREADS;
}

/* After fork() the child makes no CUDA call: the copies in flight never arrive there. The lock may
 * be held for ever by a thread that only the parent has, so the child leaves it and makes its own
 * when it needs one. A stage that such a thread is just freeing is no longer in self->stage: its
 * entries were filled before. */
static void
notice_fork(GateHistory *self)
{
    if (self->lock == NULL || mt_birth_is_here(&self->birth)) return;
    self->lock = NULL;
    if (self->stage == NULL) return;
    if (self->core != NULL && mt_stage_len(self->stage) > 0) {
        self->lost_to = mt_gatehist_appended(self->core);
        self->lost_from = self->oldest_pending;
    }
    mt_stage_abandon(self->stage);
    self->stage = NULL;
}

void
mt_py_gatehist_drop_stage(GateHistory *self)
{
    notice_fork(self);
    if (self->stage == NULL) return;
    lock_stage(self);
    if (self->stage != NULL) free_stage(self);
    unlock_stage(self);
}

/* The tag that travels with a copy: the entry's number, and its rows and dtype. */
static void
fill_one(GateHistory *self, const mt_stage_item *item)
{
    mt_rows rows = mt_rows_packed(item->host, (mt_dtype)(item->tag[1] & 0xFF),
                                  (size_t)(item->tag[1] >> 8), mt_gatehist_experts(self->core));

    mt_gatehist_fill(self->core, item->tag[0], &rows);
    mt_stage_pop(self->stage);
    self->oldest_pending = item->tag[0] + 1;
}

/* Waits for the oldest copy and fills its entry. pre: locked, the stage is not empty. */
static mt_status
fill_oldest(GateHistory *self, mt_error *err)
{
    mt_stage_item item;
    mt_status st;
    bool ready;

    Py_BEGIN_ALLOW_THREADS;
    st = mt_stage_peek(self->stage, true, &item, &ready, err);
    Py_END_ALLOW_THREADS;
    if (st == MT_OK && self->core != NULL) fill_one(self, &item);
    return st;
}

/* Fills what has arrived already. pre: locked. */
static mt_status
fill_ready(GateHistory *self, mt_error *err)
{
    mt_stage_item item;
    mt_status st;
    bool ready;

    while (mt_stage_len(self->stage) > 0) {
        if ((st = mt_stage_peek(self->stage, false, &item, &ready, err)) != MT_OK) return st;
        if (!ready) break;
        fill_one(self, &item);
    }
    return MT_OK;
}

/* Fills all entries up to and including this number. Copies arrive in the order of their numbers, so
 * it has arrived once the oldest one that is still on its way has a larger number. */
static mt_status
fill_until(GateHistory *self, uint64_t number, mt_error *err)
{
    mt_status st = MT_OK;

    while (st == MT_OK && self->core != NULL && self->stage != NULL &&
           mt_stage_len(self->stage) > 0 && self->oldest_pending <= number)
        st = fill_oldest(self, err);
    return st;
}

static int
raise_lost(GateHistory *self)
{
    mt_py_raise_own(self->state, "DeviceError",
                    "this entry was on its way from the device when the process was forked; read "
                    "histories before fork(), or start workers with spawn");
    return -1;
}

int
mt_py_gatehist_arrive(GateHistory *self, uint64_t number)
{
    mt_status st = MT_OK;
    mt_error err;

    if (!mt_py_gatehist_is_open(self)) return -1;
    notice_fork(self);
    if (number >= self->lost_from && number < self->lost_to) return raise_lost(self);
    if (self->stage != NULL) {
        lock_stage(self);
        st = fill_until(self, number, &err);
        unlock_stage(self);
    }
    if (st == MT_OK) return mt_py_gatehist_is_open(self) ? 0 : -1;
    mt_py_raise(self->state, &err, "reading gates back from the device");
    return -1;
}

int
mt_py_gatehist_arrive_all(GateHistory *self)
{
    uint64_t oldest;

    if (!mt_py_gatehist_is_open(self)) return -1;
    notice_fork(self);
    oldest = mt_gatehist_appended(self->core) - mt_gatehist_len(self->core);
    if (self->lost_to > oldest && self->lost_to > self->lost_from) return raise_lost(self);
    return mt_py_gatehist_arrive(self, UINT64_MAX);
}

static bool
stage_fits(const GateHistory *self, int device, size_t bytes)
{
    return self->stage != NULL && mt_stage_device(self->stage) == device &&
           mt_stage_capacity(self->stage) >= bytes;
}

/* Puts a stage in place that fits two such tensors, so that one can be on its way while the next one
 * comes; what the stage before still owes arrives first. This waits. */
static mt_status
replace_stage(GateHistory *self, int device, size_t bytes, mt_error *err)
{
    size_t capacity = bytes > STAGE_BYTES / 2 ? 2 * bytes : STAGE_BYTES;
    mt_status st = fill_until(self, UINT64_MAX, err);

    if (st != MT_OK) return st;
    if (self->stage != NULL) free_stage(self);
    if (self->core == NULL) return MT_OK;
    return mt_stage_new(&mt_alloc_libc, mt_cudart_dev_ops(self->state->natives->cudart), device,
                        capacity, STAGE_ITEMS, &self->stage, err);
}

/* Starts the copy and gives the entry its place. Nothing in here gives the GIL up, so the number in
 * the tag is the one that claim returns. MT_EAGAIN while the stage is full. pre: locked, admitted,
 * stage_fits. */
static mt_status
push_and_claim(GateHistory *self, const mt_rows *rows, size_t bytes, void *stream, mt_error *err)
{
    uint64_t number = mt_gatehist_appended(self->core);
    uint64_t tag[2] = {number, (uint64_t)rows->rows << 8 | (uint64_t)rows->dtype}, claimed;
    bool first = mt_stage_len(self->stage) == 0;
    mt_status st = mt_stage_push(self->stage, rows->data, bytes, stream, tag, err);

    if (st != MT_OK) return st;
    if (first) self->oldest_pending = number;
    claimed = mt_gatehist_claim(self->core, rows);
    assert(claimed == number);
    (void)claimed;
    return MT_OK;
}

/* One attempt that does not wait. MT_EAGAIN when it would have to: *lacks says whether for the
 * others in the budget. pre: locked, open. */
static mt_status
try_record(GateHistory *self, const mt_py_tensor *t, size_t bytes, void *stream, bool *lacks,
           mt_error *err)
{
    mt_status st = mt_gatehist_admit(self->core, &t->rows, err);

    *lacks = st == MT_EAGAIN;
    if (st != MT_OK) return st;
    if (bytes == 0) { /* nothing to fetch: an entry without tokens */
        mt_gatehist_fill(self->core, mt_gatehist_claim(self->core, &t->rows), &t->rows);
        return MT_OK;
    }
    if (!stage_fits(self, t->device, bytes)) return MT_EAGAIN;
    if ((st = fill_ready(self, err)) != MT_OK) return st;
    return push_and_claim(self, &t->rows, bytes, stream, err);
}

/* A full stage means that the device is many appends behind: the oldest copy is waited for, which
 * is counted. Every wait lets other threads append, clear or close the history, so all is checked
 * again after it; closed, it is left alone. pre: locked. */
static mt_status
record(GateHistory *self, const mt_py_tensor *t, void *stream, mt_error *err)
{
    size_t bytes = t->rows.rows * t->rows.cols * mt_dtype_size(t->rows.dtype);
    mt_status st = MT_OK;
    bool lacks;

    while (self->core != NULL) {
        if ((st = try_record(self, t, bytes, stream, &lacks, err)) != MT_EAGAIN) return st;
        st = MT_OK;
        if (lacks) {
            mt_py_gatehist_ask(self);
        } else if (!stage_fits(self, t->device, bytes)) {
            st = replace_stage(self, t->device, bytes, err);
        } else {
            self->device_waits++;
            st = fill_oldest(self, err);
        }
        if (st != MT_OK) return st;
    }
    return st;
}

int
mt_py_gatehist_append_device(GateHistory *self, mt_py_tensor *t)
{
    mt_error err;
    mt_status st;
    void *stream;

    notice_fork(self);
    if (!has_lock(self) || mt_state_cudart(self->state) == NULL) return -1;
    if (mt_py_current_stream(self->state, t->device, &stream) < 0) return -1;
    lock_stage(self);
    st = record(self, t, stream, &err);
    unlock_stage(self);
    if (st == MT_OK) return mt_py_gatehist_is_open(self) ? 0 : -1;
    mt_py_gatehist_raise(self->state, self->core, &err, "GateHistory.append()");
    return -1;
}
