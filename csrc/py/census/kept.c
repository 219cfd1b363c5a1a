/* kept.c -- values of context variables and callbacks of atexit: see kept.h. */
#define Py_BUILD_CORE_MODULE /* the layout of atexit's table */
#include "py/census/kept.h"

#include <internal/pycore_interp.h>

/* (ContextVar, value) of one context. -1 with an error. */
static int
add_context(PyObject *pairs, PyObject *context)
{
    PyObject *items = PyMapping_Items(context);
    int failed = items == NULL ? -1 : 0;

    if (!failed) failed = PyList_SetSlice(pairs, PyList_GET_SIZE(pairs), PY_SSIZE_T_MAX, items);
    Py_XDECREF(items);
    return failed;
}

int
mt_py_kept_open(mt_kept *kept)
{
    PyThreadState *thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    PyObject *modules = PyImport_GetModuleDict();

    *kept = (mt_kept){.pairs = PyList_New(0)};
    if (kept->pairs == NULL) return -1;
    for (; thread != NULL; thread = PyThreadState_Next(thread))
        if (thread->context != NULL && add_context(kept->pairs, thread->context) < 0) {
            mt_py_kept_close(kept);
            return -1;
        }
    if (modules != NULL && PyDict_Check(modules))
        kept->exits = PyDict_GetItemString(modules, "atexit");
    if (kept->exits != NULL && !PyModule_Check(kept->exits)) kept->exits = NULL;
    return 0;
}

void
mt_py_kept_close(mt_kept *kept)
{
    Py_CLEAR(kept->pairs);
    kept->exits = NULL;
}

/* From 3.14 on the table is a list of tuples. */
static int
visit_exits(PyObject *module, mt_py_kept_visitor visit, void *ctx)
{
    const struct atexit_state *state = &PyInterpreterState_Get()->atexit;
    int found = 0;

#if PY_VERSION_HEX < 0x030E0000
    for (int i = 0; i < state->ncallbacks && found == 0; i++) {
        if (state->callbacks[i] == NULL) continue; /* unregistered */
        PyObject *const all[] = {state->callbacks[i]->func, state->callbacks[i]->args,
                                 state->callbacks[i]->kwargs};
        for (size_t k = 0; k < sizeof all / sizeof *all && found == 0; k++)
            if (all[k] != NULL) found = visit(ctx, module, all[k]);
    }
#else
    for (Py_ssize_t i = 0; state->callbacks != NULL && found == 0; i++) {
        if (i == PyList_GET_SIZE(state->callbacks)) break;
        found = visit(ctx, module, PyList_GET_ITEM(state->callbacks, i));
    }
#endif
    return found;
}

int
mt_py_kept_visit(const mt_kept *kept, mt_py_kept_visitor visit, void *ctx)
{
    int found = 0;

    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(kept->pairs) && found == 0; i++) {
        PyObject *pair = PyList_GET_ITEM(kept->pairs, i);
        found = visit(ctx, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1));
    }
    if (found == 0 && kept->exits != NULL) found = visit_exits(kept->exits, visit, ctx);
    return found;
}
