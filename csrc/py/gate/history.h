/* history.h -- the Python object around one mt_gatehist.
 *
 * What guards what: the GIL guards everything in here but the stage. Every function of core runs
 * from start to end under it, so an append, a clear or a read of one thread is one step for all
 * others. A function that ran Python code or gave the GIL up knows nothing of the history any more:
 * it asks again whether it is open, how long it is, and for how many experts. So an append on the
 * device admits, pushes and claims without a pause in between, and starts again after every wait.
 *
 * `lock` guards the stage and `oldest_pending` over such pauses: a thread that pushes, peeks, pops, frees
 * or replaces the stage holds it. It is taken with the GIL released and no Python code runs under
 * it, so neither lock can wait for the other in a circle. */
#ifndef MT_PY_GATE_HISTORY_H
#define MT_PY_GATE_HISTORY_H

#include "py/base/state.h"
#include "py/tensor/one.h"
#include "core/gate/gate.h"
#include "os/base/forks.h"
#include "core/gate/stage.h"

typedef struct GateHistory {
    PyObject_HEAD
    mt_state *state;         /* kept alive by the type */
    mt_gatehist *core;       /* NULL once closed */
    mt_stage *stage;         /* NULL until a CUDA tensor comes */
    PyThread_type_lock lock; /* NULL as long */
    mt_birth birth;          /* of lock and stage */
    uint64_t oldest_pending; /* no entry below this number is in the stage */
    uint64_t lost_from;      /* entries [lost_from, lost_to) were on their way when this process */
    uint64_t lost_to;        /* was forked: their values never arrive */
    uint64_t recomputed;     /* appends left out because autograd was running backward */
    uint64_t device_waits;   /* appends that had to wait because the device was far behind */
    PyObject *weakrefs;
} GateHistory;

/* False with ValueError after close(). */
bool mt_py_gatehist_is_open(GateHistory *self);

/* True when the history is as it was with these numbers. Making a tensor may run the collector, and
 * with it finalizers that append or close: then RuntimeError, and the tensor is of no use. */
bool mt_py_gatehist_unchanged(GateHistory *self, uint64_t appended, size_t len);

/* Appends a tensor that lies on a CUDA device: starts its copy and returns. -1 with an error. */
int mt_py_gatehist_append_device(GateHistory *self, mt_py_tensor *t);

/* Fills every entry up to and including this number, waiting for the device where it must. The
 * history is open when it returns 0; -1 with an error. */
int mt_py_gatehist_arrive(GateHistory *self, uint64_t number);

/* The same for all entries. */
int mt_py_gatehist_arrive_all(GateHistory *self);

/* After MT_EAGAIN of admit: asks the others in the budget, with the GIL released, which takes as
 * long as they take to give memory back. pre: open, which it may not be afterwards. */
void mt_py_gatehist_ask(GateHistory *self);

/* Ends the device side; waits for copies in flight. */
void mt_py_gatehist_drop_stage(GateHistory *self);

/* Statistics as tuples, saving and loading: in statistics.c. */
PyObject *mt_py_gatehist_sums(PyObject *op, PyObject *window);
PyObject *mt_py_gatehist_windows(PyObject *op, PyObject *none);
PyObject *mt_py_gatehist_state(PyObject *op, PyObject *none);
PyObject *mt_py_gatehist_restore(PyObject *op, PyObject *args);
/* Whether the others in the budget gave way where a new history beside this one was refused. Other
 * threads run meanwhile, and may change or close this one. */
bool mt_py_gatehist_ask_for(GateHistory *self, const mt_error *refused);

PyObject *mt_py_gatehist_clone(PyObject *op, PyObject *none);
PyObject *mt_py_gatehist_cat(PyObject *op, PyObject *none);
PyObject *mt_py_gatehist_reset_statistics(PyObject *op, PyObject *none);

/* Raises what err says of a history and what to do about it, and returns NULL. With the core, which
 * may be NULL, the message of a budget that refuses lists what its members hold. */
PyObject *mt_py_gatehist_raise(mt_state *st, const mt_gatehist *core, const mt_error *err,
                               const char *doing);

/* An object of this type around core, which it takes over, also on failure. */
PyObject *mt_py_gatehist_wrap(PyTypeObject *type, mt_state *st, mt_gatehist *core);

#endif
