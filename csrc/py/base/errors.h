/* errors.h -- the one place where an mt_status becomes a Python exception. */
#ifndef MT_PY_BASE_ERRORS_H
#define MT_PY_BASE_ERRORS_H

#include "py/base/state.h"

/* Raises what err says and returns NULL. `doing` starts the sentence: "GateHistory.append()". */
PyObject *mt_py_raise(mt_state *st, const mt_error *err, const char *doing);

/* Raises memtools.errors.<name> with a message made as PyUnicode_FromFormat makes it. */
PyObject *mt_py_raise_own(mt_state *st, const char *name, const char *format, ...);

#endif
