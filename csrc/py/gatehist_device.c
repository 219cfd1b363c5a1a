/* gatehist_device.c -- recording tensors that lie on a CUDA device, without waiting for it.
 *
 *   append():  admit ─► stage.push: copies enqueued ─► claim: the entry has its place and number
 *   later:     stage.peek: this copy is done? ─► fill: record and statistics ─► stage.pop
 *
 * Every append fills what has arrived by then; a read waits for just what it reads, with the GIL
 * released. self->lock keeps other threads away from the stage meanwhile. It is taken with the GIL
 * released and no Python code runs under it, so neither lock can wait for the other in a circle. */
#include "gatehist.h"

#include <unistd.h>

#include "errors.h"

enum { STAGE_BYTES = 8 << 20, STAGE_ITEMS = 1024 };

static void
lock_stage(GateHistory *self)
{
    if (PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) return;
    Py_BEGIN_ALLOW_THREADS PyThread_acquire_lock(self->lock, WAIT_LOCK);
    Py_END_ALLOW_THREADS
}

static void
unlock_stage(GateHistory *self)
{
    PyThread_release_lock(self->lock);
}

static bool
has_lock(GateHistory *self)
{
    if (self->lock == NULL && (self->lock = PyThread_allocate_lock()) == NULL) PyErr_NoMemory();
    return self->lock != NULL;
}

/* Frees the stage after its copies are done, which may take a while. pre: locked, or unshared. */
static void
free_stage(GateHistory *self)
{
    mt_stage *stage = self->stage;

    self->stage = NULL;
    Py_BEGIN_ALLOW_THREADS mt_stage_free(stage);
    Py_END_ALLOW_THREADS
}

/* After fork() the child makes no CUDA call: the copies in flight never arrive there, and a lock
 * that another thread held stays held for ever. */
static void
notice_fork(GateHistory *self)
{
    if (self->stage == NULL || self->stage_owner == getpid()) return;
    self->lost_to = mt_gatehist_appended(self->core);
    self->lost_from = self->lost_to;
    if (mt_stage_len(self->stage) > 0) self->lost_from = self->oldest_pending;
    mt_stage_abandon(self->stage);
    self->stage = NULL;
    self->lock = NULL;
}

void
mt_py_gatehist_drop_stage(GateHistory *self)
{
    if (self->stage == NULL) return;
    if (self->stage_owner != getpid()) {
        mt_stage_abandon(self->stage);
        self->stage = NULL;
        return;
    }
    lock_stage(self);
    if (self->stage != NULL) free_stage(self);
    unlock_stage(self);
}

/* What a budget's history holds must stay while a copy that was admitted waits for its claim. */
void
mt_py_gatehist_clear(GateHistory *self)
{
    notice_fork(self);
    if (self->lock == NULL || mt_gatehist_configuration(self->core)->ledger == NULL) {
        mt_gatehist_clear(self->core);
        return;
    }
    lock_stage(self);
    if (self->core != NULL) mt_gatehist_clear(self->core);
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

    Py_BEGIN_ALLOW_THREADS st = mt_stage_peek(self->stage, true, &item, &ready, err);
    Py_END_ALLOW_THREADS if (st == MT_OK && self->core != NULL) fill_one(self, &item);
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

/* Copies arrive in order: an entry has when the oldest one still on its way is younger. */
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
    mt_error err;
    mt_status st;

    notice_fork(self);
    if (number >= self->lost_from && number < self->lost_to) return raise_lost(self);
    if (self->stage == NULL) return 0;
    lock_stage(self);
    st = fill_until(self, number, &err);
    unlock_stage(self);
    if (st == MT_OK) return mt_py_gatehist_is_open(self) ? 0 : -1;
    mt_py_raise(self->state, &err, "reading gates back from the device");
    return -1;
}

int
mt_py_gatehist_arrive_all(GateHistory *self)
{
    size_t len = mt_gatehist_len(self->core);
    uint64_t next = mt_gatehist_appended(self->core);

    notice_fork(self);
    if (self->lost_to > next - len && self->lost_to > self->lost_from) return raise_lost(self);
    return mt_py_gatehist_arrive(self, UINT64_MAX);
}

/* A stage on the tensor's device that can hold it; what another stage still owes arrives first. */
static mt_status
ready_stage(GateHistory *self, int device, size_t bytes, mt_error *err)
{
    size_t capacity = bytes > STAGE_BYTES / 4 ? 4 * bytes : STAGE_BYTES;
    mt_status st;

    if (self->stage != NULL && mt_stage_device(self->stage) == device &&
        mt_stage_capacity(self->stage) >= bytes)
        return fill_ready(self, err);
    if ((st = fill_until(self, UINT64_MAX, err)) != MT_OK) return st;
    if (self->stage != NULL) free_stage(self);
    st = mt_stage_new(&mt_alloc_libc, mt_cudart_dev_ops(self->state->cudart), device, capacity,
                      STAGE_ITEMS, &self->stage, err);
    if (st == MT_OK) self->stage_owner = getpid();
    return st;
}

/* Starts the copy. A full stage means that the device is many appends behind: wait for the oldest
 * copy, and count that. */
static mt_status
start_copy(GateHistory *self, const mt_rows *rows, size_t bytes, void *stream, mt_error *err)
{
    uint64_t number = mt_gatehist_appended(self->core);
    uint64_t tag[2] = {number, (uint64_t)rows->rows << 8 | (uint64_t)rows->dtype};
    mt_status st;

    if (mt_stage_len(self->stage) == 0) self->oldest_pending = number;
    while ((st = mt_stage_push(self->stage, rows->data, bytes, stream, tag, err)) == MT_EAGAIN) {
        self->device_waits++;
        if ((st = fill_oldest(self, err)) != MT_OK || self->core == NULL) break;
    }
    return st;
}

/* Any wait in here may let another thread close the history: core is then NULL. pre: locked. */
static mt_status
record(GateHistory *self, const mt_py_tensor *t, void *stream, mt_error *err)
{
    size_t bytes = t->rows.rows * t->rows.cols * mt_dtype_size(t->rows.dtype);
    mt_status st;

    if ((st = mt_gatehist_admit(self->core, &t->rows, err)) != MT_OK) return st;
    if (bytes == 0) { /* nothing to fetch: an entry without tokens */
        mt_gatehist_fill(self->core, mt_gatehist_claim(self->core, &t->rows), &t->rows);
        return MT_OK;
    }
    st = ready_stage(self, t->device, bytes, err);
    if (st == MT_OK && self->core != NULL) st = start_copy(self, &t->rows, bytes, stream, err);
    if (st == MT_OK && self->core != NULL) mt_gatehist_claim(self->core, &t->rows);
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
    st = self->core != NULL ? record(self, t, stream, &err) : MT_OK;
    unlock_stage(self);
    if (st == MT_OK) return mt_py_gatehist_is_open(self) ? 0 : -1;
    mt_py_gatehist_raise(self, &err, "GateHistory.append()");
    return -1;
}
