/* history.c -- how this file works.
 *
 * memtools._core.GateHistory is an object around one mt_gatehist. This file makes and closes it,
 * appends, and is the sequence of it: device.c records tensors on a CUDA device, statistics.c makes
 * tuples and bytes. Whatever runs Python or gives the GIL up may close or change the history, so
 * each function asks again afterwards (history.h says what guards what). An append that the budget
 * refuses asks the others in it with the GIL released, and starts again. */
#include "py/gate/history.h"

#include <stddef.h>
#include <structmember.h>
#include <string.h>

#include "py/budget/budget.h"
#include "py/base/errors.h"
#include "py/base/number.h"
#include "py/base/objects.h"
#include "os/port/vmem.h"

bool
mt_py_gatehist_is_open(GateHistory *self)
{
    if (self->core != NULL) return true;
    PyErr_SetString(PyExc_ValueError, "this GateHistory is closed");
    return false;
}

PyObject *
mt_py_gatehist_wrap(PyTypeObject *type, mt_state *st, mt_gatehist *core)
{
    GateHistory *self = (GateHistory *)type->tp_alloc(type, 0);

    if (self == NULL) {
        mt_gatehist_free(core);
        return NULL;
    }
    self->state = st;
    self->core = core;
    return (PyObject *)self;
}

static PyObject *
raise_shape(const mt_error *err, const char *doing)
{
    if (err->shape == MT_SHAPE_EXPERTS)
        return PyErr_Format(
            PyExc_ValueError,
            "%s: got %zu experts, this history records %zu; use one history per gate", doing,
            err->asked, err->limit);
    if (err->shape == MT_SHAPE_TOP_K)
        return PyErr_Format(PyExc_ValueError,
                            "%s: got %zu experts, fewer than top_k=%zu; pass a smaller top_k",
                            doing, err->asked, err->limit);
    return PyErr_Format(PyExc_ValueError, "%s: got %zu %s, at most %zu are possible; append parts",
                        doing, err->asked, err->shape == MT_SHAPE_ROWS ? "rows" : "columns",
                        err->limit);
}

static PyObject *
raise_limit(mt_state *st, const mt_gatehist *core, const mt_error *err, const char *doing)
{
    const mt_gatehist_config *c = core == NULL ? NULL : mt_gatehist_configuration(core);

    if (c != NULL && c->ledger != NULL && err->asked <= c->max_bytes)
        return mt_py_raise_budget(st, c->ledger, err, doing,
                                  "clear() or close() what holds it, raise the budget's limit, or "
                                  "record less (dtype=\"float16\", keep=\"topk\")");
    return mt_py_raise_own(st, "BudgetError",
                           "%s: one record takes %zu bytes, max_bytes is %zu; raise max_bytes, "
                           "append fewer rows at a time, or record less (dtype=\"float16\", "
                           "keep=\"topk\")",
                           doing, err->asked, err->limit);
}

PyObject *
mt_py_gatehist_raise(mt_state *st, const mt_gatehist *core, const mt_error *err, const char *doing)
{
    if (err->status == MT_ESHAPE) return raise_shape(err, doing);
    if (err->status == MT_ELIMIT) return raise_limit(st, core, err, doing);
    if (err->status == MT_EFORMAT)
        return PyErr_Format(PyExc_ValueError, "%s: not a gate history: %s", doing, err->detail);
    if (err->status == MT_ENOMEM && err->asked > 0)
        return PyErr_Format(
            PyExc_MemoryError,
            "%s: the system refused %zu bytes of address space (%s, errno %d); lower "
            "max_bytes or max_entries, or raise the process's limit (ulimit -v)",
            doing, err->asked, err->call, err->native);
    return mt_py_raise(st, err, doing);
}

/* Finds a word in a NULL-terminated list; -1 with a ValueError that names the choices. */
static int
choice(const char *sentence, const char *word, const char *const *choices)
{
    for (int i = 0; choices[i] != NULL; i++)
        if (strcmp(word, choices[i]) == 0) return i;
    mt_py_refuse_word(sentence, word);
    return -1;
}

static int
dtype_choice(const char *name)
{
    if (name == NULL) return MT_DTYPE_SAME;
    for (int dtype = 0; dtype < MT_DTYPE_COUNT; dtype++)
        if (mt_dtype_writable((mt_dtype)dtype) && strcmp(name, mt_dtype_name((mt_dtype)dtype)) == 0)
            return dtype;
    mt_py_refuse_word(
        "dtype must be \"float64\", \"float32\", \"float16\", \"bfloat16\" or None for "
        "what comes",
        name);
    return MT_DTYPE_COUNT;
}

