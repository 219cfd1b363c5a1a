/* ending.h -- what tells how the interpreter is about to end. A program that looks at
 * sys.excepthook and sys.exit finds built-in functions that do what the ones before did. */
#ifndef MT_PY_MONITOR_ENDING_H
#define MT_PY_MONITOR_ENDING_H

#include "py/base/state.h"

/* _watch_end(on_uncaught, on_exit_call, excepthook): what the two below call; returns the
 * excepthook of the call before. */
PyObject *mt_py_watch_end(PyObject *module, PyObject *args);

/* excepthook(type, value, traceback): calls on_uncaught(value) where the interpreter itself calls
 * it, for an exception that nobody caught, and then the excepthook before. */
PyObject *mt_py_excepthook(PyObject *module, PyObject *args);

/* exit(status=None): calls on_exit_call(status), then raises SystemExit as sys.exit does. */
PyObject *mt_py_exit(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* _hear_system_exit(): from now on, where a program makes a SystemExit of its own, on_exit_call(its
 * code) as well. exit() cannot be left out: Python 3.11 ends by it without making one. */
PyObject *mt_py_hear_system_exit(PyObject *module, PyObject *none);

/* _expect_signal(), _wait_for_signal(), _stop_waiting(): see os/record/endmark.h. */
PyObject *mt_py_expect_signal(PyObject *module, PyObject *none);
PyObject *mt_py_wait_for_signal(PyObject *module, PyObject *none);
PyObject *mt_py_stop_waiting(PyObject *module, PyObject *none);

/* _write_at_exit(clean, failed, before, after): at the end of exit(), writes one of three texts to
 * the standard error. */
PyObject *mt_py_write_at_exit(PyObject *module, PyObject *args);

#endif
