/* ending.c -- how this file works.
 *
 * Three ways lead to the end of an interpreter, and each tells Python code before it is gone: an
 * exception that nobody caught (excepthook, which the interpreter calls with no frame below it), a
 * SystemExit (exit(), and the type's own __init__ from _hear_system_exit() on), and a signal, for
 * which a thread waits while the main thread stands still (os/record/endmark.h). What is to be
 * printed when the exit code is known lies in C, because no Python runs any more then. */
#include "py/monitor/ending.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "os/record/endmark.h"
#include "os/base/forkmark.h"

PyObject *
mt_py_watch_end(PyObject *module, PyObject *args)
{
    mt_state *st = PyModule_GetState(module);
    PyObject *uncaught, *exit_call, *before, *was;

    if (!PyArg_ParseTuple(args, "OOO:_watch_end", &uncaught, &exit_call, &before)) return NULL;
    Py_XSETREF(st->on_uncaught, Py_NewRef(uncaught));
    Py_XSETREF(st->on_exit_call, Py_NewRef(exit_call));
    was = st->excepthook_before;
    st->excepthook_before = Py_NewRef(before);
    if (st->excepthook_first == NULL && before != Py_None) st->excepthook_first = Py_NewRef(before);
    return was == NULL ? Py_NewRef(Py_None) : was;
}

/* What is watched for fails unseen: the program's end goes on. */
static void
tell(PyObject *callable, PyObject *what)
{
    PyObject *done;

    if (callable == NULL || callable == Py_None) return;
    Py_INCREF(callable);
    if ((done = PyObject_CallOneArg(callable, what)) == NULL) PyErr_Clear();
    Py_XDECREF(done);
    Py_DECREF(callable);
}

/* No frame of Python is below: it is the interpreter that calls, when all frames have been left. A
 * program that calls sys.excepthook itself goes on.
 *
 * The hook that was there before may be one that another package put over this one, which calls
 * this one in turn. Then the first of all is called, as it is where this one is watched no longer.
 */
PyObject *
mt_py_excepthook(PyObject *module, PyObject *args)
{
    mt_state *st = PyModule_GetState(module);
    bool again = st->in_excepthook;
    PyObject *type, *value, *traceback, *before, *result;

    if (!PyArg_UnpackTuple(args, "excepthook", 3, 3, &type, &value, &traceback)) return NULL;
    if (!again && PyEval_GetFrame() == NULL) tell(st->on_uncaught, value);
    before = st->excepthook_before;
    if (again || before == NULL || before == Py_None) before = st->excepthook_first;
    if (before == NULL) Py_RETURN_NONE;
    Py_INCREF(before);
    st->in_excepthook = true;
    result = PyObject_Call(before, args, NULL);
    st->in_excepthook = again;
    Py_DECREF(before);
    return result;
}

PyObject *
mt_py_exit(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    mt_state *st = PyModule_GetState(module);
    PyObject *status = n > 0 ? args[0] : Py_None;

    if (n > 1) return PyErr_Format(PyExc_TypeError, "exit expected at most 1 argument, got %zd", n);
    tell(st->on_exit_call, status);
    PyErr_SetObject(PyExc_SystemExit, status);
    return NULL;
}

/* SystemExit's own, from the first call of _hear_system_exit() on; NULL before. */
static initproc system_exit_init;

/* Every SystemExit that is made, as the one that ends the process reaches no hook. By the module's
 * name: a type of the interpreter leads to no module, and each interpreter has its own. */
static int
heard_system_exit(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *name, *module, *code;

    if (system_exit_init(self, args, kwargs) < 0) return -1;
    name = PyUnicode_FromString(mt_module.m_name);
    module = name == NULL ? NULL : PyImport_GetModule(name);
    if (module != NULL && PyModule_Check(module) && PyModule_GetDef(module) == &mt_module) {
        code = ((PySystemExitObject *)self)->code;
        tell(((mt_state *)PyModule_GetState(module))->on_exit_call, code == NULL ? Py_None : code);
    }
    PyErr_Clear();
    Py_XDECREF(module);
    Py_XDECREF(name);
    return 0;
}

