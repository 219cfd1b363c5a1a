/* update.c -- KVLease.update and advance: the way of new tokens into the pool.
 *
 *   update(layer, k, v)   plain ─► read both ─► room ─► overwrites ─► write ─► advance ─► two views
 *                         may run │ no Python code between an address and its use
 *                         Python  │ nothing after room can fail on the host
 *
 * By the shim a tensor of the right kind is read in 10 ns. Any other goes through helpers.plain, in
 * Python, which makes it right where that loses nothing, or raises the sentence. Such code may
 * change either tensor, so both are made plain before the memory of one is looked at. */
#include "py/kv/pool.h"

#include <string.h>

#include "core/base/size.h"
#include "py/base/objects.h"

enum { LET_GO_BYTES = 256 << 10 }; /* longer copies let other threads run */

typedef struct input {
    const char *name; /* "k" or "v" */
    PyObject *tensor; /* borrowed, from the arguments; made plain: a new reference, in made */
    PyObject *made;
    mt_kvsource source;
    size_t tokens;
} input;

typedef struct plan { /* what room takes */
    size_t layer;
    mt_kvstep step;
} plan;

/* --- tensors in ------------------------------------------------------------------------------ */

static bool
fits(const KVLease *self, const mt_torch_view4 *t)
{
    const KVPool *pool = self->pool;
    const mt_kvconfig *c = &pool->config;
    bool here = pool->cuda_device < 0 ? !t->cuda : t->cuda && t->device == pool->cuda_device;

    return here && !t->keeps_graph && t->shape[0] == (int64_t)mt_kvlease_rows(self->core) &&
           t->shape[1] == (int64_t)c->heads && t->shape[3] == (int64_t)c->head_dim &&
           (t->strides[3] == 1 || c->head_dim == 1);
}

static void
update_take(const KVLease *self, const mt_torch_view4 *t, input *out)
{
    ptrdiff_t elem = (ptrdiff_t)self->pool->config.elem_bytes;

    out->source = (mt_kvsource){.data = t->data,
                                .row_stride = (ptrdiff_t)t->strides[0] * elem,
                                .head_stride = (ptrdiff_t)t->strides[1] * elem,
                                .token_stride = (ptrdiff_t)t->strides[2] * elem};
    out->tokens = (size_t)t->shape[2];
}

static bool
read_by_shim(const KVLease *self, input *in)
{
    const mt_state *st = self->state;
    mt_torch_view4 t;

    if (st->shim == NULL ||
        !(Py_IS_TYPE(in->tensor, st->tensor) || Py_IS_TYPE(in->tensor, st->parameter)))
        return false;
    if (st->shim->view4(in->tensor, &t) != 1) return false;
    if (t.dtype != self->pool->dtype_number || !fits(self, &t)) return false;
    update_take(self, &t, in);
    return true;
}

/* 1 and *out; 0 with an error where there is no memory. helpers.plain has seen to the dtype. */
static int
view4_by_dlpack(const KVLease *self, const input *in, mt_torch_view4 *out)
{
    DLTensor dl;

    if (self->state->dlpack->dltensor_from_py_object_no_sync(in->tensor, &dl) != 0) return 0;
    *out = (mt_torch_view4){.data = (const char *)dl.data + (dl.data ? dl.byte_offset : 0),
                            .cuda = dl.device.device_type == kDLCUDA,
                            .device = dl.device.device_id};
    if (dl.ndim != 4 || (size_t)dl.dtype.bits != 8 * self->pool->config.elem_bytes) return 1;
    memcpy(out->shape, dl.shape, sizeof out->shape);
    memcpy(out->strides, dl.strides, sizeof out->strides);
    return 1;
}

/* What helpers.plain made or let pass. pre: no Python code has run since the other one's. */
static int
update_read_plain(const KVLease *self, input *in)
{
    const mt_torch_ops *shim = self->state->shim;
    mt_torch_view4 t;
    int found = shim != NULL ? shim->view4(in->tensor, &t) : view4_by_dlpack(self, in, &t);

    if (found != 1 || (t.data == NULL && t.shape[2] > 0)) {
        PyErr_Format(PyExc_TypeError,
                     "update() cannot read %s: it does not own memory (inside vmap or another "
                     "functorch transform?); call update() outside of it",
                     in->name);
        return -1;
    }
    if (!fits(self, &t) || (shim != NULL && t.dtype != self->pool->dtype_number)) {
        PyErr_Format(PyExc_RuntimeError,
                     "update() cannot read %s: it was changed while update() looked at k and v; "
                     "pass tensors that nothing else changes meanwhile",
                     in->name);
        return -1;
    }
    update_take(self, &t, in);
    return 0;
}

