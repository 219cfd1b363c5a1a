/* acquire.c -- KVPool._acquire: a lease now, or by the ledger's queue.
 *
 *   enter ─► first in the queue? ─► acquire ─► fits: done
 *     ▲            │ no               │ does not: wait for a change, GIL released, 50 ms at most
 *     └────────────┴──────────────────┘ signals, close() and the timeout are looked at in between
 */
#include "py/kv/pool.h"

#include "py/budget/budget.h"
#include "py/base/errors.h"
#include "py/base/number.h"
#include "core/base/clock.h"
#include "core/base/size.h"

#define SLICE_NS UINT64_C(50000000)

typedef struct request {
    size_t rows, tokens;
    PyTypeObject *type;
    bool wait;
    double timeout; /* seconds; negative: none */
    uint64_t began;
} request;

/* --- the argument tuple ---------------------------------------------------------------------- */

static bool
take_timeout(PyObject *given, double *seconds)
{
    *seconds = given == Py_None ? -1 : PyFloat_AsDouble(given);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ValueError,
                        "timeout must be at least 0 seconds, or None for no limit; "
                        "got an int that no float holds");
        return false;
    }
    if (PyErr_Occurred()) return false;
    if (given == Py_None || *seconds >= 0) return true; /* not a NaN either */
    PyErr_Format(PyExc_ValueError, "timeout must be at least 0 seconds, or None, got %g", *seconds);
    return false;
}

/* (lease type, batch_size, num_tokens, wait, timeout) */
static bool
parse_request(KVPool *self, PyObject *args, request *r)
{
    mt_py_whole rows = MT_PY_WHOLE("acquire(): batch_size", 1, PY_SSIZE_T_MAX, 0);
    mt_py_whole tokens = MT_PY_WHOLE("acquire(): num_tokens", 0, PY_SSIZE_T_MAX, 0);
    PyObject *timeout;
    int wait;

    if (!PyArg_ParseTuple(args, "O!O&O&pO:_acquire", &PyType_Type, &r->type, mt_py_whole_take,
                          &rows, mt_py_whole_take, &tokens, &wait, &timeout))
        return false;
    if (!PyType_IsSubtype(r->type, self->state->KVLease)) {
        PyErr_SetString(PyExc_TypeError, "the lease's type is KVLease or a subclass of it");
        return false;
    }
    r->rows = (size_t)rows.value;
    r->tokens = (size_t)tokens.value;
    r->wait = wait != 0;
    r->began = mt_now_ns();
    return take_timeout(timeout, &r->timeout);
}

/* --- once ------------------------------------------------------------------------------------ */

/* 1: *out is written; 0: it does not fit, see err; -1 with an exception. */
static int
acquire_once(KVPool *self, const request *r, mt_kvlease **out, mt_error *err)
{
    mt_status st;

    mt_py_kvpool_await(self, self->core);
    if (mt_py_kvpool_follow_stream(self, self->core) < 0) return -1;
    st = mt_kvpool_acquire(self->core, r->rows, r->tokens, out, err);
    if (st != MT_OK && mt_py_kvpool_freed_some(self, err))
        st = mt_kvpool_acquire(self->core, r->rows, r->tokens, out, err);
    if (st == MT_OK) return 1;
    if (PyErr_Occurred()) return -1;
    if (st == MT_ELIMIT) return 0;
    mt_py_kvpool_raise(self, err, "acquire()");
    return -1;
}

/* --- waiting --------------------------------------------------------------------------------- */

/* Bytes of the blocks that the request alone takes; SIZE_MAX where it overflows. */
static size_t
acquire_bytes_of(const KVPool *self, const request *r)
{
    const mt_kvgeom *g = mt_kvpool_geom(self->core);
    size_t tokens = mt_size_min(r->tokens, self->config.max_tokens), bytes;

    if (!mt_size_mul(mt_kvgeom_blocks(g, tokens), g->block_bytes, &bytes)) return SIZE_MAX;
    return mt_size_mul(bytes, r->rows, &bytes) ? bytes : SIZE_MAX;
}

