/* errors.h -- an mt_status becomes a Python exception.
 *
 * Each status has one class of exception and one neutral sentence, here. A part that can say more,
 * because it knows the remedy or which object holds the memory, raises those statuses itself and
 * leaves the rest to mt_py_raise: see mt_py_gatehist_raise, mt_py_kvpool_raise and
 * mt_py_raise_budget. MT_ESHAPE is raised by such parts only. */
#ifndef MT_PY_BASE_ERRORS_H
#define MT_PY_BASE_ERRORS_H

#include "py/base/state.h"

/* Raises what err says and returns NULL. `doing` starts the sentence: "GateHistory.append()". */
PyObject *mt_py_raise(mt_state *st, const mt_error *err, const char *doing);

/* Raises ValueError: `what`, and the word that was passed, escaped. */
void mt_py_refuse_word(const char *what, const char *word);

/* Raises memtools.errors.<name> with a message made as PyUnicode_FromFormat makes it. */
PyObject *mt_py_raise_own(mt_state *st, const char *name, const char *format, ...);

#endif
