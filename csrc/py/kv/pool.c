/* pool.c -- memtools._core.KVPool: its making and end, errors, statistics, trim, and the type.
 *
 * How this file works. A call that may let other threads run counts itself as a user of the pool
 * (mt_py_kvpool_enter), and close() leaves the core to the last of them. Calls of leases need no
 * such count: a lease keeps its pool's core alive. Errors of the core become exceptions in
 * mt_py_kvpool_raise, for pool and leases. acquire() is in acquire.c. */
#include "py/kv/pool.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

#include "py/budget/budget.h"
#include "py/base/objects.h"
#include "py/base/errors.h"
#include "py/base/number.h"
#include "py/tensor/one.h"
#include "cuda/store.h"
#include "os/port/store.h"
#include "core/base/size.h"

enum { LINGER_MAX = 64 }; /* leases named; more are only counted */

/* --- making ---------------------------------------------------------------------------------- */

typedef struct arguments {
    mt_py_whole layers, heads, head_dim, max_tokens, max_rows, group, page_bytes;
    Py_ssize_t elem_bytes;
    PyObject *dtype, *device, *limit, *name, *helpers;
    const char *layout;
    int cuda_device;
} arguments;

/* The core keeps lengths in 32 bits. */
static bool
parse_arguments(PyObject *args, arguments *a)
{
    *a = (arguments){.layers = MT_PY_WHOLE("num_layers", 1, INT32_MAX, 0),
                     .heads = MT_PY_WHOLE("num_kv_heads", 1, PY_SSIZE_T_MAX, 0),
                     .head_dim = MT_PY_WHOLE("head_dim", 1, PY_SSIZE_T_MAX, 0),
                     .max_tokens = MT_PY_WHOLE("max_tokens", 1, INT32_MAX, 0),
                     .max_rows = MT_PY_WHOLE("max_sequences", 1, PY_SSIZE_T_MAX, 0),
                     .group = MT_PY_WHOLE("layer_group", 1, PY_SSIZE_T_MAX, 0),
                     .page_bytes = MT_PY_WHOLE("page_bytes", 0, PY_SSIZE_T_MAX, 0)};
    return PyArg_ParseTuple(args, "O&O&O&O&O&OnOiOsO&O&UO:KVPool", mt_py_whole_take, &a->layers,
                            mt_py_whole_take, &a->heads, mt_py_whole_take, &a->head_dim,
                            mt_py_whole_take, &a->max_tokens, mt_py_whole_take, &a->max_rows,
                            &a->dtype, &a->elem_bytes, &a->device, &a->cuda_device, &a->limit,
                            &a->layout, mt_py_whole_take, &a->group, mt_py_whole_take,
                            &a->page_bytes, &a->name, &a->helpers) != 0;
}

static bool
config_of(const arguments *a, mt_kvconfig *out)
{
    bool head = strcmp(a->layout, "head") == 0;

    if (!head && strcmp(a->layout, "token") != 0)
        mt_py_refuse_word("layout must be \"head\" or \"token\"", a->layout);
    else if (head && a->group.value != 1)
        PyErr_Format(PyExc_ValueError,
                     "layer_group of %zd goes with layout=\"token\"; layout=\"head\" takes 1",
                     a->group.value);
    else if (a->elem_bytes < 1 || a->elem_bytes > 8 || (a->elem_bytes & (a->elem_bytes - 1)) != 0)
        PyErr_Format(PyExc_ValueError, "a dtype of 1, 2, 4 or 8 bytes is taken, got %zd",
                     a->elem_bytes);
    *out = (mt_kvconfig){.layers = (size_t)a->layers.value,
                         .heads = (size_t)a->heads.value,
                         .head_dim = (size_t)a->head_dim.value,
                         .elem_bytes = (size_t)a->elem_bytes,
                         .max_tokens = (size_t)a->max_tokens.value,
                         .max_rows = (size_t)a->max_rows.value,
                         .layout = head ? MT_KV_HEAD_MAJOR : MT_KV_TOKEN_MAJOR,
                         .layer_group = (size_t)a->group.value};
    return !PyErr_Occurred();
}

