/* forwards.h -- notices calls of torch's modules, without a hook.
 *
 * torch calls each module by one function, Module.__call__, and CPython calls that one by a pointer
 * in the function object. We put a pointer of ours there, which counts how deep this thread is in
 * such calls, and calls what was there before:
 *
 *     model(x) ──► Module.__call__ ──► depth 0 -> 1 ──► as before ──► forward
 *                                                          layer(x) ──► 1 -> 2 ──► as before
 *     ended(model) ◄── depth 1 -> 0 ◄──────────────────────────┘
 *
 * Python sees none of it: Module.__call__ is the same function, no module has a hook, and no frame
 * is added to a traceback. So torch.compile, torch.jit, pickles and copies of modules are as they
 * were. A hook of torch's own (register_module_forward_hook) takes 2 us for each module of a model
 * and makes torch.compile warn; this takes some 10 ns. */
#ifndef MT_PY_MONITOR_FORWARDS_H
#define MT_PY_MONITOR_FORWARDS_H

#include "py/base/state.h"

/* _watch_calls(function, ended, main_thread, arguments=False): from now on ended(first argument) is
 * called whenever an outermost call of this Python function has returned without an exception, or
 * with `arguments` ended((first argument, others, values of keywords)); what it raises propagates
 * from the call. Calls on other threads are not reported while the main thread, which is given by
 * its number, is in one: they belong to it. There may be one `ended` with arguments and one without
 * them, for the same function. True; False where there is one of this kind already, or another
 * function is watched.
 *
 * _watch_calls(None, None, 0, arguments): removes the one of this kind. Calls that run now end as
 * they would. */
PyObject *mt_py_watch_calls(PyObject *module, PyObject *args);

#endif
