/* pool.h -- the Python objects around mt_kvpool and mt_kvlease.
 *
 *   KVPool ──► mt_kvpool                 NULL once closed; leases go on
 *     ▲  └──► guests (hold.h)
 *   KVLease ──► mt_kvlease               NULL once released
 *     └──► storage or base ──► hold      what all views of the lease share, made by the first
 *
 * A lease is used by one thread at a time: a method marks it busy, because it may let other threads
 * run, or run Python code, in the middle. In a forked child every method is a RuntimeError, and
 * nothing is given back when the child's copies die. */
#ifndef MT_PY_KV_POOL_H
#define MT_PY_KV_POOL_H

#include "py/base/state.h"

#include <stdatomic.h>

#include "py/kv/hold.h"

typedef struct KVPool {
    PyObject_HEAD
    mt_state *state; /* kept alive by the type */
    mt_kvpool *core; /* NULL once closed */
    mt_kvguests *guests;
    mt_ledger *ledger; /* one reference */
    PyObject *helpers; /* memtools._kv.tensors */
    PyObject *dtype, *device, *name;
    PyObject *budget; /* the Budget that was given as limit, or None */
    mt_kvconfig config;
    int dtype_number;    /* the shim's; -1 without it */
    unsigned elem_shift; /* log2 of elem_bytes */
    size_t block_tokens, block_bytes;
    int cuda_device;  /* -1: the host */
    long owner;       /* the process that made it */
    size_t users;     /* calls that let other threads run: the last one closes */
    atomic_int trims; /* that run now, without the GIL: the pool is locked for as long */
    bool closing;
    uint64_t lent; /* leases ever: their numbers */
    PyObject *weakrefs;
} KVPool;

typedef struct KVLease {
    PyObject_HEAD
    mt_state *state;
    mt_kvlease *core; /* NULL once released */
    KVPool *pool;
    bool busy;
    uint64_t number;          /* of the pool's leases, from 1 */
    const mt_torch_ops *shim; /* that made storage */
    void *storage;            /* one of the two, once there was a view */
    PyObject *base;           /* without the shim: a 1-D tensor over all slots */
    mt_kvhold *hold;          /* of storage or base: one reference */
    size_t *viewed;           /* [layers] tokens that views show which autograd may have saved */
    bool all_viewed;          /* buffers() was called: that many are viewed for ever */
    PyObject *weakrefs;
} KVLease;

/* False with a RuntimeError in a forked child, with ValueError after close(). */
bool mt_py_kvpool_is_open(KVPool *self);
/* A call, which may let other threads run: close() waits for its leave. False with the error of
 * is_open. */
bool mt_py_kvpool_enter(KVPool *self);
void mt_py_kvpool_leave(KVPool *self);
/* Waits for another thread's trim, and lets other threads run as long. core is the pool's, which
 * something holds: an enter of the pool, or a lease that is busy or being released. */
void mt_py_kvpool_await_trims(KVPool *self, mt_kvpool *core);
static inline void
mt_py_kvpool_await(KVPool *self, mt_kvpool *core)
{
    if (atomic_load_explicit(&self->trims, memory_order_relaxed) > 0)
        mt_py_kvpool_await_trims(self, core);
}
/* The core's error as an exception; NULL. */
PyObject *mt_py_kvpool_raise(KVPool *self, const mt_error *err, const char *doing);
/* On a device, what the pool does next follows torch's current stream; core is the pool's, which
 * a lease still has after close(). -1 with an error. */
int mt_py_kvpool_follow_device(KVPool *self, mt_kvpool *core);
static inline int
mt_py_kvpool_follow_stream(KVPool *self, mt_kvpool *core)
{
    return self->cuda_device < 0 ? 0 : mt_py_kvpool_follow_device(self, core);
}
/* After MT_ENOMEM: on a device, makes torch give back what it holds idle; true: try again. */
bool mt_py_kvpool_freed_some(KVPool *self, const mt_error *err);

/* An object of this type around core, which it takes over, also on failure. */
PyObject *mt_py_kvlease_wrap(PyTypeObject *type, KVPool *pool, mt_kvlease *core);
/* Marks the lease busy until leave. False with ValueError when it was released, RuntimeError when
 * another thread is using it, this is a forked child, or torch took its views elsewhere. */
bool mt_py_kvlease_enter(KVLease *self);
static inline void
mt_py_kvlease_leave(KVLease *self)
{
    assert(self->busy);
    self->busy = false;
}
/* Calls fork, reorder, room, ... until it succeeds or no other part frees anything. pre: busy. */
typedef mt_status mt_py_kvcall(KVLease *self, const void *args, mt_error *err);
/* -1 with an error. */
int mt_py_kvlease_try(KVLease *self, mt_py_kvcall *call, const void *args, const char *doing);

/* --- what Python gives: lease.c --- */

/* A Python object as n or any number of sizes. */
typedef struct mt_py_sizes {
    size_t *at; /* PyMem; NULL when `same` counts for all */
    size_t n;
    Py_ssize_t same;
} mt_py_sizes;

/* A sequence or 1-D integer tensor of whole numbers >= 0; `or_one`: or, into `same`, one whole
 * number of any sign. -1 with an error. */
int mt_py_sizes_read(KVLease *self, PyObject *object, const char *what, bool or_one,
                     mt_py_sizes *out);
void mt_py_sizes_done(mt_py_sizes *sizes);
/* Reads `object` as sizes and calls change(self, sizes), which is -1 with an error, with the lease
 * busy. None, or NULL with an error. */
typedef int mt_py_kvchange(KVLease *self, const mt_py_sizes *sizes);
PyObject *mt_py_kvlease_with_sizes(PyObject *op, PyObject *object, const char *what, bool or_one,
                                   mt_py_kvchange *change);
/* A layer's number. -1 with an error. */
int mt_py_layer_read(KVLease *self, PyObject *object, size_t *out);

/* --- the methods, by file --- */

/* update.c */
PyObject *mt_py_kvlease_update(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *names);
PyObject *mt_py_kvlease_advance(PyObject *op, PyObject *counts);
/* views.c */
PyObject *mt_py_kvlease_views(KVLease *self, size_t layer, size_t tokens, bool token_first);
/* Reports to autograd that the views' values have changed. -1 with an error. */
int mt_py_kvlease_changed(KVLease *self);
/* The same, if the step writes where a view shows something already. Appending does not. */
int mt_py_kvlease_overwrites(KVLease *self, size_t layer, const mt_kvstep *step);
PyObject *mt_py_kvlease_layer(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *mt_py_kvlease_buffers(PyObject *op, PyObject *none);
/* Gives up the lease's own reference to what its views share. rows, tokens: what it was, for those
 * who ask who keeps its pages. */
void mt_py_kvlease_drop_views(KVLease *self, size_t rows, size_t tokens);
/* rows.c */
PyObject *mt_py_kvlease_crop(PyObject *op, PyObject *n);
PyObject *mt_py_kvlease_reorder(PyObject *op, PyObject *index);
PyObject *mt_py_kvlease_select(PyObject *op, PyObject *rows);
PyObject *mt_py_kvlease_fork(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *mt_py_kvlease_reserve(PyObject *op, PyObject *args, PyObject *kwargs);

/* acquire.c */
PyObject *mt_py_kvpool_acquire(PyObject *op, PyObject *args);

#endif
