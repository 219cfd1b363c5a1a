/* managed.c -- memtools._core.Managed: calls that cost nanoseconds and are counted by a policy.
 *
 * How this file works. A call of a Managed goes through managed_vectorcall: it opens an entry of the
 * list st->calls if its thread has none for this policy, calls the function, closes the entry by its
 * token, calls `clear` (call_clear, or clear_after_error where the function raised), and, where it
 * was the outermost call and raised nothing, ticks the policy. Blocks, generators and coroutines
 * open and close entries themselves, by _begin() and _end().
 *
 * Everything that runs Python (the function, `clear`, a policy's actions, a last Py_DECREF) may call
 * this Managed again, end it or switch threads: no pointer into the list is kept over such a call,
 * only a token. */
#include "py/cleanup/managed.h"

#include <structmember.h>

#include "py/base/objects.h"
#include "py/cleanup/policy.h"

enum { CLOCK_UPDATE = 0 };

struct mt_managed_call {
    mt_managed_call *next;
    PyObject *policy; /* owned while in use */
    uint64_t thread, token;
};

typedef struct Managed {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *function;
    PyObject *policy; /* NULL: not counted */
    PyObject *clear;  /* NULL: nothing to clear */
    mt_state *state;  /* lives as long as the type does */
    PyObject *dict, *weakrefs;
} Managed;

/* --- outermost calls ------------------------------------------------------------------------- */

static uint64_t
this_thread(void)
{
    return PyThreadState_GetID(PyThreadState_Get());
}

static bool
managed_is_open(const mt_state *st, const PyObject *policy, uint64_t thread)
{
    const mt_managed_call *call = st->calls;

    while (call != NULL && (call->policy != policy || call->thread != thread))
        call = call->next;
    return call != NULL;
}

/* NULL with MemoryError. */
static mt_managed_call *
open_call(mt_state *st, PyObject *policy, uint64_t thread)
{
    mt_managed_call *call = st->idle_calls;

    if (call != NULL)
        st->idle_calls = call->next;
    else if ((call = PyMem_Malloc(sizeof *call)) == NULL)
        return (mt_managed_call *)PyErr_NoMemory();
    call->policy = Py_NewRef(policy);
    call->thread = thread;
    call->token = ++st->call_tokens;
    call->next = st->calls;
    st->calls = call;
    return call;
}

/* pre: *at is in use. */
static void
close_call(mt_state *st, mt_managed_call **at)
{
    mt_managed_call *call = *at;
    PyObject *policy = call->policy;

    *at = call->next;
    call->next = st->idle_calls;
    st->idle_calls = call;
    Py_DECREF(policy); /* last: it may run code */
}

/* By its number: an entry may have gone to another call meanwhile. */
static bool
close_by_token(mt_state *st, uint64_t token)
{
    mt_managed_call **at = &st->calls;

    while (*at != NULL && (*at)->token != token)
        at = &(*at)->next;
    if (*at == NULL) return false;
    close_call(st, at);
    return true;
}

void
mt_py_managed_free(mt_state *st)
{
    while (st->calls != NULL)
        close_call(st, &st->calls);
    while (st->idle_calls != NULL) {
        mt_managed_call *call = st->idle_calls;
        st->idle_calls = call->next;
        PyMem_Free(call);
    }
}

/* --- a call ---------------------------------------------------------------------------------- */

static PyObject *
names_to_dict(PyObject *const *values, PyObject *names)
{
    PyObject *dict = PyDict_New();

    for (Py_ssize_t i = 0; dict != NULL && i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(names, i), values[i]) < 0) Py_CLEAR(dict);
    return dict;
}

