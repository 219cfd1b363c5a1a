/* module.c -- how this file works.
 *
 * memtools._core is made in phases: PyInit__core gives the definition, module_exec fills the
 * module's state (base/state.h) and lets each file register its types. torch is not needed for
 * that: the first tensor makes mt_state_connect import memtools._base.torch, which calls _connect()
 * with the parts of torch that are needed here. The table of methods lists all functions of the
 * module; most are defined in the rooms. */
#include "py/base/state.h"

#include <stdlib.h>

#include "core/monitor/peaks.h"
#include "os/base/forks.h"
#include "py/blocks/reports.h"
#include "py/budget/budget.h"
#include "py/census/census.h"
#include "py/monitor/blocks.h"
#include "py/monitor/devices.h"
#include "py/monitor/ending.h"
#include "py/monitor/forwards.h"
#include "py/base/errors.h"
#include "py/base/objects.h"
#include "py/cleanup/managed.h"
#include "py/cleanup/policy.h"
#include "py/monitor/probe.h"
#include "py/monitor/traced.h"
#include "py/record/record.h"

mt_state *
mt_state_of_type(PyTypeObject *type)
{
    PyObject *module = PyType_GetModuleByDef(type, &mt_module);

    return module == NULL ? NULL : PyModule_GetState(module);
}

int
mt_state_connect(mt_state *st)
{
    PyObject *bridge, *done;

    if (st->dlpack != NULL) return 0;
    if ((bridge = PyImport_ImportModule("memtools._base.torch")) == NULL) return -1;
    done = PyObject_CallMethod(bridge, "connect", NULL);
    Py_DECREF(bridge);
    if (done == NULL) return -1;
    Py_DECREF(done);
    if (st->dlpack != NULL) return 0;
    PyErr_SetString(PyExc_ImportError,
                    "memtools._base.torch.connect() did not connect this module");
    return -1;
}

static const DLPackExchangeAPI *
usable_dlpack(PyObject *capsule)
{
    const DLPackExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");

    if (api == NULL) return NULL;
    if (api->header.version.major != DLPACK_MAJOR_VERSION ||
        api->dltensor_from_py_object_no_sync == NULL) {
        PyErr_Format(PyExc_ImportError,
                     "torch speaks DLPack %u, memtools was built for %d; upgrade memtools",
                     (unsigned)api->header.version.major, DLPACK_MAJOR_VERSION);
        return NULL;
    }
    return api;
}

static int
usable_shim(PyObject *capsule, const mt_torch_ops **out)
{
    const mt_torch_ops *ops = NULL;

    if (capsule != Py_None) {
        if ((ops = PyCapsule_GetPointer(capsule, MT_TORCH_CAPSULE)) == NULL) return -1;
        if (ops->version != MT_TORCH_OPS_VERSION) {
            PyErr_SetString(PyExc_ImportError,
                            "memtools._torch and memtools._core are of different "
                            "builds; reinstall memtools");
            return -1;
        }
    }
    *out = ops;
    return 0;
}

/* Takes the connection's parts from Python: see memtools/_base/torch.py. */
static PyObject *
take_connection(PyObject *module, PyObject *args)
{
    mt_state *st = PyModule_GetState(module);
    PyObject *dlpack, *tensor, *parameter, *graph_task_id, *is_neg, *plain, *shim;
    const DLPackExchangeAPI *api;
    const mt_torch_ops *ops;

    if (!PyArg_ParseTuple(args, "OO!O!OOOO:_connect", &dlpack, &PyType_Type, &tensor, &PyType_Type,
                          &parameter, &graph_task_id, &is_neg, &plain, &shim))
        return NULL;
    if ((api = usable_dlpack(dlpack)) == NULL || usable_shim(shim, &ops) < 0) return NULL;
    Py_XSETREF(st->keep_alive, PyTuple_Pack(2, dlpack, shim));
    if (st->keep_alive == NULL) return NULL;
    Py_XSETREF(st->tensor, (PyTypeObject *)Py_NewRef(tensor));
    Py_XSETREF(st->parameter, (PyTypeObject *)Py_NewRef(parameter));
    Py_XSETREF(st->graph_task_id, Py_NewRef(graph_task_id));
    Py_XSETREF(st->is_neg, Py_NewRef(is_neg));
    Py_XSETREF(st->plain, Py_NewRef(plain));
    st->shim = ops;
    st->dlpack = api;
    Py_RETURN_NONE;
}

