/* part.c -- how this file works.
 *
 * memtools._core.BudgetPart is one member of a budget's ledger, for a part that is written in Python
 * and takes its memory by torch. It holds nothing idle: a member is asked for that without the GIL.
 * A reservation that does not fit asks the other members with the GIL released, so another thread may
 * close the part meanwhile; that is looked at again after each time. One that is larger than the limit
 * does not ask: what the others gave would not help. */
#include "py/budget/budget.h"

#include "py/base/errors.h"
#include "py/base/number.h"
#include "py/base/objects.h"

typedef struct BudgetPart {
    PyObject_HEAD
    mt_state *state;   /* kept alive by the type */
    PyObject *budget;  /* what the ledger is of */
    mt_ledger *ledger; /* one reference */
    mt_member *member; /* NULL once it is closed */
} BudgetPart;

/* (budget, name) */
static PyObject *
part_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"budget", "name", NULL};
    mt_state *st = mt_state_of_type(type);
    PyObject *budget;
    mt_ledger *ledger;
    const char *name;
    BudgetPart *self;
    mt_error err;

    if (st == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "Os:BudgetPart", names, &budget, &name) ||
        (ledger = mt_py_budget_ledger(st, budget)) == NULL ||
        (self = (BudgetPart *)type->tp_alloc(type, 0)) == NULL)
        return NULL;
    self->state = st;
    self->budget = Py_NewRef(budget);
    self->ledger = mt_ledger_hold(ledger);
    if (mt_ledger_join(ledger, name, 0, NULL, &self->member, &err) == MT_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    return mt_py_raise(st, &err, "BudgetPart()");
}

static PyObject *
part_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    BudgetPart *self = (BudgetPart *)op;
    mt_member *member = self->member;

    self->member = NULL;
    Py_BEGIN_ALLOW_THREADS; /* leaving waits for reports and reclaims of others */
    mt_ledger_leave(member);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static int
part_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((BudgetPart *)op)->budget);
    return 0;
}

static void
part_dealloc(PyObject *op)
{
    BudgetPart *self = (BudgetPart *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    mt_ledger_leave(self->member);
    mt_ledger_drop(self->ledger);
    Py_XDECREF(self->budget);
    type->tp_free(op);
    Py_DECREF(type);
}

static bool
part_is_open(const BudgetPart *self)
{
    if (self->member != NULL) return true;
    PyErr_SetString(PyExc_ValueError, "this part of the budget is closed");
    return false;
}

/* (bytes, doing, remedy) */
static PyObject *
part_reserve(PyObject *op, PyObject *args)
{
    BudgetPart *self = (BudgetPart *)op;
    const char *doing, *remedy;
    mt_py_whole whole = MT_PY_WHOLE("bytes", 0, PY_SSIZE_T_MAX, 0);
    mt_error err;
    size_t gave = 1, bytes;

    if (!PyArg_ParseTuple(args, "O&ss:reserve", mt_py_whole_take, &whole, &doing, &remedy))
        return NULL;
    bytes = (size_t)whole.value;
    while (part_is_open(self)) {
        if (mt_member_reserve(self->member, bytes, &err) == MT_OK) Py_RETURN_NONE;
        if (gave == 0 || bytes > mt_ledger_limit(self->ledger))
            return mt_py_raise_budget(self->state, self->ledger, &err, doing, remedy);
        Py_BEGIN_ALLOW_THREADS;
        gave = mt_ledger_reclaim(self->ledger, NULL, bytes);
        Py_END_ALLOW_THREADS;
    }
    return NULL;
}

static PyObject *
part_release(PyObject *op, PyObject *arg)
{
    BudgetPart *self = (BudgetPart *)op;
    mt_py_whole bytes = MT_PY_WHOLE("release(): bytes", 0, PY_SSIZE_T_MAX, 0);

    if (!mt_py_whole_take(arg, &bytes) || !part_is_open(self)) return NULL;
    if ((size_t)bytes.value > mt_member_reserved(self->member))
        return PyErr_Format(PyExc_ValueError, "release(%zd) of %zu reserved bytes", bytes.value,
                            mt_member_reserved(self->member));
    mt_member_release(self->member, (size_t)bytes.value);
    Py_RETURN_NONE;
}

static PyObject *
get_reserved(PyObject *op, void *Py_UNUSED(which))
{
    const mt_member *member = ((BudgetPart *)op)->member;

    return PyLong_FromSize_t(member == NULL ? 0 : mt_member_reserved(member));
}

static PyGetSetDef getters[] = {
    {"reserved", get_reserved, NULL, "Bytes that the part has reserved; 0 once it is closed.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"reserve", part_reserve, METH_VARARGS,
     "reserve($self, bytes, doing, remedy, /)\n--\n\n"
     "Reserve bytes, after asking other parts for what they hold idle where that is needed.\n\n"
     "Raises BudgetError, which begins with `doing` and ends with `remedy`, if they do not fit;\n"
     "ValueError if bytes is below 0 or the part is closed. Then nothing was reserved."},
    {"release", part_release, METH_O,
     "release($self, bytes, /)\n--\n\n"
     "Release bytes whose memory was given back. Raises ValueError for more than are reserved."},
    {"close", part_close, METH_NOARGS,
     "close($self, /)\n--\n\n"
     "Release everything and leave the budget. May be called twice."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "BudgetPart(budget, name)\n--\n\n"
                "A part of a Budget that is written in Python: it reserves and releases here."},
    {Py_tp_new, part_new},
    {Py_tp_dealloc, part_dealloc},
    {Py_tp_traverse, part_traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {0, NULL},
};

/* HAVE_GC: it owns the Budget, which a subclass may let refer back. */
static PyType_Spec spec = {
    .name = "memtools._core.BudgetPart",
    .basicsize = sizeof(BudgetPart),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_budgetpart_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->BudgetPart);
}
