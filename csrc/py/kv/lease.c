/* lease.c -- memtools._core.KVLease: arguments, lifecycle, its attributes, and its type.
 *
 * How this file works. A method reads its arguments, enters the lease (mt_py_kvlease_enter, which
 * refuses a released, a busy or a forked one), calls the core by mt_py_kvlease_try, and leaves. The
 * lease ends in kvlease_let_go, however it ends: release(), the with block or the garbage collector.
 * update() and advance() are in update.c, what gives tensors in views.c, what changes rows in
 * rows.c. */
#include <stddef.h>

#include "py/kv/pool.h"

#include <structmember.h>

#include "core/base/size.h"
#include "py/base/number.h"
#include "py/base/objects.h"

/* --- counts, lengths, row numbers and layers as Python gives them ---------------------------- */

static int
kvlease_refuse(PyObject *object, const char *what)
{
    PyErr_Format(PyExc_TypeError,
                 "%s must be whole numbers in a sequence or a 1-D integer tensor, got %s", what,
                 Py_TYPE(object)->tp_name);
    return -1;
}

/* A bool is an int to Python, but a list of them is a mask: what it means is not what it says. */
static int
kvlease_read_one(PyObject *item, const char *what, size_t *out)
{
    mt_py_whole number = MT_PY_INDEX(what);

    if (!PyIndex_Check(item) || PyBool_Check(item)) {
        PyErr_Format(PyExc_TypeError, "%s must be whole numbers, got %s among them", what,
                     Py_TYPE(item)->tp_name);
        return -1;
    }
    if (!mt_py_whole_take(item, &number)) return -1;
    if (number.value >= 0) {
        *out = (size_t)number.value;
        return 0;
    }
    PyErr_Format(PyExc_IndexError, "%s must be 0 or more, got %zd among them", what, number.value);
    return -1;
}