/* What a ledger would say to the request now: the one with the least room. */
static mt_error
refusal_of(const KVPool *self, const request *r)
{
    mt_error err = {.status = MT_ELIMIT, .asked = acquire_bytes_of(self, r), .limit = SIZE_MAX};
    size_t least = SIZE_MAX;

    for (mt_ledger *l = self->ledger; l != NULL; l = mt_ledger_parent(l)) {
        size_t used = mt_ledger_used(l), limit = mt_ledger_limit(l);

        if (limit - mt_size_min(used, limit) >= least) continue;
        least = limit - mt_size_min(used, limit);
        err.used = used;
        err.limit = limit;
    }
    return err;
}

/* tried: what the ledger said when this was the first that waits, or NULL. */
static int
raise_timeout(KVPool *self, const request *r, const mt_error *tried)
{
    mt_error err = tried != NULL ? *tried : refusal_of(self, r);
    mt_kvstats s;

    mt_kvpool_stats(self->core, &s);
    PyErr_Format(PyExc_TimeoutError,
                 "acquire(): no room for %zu rows of %zu tokens in %llu ms: %zu bytes asked%s, %zu "
                 "used, limit %zu; %zu leases are alive, %zu bytes promised and not taken; release "
                 "leases, or wait longer",
                 r->rows, r->tokens, (unsigned long long)((mt_now_ns() - r->began) / 1000000),
                 err.asked, tried == NULL ? " behind others that wait" : "", err.used, err.limit,
                 s.leases, s.promised_bytes);
    return -1;
}

/* 0: look again; -1 with an exception. */
static int
wait_for_change(KVPool *self, const request *r, uint64_t seen, const mt_error *tried)
{
    double spent = (double)(mt_now_ns() - r->began), left = r->timeout * 1e9 - spent;
    uint64_t ns = SLICE_NS;

    if (r->timeout >= 0 && left <= 0) return raise_timeout(self, r, tried);
    if (r->timeout >= 0 && left <= (double)SLICE_NS) ns = (uint64_t)left + 1;
    Py_BEGIN_ALLOW_THREADS;
    mt_ledger_wait(self->ledger, seen, ns);
    Py_END_ALLOW_THREADS;
    if (PyErr_CheckSignals() < 0) return -1;
    return mt_py_kvpool_is_open(self) ? 0 : -1;
}

static int
acquire_in_turn(KVPool *self, const request *r, uint64_t ticket, mt_kvlease **out)
{
    mt_error err;
    bool first = false;
    uint64_t seen;
    int got = 0;

    for (;;) {
        seen = mt_ledger_changes(self->ledger);
        if (mt_ledger_is_first(self->ledger, ticket)) {
            if ((got = acquire_once(self, r, out, &err)) != 0) return got;
            /* What alone is more than the limit never fits: waiting for it would not end. */
            if (acquire_bytes_of(self, r) > err.limit) break;
            first = true;
        }
        if (wait_for_change(self, r, seen, first ? &err : NULL) < 0) return -1;
    }
    mt_py_kvpool_raise(self, &err, "acquire()");
    return -1;
}

PyObject *
mt_py_kvpool_acquire(PyObject *op, PyObject *args)
{
    KVPool *self = (KVPool *)op;
    mt_kvlease *core = NULL;
    uint64_t ticket;
    mt_error err;
    request r;
    int got = -1;

    if (!parse_request(self, args, &r) || !mt_py_kvpool_enter(self)) return NULL;
    if (!r.wait) {
        if ((got = acquire_once(self, &r, &core, &err)) == 0)
            mt_py_kvpool_raise(self, &err, "acquire()");
    } else if ((ticket = mt_ledger_enter(self->ledger)) == 0) {
        PyErr_NoMemory();
    } else {
        got = acquire_in_turn(self, &r, ticket, &core);
        mt_ledger_quit(self->ledger, ticket);
    }
    mt_py_kvpool_leave(self);
    return got == 1 ? mt_py_kvlease_wrap(r.type, self, core) : NULL;
}