static int
make_plain(const KVLease *self, input *in)
{
    in->made = PyObject_CallMethod(self->pool->helpers, "plain", "OsOn", self->pool, in->name,
                                   in->tensor, (Py_ssize_t)mt_kvlease_rows(self->core));
    in->tensor = in->made;
    return in->made == NULL ? -1 : 0;
}

static int
read_inputs(const KVLease *self, input *k, input *v)
{
    if (read_by_shim(self, k) && read_by_shim(self, v)) return 0;
    if (make_plain(self, k) < 0 || make_plain(self, v) < 0) return -1;
    return update_read_plain(self, k) < 0 || update_read_plain(self, v) < 0 ? -1 : 0;
}

/* --- counts ---------------------------------------------------------------------------------- */

/* Counts of one step, checked against rows and against tokens, the most there are. */
static int
update_step_of(const KVLease *self, const mt_py_sizes *counts, size_t tokens, const char *doing,
               mt_kvstep *out)
{
    size_t rows = mt_kvlease_rows(self->core), most = 0;

    if (counts->at != NULL && counts->n != rows) {
        PyErr_Format(PyExc_ValueError, "%s got %zu counts, this lease has %zu rows", doing,
                     counts->n, rows);
        return -1;
    }
    if (counts->same < 0) {
        PyErr_Format(PyExc_ValueError, "%s takes counts of 0 or more, got %zd", doing,
                     counts->same);
        return -1;
    }
    *out = (mt_kvstep){.count = (size_t)counts->same, .counts = counts->at};
    for (size_t row = 0; row < rows; row++)
        most = mt_size_max(most, mt_kvstep_count(out, row));
    if (most <= tokens) return 0;
    PyErr_Format(PyExc_ValueError, "%s got a count of %zu, k and v hold %zu tokens a row", doing,
                 most, tokens);
    return -1;
}

/* --- the step -------------------------------------------------------------------------------- */

static mt_status
update_make_room(KVLease *self, const void *args, mt_error *err)
{
    const plan *p = args;

    return mt_kvlease_room(self->core, p->layer, &p->step, err);
}

static void
write_host(KVLease *self, const plan *p, const input *k, const input *v)
{
    size_t bytes = k->tokens * mt_kvlease_rows(self->core) *
                   mt_kvlease_geom(self->core)->row_bytes * self->pool->config.heads;

    if (bytes == 0) return; /* an empty tensor has no address */
    if (bytes < LET_GO_BYTES) {
        mt_kvlease_write(self->core, p->layer, &p->step, &k->source, &v->source);
        return;
    }
    Py_BEGIN_ALLOW_THREADS;
    mt_kvlease_write(self->core, p->layer, &p->step, &k->source, &v->source);
    Py_END_ALLOW_THREADS;
}

typedef struct lengths_and_counts {
    const mt_kvlease *core;
    const plan *p;
} lengths_and_counts;

/* (length, count) of the row, for helpers.write. */
static PyObject *
length_and_count(const void *from, size_t row)
{
    const lengths_and_counts *l = from;

    return Py_BuildValue("nn", (Py_ssize_t)mt_kvlease_length(l->core, l->p->layer, row),
                         (Py_ssize_t)mt_kvstep_count(&l->p->step, row));
}

