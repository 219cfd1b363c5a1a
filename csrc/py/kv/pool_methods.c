/* pool_methods.c -- what a KVPool tells, trim, and the type. */
#include "py/kv/pool.h"

#include "core/kv/check.h"

#include <stddef.h>
#include <structmember.h>

enum { LINGER_MAX = 64 }; /* leases named; more are only counted */

/* --- statistics ------------------------------------------------------------------------------ */

static PyObject *
lingering_list(KVPool *self)
{
    mt_kvlinger line[LINGER_MAX];
    size_t n = mt_kvguests_lingering(self->guests, line, LINGER_MAX);
    PyObject *list = PyList_New(0), *item;

    if (n > LINGER_MAX) n = LINGER_MAX;
    for (size_t i = 0; list != NULL && i < n; i++) {
        item = Py_BuildValue("Knnn", (unsigned long long)line[i].number, (Py_ssize_t)line[i].rows,
                             (Py_ssize_t)line[i].tokens, (Py_ssize_t)line[i].views);
        if (item == NULL || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *
numbers_tuple(const mt_kvstats *s)
{
    const uint64_t numbers[] = {
        s->live_bytes,
        s->shared_bytes,
        s->idle_bytes,
        s->promised_bytes,
        s->reserved_bytes,
        s->physical_bytes,
        s->peak_bytes,
        s->payload_bytes,
        s->address_bytes,
        s->maps,
        s->mapped_again_bytes,
        s->leases,
        s->rows,
        s->lingering,
        s->lingering_bytes,
        s->acquired,
        s->forked,
        s->released,
        s->taken,
        s->recycled,
        s->dropped,
        s->copied,
        s->map_calls,
    };
    Py_ssize_t n = sizeof numbers / sizeof numbers[0];
    PyObject *tuple = PyTuple_New(n), *number;

    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        if ((number = PyLong_FromUnsignedLongLong(numbers[i])) == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, number);
    }
    return tuple;
}

/* (numbers in the order of mt_kvstats, limit or None, [(lease, rows, tokens, views)]) */
static PyObject *
kvpool_stats(PyObject *op, PyObject *Py_UNUSED(none))
{
    KVPool *self = (KVPool *)op;
    mt_kvstats stats;
    size_t limit;

    if (!mt_py_kvpool_enter(self)) return NULL;
    mt_kvpool_stats(self->core, &stats);
    mt_py_kvpool_leave(self);
    limit = mt_ledger_limit(self->ledger);
    if (limit == SIZE_MAX)
        return Py_BuildValue("NON", numbers_tuple(&stats), Py_None, lingering_list(self));
    return Py_BuildValue("NKN", numbers_tuple(&stats), (unsigned long long)limit,
                         lingering_list(self));
}

/* --- methods --------------------------------------------------------------------------------- */

/* (batch_size, num_tokens, shared_tokens) */
static PyObject *
kvpool_would_fit(PyObject *op, PyObject *args)
{
    KVPool *self = (KVPool *)op;
    Py_ssize_t rows, tokens, shared;
    bool fits;

    if (!PyArg_ParseTuple(args, "nnn:_would_fit", &rows, &tokens, &shared)) return NULL;
    if (rows < 1 || tokens < 0 || shared < 0)
        return PyErr_Format(PyExc_ValueError,
                            "would_fit() takes batch_size of at least 1 and tokens of 0 or more, "
                            "got %zd, %zd and shared_tokens=%zd",
                            rows, tokens, shared);
    if (!mt_py_kvpool_enter(self)) return NULL;
    fits = mt_kvpool_would_fit(self->core, (size_t)rows, (size_t)tokens, (size_t)shared);
    mt_py_kvpool_leave(self);
    return PyBool_FromLong(fits);
}

static PyObject *
kvpool_trim(PyObject *op, PyObject *target)
{
    KVPool *self = (KVPool *)op;
    size_t bytes = PyLong_AsSize_t(target), freed;

    if (bytes == (size_t)-1 && PyErr_Occurred()) return NULL;
    if (!mt_py_kvpool_enter(self)) return NULL;
    if (mt_py_kvpool_follow_stream(self, self->core) < 0) {
        mt_py_kvpool_leave(self);
        return NULL;
    }
    atomic_fetch_add(&self->trims, 1);
    Py_BEGIN_ALLOW_THREADS;
    freed = mt_kvpool_trim(self->core, bytes);
    atomic_fetch_sub(&self->trims, 1);
    Py_END_ALLOW_THREADS;
    mt_py_kvpool_leave(self);
    return PyLong_FromSize_t(freed);
}

static PyObject *
kvpool_check(PyObject *op, PyObject *Py_UNUSED(none))
{
    KVPool *self = (KVPool *)op;
    bool right;

    if (!mt_py_kvpool_enter(self)) return NULL;
    right = mt_kvpool_check(self->core);
    mt_py_kvpool_leave(self);
    return PyBool_FromLong(right);
}

static PyObject *
kvpool_open(PyObject *op, PyObject *Py_UNUSED(none))
{
    return mt_py_kvpool_is_open((KVPool *)op) ? Py_NewRef(op) : NULL;
}

static PyObject *
kvpool_exit(PyObject *op, PyObject *Py_UNUSED(exception))
{
    return mt_py_kvpool_close(op, NULL);
}

/* --- attributes: they stay readable after close() -------------------------------------------- */

static PyObject *
get_object(PyObject *op, void *offset)
{
    return Py_NewRef(*(PyObject **)((char *)op + (intptr_t)offset));
}

static PyObject *
get_size(PyObject *op, void *offset)
{
    return PyLong_FromSize_t(*(const size_t *)((char *)op + (intptr_t)offset));
}

static PyObject *
get_closed(PyObject *op, void *Py_UNUSED(which))
{
    KVPool *self = (KVPool *)op;

    return PyBool_FromLong(self->core == NULL || self->closing);
}

static PyObject *
get_layout(PyObject *op, void *Py_UNUSED(which))
{
    return PyUnicode_FromString(((KVPool *)op)->config.layout == MT_KV_HEAD_MAJOR ? "head"
                                                                                  : "token");
}

#define OBJECT(name, field, doc) {name, get_object, NULL, doc, (void *)offsetof(KVPool, field)}
#define SIZE(name, field, doc)   {name, get_size, NULL, doc, (void *)offsetof(KVPool, field)}
static PyGetSetDef getters[] = {
    OBJECT("dtype", dtype, "The torch.dtype of keys and values."),
    OBJECT("device", device, "The torch.device that holds them."),
    OBJECT("name", name, "How budgets and errors call this pool."),
    OBJECT("budget", budget, "The Budget that its pages count in."),
    SIZE("num_layers", config.layers, "Layers."),
    SIZE("num_kv_heads", config.heads, "Heads of K and of V in each layer."),
    SIZE("head_dim", config.head_dim, "Elements of one head."),
    SIZE("max_tokens", config.max_tokens, "Tokens that one row can hold."),
    SIZE("max_sequences", config.max_rows, "Rows that one lease can have."),
    SIZE("layer_group", config.layer_group, "Layers that share pages; 1 but for layout \"token\"."),
    SIZE("block_tokens", block_tokens, "Tokens by which a row's memory grows and is shared."),
    SIZE("block_bytes", block_bytes, "Bytes of so many tokens in all layers."),
    {"layout", get_layout, NULL, "\"head\" or \"token\": what lies together in memory.", NULL},
    {"closed", get_closed, NULL, "True after close().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"_acquire", mt_py_kvpool_acquire, METH_VARARGS,
     "_acquire($self, type, batch_size, num_tokens, wait, timeout, /)\n--\n\n"},
    {"_would_fit", kvpool_would_fit, METH_VARARGS,
     "_would_fit($self, batch_size, num_tokens, shared_tokens, /)\n--\n\n"},
    {"_stats", kvpool_stats, METH_NOARGS, "_stats($self, /)\n--\n\n"},
    {"_trim", kvpool_trim, METH_O, "_trim($self, target, /)\n--\n\n"},
    {"_check", kvpool_check, METH_NOARGS,
     "_check($self, /)\n--\n\nWhether every invariant holds; for tests."},
    {"close", mt_py_kvpool_close, METH_NOARGS,
     "close($self, /)\n--\n\n"
     "Lend no more, and give idle pages back now. Leases that are alive go on; what they hold is\n"
     "given back with the last of them. Leaving the pool's own with block does the same."},
    {"__enter__", kvpool_open, METH_NOARGS, "__enter__($self, /)\n--\n\n"},
    {"__exit__", kvpool_exit, METH_VARARGS, "__exit__($self, /, *exception)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(KVPool, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native half of memtools.KVPool."},
    {Py_tp_new, mt_py_kvpool_new},
    {Py_tp_dealloc, mt_py_kvpool_dealloc},
    {Py_tp_traverse, mt_py_kvpool_traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_members, members},
    {0, NULL},
};

/* HAVE_GC: it owns what was given as limit, which a subclass may let refer back. */
static PyType_Spec spec = {
    .name = "memtools._core.KVPool",
    .basicsize = sizeof(KVPool),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_kvpool_register(PyObject *module, mt_state *st)
{
    st->KVPool = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
    return st->KVPool == NULL ? -1 : PyModule_AddType(module, st->KVPool);
}