static bool
parse_config(mt_state *st, PyObject *args, PyObject *kwargs, mt_gatehist_config *c)
{
    static const char *const trims[] = {"half", "oldest", NULL};
    static const char *const keeps[] = {"all", "topk", NULL};
    static char *names[] = {"max_entries", "max_bytes",  "trim",   "keep", "dtype",
                            "top_k",       "statistics", "budget", NULL};
    const char *trim = "half", *keep = "all", *dtype = NULL;
    PyObject *budget = Py_None;
    mt_py_whole max_entries = MT_PY_WHOLE("max_entries", 1, PY_SSIZE_T_MAX, 0);
    mt_py_whole max_bytes = MT_PY_WHOLE("max_bytes", 1, PY_SSIZE_T_MAX, 0);
    mt_py_whole top_k = MT_PY_WHOLE("top_k", 1, MT_TOP_K_MAX, 1);
    mt_ledger *ledger = NULL;
    int statistics = 1, trim_choice, keep_choice;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|sszO&pO:GateHistory", names,
                                     mt_py_whole_take, &max_entries, mt_py_whole_take, &max_bytes,
                                     &trim, &keep, &dtype, mt_py_whole_take, &top_k, &statistics,
                                     &budget))
        return false;
    if (budget != Py_None && (ledger = mt_py_budget_ledger(st, budget)) == NULL) return false;
    if ((trim_choice = choice("trim must be \"half\" or \"oldest\"", trim, trims)) < 0)
        return false;
    if ((keep_choice = choice("keep must be \"all\" or \"topk\"", keep, keeps)) < 0) return false;
    *c = (mt_gatehist_config){.max_entries = (size_t)max_entries.value,
                              .max_bytes = (size_t)max_bytes.value,
                              .trim = (mt_trim)trim_choice,
                              .keep = (mt_keep)keep_choice,
                              .dtype = dtype_choice(dtype),
                              .top_k = (unsigned)top_k.value,
                              .statistics = statistics != 0,
                              .ledger = ledger,
                              .owner_asks = true};
    return c->dtype != MT_DTYPE_COUNT;
}

static PyObject *
gatehist_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    mt_state *st = mt_state_of_type(type);
    mt_gatehist_config config;
    mt_gatehist *core;
    mt_error err;

    if (st == NULL || !parse_config(st, args, kwargs, &config)) return NULL;
    if (mt_gatehist_new(&mt_alloc_libc, &mt_vmem_linux, &config, &core, &err) != MT_OK)
        return mt_py_gatehist_raise(st, NULL, &err, "GateHistory()");
    return mt_py_gatehist_wrap(type, st, core);
}

/* Drops what the object holds; it stays a valid, closed object. */
static void
let_go(GateHistory *self)
{
    mt_gatehist *core = self->core;

    self->core = NULL; /* first: dropping the stage lets other threads run */
    mt_py_gatehist_drop_stage(self);
    mt_gatehist_free(core);
}

static void
gatehist_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    if (((GateHistory *)op)->weakrefs != NULL) PyObject_ClearWeakRefs(op);
    let_go((GateHistory *)op);
    if (((GateHistory *)op)->lock != NULL) PyThread_free_lock(((GateHistory *)op)->lock);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
gatehist_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    let_go((GateHistory *)op);
    Py_RETURN_NONE;
}

/* Returns what the others in the budget gave, of whom a history is none: it has nothing idle. Other
 * threads run meanwhile, and may close the history. pre: it has a budget. */
static size_t
ask_others(const GateHistory *self, size_t bytes)
{
    mt_ledger *ledger = mt_ledger_hold(mt_gatehist_configuration(self->core)->ledger);
    size_t gave;

    Py_BEGIN_ALLOW_THREADS;
    gave = mt_ledger_reclaim(ledger, NULL, bytes);
    mt_ledger_drop(ledger);
    Py_END_ALLOW_THREADS;
    return gave;
}

void
mt_py_gatehist_ask(GateHistory *self)
{
    mt_gatehist_lack lack = mt_gatehist_lacks(self->core);

    ask_others(self, lack.bytes);
    if (self->core != NULL) mt_gatehist_asked(self->core, lack);
}

