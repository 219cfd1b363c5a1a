/* budget.c -- how this file works.
 *
 * memtools._core.Budget is an object around one ledger; parts ask it for that ledger, or have one
 * made of a limit (mt_py_ledger). Reports are taken with the GIL released, because members are
 * asked for what they hold idle, and turned into tuples afterwards. A refusal becomes a BudgetError
 * whose sentence memtools._budget words: it has the format of sizes. */
#include "py/budget/budget.h"

#include <stddef.h>
#include <structmember.h>

#include "py/base/errors.h"
#include "py/base/number.h"
#include "py/base/objects.h"
#include "os/base/forks.h"

typedef struct Budget {
    PyObject_HEAD
    mt_state *state; /* kept alive by the type */
    mt_ledger *ledger;
    PyObject *device; /* a str or None */
    PyObject *weakrefs;
} Budget;

/* --- ledgers out of Python objects ----------------------------------------------------------- */

static mt_ledger *
new_ledger(mt_state *st, size_t limit, const char *name, mt_ledger *parent)
{
    mt_ledger *ledger;
    mt_birth birth = mt_birth_now();
    mt_error err;

    if (mt_ledger_new(&mt_alloc_libc, limit, name, parent, &ledger, &err) == MT_OK) {
        if (parent == NULL) mt_ledger_notice_forks(ledger, &birth);
        return ledger;
    }
    mt_py_raise(st, &err, "Budget()");
    return NULL;
}

/* None: there is no limit. memtools._base.size reads text and refuses other types. */
static bool
budget_bytes_of(PyObject *limit, size_t *out)
{
    mt_py_whole whole = MT_PY_WHOLE("limit", 1, PY_SSIZE_T_MAX, 0);
    PyObject *module, *bytes;
    bool taken = false;

    *out = SIZE_MAX;
    if (limit == Py_None) return true;
    if ((module = PyImport_ImportModule("memtools._base.size")) == NULL) return false;
    bytes = PyObject_CallMethod(module, "parse_bytes", "Os", limit, "limit");
    Py_DECREF(module);
    if (bytes != NULL) taken = mt_py_whole_take(bytes, &whole) != 0;
    Py_XDECREF(bytes);
    if (taken) *out = (size_t)whole.value;
    return taken;
}

mt_ledger *
mt_py_budget_ledger(mt_state *st, PyObject *budget)
{
    if (PyObject_TypeCheck(budget, st->Budget)) return ((Budget *)budget)->ledger;
    PyErr_Format(PyExc_TypeError, "a Budget is needed, got %s", Py_TYPE(budget)->tp_name);
    return NULL;
}

mt_ledger *
mt_py_ledger(mt_state *st, PyObject *limit, const char *name)
{
    size_t bytes;

    if (PyObject_TypeCheck(limit, st->Budget)) return mt_ledger_hold(((Budget *)limit)->ledger);
    return budget_bytes_of(limit, &bytes) ? new_ledger(st, bytes, name, NULL) : NULL;
}

/* No limit is None. */
static PyObject *
bytes_or_none(size_t bytes)
{
    if (bytes == SIZE_MAX) Py_RETURN_NONE;
    return PyLong_FromSize_t(bytes);
}

/* --- reports --------------------------------------------------------------------------------- */

/* All lines, in PyMem memory. Asking the members may take a while, so other threads run. NULL with
 * MemoryError. pre: the ledger is held. */
