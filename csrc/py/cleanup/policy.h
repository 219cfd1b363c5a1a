/* policy.h -- the Python object around one mt_policy, and its ticks for others. */
#ifndef MT_PY_CLEANUP_POLICY_H
#define MT_PY_CLEANUP_POLICY_H

#include "py/base/state.h"

/* Registers Policy in the module: st->Policy. */
int mt_py_policy_register(PyObject *module, mt_state *st);

/* One more tick of a clock; acts where something is due. 0, or -1 with an error: what an action let
 * pass. A tick from within an action, or while another thread acts, only counts. pre: policy is
 * one, clock < MT_POLICY_CLOCKS. */
int mt_py_policy_tick(PyObject *policy, unsigned clock);

#endif