/* An object with everything but its core. */
static KVPool *
new_object(PyTypeObject *type, mt_state *st, const arguments *a)
{
    KVPool *self = (KVPool *)type->tp_alloc(type, 0);

    if (self == NULL) return NULL;
    self->state = st;
    self->helpers = Py_NewRef(a->helpers);
    self->dtype = Py_NewRef(a->dtype);
    self->device = Py_NewRef(a->device);
    self->name = Py_NewRef(a->name);
    self->budget = Py_NewRef(PyObject_TypeCheck(a->limit, st->Budget) ? a->limit : Py_None);
    self->cuda_device = a->cuda_device;
    self->owner = (long)getpid();
    self->dtype_number = st->shim == NULL ? -1 : st->shim->dtype(a->dtype);
    while ((Py_ssize_t)1 << self->elem_shift < a->elem_bytes)
        self->elem_shift++;
    return self;
}

/* A host store has the system's pages; the pool may count in multiples of them. */
static mt_status
open_store(KVPool *self, size_t page_bytes, mt_store_ops *store, mt_error *err)
{
    mt_status st;

    if (self->cuda_device >= 0)
        return mt_store_cuda_new(&mt_alloc_libc, self->state->natives->cudart, self->cuda_device,
                                 page_bytes, &self->guests->birth, store, err);
    st = mt_store_linux_new(&mt_alloc_libc, store, err);
    if (st != MT_OK || page_bytes == 0) return st;
    if (page_bytes < store->page_bytes || (page_bytes & (page_bytes - 1)) != 0) {
        store->close(store->ctx);
        return mt_fail_shape(err, MT_SHAPE_PAGE_BYTES, page_bytes, store->page_bytes);
    }
    store->page_bytes = page_bytes;
    return MT_OK;
}

static mt_status
open_core(KVPool *self, size_t page_bytes, const char *name, mt_error *err)
{
    mt_store_ops store;
    mt_status st;

    if ((st = mt_kvguests_new(self->state->natives, &self->guests, err)) != MT_OK) return st;
    if ((st = open_store(self, page_bytes, &store, err)) != MT_OK) return st;
    st = mt_kvpool_new(&mt_alloc_libc, &store, self->ledger, name, &self->config,
                       self->cuda_device < 0 ? mt_store_linux_mapped_again() : NULL, &self->core,
                       err);
    if (st != MT_OK) return st;
    self->block_tokens = mt_kvpool_geom(self->core)->block_tokens;
    self->block_bytes = mt_kvpool_geom(self->core)->block_bytes;
    return MT_OK;
}

static int
fill_object(KVPool *self, const arguments *a)
{
    const char *name = PyUnicode_AsUTF8(a->name);
    mt_error err;

    if (name == NULL || !config_of(a, &self->config)) return -1;
    if (self->cuda_device >= 0 && mt_state_cudart(self->state) == NULL) return -1;
    if ((self->ledger = mt_py_ledger(self->state, a->limit, name)) == NULL) return -1;
    if (open_core(self, (size_t)a->page_bytes.value, name, &err) == MT_OK) return 0;
    mt_py_kvpool_raise(self, &err, "KVPool()");
    return -1;
}

static PyObject *
kvpool_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    mt_state *st = mt_state_of_type(type);
    arguments a;
    KVPool *self;

    if (st == NULL || !parse_arguments(args, &a) || mt_state_connect(st) < 0) return NULL;
    if ((self = new_object(type, st, &a)) == NULL) return NULL;
    if (fill_object(self, &a) == 0) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return NULL;
}

/* --- ending ---------------------------------------------------------------------------------- */

/* Leases go on without it; what they hold is freed with the last. */
static void
close_core(KVPool *self)
{
    mt_kvpool *core = self->core;

    self->core = NULL;
    mt_kvpool_close(core);
}

void
mt_py_kvpool_await_trims(KVPool *self, mt_kvpool *core)
{
    while (atomic_load_explicit(&self->trims, memory_order_relaxed) > 0) {
        Py_BEGIN_ALLOW_THREADS;
        mt_kvpool_await(core);
        Py_END_ALLOW_THREADS;
    }
}

bool
mt_py_kvpool_enter(KVPool *self)
{
    if (!mt_py_kvpool_is_open(self)) return false;
    self->users++;
    mt_py_kvpool_await(self, self->core);
    if (!self->closing) return true;
    mt_py_kvpool_leave(self);
    return mt_py_kvpool_is_open(self); /* which says that it was closed meanwhile */
}

