/* kept.h -- what the interpreter itself keeps for a program, out of the collector's sight.
 *
 *   var = ContextVar("history"); var.set([])     the context of a thread ──► [(var, value)]
 *   atexit.register(save, data)                  a table of the interpreter ──► save, (data,)
 *
 * No object of the program refers to these values, so no path from its names leads to them. */
#ifndef MT_PY_CENSUS_KEPT_H
#define MT_PY_CENSUS_KEPT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct mt_kept {
    PyObject *pairs; /* list of (ContextVar, value), thread by thread */
    PyObject *exits; /* module atexit, borrowed; NULL where it is not loaded */
} mt_kept;

/* `keeper` is the ContextVar or the module atexit. Nonzero ends the visit. */
typedef int (*mt_py_kept_visitor)(void *ctx, PyObject *keeper, PyObject *value);

/* Takes the pairs, with a reference to each. It runs no Python code of the program. -1 with an
 * error, and nothing is held. */
int mt_py_kept_open(mt_kept *kept);
void mt_py_kept_close(mt_kept *kept);

/* Shows all of them, those of one keeper in a thread one after the other. Returns what ended it. */
int mt_py_kept_visit(const mt_kept *kept, mt_py_kept_visitor visit, void *ctx);

#endif