/* A tuple, so that it cannot change while __index__ of its items runs. */
static int
read_tuple(PyObject *tuple, const char *what, mt_py_sizes *out)
{
    size_t n = (size_t)PyTuple_GET_SIZE(tuple);

    if ((out->at = PyMem_New(size_t, n + 1)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    out->n = n;
    for (size_t i = 0; i < n; i++)
        if (kvlease_read_one(PyTuple_GET_ITEM(tuple, (Py_ssize_t)i), what, &out->at[i]) < 0) {
            mt_py_sizes_done(out);
            return -1;
        }
    return 0;
}

/* A tensor's numbers as a list, or one as an int; other objects as they are. */
static PyObject *
without_tensor(KVLease *self, PyObject *object, const char *what)
{
    int is_tensor = PyObject_IsInstance(object, (PyObject *)self->state->tensor);

    if (is_tensor < 0) return NULL;
    if (!is_tensor) return Py_NewRef(object);
    return PyObject_CallMethod(self->pool->helpers, "whole_numbers", "Os", object, what);
}

static int
kvlease_read_plain(PyObject *object, const char *what, mt_py_sizes *out)
{
    PyObject *tuple;
    int failed;

    if (PyUnicode_Check(object) || PyBytes_Check(object)) return kvlease_refuse(object, what);
    if ((tuple = PySequence_Tuple(object)) == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Clear();
        return kvlease_refuse(object, what);
    }
    failed = read_tuple(tuple, what, out);
    Py_DECREF(tuple);
    return failed;
}

int
mt_py_sizes_read(KVLease *self, PyObject *object, const char *what, bool or_one, mt_py_sizes *out)
{
    PyObject *plain = without_tensor(self, object, what);
    mt_py_whole same = MT_PY_INDEX(what);
    int failed;

    *out = (mt_py_sizes){0};
    if (plain == NULL) return -1;
    if (!or_one || !PyIndex_Check(plain) || PyBool_Check(plain)) {
        failed = kvlease_read_plain(plain, what, out);
    } else {
        failed = mt_py_whole_take(plain, &same) ? 0 : -1;
        out->same = same.value;
    }
    Py_DECREF(plain);
    return failed;
}

void
mt_py_sizes_done(mt_py_sizes *sizes)
{
    PyMem_Free(sizes->at);
    sizes->at = NULL;
}

int
mt_py_layer_read(KVLease *self, PyObject *object, size_t *out)
{
    mt_py_whole layer = MT_PY_INDEX("layer");
    size_t layers = self->pool->config.layers;

    if (!mt_py_whole_take(object, &layer)) return -1;
    if (layer.value >= 0 && (size_t)layer.value < layers) {
        *out = (size_t)layer.value;
        return 0;
    }
    PyErr_Format(PyExc_IndexError, "layer %zd of a pool of %zu layers", layer.value, layers);
    return -1;
}

/* --- lifecycle ------------------------------------------------------------------------------- */

PyObject *
mt_py_kvlease_wrap(PyTypeObject *type, KVPool *pool, mt_kvlease *core)
{
    KVLease *self = (KVLease *)type->tp_alloc(type, 0);

    if (self == NULL) {
        mt_kvlease_release(core);
        return NULL;
    }
    self->state = pool->state;
    self->core = core;
    self->pool = (KVPool *)Py_NewRef((PyObject *)pool);
    self->number = ++pool->lent;
    return (PyObject *)self;
}

static size_t
most_tokens(const mt_kvlease *core)
{
    size_t most = 0;

    for (size_t row = 0; row < mt_kvlease_rows(core); row++)
        most = mt_size_max(most, mt_kvlease_row_tokens(core, row));
    return most;
}

/* Gives everything back, once. Without views of it, in this moment: our own reference to their
 * storage goes first. In a forked child nothing is touched but that reference. */
static void
kvlease_let_go(KVLease *self)
{
    mt_kvlease *core = self->core;

    if (core == NULL) return;
    self->core = NULL;
    if (!mt_kvguests_at_home(self->pool->guests)) {
        mt_py_kvlease_drop_views(self, 0, 0);
        return;
    }
    mt_py_kvpool_await(self->pool, mt_kvlease_pool(core));
    if (mt_py_kvpool_follow_stream(self->pool, mt_kvlease_pool(core)) < 0)
        PyErr_Clear(); /* the default stream, then */
    mt_py_kvlease_drop_views(self, mt_kvlease_rows(core), most_tokens(core));
    mt_kvlease_release(core);
}

static int
kvlease_traverse(PyObject *op, visitproc visit, void *arg)
{
    KVLease *self = (KVLease *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->pool);
    Py_VISIT(self->base);
    return 0;
}

static int
kvlease_clear(PyObject *op)
{
    kvlease_let_go((KVLease *)op);
    return 0; /* pool stays: methods count on it, and no cycle goes through it alone */
}

/* May run in the middle of anything, an exception included. */
static void
kvlease_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject *kind, *value, *trace;

    PyObject_GC_UnTrack(op);
    if (((KVLease *)op)->weakrefs != NULL) PyObject_ClearWeakRefs(op);
    PyErr_Fetch(&kind, &value, &trace);
    kvlease_let_go((KVLease *)op);
    PyErr_Restore(kind, value, trace);
    Py_CLEAR(((KVLease *)op)->pool);
    type->tp_free(op);
    Py_DECREF(type);
}

/* False with an exception in a forked child, or while another thread is inside. */
static bool
is_ours(const KVLease *self)
{
    if (!mt_kvguests_at_home(self->pool->guests))
        PyErr_Format(PyExc_RuntimeError,
                     "this lease's pool belongs to process %ld, which was forked; make a new pool "
                     "in the child",
                     self->pool->owner);
    else if (self->busy)
        PyErr_SetString(PyExc_RuntimeError,
                        "this lease is in use by another thread; use a lease from one thread at a "
                        "time");
    else
        return true;
    return false;
}

bool
mt_py_kvlease_enter(KVLease *self)
{
    if (!is_ours(self)) return false;
    if (self->core == NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "this lease was released; acquire() another one, its views stay readable");
        return false;
    }
    if (mt_kvhold_is_done(self->hold)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "torch moved the views of this lease into its own memory, as "
                        "share_memory_() and queues between processes do, so they are no longer "
                        "its pages; release() it, and share a copy: clone() first");
        return false;
    }
    self->busy = true;
    mt_py_kvpool_await(self->pool, mt_kvlease_pool(self->core));
    return true;
}