/* By torch's own copies, in the order of its current stream. */
static int
write_device(KVLease *self, const plan *p, const input *k, const input *v)
{
    lengths_and_counts l = {self->core, p};
    size_t longest = 0;
    PyObject *views, *rows, *done = NULL;

    for (size_t row = 0; row < mt_kvlease_rows(self->core); row++)
        longest = mt_size_max(longest, mt_kvlease_length(self->core, p->layer, row) +
                                           mt_kvstep_count(&p->step, row));
    if ((views = mt_py_kvlease_views(self, p->layer, longest, false)) == NULL) return -1;
    if ((rows = mt_py_list(mt_kvlease_rows(self->core), length_and_count, &l)) != NULL)
        done = PyObject_CallMethod(self->pool->helpers, "write", "OOOO", views, k->tensor,
                                   v->tensor, rows);
    Py_DECREF(views);
    Py_XDECREF(rows);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int
append(KVLease *self, const plan *p, const input *k, const input *v)
{
    if (mt_py_kvlease_try(self, update_make_room, p, "update()") < 0) return -1;
    if (mt_py_kvlease_overwrites(self, p->layer, &p->step) < 0) return -1;
    if (self->pool->cuda_device < 0)
        write_host(self, p, k, v);
    else if (write_device(self, p, k, v) < 0)
        return -1;
    mt_kvlease_advance(self->core, p->layer, &p->step);
    return 0;
}

/* pre: busy; both tensors are read. */
static PyObject *
append_read(KVLease *self, size_t layer, const mt_py_sizes *counts, const input *k, const input *v)
{
    plan p = {.layer = layer, .step = {.count = k->tokens}};

    if (k->tokens != v->tokens)
        return PyErr_Format(PyExc_ValueError,
                            "update() takes k and v of as many tokens, got %zu and %zu", k->tokens,
                            v->tokens);
    if (counts != NULL && update_step_of(self, counts, k->tokens, "update()", &p.step) < 0)
        return NULL;
    if (append(self, &p, k, v) < 0) return NULL;
    return mt_py_kvlease_views(self, layer, mt_kvlease_longest(self->core, layer), false);
}

static PyObject *
append_tensors(KVLease *self, size_t layer, PyObject *const given[4], const mt_py_sizes *counts)
{
    input k = {.name = "k", .tensor = given[1]}, v = {.name = "v", .tensor = given[2]};
    PyObject *views = NULL;

    if (!mt_py_kvlease_enter(self)) return NULL;
    if (read_inputs(self, &k, &v) == 0) views = append_read(self, layer, counts, &k, &v);
    mt_py_kvlease_leave(self);
    Py_XDECREF(k.made);
    Py_XDECREF(v.made);
    return views;
}

/* --- the methods ----------------------------------------------------------------------------- */

static int
update_take_arguments(PyObject *const *args, Py_ssize_t nargs, PyObject *names, PyObject *given[4])
{
    static const char *const known[4] = {"layer", "k", "v", "counts"};
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);

    for (Py_ssize_t i = 0; i < nargs && i < 4; i++)
        given[i] = args[i];
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int at = 0;

        while (at < 4 && PyUnicode_CompareWithASCIIString(name, known[at]) != 0)
            at++;
        if (at == 4 || given[at] != NULL) {
            PyErr_Format(PyExc_TypeError,
                         at == 4 ? "update() takes layer, k, v and counts, got %U"
                                 : "update() got %U twice",
                         name);
            return -1;
        }
        given[at] = args[nargs + i];
    }
    if (nargs <= 4 && given[0] != NULL && given[1] != NULL && given[2] != NULL) return 0;
    PyErr_Format(PyExc_TypeError, "update() takes layer, k, v and counts=None, got %zd arguments",
                 nargs + named);
    return -1;
}

PyObject *
mt_py_kvlease_update(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    KVLease *self = (KVLease *)op;
    mt_py_sizes counts = {0};
    PyObject *given[4] = {NULL}, *views;
    bool ragged;
    size_t layer;

    if (update_take_arguments(args, nargs, names, given) < 0) return NULL;
    if (mt_py_layer_read(self, given[0], &layer) < 0) return NULL;
    ragged = given[3] != NULL && given[3] != Py_None;
    if (ragged && mt_py_sizes_read(self, given[3], "counts", true, &counts) < 0) return NULL;
    views = append_tensors(self, layer, given, ragged ? &counts : NULL);
    mt_py_sizes_done(&counts);
    return views;
}

static mt_status
advance(KVLease *self, const void *args, mt_error *err)
{
    return mt_kvlease_advance_all(self->core, args, err);
}

static int
advance_all(KVLease *self, const mt_py_sizes *counts)
{
    mt_kvstep step;

    if (update_step_of(self, counts, SIZE_MAX, "advance()", &step) < 0) return -1;
    return mt_py_kvlease_try(self, advance, &step, "advance()");
}

PyObject *
mt_py_kvlease_advance(PyObject *op, PyObject *n)
{
    return mt_py_kvlease_with_sizes(op, n, "counts", true, advance_all);
}
