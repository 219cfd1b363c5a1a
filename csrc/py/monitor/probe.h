/* probe.h -- the Python object around one mt_probe_linux and the phases seen through it. */
#ifndef MT_PY_MONITOR_PROBE_H
#define MT_PY_MONITOR_PROBE_H

#include "py/base/state.h"

#include "core/port/probe.h"
#include "os/monitor/procfile.h"

/* Unknown is None, no limit is -1. */
PyObject *mt_py_number(uint64_t value);

/* A Sample, which has no device columns. */
PyObject *mt_py_sample(mt_state *st, const mt_sample *sample);

/* "/" and "/x/" are "" and "/x", to which paths are appended. False with a ValueError that begins
 * with `who`, for one that is too long. */
bool mt_py_root(const char *given, const char *who, char out[MT_PATH_ROOM]);

/* Bytes above 0; MT_UNLIMITED for None. False with an error that begins with `who`. */
bool mt_py_limit(PyObject *given, const char *who, uint64_t *out);

/* _note_shm(name). Raises nothing. */
PyObject *mt_py_note_shm(PyObject *module, PyObject *name);
/* _watch_files(). Raises nothing. */
PyObject *mt_py_watch_files(PyObject *module, PyObject *none);

/* Registers Probe and Sample in the module. */
int mt_py_probe_register(PyObject *module, mt_state *st);

#endif