PyObject *
mt_py_hear_system_exit(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    PyTypeObject *type = (PyTypeObject *)PyExc_SystemExit;
    PyObject *method; /* what derived classes call, and take for their own where they have none */

    if (system_exit_init != NULL) Py_RETURN_NONE;
    if ((method = PyObject_GetAttrString(PyExc_SystemExit, "__init__")) == NULL) return NULL;
    if (Py_IS_TYPE(method, &PyWrapperDescr_Type)) {
        system_exit_init = type->tp_init;
        type->tp_init = heard_system_exit;
        ((PyWrapperDescrObject *)method)->d_wrapped = heard_system_exit;
    }
    Py_DECREF(method);
    Py_RETURN_NONE;
}

/* On the main thread, at its next instruction of Python: by default the program would have ended.
 */
static int
stand_still(void *Py_UNUSED(none))
{
    Py_BEGIN_ALLOW_THREADS;
    for (;;)
        pause();
    Py_END_ALLOW_THREADS;
    return 0;
}

/* In a signal handler, although the call takes a lock there that the interrupted thread may hold: the
 * timer, which is set before, then ends the process in 0.2 s as the signal would. From another
 * thread it is too late: Python 3.11 lets the main thread notice such a call only when somebody asks
 * for the interpreter lock, up to 5 ms later, and until then the program goes on. */
static void
stop_the_program(void)
{
    (void)Py_AddPendingCall(stand_still, NULL);
}

PyObject *
mt_py_expect_signal(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(mt_endmark_expect(stop_the_program));
}

PyObject *
mt_py_wait_for_signal(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    int number;

    Py_BEGIN_ALLOW_THREADS;
    number = mt_endmark_wait();
    Py_END_ALLOW_THREADS;
    if (number != 0) mt_endmark_extend(number);
    return PyLong_FromLong(number);
}

PyObject *
mt_py_stop_waiting(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    mt_endmark_stop();
    Py_RETURN_NONE;
}

/* --- what is said when the exit code is known --- */

enum { CLEAN, FAILED, BEFORE, AFTER, TEXTS };

typedef struct last_words {
    mt_forkmark *home;
    char *text[TEXTS];
} last_words;

static void
write_all(const char *text)
{
    (void)!write(STDERR_FILENO, text, strlen(text));
}

static void
write_last_words(int status, void *ctx)
{
    const last_words *words = ctx;
    char code[16];

    if (!mt_forkmark_is_home(words->home)) return;
    status &= 0xFF;
    if (status == 0 && words->text[CLEAN][0] != 0) {
        write_all(words->text[CLEAN]);
    } else if (status == 1 && words->text[FAILED][0] != 0) {
        write_all(words->text[FAILED]);
    } else {
        snprintf(code, sizeof code, "%d", status);
        write_all(words->text[BEFORE]);
        write_all(code);
        write_all(words->text[AFTER]);
    }
}

static void
free_last_words(last_words *words)
{
    if (words == NULL) return;
    mt_forkmark_free(words->home);
    for (size_t i = 0; i < TEXTS; i++)
        free(words->text[i]);
    free(words);
}

/* It is kept to the end of the process. on_exit is glibc's: atexit does not tell the status. */
PyObject *
mt_py_write_at_exit(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *given[TEXTS];
    last_words *words;
    bool kept = true;

    if (!PyArg_ParseTuple(args, "yyyy:_write_at_exit", &given[CLEAN], &given[FAILED],
                          &given[BEFORE], &given[AFTER]))
        return NULL;
    if ((words = calloc(1, sizeof *words)) == NULL) return PyErr_NoMemory();
    for (size_t i = 0; i < TEXTS; i++)
        kept = kept && (words->text[i] = strdup(given[i])) != NULL;
    if (kept && mt_forkmark_new(&words->home, NULL) == MT_OK &&
        on_exit(write_last_words, words) == 0)
        Py_RETURN_NONE;
    free_last_words(words);
    return PyErr_NoMemory();
}