bool
mt_py_gatehist_ask_for(GateHistory *self, const mt_error *refused)
{
    bool has_budget = mt_gatehist_configuration(self->core)->ledger != NULL;

    return refused->status == MT_ELIMIT && has_budget && ask_others(self, refused->asked) > 0;
}

/* Everything that runs Python code comes before the tensor's address is read. *lacks: nothing was
 * appended, and the others in the budget must be asked first. */
static int
try_append(GateHistory *self, PyObject *tensor, bool *lacks)
{
    mt_py_tensor t;
    mt_error err;
    mt_status st;
    int failed = 0;

    *lacks = false;
    if (mt_py_tensor_read(self->state, tensor, &t) < 0) return -1;
    if (!mt_py_gatehist_is_open(self)) { /* closed by what read() may have run */
        failed = -1;
    } else if (t.on_device) {
        failed = mt_py_gatehist_append_device(self, &t);
    } else if ((st = mt_gatehist_push(self->core, &t.rows, &err)) == MT_EAGAIN) {
        *lacks = true;
    } else if (st != MT_OK) {
        mt_py_gatehist_raise(self->state, self->core, &err, "GateHistory.append()");
        failed = -1;
    }
    mt_py_tensor_done(&t);
    return failed;
}

static PyObject *
gatehist_append(PyObject *op, PyObject *tensor)
{
    GateHistory *self = (GateHistory *)op;
    int backward, failed;
    bool lacks;

    if (!mt_py_gatehist_is_open(self) || mt_state_connect(self->state) < 0) return NULL;
    if ((backward = mt_py_in_backward(self->state)) < 0) return NULL;
    if (backward) {
        self->recomputed++;
        Py_RETURN_NONE;
    }
    while ((failed = try_append(self, tensor, &lacks)) == 0 && lacks)
        mt_py_gatehist_ask(self);
    if (failed < 0) return NULL;
    Py_RETURN_NONE;
}

static Py_ssize_t
gatehist_len(PyObject *op)
{
    GateHistory *self = (GateHistory *)op;

    return mt_py_gatehist_is_open(self) ? (Py_ssize_t)mt_gatehist_len(self->core) : -1;
}

bool
mt_py_gatehist_unchanged(GateHistory *self, uint64_t appended, size_t len)
{
    if (self->core != NULL && mt_gatehist_appended(self->core) == appended &&
        mt_gatehist_len(self->core) == len)
        return true;
    PyErr_SetString(PyExc_RuntimeError,
                    "a finalizer or another thread changed the history while it "
                    "was read; read it again");
    return false;
}

/* Copies entry i into a new tensor. */
static PyObject *
copied_entry(GateHistory *self, size_t i)
{
    uint64_t appended = mt_gatehist_appended(self->core);
    size_t len = mt_gatehist_len(self->core);
    mt_rows shape = mt_gatehist_shape(self->core, i);
    PyObject *tensor;
    void *data;

    if ((tensor = mt_py_tensor_new(self->state, &shape, &data)) == NULL) return NULL;
    if (!mt_py_gatehist_unchanged(self, appended, len)) {
        Py_DECREF(tensor);
        return NULL;
    }
    mt_gatehist_copy(self->core, i, data);
    return tensor;
}

/* Importing torch and waiting for the device let other threads append, clear and close: the entry
 * is found again by its number. */
static PyObject *
entry_tensor(GateHistory *self, size_t i)
{
    uint64_t number = mt_gatehist_appended(self->core) - mt_gatehist_len(self->core) + i, oldest;

    if (mt_state_connect(self->state) < 0 || mt_py_gatehist_arrive(self, number) < 0) return NULL;
    oldest = mt_gatehist_appended(self->core) - mt_gatehist_len(self->core);
    if (number >= oldest) return copied_entry(self, (size_t)(number - oldest));
    PyErr_Format(PyExc_IndexError, "entry %zu was evicted while it was waited for", i);
    return NULL;
}

/* Also what iteration uses, as a list's does: an index past the end ends it. */
static PyObject *
gatehist_item(PyObject *op, Py_ssize_t i)
{
    GateHistory *self = (GateHistory *)op;

    if (!mt_py_gatehist_is_open(self)) return NULL;
    if (i < 0 || (size_t)i >= mt_gatehist_len(self->core))
        return PyErr_Format(PyExc_IndexError, "entry %zd of a history of %zu entries", i,
                            mt_gatehist_len(self->core));
    return entry_tensor(self, (size_t)i);
}