/* clear(args, kwargs): 0, or -1 with its error. */
static int
call_clear(const Managed *self, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *positional = PyTuple_New(n), *named = Py_None, *done = NULL;

    if (positional == NULL) return -1;
    for (Py_ssize_t i = 0; i < n; i++)
        PyTuple_SET_ITEM(positional, i, Py_NewRef(args[i]));
    named = names == NULL ? Py_NewRef(Py_None) : names_to_dict(args + n, names);
    if (named != NULL) done = PyObject_CallFunctionObjArgs(self->clear, positional, named, NULL);
    Py_DECREF(positional);
    Py_XDECREF(named);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Adds a line below the exception's traceback. Errors here are dropped. */
static void
add_note(PyObject *error, PyObject *about)
{
    PyObject *note = PyUnicode_FromFormat(
        "while this exception propagated, clearing failed: %s: %S", Py_TYPE(about)->tp_name, about);
    PyObject *done = note == NULL ? NULL : PyObject_CallMethod(error, "add_note", "O", note);

    PyErr_Clear();
    Py_XDECREF(note);
    Py_XDECREF(done);
}

/* Clears while the function's own exception waits, which passes on with a note if this fails too;
 * an interrupt meanwhile takes its place, as from a `finally`. */
static void
clear_after_error(const Managed *self, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *type, *error, *traceback, *new_type, *new_error, *new_traceback;

    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (call_clear(self, args, n, names) == 0) {
        PyErr_Restore(type, error, traceback);
        return;
    }
    PyErr_Fetch(&new_type, &new_error, &new_traceback);
    PyErr_NormalizeException(&new_type, &new_error, &new_traceback);
    if (traceback != NULL) PyException_SetTraceback(error, traceback);
    if (PyErr_GivenExceptionMatches(new_type, PyExc_Exception)) {
        add_note(error, new_error);
        Py_XDECREF(new_type), Py_XDECREF(new_error), Py_XDECREF(new_traceback);
        PyErr_Restore(type, error, traceback);
    } else {
        PyException_SetContext(new_error, error);
        Py_XDECREF(type), Py_XDECREF(traceback);
        PyErr_Restore(new_type, new_error, new_traceback);
    }
}

static PyObject *
after_gc(void)
{
    PyErr_SetString(PyExc_RuntimeError,
                    "this managed function is being garbage-collected and can no longer be called");
    return NULL;
}

/* What it wraps may be managed too, and so on: such a chain recurses in C. */
static PyObject *
call_function(const Managed *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *result;

    if (Py_TYPE(self->function) != self->state->Managed)
        return PyObject_Vectorcall(self->function, args, nargsf, names);
    if (Py_EnterRecursiveCall(" in a managed function")) return NULL;
    result = PyObject_Vectorcall(self->function, args, nargsf, names);
    Py_LeaveRecursiveCall();
    return result;
}

static PyObject *
managed_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Managed *self = (Managed *)op;
    mt_state *st = self->state;
    uint64_t token = 0;
    PyObject *result;

    if (self->function == NULL) return after_gc();
    if (self->policy != NULL) {
        uint64_t thread = this_thread();
        if (!managed_is_open(st, self->policy, thread)) {
            mt_managed_call *call = open_call(st, self->policy, thread);
            if (call == NULL) return NULL;
            token = call->token;
        }
    }
    result = call_function(self, args, nargsf, names);
    if (token != 0) close_by_token(st, token);
    if (self->clear != NULL && result == NULL)
        clear_after_error(self, args, PyVectorcall_NARGS(nargsf), names);
    else if (self->clear != NULL && call_clear(self, args, PyVectorcall_NARGS(nargsf), names) < 0)
        Py_CLEAR(result);
    if (token != 0 && result != NULL && mt_py_policy_tick(self->policy, CLOCK_UPDATE) < 0)
        Py_CLEAR(result);
    return result;
}

/* --- for what does not run from a call to its return: blocks, generators, coroutines ---------- */

static PyObject *
managed_begin(PyObject *op, PyObject *Py_UNUSED(none))
{
    Managed *self = (Managed *)op;
    uint64_t thread = this_thread();
    mt_managed_call *call;

    if (self->policy == NULL || managed_is_open(self->state, self->policy, thread))
        return PyLong_FromLong(0);
    if ((call = open_call(self->state, self->policy, thread)) == NULL) return NULL;
    return PyLong_FromUnsignedLongLong(call->token);
}

static PyObject *
managed_end(PyObject *op, PyObject *number)
{
    unsigned long long token = PyLong_AsUnsignedLongLong(number);

    if (token == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    return PyBool_FromLong(close_by_token(((Managed *)op)->state, token));
}

/* --- the type -------------------------------------------------------------------------------- */

/* (function, policy, clear=None) */
static PyObject *
managed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", "policy", "clear", NULL};
    mt_state *st = mt_state_of_type(type);
    PyObject *function, *policy, *clear = Py_None;
    Managed *self;

    if (st == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O:Managed", names, &function,
                                                   &policy, &clear))
        return NULL;
    if (policy != Py_None && !Py_IS_TYPE(policy, st->Policy))
        return PyErr_Format(PyExc_TypeError, "policy must be a _core.Policy or None, not %s",
                            Py_TYPE(policy)->tp_name);
    if (!PyCallable_Check(function) || (clear != Py_None && !PyCallable_Check(clear)))
        return PyErr_Format(PyExc_TypeError, "%s is not callable",
                            Py_TYPE(PyCallable_Check(function) ? clear : function)->tp_name);
    if ((self = (Managed *)type->tp_alloc(type, 0)) == NULL) return NULL;
    self->call = managed_vectorcall;
    self->state = st;
    self->function = Py_NewRef(function);
    self->policy = policy == Py_None ? NULL : Py_NewRef(policy);
    self->clear = clear == Py_None ? NULL : Py_NewRef(clear);
    return (PyObject *)self;
}