static PyObject *
kvlease_release(PyObject *op, PyObject *Py_UNUSED(none))
{
    KVLease *self = (KVLease *)op;

    if (self->core == NULL) Py_RETURN_NONE;
    if (!is_ours(self)) return NULL;
    kvlease_let_go(self);
    Py_RETURN_NONE;
}

static PyObject *
kvlease_open(PyObject *op, PyObject *Py_UNUSED(none))
{
    KVLease *self = (KVLease *)op;

    if (!mt_py_kvlease_enter(self)) return NULL;
    mt_py_kvlease_leave(self);
    return Py_NewRef(op);
}

static PyObject *
kvlease_exit(PyObject *op, PyObject *Py_UNUSED(exception))
{
    return kvlease_release(op, NULL);
}

int
mt_py_kvlease_try(KVLease *self, mt_py_kvcall *call, const void *args, const char *doing)
{
    mt_error err;

    assert(self->busy);
    if (mt_py_kvpool_follow_stream(self->pool, mt_kvlease_pool(self->core)) < 0) return -1;
    if (call(self, args, &err) == MT_OK) return 0;
    if (mt_py_kvpool_freed_some(self->pool, &err) && call(self, args, &err) == MT_OK) return 0;
    if (!PyErr_Occurred()) mt_py_kvpool_raise(self->pool, &err, doing);
    return -1;
}

PyObject *
mt_py_kvlease_with_sizes(PyObject *op, PyObject *object, const char *what, bool or_one,
                         mt_py_kvchange *change)
{
    KVLease *self = (KVLease *)op;
    mt_py_sizes sizes;
    int failed = -1;

    if (mt_py_sizes_read(self, object, what, or_one, &sizes) < 0) return NULL;
    if (mt_py_kvlease_enter(self)) {
        failed = change(self, &sizes);
        mt_py_kvlease_leave(self);
    }
    mt_py_sizes_done(&sizes);
    return failed < 0 ? NULL : Py_NewRef(Py_None);
}

/* --- attributes --------------------------------------------------------------------------- */

static PyObject *
length_of_row(const void *core, size_t row)
{
    return PyLong_FromSize_t(mt_kvlease_row_tokens(core, row));
}

static PyObject *
get_lengths(PyObject *op, void *Py_UNUSED(which))
{
    KVLease *self = (KVLease *)op;
    PyObject *list;

    if (!mt_py_kvlease_enter(self)) return NULL;
    list = mt_py_list(mt_kvlease_rows(self->core), length_of_row, self->core);
    mt_py_kvlease_leave(self);
    return list;
}

enum { TOKENS, BATCH };

static PyObject *
kvlease_get_number(PyObject *op, void *which)
{
    KVLease *self = (KVLease *)op;
    size_t number;

    if (!mt_py_kvlease_enter(self)) return NULL;
    number = (intptr_t)which == TOKENS ? most_tokens(self->core) : mt_kvlease_rows(self->core);
    mt_py_kvlease_leave(self);
    return PyLong_FromSize_t(number);
}

static PyObject *
kvlease_seq_length(PyObject *op, PyObject *which)
{
    KVLease *self = (KVLease *)op;
    size_t layer, length;

    if (mt_py_layer_read(self, which, &layer) < 0 || !mt_py_kvlease_enter(self)) return NULL;
    length = mt_kvlease_longest(self->core, layer);
    mt_py_kvlease_leave(self);
    return PyLong_FromSize_t(length);
}

static PyObject *
get_pool(PyObject *op, void *Py_UNUSED(which))
{
    return Py_NewRef((PyObject *)((KVLease *)op)->pool);
}

static PyObject *
kvlease_get_name(PyObject *op, void *Py_UNUSED(which))
{
    return PyUnicode_FromFormat("lease %llu", (unsigned long long)((KVLease *)op)->number);
}

