/* ending.h -- finds out how the interpreter is about to end. A program that looks at
 * sys.excepthook finds a built-in function that does what the one before did. */
#ifndef MT_PY_MONITOR_ENDING_H
#define MT_PY_MONITOR_ENDING_H

#include "py/base/state.h"

/* _watch_end(on_uncaught, excepthook): what the one below calls; returns the excepthook of the call
 * before. */
PyObject *mt_py_watch_end(PyObject *module, PyObject *args);

/* excepthook(type, value, traceback): calls on_uncaught(value) where the interpreter itself calls
 * it, for an uncaught exception, and then the excepthook before. */
PyObject *mt_py_excepthook(PyObject *module, PyObject *args);

/* _set_last_command(words, instead, root="/"): what is run when this process ends, and the line that
 * is written to the standard error if that fails or the control group has less than 32 MiB left.
 * From now on SIGTERM and SIGHUP run it if they end the process. */
PyObject *mt_py_set_last_command(PyObject *module, PyObject *args);

/* _run_last_command(at_exit): runs it now and waits for it, or as the last of all that exit() does.
 * Nothing where there is none, where it ran already, and in a forked child. */
PyObject *mt_py_run_last_command(PyObject *module, PyObject *at_exit);

#endif
