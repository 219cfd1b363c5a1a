#include "py/monitor/devices.h"

#include <stdlib.h>

#include "py/monitor/probe.h"
#include "core/monitor/devprobe.h"

typedef struct sources {
    const mt_torch_ops *shim; /* or NULL */
    mt_devmem *driver;        /* or NULL */
} sources;

static bool
ask_allocator(void *ctx, int device, mt_device_sample *out)
{
    const sources *s = ctx;
    mt_torch_memory memory;

    if (s->shim == NULL || !s->shim->memory(device, &memory)) return false;
    out->allocated = memory.allocated;
    out->allocated_peak = memory.allocated_peak;
    out->reserved = memory.reserved;
    out->inactive_split = memory.inactive_split;
    return true;
}

static bool
ask_driver(void *ctx, int device, uint64_t *left, uint64_t *total)
{
    const sources *s = ctx;

    return s->driver != NULL && mt_devmem_read(s->driver, device, left, total);
}

static void
close_sources(void *ctx)
{
    sources *s = ctx;

    mt_devmem_free(s->driver);
    free(s);
}

/* Without a runtime there is no driver to ask, which is no fault. */
static mt_status
open_driver(mt_state *st, mt_devmem **out, mt_error *err)
{
    if (st->natives->cudart == NULL)
        (void)mt_cudart_open(&mt_alloc_libc, getenv("MEMTOOLS_CUDART"), &st->natives->cudart, NULL);
    return st->natives->cudart == NULL
               ? MT_OK
               : mt_devmem_new(&mt_alloc_libc, st->natives->cudart, out, err);
}

/* A probe over `inner`, taken over on success, with the columns of so many devices. */
static mt_status
with_devices(mt_state *st, const mt_probe_ops *inner, size_t devices, mt_probe_ops *out,
             mt_error *err)
{
    mt_devprobe_sources from = {ask_allocator, ask_driver, close_sources, NULL};
    sources *s = calloc(1, sizeof *s);
    mt_status status;

    if (s == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    s->shim = st->shim;
    from.ctx = s;
    status = open_driver(st, &s->driver, err);
    if (status == MT_OK) status = mt_devprobe_new(&mt_alloc_libc, inner, &from, devices, out, err);
    if (status != MT_OK) close_sources(s);
    return status;
}

mt_status
mt_py_open_probe(mt_state *st, const char *root, const mt_probe_ages *ages, int devices,
                 mt_probe_ops *out, mt_error *err)
{
    mt_probe_linux *probe;
    mt_probe_ops host;
    mt_status status =
        mt_probe_linux_new(&mt_alloc_libc, &mt_proc_sys_libc, root, ages, &probe, err);

    if (status != MT_OK) return status;
    *out = host = mt_probe_linux_ops(probe);
    if (devices > 0) status = with_devices(st, &host, (size_t)devices, out, err);
    if (status != MT_OK) host.close(host.ctx);
    return status;
}

/* --- one reading now -------------------------------------------------------------------------- */

PyObject *
mt_py_device_tuple(const void *devices, size_t i)
{
    const mt_device_sample *d = &((const mt_device_sample *)devices)[i];

    return Py_BuildValue("(NNNNNN)", mt_py_number(d->allocated), mt_py_number(d->reserved),
                         mt_py_number(d->free), mt_py_number(d->total),
                         mt_py_number(d->inactive_split), mt_py_number(d->allocated_peak));
}

PyObject *
mt_py_device_memory(PyObject *module, PyObject *arg)
{
    mt_state *st = PyModule_GetState(module);
    mt_device_sample d = {MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN};
    long device = PyLong_AsLong(arg);
    sources s = {NULL, NULL};

    if (device == -1 && PyErr_Occurred()) return NULL;
    if (device < 0 || device > 127)
        return PyErr_Format(PyExc_ValueError, "device_memory(): a device must be 0 to 127, got %ld",
                            device);
    if (mt_state_connect(st) < 0) return NULL;
    s.shim = st->shim;
    if (!ask_allocator(&s, (int)device, &d)) Py_RETURN_NONE;
    if (st->devmem == NULL) (void)open_driver(st, &st->devmem, NULL);
    s.driver = st->devmem;
    (void)ask_driver(&s, (int)device, &d.free, &d.total);
    return mt_py_device_tuple(&d, 0);
}
