#include "py/monitor/forwards.h"

#include <stdbool.h>

#include "py/blocks/recording.h"

/* The two callables that may watch: one gets a tuple of all that was passed, the module first, and
 * one the module alone. They are called in this order, as the second may end the step whose inputs
 * the first one notes. */
enum { WITH_ARGUMENTS, MODULE_ALONE, KINDS };

/* What is watched, under the interpreter's lock. */
static struct {
    PyObject *function;     /* NULL: nothing is watched */
    PyObject *ended[KINDS]; /* what is called when an outermost call has ended; NULL: nothing */
    vectorcallfunc before;  /* what called the function before; stays, for calls that run */
    unsigned long main_thread;
    bool main_is_inside; /* the main thread is in a call */
} watched;

static _Thread_local int depth; /* calls of the function that this thread is in */

static void
set_vectorcall(PyObject *function, vectorcallfunc call)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyFunction_SetVectorcall((PyFunctionObject *)function, call);
#else
    /* A version of 0 makes the interpreter forget what it knows of the function's calls. */
    ((PyFunctionObject *)function)->func_version = 0;
    ((PyFunctionObject *)function)->vectorcall = call;
#endif
}

/* False with an exception of one of them. */
static bool
tell_all(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names)
{
    for (int kind = 0; kind < KINDS; kind++) {
        PyObject *ended, *what, *done = NULL;

        if (watched.function != function || watched.ended[kind] == NULL) continue;
        ended = Py_NewRef(watched.ended[kind]); /* it may stop the watching */
        if (kind == MODULE_ALONE) {
            what = Py_NewRef(args[0]);
        } else { /* all that was passed, by position and by name */
            Py_ssize_t count =
                PyVectorcall_NARGS(nargsf) + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
            what = PyTuple_New(count);
            for (Py_ssize_t i = 0; what != NULL && i < count; i++)
                PyTuple_SET_ITEM(what, i, Py_NewRef(args[i]));
        }
        if (what != NULL) done = PyObject_CallOneArg(ended, what);
        Py_XDECREF(what);
        Py_DECREF(ended);
        if (done == NULL) return false;
        Py_DECREF(done);
    }
    return true;
}

static PyObject *
watched_call(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names)
{
    bool is_outermost = depth == 0, is_main = false, is_part = false;
    uint64_t recorded = 0;
    PyObject *result;

    if (is_outermost) {
        is_main = PyThread_get_thread_ident() == watched.main_thread;
        is_part = !is_main && watched.main_is_inside;
        if (is_main) watched.main_is_inside = true;
    }
    depth++;
    if (PyVectorcall_NARGS(nargsf) > 0) recorded = mt_py_recording_enter(args[0]);
    result = watched.before(function, args, nargsf, names);
    if (PyVectorcall_NARGS(nargsf) > 0) mt_py_recording_leave(recorded);
    /* Still inside: modules that `ended` calls do not count. */
    if (is_outermost && !is_part && result != NULL && PyVectorcall_NARGS(nargsf) > 0 &&
        !tell_all(function, args, nargsf, names)) {
        Py_CLEAR(result);
    }
    depth--;
    if (is_main) watched.main_is_inside = false;
    return result;
}

static void
stop(int kind)
{
    PyObject *ended = watched.ended[kind], *function = NULL;

    watched.ended[kind] = NULL;
    if (watched.function != NULL && watched.ended[WITH_ARGUMENTS] == watched.ended[MODULE_ALONE]) {
        function = watched.function; /* both are NULL: nothing is watched any more */
        watched.function = NULL;
        set_vectorcall(function, watched.before);
    }
    Py_XDECREF(ended);
    Py_XDECREF(function);
}

PyObject *
mt_py_watch_calls(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *function, *ended;
    unsigned long main_thread;
    int with_arguments = 0, kind;

    if (!PyArg_ParseTuple(args, "OOk|p:_watch_calls", &function, &ended, &main_thread,
                          &with_arguments)) {
        return NULL;
    }
    kind = with_arguments ? WITH_ARGUMENTS : MODULE_ALONE;
    if (function == Py_None) {
        stop(kind);
        Py_RETURN_TRUE;
    }
    if (!PyFunction_Check(function)) {
        return PyErr_Format(
            PyExc_TypeError,
            "_watch_calls(): function must be a Python function or None, got %.100s",
            Py_TYPE(function)->tp_name);
    }
    if (!PyCallable_Check(ended)) {
        return PyErr_Format(PyExc_TypeError, "_watch_calls(): ended cannot be called: %.100s",
                            Py_TYPE(ended)->tp_name);
    }
    if (watched.ended[kind] != NULL || (watched.function != NULL && watched.function != function))
        Py_RETURN_FALSE;
    watched.ended[kind] = Py_NewRef(ended);
    if (watched.function == NULL) {
        watched.function = Py_NewRef(function);
        watched.before = ((PyFunctionObject *)function)->vectorcall;
        watched.main_thread = main_thread;
        watched.main_is_inside = false;
        set_vectorcall(function, watched_call);
    }
    Py_RETURN_TRUE;
}