/* Where the budget refuses, the others in it are asked once; the indices count what is there after
 * that. */
static PyObject *
gatehist_slice(GateHistory *self, PyObject *slice)
{
    Py_ssize_t start, stop, step;
    mt_gatehist *core;
    mt_error err;

    if (PySlice_Unpack(slice, &start, &stop, &step) < 0) return NULL; /* this may close it */
    for (bool asked = false;; asked = true) {
        Py_ssize_t first = start, end = stop, count;

        if (mt_py_gatehist_arrive_all(self) < 0) return NULL;
        count = PySlice_AdjustIndices((Py_ssize_t)mt_gatehist_len(self->core), &first, &end, step);
        if (mt_gatehist_slice(self->core, (size_t)first, step, (size_t)count, &core, &err) == MT_OK)
            return mt_py_gatehist_wrap(Py_TYPE(self), self->state, core);
        if (asked || !mt_py_gatehist_ask_for(self, &err))
            return mt_py_gatehist_raise(self->state, self->core, &err, "GateHistory[slice]");
    }
}

static PyObject *
gatehist_subscript(PyObject *op, PyObject *key)
{
    GateHistory *self = (GateHistory *)op;
    Py_ssize_t i;

    if (!mt_py_gatehist_is_open(self)) return NULL;
    if (PySlice_Check(key)) return gatehist_slice(self, key);
    if (!PyIndex_Check(key))
        return PyErr_Format(PyExc_TypeError, "history indices are integers or slices, not %s",
                            Py_TYPE(key)->tp_name);
    if ((i = PyNumber_AsSsize_t(key, PyExc_IndexError)) == -1 && PyErr_Occurred()) return NULL;
    if (!mt_py_gatehist_is_open(self)) return NULL; /* __index__ may have closed it */
    return gatehist_item(op, i < 0 ? i + (Py_ssize_t)mt_gatehist_len(self->core) : i);
}

static PyObject *
gatehist_clear(PyObject *op, PyObject *Py_UNUSED(none))
{
    GateHistory *self = (GateHistory *)op;

    if (!mt_py_gatehist_is_open(self)) return NULL;
    mt_gatehist_clear(self->core);
    Py_RETURN_NONE;
}

/* One getter for all numbers; the closure says where in here the number is. */
typedef struct numbers {
    uint64_t nbytes, arena_bytes, n_experts, appended, max_entries, max_bytes, top_k;
    uint64_t recomputed, device_waits, pending;
} numbers;

static PyObject *
get_number(PyObject *op, void *offset)
{
    GateHistory *self = (GateHistory *)op;
    const mt_gatehist_config *c;
    numbers n;

    if (!mt_py_gatehist_is_open(self)) return NULL;
    c = mt_gatehist_configuration(self->core);
    n = (numbers){.nbytes = mt_gatehist_bytes(self->core),
                  .arena_bytes = mt_gatehist_extent(self->core),
                  .n_experts = mt_gatehist_experts(self->core),
                  .appended = mt_gatehist_appended(self->core),
                  .max_entries = c->max_entries,
                  .max_bytes = c->max_bytes,
                  .top_k = c->top_k,
                  .recomputed = self->recomputed,
                  .device_waits = self->device_waits,
                  .pending = self->stage == NULL ? 0 : mt_stage_len(self->stage)};
    return mt_py_uint64_at((const char *)&n + (intptr_t)offset, 0);
}

static PyObject *
gatehist_get_closed(PyObject *op, void *Py_UNUSED(which))
{
    return PyBool_FromLong(((GateHistory *)op)->core == NULL);
}

static PyObject *
get_statistics(PyObject *op, void *Py_UNUSED(which))
{
    GateHistory *self = (GateHistory *)op;

    if (!mt_py_gatehist_is_open(self)) return NULL;
    return PyBool_FromLong(mt_gatehist_configuration(self->core)->statistics);
}

static PyObject *
get_word(PyObject *op, void *which)
{
    GateHistory *self = (GateHistory *)op;
    const mt_gatehist_config *c;

    if (!mt_py_gatehist_is_open(self)) return NULL;
    c = mt_gatehist_configuration(self->core);
    if (strcmp(which, "trim") == 0)
        return PyUnicode_FromString(c->trim == MT_TRIM_HALF ? "half" : "oldest");
    if (strcmp(which, "keep") == 0)
        return PyUnicode_FromString(c->keep == MT_KEEP_ALL ? "all" : "topk");
    if (c->dtype == MT_DTYPE_SAME) Py_RETURN_NONE;
    return PyUnicode_FromString(mt_dtype_name((mt_dtype)c->dtype));
}

