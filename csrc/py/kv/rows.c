/* rows.c -- what changes a lease's rows as wholes: crop, reorder, select, fork, reserve.
 *
 * How this file works. Each method reads its arguments, which may run Python code, before it enters
 * the lease. Then it checks them against the lease's rows, calls the core through
 * mt_py_kvlease_try, and marks the views as changed for autograd. */
#include "py/kv/pool.h"

#include "py/base/number.h"

/* --- crop ------------------------------------------------------------------------------------ */

/* n >= 0: at most n tokens of each row; n < 0: all but the last -n. */
static size_t
kept_of(const mt_kvlease *core, size_t row, Py_ssize_t n)
{
    size_t length = mt_kvlease_row_tokens(core, row), cut = (size_t)0 - (size_t)n;

    if (n >= 0) return (size_t)n;
    return cut > length ? 0 : length - cut;
}

static bool
shortens(const mt_kvlease *core, const size_t *lengths)
{
    for (size_t row = 0; row < mt_kvlease_rows(core); row++)
        if (lengths[row] < mt_kvlease_row_tokens(core, row)) return true;
    return false;
}

static int
crop_to(KVLease *self, const size_t *lengths)
{
    if (!shortens(self->core, lengths)) return 0;
    if (mt_py_kvlease_changed(self) < 0) return -1;
    mt_kvlease_crop(self->core, lengths);
    return 0;
}

static int
crop_rows(KVLease *self, const mt_py_sizes *n)
{
    size_t rows = mt_kvlease_rows(self->core);
    size_t *lengths;
    int failed;

    if (n->at != NULL && n->n != rows) {
        PyErr_Format(PyExc_ValueError, "crop() got %zu lengths, this lease has %zu rows", n->n,
                     rows);
        return -1;
    }
    if (mt_py_kvpool_follow_stream(self->pool, mt_kvlease_pool(self->core)) < 0) return -1;
    if (n->at != NULL) return crop_to(self, n->at);
    if ((lengths = PyMem_New(size_t, rows)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t row = 0; row < rows; row++)
        lengths[row] = kept_of(self->core, row, n->same);
    failed = crop_to(self, lengths);
    PyMem_Free(lengths);
    return failed;
}

PyObject *
mt_py_kvlease_crop(PyObject *op, PyObject *n)
{
    return mt_py_kvlease_with_sizes(op, n, "lengths", true, crop_rows);
}

/* --- reorder and select ---------------------------------------------------------------------- */

static mt_status
reorder(KVLease *self, const void *args, mt_error *err)
{
    const mt_py_sizes *index = args;

    return mt_kvlease_reorder(self->core, index->at, index->n, err);
}

static int
take_rows(KVLease *self, const mt_py_sizes *index, const char *doing)
{
    size_t rows = mt_kvlease_rows(self->core);

    for (size_t i = 0; i < index->n; i++)
        if (index->at[i] >= rows) {
            PyErr_Format(PyExc_IndexError, "%s got row %zu, this lease has rows 0 to %zu", doing,
                         index->at[i], rows - 1);
            return -1;
        }
    if (mt_py_kvlease_try(self, reorder, index, doing) < 0) return -1;
    return mt_py_kvlease_changed(self);
}

static int
reorder_rows(KVLease *self, const mt_py_sizes *index)
{
    size_t rows = mt_kvlease_rows(self->core);

    if (index->n != rows) {
        PyErr_Format(PyExc_ValueError,
                     "reorder() takes one row number for each of the %zu rows, got %zu; select() "
                     "changes how many there are",
                     rows, index->n);
        return -1;
    }
    return take_rows(self, index, "reorder()");
}

static int
select_rows(KVLease *self, const mt_py_sizes *index)
{
    size_t most = mt_kvlease_max_rows(self->core);

    if (index->n == 0 || index->n > most) {
        PyErr_Format(PyExc_ValueError,
                     "select() takes 1 to %zu rows, as many as this lease was acquired with, got "
                     "%zu",
                     most, index->n);
        return -1;
    }
    return take_rows(self, index, "select()");
}

PyObject *
mt_py_kvlease_reorder(PyObject *op, PyObject *index)
{
    return mt_py_kvlease_with_sizes(op, index, "row numbers", false, reorder_rows);
}

PyObject *
mt_py_kvlease_select(PyObject *op, PyObject *rows)
{
    return mt_py_kvlease_with_sizes(op, rows, "row numbers", false, select_rows);
}

/* --- fork ------------------------------------------------------------------------------------ */

typedef struct forked {
    size_t n, tokens;
    mt_kvlease **out;
} forked;

static mt_status
fork_lease(KVLease *self, const void *args, mt_error *err)
{
    const forked *f = args;

    return mt_kvlease_fork(self->core, f->n, f->tokens, f->out, err);
}

static int
fork_arguments(PyObject *args, PyObject *kwargs, forked *out)
{
    static char *names[] = {"n", "num_tokens", NULL};
    mt_py_whole n = MT_PY_WHOLE("fork(): n", 1, PY_SSIZE_T_MAX, 1);
    mt_py_whole count = MT_PY_WHOLE("fork(): num_tokens", 0, PY_SSIZE_T_MAX, 0);
    PyObject *tokens = Py_None;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&O:fork", names, mt_py_whole_take, &n,
                                     &tokens))
        return -1;
    if (tokens != Py_None && !mt_py_whole_take(tokens, &count)) return -1;
    out->n = (size_t)n.value;
    out->tokens = (size_t)count.value;
    return 0;
}

PyObject *
mt_py_kvlease_fork(PyObject *op, PyObject *args, PyObject *kwargs)
{
    KVLease *self = (KVLease *)op;
    mt_kvlease *child = NULL;
    forked f = {.out = &child};
    PyObject *lease = NULL;

    if (fork_arguments(args, kwargs, &f) < 0) return NULL;
    if (!mt_py_kvlease_enter(self)) return NULL;
    if (mt_py_kvlease_try(self, fork_lease, &f, "fork()") == 0)
        lease = mt_py_kvlease_wrap(Py_TYPE(op), self->pool, child);
    mt_py_kvlease_leave(self);
    return lease;
}

/* --- reserve --------------------------------------------------------------------------------- */

typedef struct reservation {
    size_t tokens;
    bool held;
} reservation;

static mt_status
reserve(KVLease *self, const void *args, mt_error *err)
{
    const reservation *want = args;

    return mt_kvlease_reserve(self->core, want->tokens, want->held, err);
}

static int
reserve_tokens(KVLease *self, Py_ssize_t tokens, bool held)
{
    reservation want = {(size_t)tokens, held};
    size_t most = self->pool->config.max_tokens;

    if (tokens < 0 || want.tokens > most) {
        PyErr_Format(tokens < 0 ? PyExc_ValueError : PyExc_IndexError,
                     "reserve() takes 0 to %zu tokens, max_tokens of this pool, got %zd", most,
                     tokens);
        return -1;
    }
    return mt_py_kvlease_try(self, reserve, &want, "reserve()");
}

PyObject *
mt_py_kvlease_reserve(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", "private", NULL};
    KVLease *self = (KVLease *)op;
    mt_py_whole tokens = MT_PY_INDEX("reserve(): tokens");
    int held = 0, failed;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$p:reserve", names, mt_py_whole_take,
                                     &tokens, &held))
        return NULL;
    if (!mt_py_kvlease_enter(self)) return NULL;
    failed = reserve_tokens(self, tokens.value, held != 0);
    mt_py_kvlease_leave(self);
    return failed < 0 ? NULL : Py_NewRef(Py_None);
}
