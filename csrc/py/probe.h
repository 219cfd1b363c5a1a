/* probe.h -- the Python object around one mt_probe_linux and the phases seen through it. */
#ifndef MT_PY_PROBE_H
#define MT_PY_PROBE_H

#include "state.h"

/* Registers Probe and Sample in the module. */
int mt_py_probe_register(PyObject *module, mt_state *st);

#endif
