/* budget.h -- the Python object around one mt_ledger, and what parts that take a limit need of it.
 *
 *   limit=None, bytes, "2 GiB" ──► a ledger of its own, named after the part
 *   limit=Budget               ──► that budget's ledger, which the part joins
 */
#ifndef MT_PY_BUDGET_BUDGET_H
#define MT_PY_BUDGET_BUDGET_H

#include "py/base/state.h"
#include "core/budget/ledger.h"

/* A new reference to the ledger that `limit` means: None, an int of bytes or text like "2 GiB", or
 * a Budget. NULL with TypeError, ValueError or MemoryError. */
mt_ledger *mt_py_ledger(mt_state *st, PyObject *limit, const char *name);

/* A Budget's ledger, borrowed; NULL with a TypeError for another object. */
mt_ledger *mt_py_budget_ledger(mt_state *st, PyObject *budget);

/* Raises BudgetError for MT_ELIMIT and returns NULL: "<doing>: asked 12.0 MiB, used 60.0 MiB
 * of 64.0 MiB (KVPool 56.0 MiB, of it 8.0 MiB idle, GateHistory 4.0 MiB); <remedy>". Names who
 * holds what in the ledger that refused: this one or a parent of it. Other threads may run
 * meanwhile. */
PyObject *mt_py_raise_budget(mt_state *st, mt_ledger *ledger, const mt_error *err,
                             const char *doing, const char *remedy);

/* Register Budget and BudgetPart in the module. */
int mt_py_budget_register(PyObject *module, mt_state *st);
int mt_py_budgetpart_register(PyObject *module, mt_state *st);

#endif