void
mt_py_kvpool_leave(KVPool *self)
{
    assert(self->users > 0);
    if (--self->users == 0 && self->closing) close_core(self);
}

static PyObject *
kvpool_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    KVPool *self = (KVPool *)op;

    if (!mt_kvguests_at_home(self->guests)) Py_RETURN_NONE;
    if (self->core == NULL || self->closing) Py_RETURN_NONE;
    self->closing = true;
    if (self->users == 0)
        close_core(self);
    else
        mt_ledger_notify(self->ledger); /* waiting threads look again, and find it closed */
    Py_RETURN_NONE;
}

static int
kvpool_traverse(PyObject *op, visitproc visit, void *arg)
{
    KVPool *self = (KVPool *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->budget);
    return 0;
}

/* In a forked child all but the Python objects is left alone. */
static void
kvpool_dealloc(PyObject *op)
{
    KVPool *self = (KVPool *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) PyObject_ClearWeakRefs(op);
    if (self->guests == NULL || mt_kvguests_at_home(self->guests)) {
        mt_kvpool_close(self->core);
        mt_kvguests_drop(self->guests);
        mt_ledger_drop(self->ledger);
    }
    Py_XDECREF(self->helpers);
    Py_XDECREF(self->dtype);
    Py_XDECREF(self->device);
    Py_XDECREF(self->name);
    Py_XDECREF(self->budget);
    type->tp_free(op);
    Py_DECREF(type);
}

/* --- errors ---------------------------------------------------------------------------------- */

bool
mt_py_kvpool_is_open(KVPool *self)
{
    if (!mt_kvguests_at_home(self->guests))
        PyErr_Format(PyExc_RuntimeError,
                     "this pool belongs to process %ld, which was forked; make a new pool in the "
                     "child",
                     self->owner);
    else if (self->core == NULL || self->closing)
        PyErr_SetString(PyExc_ValueError, "this KVPool is closed; make another one");
    else
        return true;
    return false;
}

static PyObject *
kvpool_raise_shape(const KVPool *self, const mt_error *err, const char *doing)
{
    if (err->shape == MT_SHAPE_TOKENS)
        return PyErr_Format(PyExc_IndexError,
                            "%s: a row would hold %zu tokens, max_tokens of this pool is %zu; "
                            "crop() first, or make the pool with a larger max_tokens",
                            doing, err->asked, err->limit);
    if (err->shape == MT_SHAPE_PAGE_BYTES)
        return PyErr_Format(
            PyExc_ValueError,
            "%s: page_bytes must be a power of two and a multiple of %zu here, got %zu", doing,
            err->limit, err->asked);
    return PyErr_Format(PyExc_ValueError,
                        "%s: a lease of %zu rows was asked for, max_sequences of this pool is %zu",
                        doing, err->asked, self->config.max_rows);
}

static PyObject *
raise_no_memory(const KVPool *self, const mt_error *err, const char *doing)
{
    enum { SIZE = 24 };
    char gib[SIZE];

    snprintf(gib, sizeof gib, "%.3g", (double)err->asked / ((uint64_t)1 << 30));
    if (strcmp(err->call, MT_STORE_ADDRESSES) == 0)
        return PyErr_Format(PyExc_MemoryError,
                            "%s: max_tokens %zu for max_sequences %zu rows takes %s GiB of "
                            "addresses, twice, and the system gave none (see ulimit -v); lower one "
                            "of them",
                            doing, self->config.max_tokens, self->config.max_rows, gib);
    if (strcmp(err->call, MT_STORE_ARENAS) == 0)
        return PyErr_Format(PyExc_MemoryError,
                            "%s: the KV pools of this process have %zu ranges of addresses for "
                            "max_sequences rows each (%zu in this pool), the most that can be "
                            "closed in forked children; make pools with a larger max_sequences, or "
                            "close those that are not in use",
                            doing, err->limit, self->config.max_rows);
    if (strcmp(err->call, MT_STORE_MAPS) == 0)
        return PyErr_Format(PyExc_MemoryError,
                            "%s: the process has as many memory map areas as vm.max_map_count "
                            "allows, less a tenth for the program; release leases or close other "
                            "pools, or raise it (sysctl -w vm.max_map_count=262144)",
                            doing);
    if (err->native == 0) /* malloc says no more */
        return PyErr_Format(PyExc_MemoryError,
                            "%s: there is no host memory for the tables of %zu layers and %zu rows "
                            "(%s); lower one of them",
                            doing, self->config.layers, self->config.max_rows, err->call);
    if (err->native == EPERM || err->native == EACCES || err->native == ENOSYS)
        return PyErr_Format(PyExc_MemoryError,
                            "%s: this process may not call %s (%s); allow it in the seccomp "
                            "profile of the container or sandbox",
                            doing, err->call, strerror(err->native));
    if (err->native == EMFILE || err->native == ENFILE)
        return PyErr_Format(PyExc_MemoryError,
                            "%s: this process has no descriptor left for %s (%s); close files, or "
                            "raise the limit by ulimit -n",
                            doing, err->call, strerror(err->native));
    if (err->native == EBADF)
        return PyErr_Format(PyExc_MemoryError,
                            "%s: the program has closed the descriptor of this pool's memory "
                            "(os.closerange?), so that it cannot grow; make a new pool",
                            doing);
    return PyErr_Format(PyExc_MemoryError,
                        "%s: %s failed with code %d for %zu bytes; make room on the machine, or "
                        "set a limit that it can hold",
                        doing, err->call, err->native, err->asked);
}

