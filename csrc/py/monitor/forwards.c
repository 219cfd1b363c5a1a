#include "py/monitor/forwards.h"

#include <stdbool.h>

#include "py/blocks/recording.h"

/* What is heard, under the interpreter's lock. */
static struct {
    PyObject *function;    /* NULL: nothing is heard */
    PyObject *ended;       /* what is told of an outermost call */
    vectorcallfunc before; /* what called the function before; stays, for calls that run */
    unsigned long main_thread;
    bool main_is_inside; /* the main thread is in a call */
    bool with_arguments; /* what is told gets a tuple of all that was passed, the module first */
} heard;

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

/* All that was passed by a vectorcall, by position and by name. */
static PyObject *
passed(PyObject *const *args, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf) + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
    PyObject *all = PyTuple_New(count);

    for (Py_ssize_t i = 0; all != NULL && i < count; i++) {
        PyTuple_SET_ITEM(all, i, Py_NewRef(args[i]));
    }
    return all;
}

static bool
tell(PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *ended = Py_NewRef(heard.ended); /* it may stop the hearing */
    PyObject *what = heard.with_arguments ? passed(args, nargsf, names) : Py_NewRef(args[0]);
    PyObject *done = what == NULL ? NULL : PyObject_CallOneArg(ended, what);

    Py_XDECREF(what);
    Py_DECREF(ended);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *
heard_call(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names)
{
    bool is_outermost = depth == 0, is_main = false, is_part = false;
    uint64_t recorded = 0;
    PyObject *result;

    if (is_outermost) {
        is_main = PyThread_get_thread_ident() == heard.main_thread;
        is_part = !is_main && heard.main_is_inside;
        if (is_main) heard.main_is_inside = true;
    }
    depth++;
    if (PyVectorcall_NARGS(nargsf) > 0) recorded = mt_py_recording_enter(args[0]);
    result = heard.before(function, args, nargsf, names);
    if (PyVectorcall_NARGS(nargsf) > 0) mt_py_recording_leave(recorded);
    /* Still inside: modules that are called by what is told are no calls of their own. */
    if (is_outermost && !is_part && result != NULL && heard.function == function &&
        PyVectorcall_NARGS(nargsf) > 0 && !tell(args, nargsf, names)) {
        Py_CLEAR(result);
    }
    depth--;
    if (is_main) heard.main_is_inside = false;
    return result;
}

static void
stop(void)
{
    if (heard.function == NULL) return;
    set_vectorcall(heard.function, heard.before);
    Py_CLEAR(heard.function);
    Py_CLEAR(heard.ended);
}

PyObject *
mt_py_hear_calls(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *function, *ended;
    unsigned long main_thread;
    int with_arguments = 0;

    if (!PyArg_ParseTuple(args, "OOk|p:_hear_calls", &function, &ended, &main_thread,
                          &with_arguments)) {
        return NULL;
    }
    if (function == Py_None) {
        stop();
        Py_RETURN_TRUE;
    }
    if (!PyFunction_Check(function)) {
        return PyErr_Format(PyExc_TypeError,
                            "_hear_calls(): function is a Python function or None, got %.100s",
                            Py_TYPE(function)->tp_name);
    }
    if (!PyCallable_Check(ended)) {
        return PyErr_Format(PyExc_TypeError, "_hear_calls(): ended cannot be called: %.100s",
                            Py_TYPE(ended)->tp_name);
    }
    if (heard.function != NULL) Py_RETURN_FALSE;
    heard.function = Py_NewRef(function);
    heard.ended = Py_NewRef(ended);
    heard.before = ((PyFunctionObject *)function)->vectorcall;
    heard.main_thread = main_thread;
    heard.main_is_inside = false;
    heard.with_arguments = with_arguments != 0;
    set_vectorcall(function, heard_call);
    Py_RETURN_TRUE;
}