static PyObject *
get_released(PyObject *op, void *Py_UNUSED(which))
{
    return PyBool_FromLong(((KVLease *)op)->core == NULL);
}

/* --- the type -------------------------------------------------------------------------------- */

static PyGetSetDef getters[] = {
    {"lengths", get_lengths, NULL, "The tokens of each row, in its longest layer.", NULL},
    {"num_tokens", kvlease_get_number, NULL, "Tokens of the longest row.",
     (void *)(intptr_t)TOKENS},
    {"batch_size", kvlease_get_number, NULL, "The number of rows.", (void *)(intptr_t)BATCH},
    {"pool", get_pool, NULL, "The pool of the rows.", NULL},
    {"name", kvlease_get_name, NULL, "Shown in statistics and errors, such as \"lease 3\".", NULL},
    {"released", get_released, NULL, "Whether the lease has ended.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"update", MT_PY_FUNCTION(mt_py_kvlease_update), METH_FASTCALL | METH_KEYWORDS,
     "update($self, layer, k, v, counts=None)\n--\n\n"
     "Append k and v to one layer and return all keys and values of that layer.\n\n"
     "K and V are views of all tokens of the layer, `[B, H_kv, T, D]`, where T is the length of\n"
     "the longest row; shorter rows are padded with zeros. No earlier token is copied. Costs 1 to "
     "2 us and the copy of k and v.\n\n"
     "Args:\n"
     "    layer: the index of the layer.\n"
     "    k: the new keys, `[B, H_kv, t, D]`, with the pool's dtype and device and any strides.\n"
     "    v: the new values, of the same shape.\n"
     "    counts: how many of the t tokens are real: an int for all rows, or one for each row.\n"
     "        The other tokens are left out. None: all t.\n\n"
     "Returns (K, V). An error changes nothing.\n\n"
     "Raises:\n"
     "    IndexError: there is no such layer, or a row would be longer than max_tokens.\n"
     "    BudgetError: the limit leaves no room for the tokens.\n"
     "    ValueError: a shape, a device or a count does not fit, or k or v requires grad while\n"
     "        grad mode is on.\n"
     "    TypeError: k or v is not a plain tensor, or has another dtype."},
    {"layer", MT_PY_FUNCTION(mt_py_kvlease_layer), METH_VARARGS | METH_KEYWORDS,
     "layer($self, i, *, layout=\"BHTD\", tokens=None)\n--\n\n"
     "Return the keys and values of one layer as views, without adding any.\n\n"
     "Past the end of a row they read as zeros. Rows share tokens after `fork()`, `reorder()` and\n"
     "`select()`: call `reserve(0, private=True)` before you write into them.\n\n"
     "Args:\n"
     "    i: the index of the layer.\n"
     "    layout: \"BHTD\" for `[B, H_kv, T, D]` or \"BTHD\" for `[B, T, H_kv, D]`.\n"
     "    tokens: the length T of the views, 0 to max_tokens. None: the longest row.\n\n"
     "Returns (K, V).\n\n"
     "Raises IndexError for a missing layer or tokens beyond max_tokens; BudgetError if zeros\n"
     "behind a row need a page and the limit leaves no room."},
    {"crop", mt_py_kvlease_crop, METH_O,
     "crop($self, n, /)\n--\n\n"
     "Shorten rows, for example to drop rejected tokens in speculative decoding.\n\n"
     "Pages past the new lengths go back to the pool.\n\n"
     "Args:\n"
     "    n: an int of 0 or more is the most that every row keeps; a negative int drops the\n"
     "        last -n tokens of every row; a sequence or a tensor has a length for each row."},
    {"reorder", mt_py_kvlease_reorder, METH_O,
     "reorder($self, index, /)\n--\n\n"
     "Replace row i with row index[i], for beam search. Full pages are shared, not copied.\n\n"
     "Args:\n"
     "    index: a row number for each row, with repeats; a sequence of ints or an integer tensor\n"
     "        of one dimension.\n\n"
     "Raises IndexError for a missing row, ValueError for another number of rows,\n"
     "BudgetError if the limit leaves no room; then nothing has changed."},
    {"select", mt_py_kvlease_select, METH_O,
     "select($self, rows, /)\n--\n\n"
     "Keep, repeat or drop rows, such as finished ones, as `reorder()` does.\n\n"
     "Args:\n"
     "    rows: the numbers of at least one row, and at most as many as the lease was acquired\n"
     "        with."},
    {"fork", MT_PY_FUNCTION(mt_py_kvlease_fork), METH_VARARGS | METH_KEYWORDS,
     "fork($self, n=1, num_tokens=None)\n--\n\n"
     "Continue every row in n rows of a new lease, which share the tokens so far.\n\n"
     "Row r * n + i of the new lease continues row r of this one. A shared page is copied before\n"
     "one of them writes to it. Costs a few us for each row, and no memory.\n\n"
     "Args:\n"
     "    n: how many rows continue each row.\n"
     "    num_tokens: tokens of each row, the shared ones included, for which room is reserved\n"
     "        now. None: no room is reserved.\n\n"
     "Raises ValueError for more than max_sequences rows, BudgetError if the limit leaves no\n"
     "room. Then nothing has changed."},
    {"advance", mt_py_kvlease_advance, METH_O,
     "advance($self, n, /)\n--\n\n"
     "Count tokens that the program wrote into the views, past the ends of the rows.\n\n"
     "Args:\n"
     "    n: how many tokens each row gained, in every layer: an int for all rows, or a sequence\n"
     "        or a tensor with one for each row.\n\n"
     "Raises IndexError if a row would be longer than max_tokens, BudgetError if the limit\n"
     "leaves no room; then nothing has changed."},
    {"reserve", MT_PY_FUNCTION(mt_py_kvlease_reserve), METH_VARARGS | METH_KEYWORDS,
     "reserve($self, tokens, /, *, private=False)\n--\n\n"
     "Make the tokens past the end of every row writable in place, before `advance()`.\n\n"
     "Pages are taken for them in every layer; the last page of a row is copied if it is shared.\n"
     "Earlier tokens stay shared.\n\n"
     "Args:\n"
     "    tokens: up to which token of each row, 0 to max_tokens.\n"
     "    private: also copy every shared page of the rows, so that no other row shows what is\n"
     "        written there, until the next `fork()`, `reorder()` or `select()`.\n\n"
     "Raises IndexError for tokens beyond max_tokens, BudgetError if the limit leaves no room;\n"
     "then nothing has changed."},
    {"buffers", mt_py_kvlease_buffers, METH_NOARGS,
     "buffers($self, /)\n--\n\n"
     "Return keys and values of all layers as views of full capacity, at addresses that stay.\n\n"
     "For code that keeps its own position: it writes in place and calls `advance()`. On the\n"
     "host, pages appear when they are written to, and count from then on. On CUDA call\n"
     "`reserve()` before writing.\n\n"
     "Returns (K, V), `[L, B, H_kv, max_tokens, D]` each.\n\n"
     "Raises ValueError if layer_group is neither 1 nor the number of layers."},
    {"seq_length", kvlease_seq_length, METH_O,
     "seq_length($self, layer, /)\n--\n\n"
     "Return the tokens of the longest row in one layer. Raises IndexError for a missing layer."},
    {"release", kvlease_release, METH_NOARGS,
     "release($self, /)\n--\n\n"
     "End the lease and return every page to the pool.\n\n"
     "Pages of live views are returned when the last view dies. May be called twice."},
    {"__enter__", kvlease_open, METH_NOARGS, "__enter__($self, /)\n--\n\n"},
    {"__exit__", kvlease_exit, METH_VARARGS, "__exit__($self, /, *exception)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(KVLease, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native half of memtools.KVLease."},
    {Py_tp_dealloc, kvlease_dealloc},
    {Py_tp_traverse, kvlease_traverse},
    {Py_tp_clear, kvlease_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_members, members},
    {0, NULL},
};

/* HAVE_GC: it owns its pool, which a subclass may let refer back. */
static PyType_Spec spec = {
    .name = "memtools._core.KVLease",
    .basicsize = sizeof(KVLease),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int
mt_py_kvlease_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->KVLease);
}