static mt_holder *
take_report(mt_ledger *ledger, size_t *n)
{
    for (size_t cap = 16;; cap = *n + 4) { /* some may join in between */
        mt_holder *lines = PyMem_Calloc(cap, sizeof *lines);
        if (lines == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        Py_BEGIN_ALLOW_THREADS;
        *n = mt_ledger_report(ledger, lines, cap);
        Py_END_ALLOW_THREADS;
        if (*n <= cap) return lines;
        PyMem_Free(lines);
    }
}

/* Names are cut between characters, and came from Python: they are UTF-8. */
static PyObject *
line_tuple(const void *lines, size_t i)
{
    const mt_holder *line = &((const mt_holder *)lines)[i];

    return Py_BuildValue("(sKKKNKO)", line->name, (unsigned long long)line->reserved,
                         (unsigned long long)line->idle, (unsigned long long)line->peak,
                         bytes_or_none(line->limit), (unsigned long long)line->depth,
                         line->suballocation ? Py_True : Py_False);
}

static PyObject *
budget_report(PyObject *op, PyObject *Py_UNUSED(none))
{
    size_t n;
    mt_holder *lines = take_report(((Budget *)op)->ledger, &n);
    PyObject *list = lines == NULL ? NULL : mt_py_list(n, line_tuple, lines);

    PyMem_Free(lines);
    return list;
}

/* --- the sentence ---------------------------------------------------------------------------- */

/* The ledger that said no, by its figures: borrowed, this one or a parent. Two of one limit are
 * distinguished by what is used. */
static mt_ledger *
refuser(mt_ledger *ledger, const mt_error *err)
{
    mt_ledger *found = NULL;

    for (mt_ledger *l = ledger; l != NULL; l = mt_ledger_parent(l)) {
        if (mt_ledger_limit(l) != err->limit) continue;
        if (found == NULL || mt_ledger_used(l) == err->used) found = l;
    }
    return found != NULL ? found : ledger;
}

/* What memtools._budget makes of the refusal and of what the members of `by` hold. */
static PyObject *
sentence(mt_ledger *by, bool nested, const mt_error *err, const char *doing, const char *remedy)
{
    PyObject *module, *text;
    mt_holder *lines;
    size_t n;

    if ((lines = take_report(by, &n)) == NULL) return NULL;
    if ((module = PyImport_ImportModule("memtools._budget")) == NULL) {
        PyMem_Free(lines);
        return NULL;
    }
    text = PyObject_CallMethod(module, "_refusal", "sKKNzNs", doing, (unsigned long long)err->asked,
                               (unsigned long long)err->used, bytes_or_none(err->limit),
                               nested ? mt_ledger_name(by) : NULL, mt_py_list(n, line_tuple, lines),
                               remedy);
    Py_DECREF(module);
    PyMem_Free(lines);
    return text;
}

PyObject *
mt_py_raise_budget(mt_state *st, mt_ledger *ledger, const mt_error *err, const char *doing,
                   const char *remedy)
{
    mt_ledger *by = mt_ledger_hold(refuser(ledger, err)); /* others may close the part meanwhile */
    bool nested = by != ledger || mt_ledger_parent(by) != NULL;
    PyObject *text = sentence(by, nested, err, doing, remedy);

    mt_ledger_drop(by);
    if (text != NULL) mt_py_raise_own(st, "BudgetError", "%U", text);
    Py_XDECREF(text);
    return NULL;
}

/* --- the type -------------------------------------------------------------------------------- */

/* (limit, name, device, parent) */
static PyObject *
budget_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"limit", "name", "device", "parent", NULL};
    mt_state *st = mt_state_of_type(type);
    PyObject *limit, *device = Py_None, *parent = Py_None;
    mt_ledger *above = NULL;
    const char *name;
    Budget *self;
    size_t bytes;

    if (st == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "Os|OO:Budget", names, &limit,
                                                   &name, &device, &parent))
        return NULL;
    if (parent != Py_None && (above = mt_py_budget_ledger(st, parent)) == NULL) return NULL;
    if (device != Py_None && !PyUnicode_Check(device))
        return PyErr_Format(PyExc_TypeError, "device must be a str or None, not %s",
                            Py_TYPE(device)->tp_name);
    if (!budget_bytes_of(limit, &bytes) || (self = (Budget *)type->tp_alloc(type, 0)) == NULL)
        return NULL;
    self->state = st;
    self->device = Py_NewRef(device);
    self->ledger = new_ledger(st, bytes, name, above);
    if (self->ledger == NULL) Py_CLEAR(self);
    return (PyObject *)self;
}

static void
budget_dealloc(PyObject *op)
{
    Budget *self = (Budget *)op;
    PyTypeObject *type = Py_TYPE(op);

    if (self->weakrefs != NULL) PyObject_ClearWeakRefs(op);
    mt_ledger_drop(self->ledger);
    Py_XDECREF(self->device);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
get_limit(PyObject *op, void *Py_UNUSED(which))
{
    return bytes_or_none(mt_ledger_limit(((Budget *)op)->ledger));
}

static PyObject *
get_used(PyObject *op, void *Py_UNUSED(which))
{
    return PyLong_FromSize_t(mt_ledger_used(((Budget *)op)->ledger));
}

static PyObject *
get_peak(PyObject *op, void *Py_UNUSED(which))
{
    return PyLong_FromSize_t(mt_ledger_peak(((Budget *)op)->ledger));
}

/* Where nothing has a limit, what is left of size_t is not a useful figure. */
static PyObject *
get_available(PyObject *op, void *Py_UNUSED(which))
{
    mt_ledger *ledger = ((Budget *)op)->ledger, *l = ledger;

    while (l != NULL && mt_ledger_limit(l) == SIZE_MAX)
        l = mt_ledger_parent(l);
    return bytes_or_none(l == NULL ? SIZE_MAX : mt_ledger_available(ledger));
}

static PyObject *
get_name(PyObject *op, void *Py_UNUSED(which))
{
    return PyUnicode_FromString(mt_ledger_name(((Budget *)op)->ledger));
}

static PyObject *
get_device(PyObject *op, void *Py_UNUSED(which))
{
    return Py_NewRef(((Budget *)op)->device);
}

#define GET(name, doc) {#name, get_##name, NULL, doc, NULL}
static PyGetSetDef getters[] = {
    GET(limit, "Bytes that may be reserved."),
    GET(used, "The bytes reserved now."),
    GET(peak, "The most bytes ever used."),
    GET(available,
        "Bytes that can be reserved now, here and in the budgets above, without taking idle memory "
        "of other parts."),
    GET(name, "Shown in reports and errors, cut to 47 bytes of UTF-8."),
    GET(device, "The device whose memory is counted, or None for any."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"_report", budget_report, METH_NOARGS, "_report($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Budget, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native half of memtools.Budget."},
    {Py_tp_new, budget_new},
    {Py_tp_dealloc, budget_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_members, members},
    {0, NULL},
};

/* No Py_TPFLAGS_HAVE_GC: the one object it holds is text, so it cannot be in a cycle. */
static PyType_Spec spec = {
    .name = "memtools._core.Budget",
    .basicsize = sizeof(Budget),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_budget_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->Budget);
}
