/* devices.h -- a probe's device columns by torch's allocator and the CUDA driver. */
#ifndef MT_PY_MONITOR_DEVICES_H
#define MT_PY_MONITOR_DEVICES_H

#include "py/base/state.h"
#include "core/port/probe.h"
#include "os/monitor/probe.h"

/* A probe of this process, by the files below `root` ("" for the machine's own), with the columns
 * of so many devices; reading it needs no GIL. allocated and its peak, reserved and inactive_split
 * are unknown without the shim, free and total without a CUDA runtime, and all of a device until
 * torch uses it. pre: connected to torch where devices > 0. MT_ENOMEM. */
mt_status mt_py_open_probe(mt_state *st, const char *root, const mt_probe_ages *ages, int devices,
                           mt_probe_ops *out, mt_error *err);

/* Device i of an array of mt_device_sample as (allocated, reserved, free, total, inactive_split,
 * allocated_peak), None where it is unknown: an mt_py_item. */
PyObject *mt_py_device_tuple(const void *devices, size_t i);

/* memtools._core.device_memory(device). */
PyObject *mt_py_device_memory(PyObject *module, PyObject *device);

#endif
