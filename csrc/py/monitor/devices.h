/* devices.h -- a probe's device columns by torch's allocator and the CUDA driver. */
#ifndef MT_PY_MONITOR_DEVICES_H
#define MT_PY_MONITOR_DEVICES_H

#include "py/base/state.h"
#include "core/port/probe.h"

/* A probe over `inner`, taken over on success, with the columns of so many devices, which needs no
 * GIL. allocated and its peak, reserved and inactive_split are unknown without the shim, free and
 * total without a CUDA runtime, and all of a device until torch uses it. pre: connected to torch.
 * MT_ENOMEM. */
mt_status mt_py_devices(mt_state *st, const mt_probe_ops *inner, size_t devices, mt_probe_ops *out,
                        mt_error *err);

/* Device i of an array of mt_device_sample as (allocated, reserved, free, total, inactive_split,
 * allocated_peak), None where it is unknown: an mt_py_item. */
PyObject *mt_py_device_tuple(const void *devices, size_t i);

/* memtools._core.device_memory(device). */
PyObject *mt_py_device_memory(PyObject *module, PyObject *device);

#endif