#define NUMBER(name, doc) {#name, get_number, NULL, doc, (void *)offsetof(numbers, name)}
static PyGetSetDef getters[] = {
    NUMBER(nbytes, "Bytes of the present entries."),
    NUMBER(arena_bytes, "Bytes of memory that entries have used so far."),
    NUMBER(n_experts, "The columns of every entry; 0 before the first."),
    NUMBER(appended, "Entries ever appended."),
    NUMBER(max_entries, "The most entries."),
    NUMBER(max_bytes, "The most bytes of entries."),
    NUMBER(top_k, "Experts of a token that count as its load."),
    NUMBER(recomputed, "Appends that recorded nothing because they ran in a backward pass."),
    NUMBER(device_waits, "Appends that waited for the device."),
    NUMBER(pending, "Entries still in transfer from the device."),
    {"closed", gatehist_get_closed, NULL, "Whether `close()` was called.", NULL},
    {"statistics", get_statistics, NULL, "Whether statistics are kept.", NULL},
    {"trim", get_word, NULL, "How room is made, \"half\" or \"oldest\".", "trim"},
    {"keep", get_word, NULL, "What is recorded of a row, \"all\" gates or the \"topk\" largest.",
     "keep"},
    {"dtype", get_word, NULL, "Of the entries; None if each keeps its own.", "dtype"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"append", gatehist_append, METH_O,
     "append($self, gates, /)\n--\n\n"
     "Record a copy of a gate tensor as the newest entry.\n\n"
     "Old entries are dropped to stay within the limits. A CUDA tensor is copied asynchronously.\n"
     "Nothing is recorded during a backward pass, where activation checkpointing repeats the\n"
     "forward pass; `recomputed` counts these calls.\n\n"
     "Args:\n"
     "    gates: a floating-point tensor `[n, n_experts]` on any device, with any strides, with\n"
     "        or without a graph. The first entry decides n_experts.\n\n"
     "Raises TypeError if gates is not a plain floating-point tensor; ValueError if it has not\n"
     "two dimensions or another number of experts; BudgetError if it does not fit into\n"
     "max_bytes or a Budget. Then nothing has changed."},
    {"clear", gatehist_clear, METH_NOARGS,
     "clear($self, /)\n--\n\n"
     "Drop all entries, but not the statistics. Releases the memory of a Budget at once."},
    {"reset_stats", mt_py_gatehist_reset_statistics, METH_NOARGS,
     "reset_stats($self, /)\n--\n\n"
     "Forget the statistics, not the entries."},
    {"close", gatehist_close, METH_NOARGS,
     "close($self, /)\n--\n\n"
     "Release all memory. Later use raises ValueError. May be called twice."},
    {"_sums", mt_py_gatehist_sums, METH_O, "_sums($self, window, /)\n--\n\n"},
    {"_windows", mt_py_gatehist_windows, METH_NOARGS, "_windows($self, /)\n--\n\n"},
    {"_cat", mt_py_gatehist_cat, METH_NOARGS, "_cat($self, /)\n--\n\n"},
    {"_copy", mt_py_gatehist_clone, METH_NOARGS, "_copy($self, /)\n--\n\n"},
    {"_state", mt_py_gatehist_state, METH_NOARGS, "_state($self, /)\n--\n\n"},
    {"_restore", mt_py_gatehist_restore, METH_VARARGS,
     "_restore($self, experts, appended, counted, span, sums, index, records, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(GateHistory, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native half of memtools.GateHistory."},
    {Py_tp_new, gatehist_new},
    {Py_tp_dealloc, gatehist_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_members, members},
    {Py_tp_iter, PySeqIter_New},
    {Py_sq_length, gatehist_len},
    {Py_sq_item, gatehist_item},
    {Py_mp_length, gatehist_len},
    {Py_mp_subscript, gatehist_subscript},
    {0, NULL},
};

/* No Py_TPFLAGS_HAVE_GC: it holds no PyObject but weak references, so it cannot be in a cycle.
 * Python subclasses it once, in memtools/_gate/history.py. */
static PyType_Spec spec = {
    .name = "memtools._core.GateHistory",
    .basicsize = sizeof(GateHistory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_gatehist_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->GateHistory);
}