/* MEMTOOLS_CUDART names another library than the one torch brings. */
mt_cudart *
mt_state_cudart(mt_state *st)
{
    mt_error err;

    if (st->natives->cudart == NULL && mt_cudart_open(&mt_alloc_libc, getenv("MEMTOOLS_CUDART"),
                                                      &st->natives->cudart, &err) != MT_OK)
        mt_py_raise(st, &err, "opening the CUDA runtime");
    return st->natives->cudart;
}

static PyObject *
cuda_info(PyObject *module, PyObject *Py_UNUSED(none))
{
    mt_state *st = PyModule_GetState(module);
    int runtime, driver, devices;
    mt_error err;

    if (mt_state_cudart(st) == NULL) return NULL;
    if (mt_cudart_info(st->natives->cudart, &runtime, &driver, &devices, &err) != MT_OK)
        return mt_py_raise(st, &err, "asking the CUDA runtime");
    return Py_BuildValue("{s:i,s:i,s:i}", "runtime_version", runtime, "driver_version", driver,
                         "devices", devices);
}

static PyMethodDef methods[] = {
    {"_connect", take_connection, METH_VARARGS,
     "_connect(dlpack, tensor, parameter, graph_task_id, is_neg, plain, shim)\n--\n\n"
     "Take torch's parts; memtools._base.torch calls it."},
    {"cuda_info", cuda_info, METH_NOARGS,
     "cuda_info()\n--\n\n"
     "runtime_version, driver_version and devices of the CUDA runtime as a dict of int; "
     "DeviceError when there is none."},
    {"device_memory", mt_py_device_memory, METH_O,
     "device_memory(device, /)\n--\n\n"
     "(allocated, reserved, free, total, inactive_split, allocated_peak) bytes of a CUDA device "
     "now, each None where it cannot be known; None where torch does not use CUDA in this process. "
     "Imports torch."},
    {"_note_shm", mt_py_note_shm, METH_O,
     "_note_shm(name, /)\n--\n\n"
     "The program has just made this file of /dev/shm: it is of the job's shared memory. None: "
     "from now on forked children report to this process as well."},
    {"_watch_files", mt_py_watch_files, METH_NOARGS,
     "_watch_files($module, /)\n--\n\n"
     "Where files of this user have come into /dev/shm that were not noted, watch from now on "
     "which files Python opens to write there."},
    {"excepthook", mt_py_excepthook, METH_VARARGS,
     "excepthook($module, exctype, value, traceback, /)\n--\n\n"
     "Handle an exception by displaying it with a traceback on sys.stderr."},
    {"_watch_calls", mt_py_watch_calls, METH_VARARGS,
     "_watch_calls(function, ended, main_thread, arguments=False, /)\n--\n\n"
     "Call ended(first argument) when an outermost call of this Python function has returned, or "
     "ended(tuple of all of them) with arguments; there may be one of each. None removes it. False "
     "where there is one already."},
    {"_watch_end", mt_py_watch_end, METH_VARARGS,
     "_watch_end(on_uncaught, excepthook, /)\n--\n\n"
     "What excepthook() of this module calls, None for nothing. Returns the excepthook of the call "
     "before."},
    {"_set_last_command", mt_py_set_last_command, METH_VARARGS,
     "_set_last_command(words, instead, root='/', /)\n--\n\n"
     "Set the command, a tuple of bytes, that SIGTERM and SIGHUP run if they end this process, and "
     "_run_last_command() otherwise. If it fails, or the control group has less than 32 MiB left, "
     "`instead` is written to the standard error."},
    {"_run_last_command", mt_py_run_last_command, METH_O,
     "_run_last_command(at_exit, /)\n--\n\n"
     "Run the last command and wait for it; at exit: when the process ends, after everything that "
     "is registered later. It runs once, and not in a forked child."},
    {"_python_bytes", mt_py_python_bytes, METH_NOARGS, "_python_bytes()\n--\n\n"},
    {"_heap_bytes", mt_py_heap_bytes, METH_NOARGS, "_heap_bytes()\n--\n\n"},
    {"_traced", mt_py_traced, METH_NOARGS, "_traced()\n--\n\n"},
    {"_traced_at", mt_py_traced_at, METH_O, "_traced_at(object, /)\n--\n\n"},
    {"_census", mt_py_census, METH_VARARGS, "_census(tensor, shim, /)\n--\n\n"},
    {"_fresh", mt_py_fresh, METH_VARARGS, "_fresh(type, seen, limit, /)\n--\n\n"},
    {"_instances", mt_py_instances, METH_O, "_instances(classes, /)\n--\n\n"},
    {"_held", mt_py_held, METH_O, "_held(types, /)\n--\n\n"},
    {"_referrers", mt_py_referrers, METH_VARARGS, "_referrers(targets, /)\n--\n\n"},
    {"_place", mt_py_place, METH_VARARGS, "_place(container, value, /)\n--\n\n"},
    {"_frame_variables", mt_py_frame_variables, METH_O, "_frame_variables(frame, /)\n--\n\n"},
    {"_module_of", mt_py_module_of, METH_O, "_module_of(namespace, /)\n--\n\n"},
    {"_instance_dict", mt_py_instance_dict, METH_O, "_instance_dict(object, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

/* In the order in which they are made. */
static int (*const registers[])(PyObject *module, mt_state *st) = {
    mt_py_gatehist_register,     mt_py_kvpool_register,     mt_py_kvlease_register,
    mt_py_budget_register,       mt_py_budgetpart_register, mt_py_probe_register,
    mt_py_recordwriter_register, mt_py_sampler_register,    mt_py_managed_register,
    mt_py_policy_register,       mt_py_gradset_register,    mt_py_growthtable_register,
    mt_py_blocks_register,
};

static int
module_exec(PyObject *module)
{
    mt_state *st = PyModule_GetState(module);

    if (!mt_forks_count() || (st->natives = mt_natives_new()) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if ((st->errors = PyImport_ImportModule("memtools.errors")) == NULL) return -1;
    if (PyModule_AddStringConstant(module, "__version__", MEMTOOLS_VERSION) < 0) return -1;
    for (size_t i = 0; i < sizeof registers / sizeof *registers; i++)
        if (registers[i](module, st) < 0) return -1;
    return 0;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    mt_state *st = PyModule_GetState(module);

#define VISIT(type, name) Py_VISIT(st->name);
    MT_STATE_OBJECTS(VISIT)
#undef VISIT
    return 0;
}

static int
module_clear(PyObject *module)
{
    mt_state *st = PyModule_GetState(module);

    st->dlpack = NULL; /* no tensor can be read from here on */
    st->shim = NULL;
#define CLEAR(type, name) Py_CLEAR(st->name);
    MT_STATE_OBJECTS(CLEAR)
#undef CLEAR
    return 0;
}

static void
module_free(void *module)
{
    mt_state *st = PyModule_GetState(module);

    module_clear(module);
    mt_py_managed_free(st);
    mt_peaks_drop(st->peaks);
    mt_devmem_free(st->devmem);
    /* Histories are gone, because each holds its type and each type this module. Pages of a pool
     * may be left under tensors, and hold their part of this. */
    mt_natives_drop(st->natives);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    /* What it watches (calls of modules, signals) is the process's. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

PyModuleDef mt_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "memtools._core",
    .m_doc = "The native half of memtools. Its names are private; use the package's.",
    .m_size = sizeof(mt_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&mt_module);
}