/* What is reserved and not allocated is not a mistake, but it surprises a reader of physical bytes. */
static PyObject *
kvpool_raise_limit(KVPool *self, const mt_error *err, const char *doing)
{
    enum { REMEDY_BYTES = 256 };
    char remedy[REMEDY_BYTES];
    mt_kvstats s = {0};

    if (self->core != NULL) mt_kvpool_stats(self->core, &s);
    snprintf(remedy, sizeof remedy,
             "this pool has %.1f MiB reserved but unallocated (num_tokens of leases) and %.1f MiB "
             "idle; raise limit, release leases, or ask for fewer rows or a smaller num_tokens",
             (double)s.promised_bytes / (1 << 20), (double)s.idle_bytes / (1 << 20));
    return mt_py_raise_budget(self->state, self->ledger, err, doing, remedy);
}

PyObject *
mt_py_kvpool_raise(KVPool *self, const mt_error *err, const char *doing)
{
    if (err->status == MT_ELIMIT) return kvpool_raise_limit(self, err, doing);
    if (err->status == MT_ESHAPE) return kvpool_raise_shape(self, err, doing);
    if (err->status == MT_ENOMEM) return raise_no_memory(self, err, doing);
    return mt_py_raise(self->state, err, doing);
}

int
mt_py_kvpool_follow_device(KVPool *self, mt_kvpool *core)
{
    mt_error err;
    void *stream;

    if (mt_py_current_stream(self->state, self->cuda_device, &stream) < 0) return -1;
    if (mt_kvpool_use_stream(core, stream, &err) == MT_OK) return 0;
    mt_py_kvpool_raise(self, &err, "following the stream");
    return -1;
}

bool
mt_py_kvpool_freed_some(KVPool *self, const mt_error *err)
{
    PyObject *done;

    if (self->cuda_device < 0 || err->status != MT_ENOMEM) return false;
    done = PyObject_CallMethod(self->helpers, "free_device_memory", NULL);
    Py_XDECREF(done);
    return done != NULL;
}

/* --- statistics ------------------------------------------------------------------------------ */

static PyObject *
lingering_item(const void *lines, size_t i)
{
    const mt_kvlinger *line = (const mt_kvlinger *)lines + i;

    return Py_BuildValue("Knnn", (unsigned long long)line->number, (Py_ssize_t)line->rows,
                         (Py_ssize_t)line->tokens, (Py_ssize_t)line->views);
}

/* (numbers in the order of mt_kvstats, limit or None, [(lease, rows, tokens, views)]) */
static PyObject *
kvpool_stats(PyObject *op, PyObject *Py_UNUSED(none))
{
    enum { NUMBERS = sizeof(mt_kvstats) / sizeof(uint64_t) };
    KVPool *self = (KVPool *)op;
    mt_kvstats stats;
    uint64_t numbers[NUMBERS];
    mt_kvlinger lines[LINGER_MAX];
    size_t n, limit;

    if (!mt_py_kvpool_enter(self)) return NULL;
    mt_kvpool_stats(self->core, &stats);
    mt_py_kvpool_leave(self);
    memcpy(numbers, &stats, sizeof numbers);
    n = mt_kvguests_lingering(self->guests, lines, LINGER_MAX);
    limit = mt_ledger_limit(self->ledger);
    return Py_BuildValue("NNN", mt_py_list(NUMBERS, mt_py_uint64_at, numbers),
                         limit == SIZE_MAX ? Py_NewRef(Py_None) : PyLong_FromSize_t(limit),
                         mt_py_list(mt_size_min(n, LINGER_MAX), lingering_item, lines));
}