static int
managed_traverse(PyObject *op, visitproc visit, void *arg)
{
    Managed *self = (Managed *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->function);
    Py_VISIT(self->policy);
    Py_VISIT(self->clear);
    Py_VISIT(self->dict);
    return 0;
}

static int
managed_clear(PyObject *op)
{
    Managed *self = (Managed *)op;

    Py_CLEAR(self->function);
    Py_CLEAR(self->policy);
    Py_CLEAR(self->clear);
    Py_CLEAR(self->dict);
    return 0;
}

static void
managed_dealloc(PyObject *op)
{
    Managed *self = (Managed *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    Py_TRASHCAN_BEGIN(op, managed_dealloc)
    if (self->weakrefs != NULL) PyObject_ClearWeakRefs(op);
    managed_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
    Py_TRASHCAN_END
}

/* Only code that looks for it binds: `obj.update()` finds the mark METHOD_DESCRIPTOR instead, and
 * makes no bound method. One that is made has the Python function in it, which calls this: there
 * are those who look for the file and the code of a method's function, torch.compile for one. */
static PyObject *
managed_get(PyObject *op, PyObject *obj, PyObject *Py_UNUSED(type))
{
    PyObject *dict = ((Managed *)op)->dict, *traced = NULL, *method;

    if (obj == NULL || obj == Py_None) return Py_NewRef(op);
    if (dict != NULL) traced = PyDict_GetItemString(dict, "_traced");
    /* Held: to make a method may start a collection, which runs code that may delete it. */
    traced = Py_NewRef(traced != NULL ? traced : op);
    method = PyMethod_New(traced, obj);
    Py_DECREF(traced);
    return method;
}

static PyObject *
managed_repr(PyObject *op)
{
    PyObject *function = ((Managed *)op)->function;

    return function == NULL ? after_gc() : PyUnicode_FromFormat("<managed %R>", function);
}

/* By its name, as functions are pickled; copies are itself. */
static PyObject *
managed_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    return PyObject_GetAttrString(op, "__qualname__");
}

/* An update that torch's compiler made part of a graph: it knows no calls of C, but it keeps what
 * is assigned to, and assigns after the graph has run. True: one more update, unless one is open.
 */
static int
set_updated(PyObject *op, PyObject *value, void *Py_UNUSED(which))
{
    Managed *self = (Managed *)op;

    if (value != Py_True) {
        PyErr_SetString(PyExc_TypeError, "_updated can be set to True only");
        return -1;
    }
    if (self->policy == NULL || managed_is_open(self->state, self->policy, this_thread())) return 0;
    return mt_py_policy_tick(self->policy, CLOCK_UPDATE);
}

static PyGetSetDef getters[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {"_updated", NULL, set_updated, "Count an update that a compiled graph made.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"_begin", managed_begin, METH_NOARGS,
     "_begin($self, /)\n--\n\n"
     "Open an outermost call of this thread; its number, or 0 where one is open."},
    {"_end", managed_end, METH_O,
     "_end($self, number, /)\n--\n\n"
     "Close it, on any thread; whether it was open."},
    {"__reduce__", managed_reduce, METH_NOARGS, "__reduce__($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Managed, call), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Managed, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Managed, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native half of memtools.managed."},
    {Py_tp_new, managed_new},
    {Py_tp_dealloc, managed_dealloc},
    {Py_tp_traverse, managed_traverse},
    {Py_tp_clear, managed_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_descr_get, managed_get},
    {Py_tp_repr, managed_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_members, members},
    {0, NULL},
};

/* HAVE_GC: functions, policies and callbacks may all lead back here. IMMUTABLETYPE: only then does
 * the interpreter trust METHOD_DESCRIPTOR where it specialises a call. */
static PyType_Spec spec = {
    .name = "memtools._core.Managed",
    .basicsize = sizeof(Managed),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = slots,
};

/* What `type.__call__` and `type.__get__` are to those who read them, beside the slots that the
 * interpreter uses: torch's compiler traces Python and breaks at C. */
static int
add_traceable(PyTypeObject *type)
{
    static const char *const names[] = {"__call__", "__get__"};
    PyObject *python = PyImport_ImportModule("memtools._base.decorate"), *function;
    int failed = python == NULL;

    for (size_t i = 0; !failed && i < sizeof names / sizeof names[0]; i++) {
        function = PyObject_GetAttrString(python, names[i]);
        failed = function == NULL || PyDict_SetItemString(type->tp_dict, names[i], function) < 0;
        Py_XDECREF(function);
    }
    Py_XDECREF(python);
    PyType_Modified(type);
    return failed ? -1 : 0;
}

int
mt_py_managed_register(PyObject *module, mt_state *st)
{
    if (mt_py_add_type(module, &spec, &st->Managed) < 0) return -1;
    return add_traceable(st->Managed);
}
