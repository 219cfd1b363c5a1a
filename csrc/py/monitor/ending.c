/* ending.c -- how this file works.
 *
 * For an uncaught exception the interpreter calls excepthook(), with no frame below it. At all other
 * ends no Python runs: only exit() knows the exit code, and a signal may come while C code runs. So
 * another process prints the last report, and its command is made before:
 *
 *   SIGTERM, SIGHUP ──► the mark in the record (os/record/endmark.h) ──┐
 *   exit(code) ──► the end of the record (record/writer.c) ────────────┴─► the last command
 *
 * It runs once, and only if the control group has room for it: a process that is started in a full
 * group makes the kernel kill one. It is waited for, after a signal for IN_TIME_MS at most. */
#include "py/monitor/ending.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/base/size.h"
#include "os/base/forks.h"
#include "os/monitor/cgroup.h"
#include "os/record/endmark.h"

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

/* An exception of the callable is dropped: the program's end goes on. */
static void
call_quietly(PyObject *callable, PyObject *what)
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
    if (!again && PyEval_GetFrame() == NULL) call_quietly(st->on_uncaught, value);
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

/* --- the last command --- */

typedef struct last_command {
    mt_birth birth;
    mt_cgroup group;
    char *root;    /* under which the files of `group` are read: "/" but in tests */
    char *instead; /* is written if the command is not run or fails */
    char *words[]; /* NULL is the end */
} last_command;

enum { IN_TIME_MS = 2000, PAUSE_MS = 5 };

/* The command that prints a summary takes 26 MiB. */
static const uint64_t ROOM = (uint64_t)32 << 20;

static last_command *_Atomic last; /* the process's, as signal handlers are */

/* True as well if the group has no limit, or one that cannot be read. Neither takes a lock nor memory
 * of malloc. */
static bool
has_room(mt_cgroup *group)
{
    uint64_t usage, inactive;

    mt_cgroup_refresh(group);
    if (group->limit == MT_UNKNOWN || group->limit == MT_UNLIMITED) return true;
    if ((usage = mt_cgroup_usage(group)) == MT_UNKNOWN) return true;
    inactive = mt_cgroup_inactive(group);
    if (inactive != MT_UNKNOWN) usage = mt_cgroup_used(usage, inactive);
    return usage <= group->limit && group->limit - usage >= ROOM;
}

/* Blocked: what another process, or Ctrl-C that is pressed again, sends to the whole group must not
 * end the command. Everything else is not, whatever this thread blocks. */
static int
spawn(const last_command *command, pid_t *child)
{
    posix_spawnattr_t attributes;
    sigset_t blocked;
    int failed = posix_spawnattr_init(&attributes);

    if (failed != 0) return failed;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGTERM);
    sigaddset(&blocked, SIGHUP);
    sigaddset(&blocked, SIGINT);
    (void)posix_spawnattr_setsigmask(&attributes, &blocked);
    (void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    failed = posix_spawn(child, command->words[0], NULL, &attributes, command->words, environ);
    posix_spawnattr_destroy(&attributes);
    return failed;
}

/* The status of a child that has ended; 0 as well where it has none, because the program ignores
 * SIGCHLD, and where the time is over. */
static int
wait_for(pid_t child, bool in_time)
{
    const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000L};
    int status = 0;

    if (!in_time) {
        while (waitpid(child, &status, 0) == -1 && errno == EINTR)
            ;
        return status;
    }
    for (int ms = 0; ms < IN_TIME_MS && waitpid(child, &status, WNOHANG) == 0; ms += PAUSE_MS)
        nanosleep(&pause, NULL);
    return status;
}

/* Also in a signal handler: glibc's posix_spawn takes no lock and no memory of malloc. */
static void
run_last_command(bool in_time)
{
    last_command *command = atomic_exchange(&last, NULL);
    pid_t child;

    if (command == NULL || !mt_birth_is_here(&command->birth)) return;
    if (!has_room(&command->group) || spawn(command, &child) != 0 || wait_for(child, in_time) != 0)
        (void)!write(STDERR_FILENO, command->instead, strlen(command->instead));
}

static void
run_at_signal(void)
{
    run_last_command(true);
}

static void
run_at_exit(int Py_UNUSED(status), void *Py_UNUSED(ctx))
{
    run_last_command(false);
}

/* NULL with an exception. */
static last_command *
make_last_command(PyObject *words, const char *instead, const char *root)
{
    Py_ssize_t n = PyTuple_GET_SIZE(words);
    last_command *made = calloc(1, sizeof *made + ((size_t)n + 1) * sizeof made->words[0]);
    char *word;

    if (made == NULL) goto no_memory;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(words, i), &word, NULL) < 0) goto failed;
        if ((made->words[i] = strdup(word)) == NULL) goto no_memory;
    }
    if ((made->instead = strdup(instead)) == NULL) goto no_memory;
    if ((made->root = strdup(root)) == NULL) goto no_memory;
    mt_cgroup_init(&made->group, &mt_proc_sys_libc, made->root);
    made->birth = mt_birth_now();
    return made;

no_memory:
    PyErr_NoMemory();
failed:
    if (made == NULL) return NULL;
    free(made->root);
    free(made->instead);
    for (char **each = made->words; *each != NULL; each++)
        free(*each);
    free(made);
    return NULL;
}

/* One that is replaced is not freed, because a handler may read it. */
PyObject *
mt_py_set_last_command(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *words;
    const char *instead, *root = "/";
    last_command *made;

    if (!PyArg_ParseTuple(args, "O!y|s:_set_last_command", &PyTuple_Type, &words, &instead, &root))
        return NULL;
    if (PyTuple_GET_SIZE(words) == 0)
        return PyErr_Format(PyExc_ValueError, "a command has at least one word");
    if ((made = make_last_command(words, instead, root)) == NULL) return NULL;
    last = made;
    mt_endmark_before_end(run_at_signal);
    Py_RETURN_NONE;
}

/* on_exit is glibc's, as that of RecordWriter._close_at_exit is, which is called before it. */
PyObject *
mt_py_run_last_command(PyObject *Py_UNUSED(module), PyObject *at_exit)
{
    int later = PyObject_IsTrue(at_exit);

    if (later < 0) return NULL;
    if (later) return on_exit(run_at_exit, NULL) == 0 ? Py_NewRef(Py_None) : PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    run_last_command(false);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