/* --- methods --------------------------------------------------------------------------------- */

/* (batch_size, num_tokens, shared_tokens) */
static PyObject *
kvpool_would_fit(PyObject *op, PyObject *args)
{
    KVPool *self = (KVPool *)op;
    mt_py_whole rows = MT_PY_WHOLE("would_fit(): batch_size", 1, PY_SSIZE_T_MAX, 0);
    mt_py_whole tokens = MT_PY_WHOLE("would_fit(): num_tokens", 0, PY_SSIZE_T_MAX, 0);
    mt_py_whole shared = MT_PY_WHOLE("would_fit(): shared_tokens", 0, PY_SSIZE_T_MAX, 0);
    bool fits;

    if (!PyArg_ParseTuple(args, "O&O&O&:_would_fit", mt_py_whole_take, &rows, mt_py_whole_take,
                          &tokens, mt_py_whole_take, &shared))
        return NULL;
    if (!mt_py_kvpool_enter(self)) return NULL;
    fits = mt_kvpool_would_fit(self->core, (size_t)rows.value, (size_t)tokens.value,
                               (size_t)shared.value);
    mt_py_kvpool_leave(self);
    return PyBool_FromLong(fits);
}

static PyObject *
kvpool_trim(PyObject *op, PyObject *target)
{
    KVPool *self = (KVPool *)op;
    mt_py_whole bytes = MT_PY_WHOLE("trim(): target", 0, PY_SSIZE_T_MAX, 0);
    size_t freed;

    if (!mt_py_whole_take(target, &bytes)) return NULL;
    if (!mt_py_kvpool_enter(self)) return NULL;
    if (mt_py_kvpool_follow_stream(self, self->core) < 0) {
        mt_py_kvpool_leave(self);
        return NULL;
    }
    atomic_fetch_add(&self->trims, 1);
    Py_BEGIN_ALLOW_THREADS;
    freed = mt_kvpool_trim(self->core, (size_t)bytes.value);
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
    return kvpool_close(op, NULL);
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
kvpool_get_closed(PyObject *op, void *Py_UNUSED(which))
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
    OBJECT("dtype", dtype, "Of keys and values."),
    OBJECT("device", device, "Of keys and values."),
    OBJECT("name", name, "Shown in budgets, reports and errors."),
    OBJECT("budget", budget, "Counts the pages."),
    SIZE("num_layers", config.layers, "The number of layers."),
    SIZE("num_kv_heads", config.heads, "Heads of K, and of V, in each layer."),
    SIZE("head_dim", config.head_dim, "Elements of a head."),
    SIZE("max_tokens", config.max_tokens, "The most tokens of a row."),
    SIZE("max_sequences", config.max_rows, "The most rows of a lease."),
    SIZE("layer_group", config.layer_group, "Layers that share a page."),
    SIZE("block_tokens", block_tokens, "Tokens by which a row's memory grows and is shared."),
    SIZE("block_bytes", block_bytes, "The size of these tokens in all layers."),
    {"layout", get_layout, NULL, "What lies together in memory, \"head\" or \"token\".", NULL},
    {"closed", kvpool_get_closed, NULL, "Whether `close()` was called.", NULL},
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
    {"close", kvpool_close, METH_NOARGS,
     "close($self, /)\n--\n\n"
     "Give idle pages back now, and lend no more, as the end of the pool's `with` block does.\n\n"
     "Live leases go on; their memory is given back when the last of them ends. May be called\n"
     "twice."},
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
    {Py_tp_new, kvpool_new},
    {Py_tp_dealloc, kvpool_dealloc},
    {Py_tp_traverse, kvpool_traverse},
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
    return mt_py_add_type(module, &spec, &st->KVPool);
}
