/* managed.h -- the Python object around a function whose outermost calls are a policy's updates.
 *
 *   obj.update(buffer) ──► Managed ──► function ──► clear(args, kwargs) ──► tick of the policy
 *                             │                     also when the           only when it did not
 *                             │                     function raised         raise, and only for an
 *                             ▼                                             outermost call
 *   mt_state.calls: thread 1, policy A ──► thread 2, policy A ──► thread 1, policy B
 *
 * A call is an outermost one if its thread has no entry for its policy yet. The entries are few:
 * one a thread and policy, however deep the calls nest. They lie in the heap, not on the C stack,
 * because greenlets move stacks away; threads are known by number, because a new thread may lie
 * where an ended one lay. All of it is under the interpreter's lock. */
#ifndef MT_PY_CLEANUP_MANAGED_H
#define MT_PY_CLEANUP_MANAGED_H

#include "py/base/state.h"

/* Registers Managed in the module: st->Managed. */
int mt_py_managed_register(PyObject *module, mt_state *st);

/* Frees the entries that are kept for the next calls. */
void mt_py_managed_free(mt_state *st);

#endif
