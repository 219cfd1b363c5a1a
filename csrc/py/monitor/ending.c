/* ending.c -- how this file works.
 *
 * An exception that nobody caught and a signal tell Python code before the interpreter is gone: the
 * interpreter calls excepthook() with no frame below it, and for a signal a thread waits while the
 * main thread stands still (os/record/endmark.h). The exit code is known to exit() alone, when no
 * Python runs any more: who wants to say something then has a command run. */
#include "py/monitor/ending.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/record/endmark.h"
#include "os/base/forks.h"

PyObject *
mt_py_watch_end(PyObject *module, PyObject *args)
{
    mt_state *st = PyModule_GetState(module);
    PyObject *uncaught, *before, *was;

    if (!PyArg_ParseTuple(args, "OO:_watch_end", &uncaught, &before)) return NULL;
    Py_XSETREF(st->on_uncaught, Py_NewRef(uncaught));
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

/* --- the last command --- */

typedef struct last_command {
    mt_birth birth;
    char *instead; /* what is written where the command cannot be run or fails */
    char *words[]; /* NULL is the end */
} last_command;

/* The signals that this thread blocks would be blocked in the command too, and Ctrl-C not end it. */
static int
spawn(const last_command *last, pid_t *child)
{
    posix_spawnattr_t attributes;
    sigset_t none;
    int failed = posix_spawnattr_init(&attributes);

    if (failed != 0) return failed;
    sigemptyset(&none);
    (void)posix_spawnattr_setsigmask(&attributes, &none);
    (void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    failed = posix_spawn(child, last->words[0], NULL, &attributes, last->words, environ);
    posix_spawnattr_destroy(&attributes);
    return failed;
}

/* A program that ignores SIGCHLD has no status to wait for: then `ended` stays 0. */
static void
run_last_command(const last_command *last)
{
    pid_t child;
    int ended = 0;

    if (spawn(last, &child) != 0) {
        ended = 1;
    } else {
        while (waitpid(child, &ended, 0) == -1 && errno == EINTR)
            ;
    }
    if (ended != 0) (void)!write(STDERR_FILENO, last->instead, strlen(last->instead));
}

static void
run_at_exit(int Py_UNUSED(status), void *ctx)
{
    const last_command *last = ctx;

    if (mt_birth_is_here(&last->birth)) run_last_command(last);
}

static void
free_last_command(last_command *last)
{
    if (last == NULL) return;
    free(last->instead);
    for (char **word = last->words; *word != NULL; word++)
        free(*word);
    free(last);
}

/* NULL with an exception. */
static last_command *
make_last_command(PyObject *words, const char *instead)
{
    Py_ssize_t n = PyTuple_GET_SIZE(words);
    last_command *last = calloc(1, sizeof *last + ((size_t)n + 1) * sizeof last->words[0]);
    char *word;

    if (last == NULL) goto no_memory;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(words, i), &word, NULL) < 0) goto failed;
        if ((last->words[i] = strdup(word)) == NULL) goto no_memory;
    }
    if ((last->instead = strdup(instead)) == NULL) goto no_memory;
    if (mt_birth_now(&last->birth, NULL) != MT_OK) goto no_memory;
    return last;

no_memory:
    PyErr_NoMemory();
failed:
    free_last_command(last);
    return NULL;
}

/* At exit it is kept to the end of the process. on_exit is glibc's, and so is its order with that
 * of RecordWriter._close_at_exit; torch itself comes for glibc only. */
PyObject *
mt_py_run_last(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *words;
    const char *instead;
    int at_exit;
    last_command *last;

    if (!PyArg_ParseTuple(args, "O!yp:_run_last", &PyTuple_Type, &words, &instead, &at_exit))
        return NULL;
    if (PyTuple_GET_SIZE(words) == 0)
        return PyErr_Format(PyExc_ValueError, "a command has at least one word");
    if ((last = make_last_command(words, instead)) == NULL) return NULL;
    if (at_exit) {
        if (on_exit(run_at_exit, last) == 0) Py_RETURN_NONE;
        free_last_command(last);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS;
    run_last_command(last);
    Py_END_ALLOW_THREADS;
    free_last_command(last);
    Py_RETURN_NONE;
}
