/* state.h -- what the module keeps: error classes, the type, and the connection to torch.
 *
 * One per interpreter, in the module object; no mutable statics anywhere. The torch half is empty
 * until memtools._base.torch.connect() fills it, which the first tensor triggers. */
#ifndef MT_PY_BASE_STATE_H
#define MT_PY_BASE_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "core/monitor/peaks.h"
#include "cuda/memory.h"
#include "third_party/dlpack/dlpack.h"
#include "torch/torch_shim.h"
#include "py/base/natives.h"

typedef struct mt_managed_call mt_managed_call; /* see managed.h */

typedef struct mt_state {
    PyObject *errors; /* module memtools.errors */
    PyTypeObject *GateHistory;
    PyTypeObject *KVPool, *KVLease;
    mt_natives *natives;
    PyTypeObject *Budget;
    PyTypeObject *Probe, *Sample;
    mt_peaks *peaks; /* of this process, opened by the first Probe */
    PyTypeObject *RecordWriter;
    PyTypeObject *LeakDetector;
    PyTypeObject *Sampler;
    PyTypeObject *Policy;
    PyTypeObject *Managed;
    PyTypeObject *GradMeasure;
    PyObject *on_uncaught, *on_exit_call; /* see ending.h; NULL: not set */
    PyObject *excepthook_before, *excepthook_first;
    bool in_excepthook;
    mt_managed_call *calls, *idle_calls; /* of managed functions: those that run, and spare ones */
    uint64_t call_tokens;                /* numbers that were given to them */
    mt_devmem *devmem;                   /* by the first device_memory() */
    /* From here on: NULL until connected. */
    const DLPackExchangeAPI *dlpack; /* static in torch */
    PyTypeObject *tensor;            /* torch.Tensor */
    PyTypeObject *parameter;         /* torch.nn.Parameter */
    PyObject *graph_task_id;         /* callable: -1 outside of a backward pass */
    PyObject *is_neg;                /* torch.Tensor.is_neg, for use without the shim */
    PyObject *plain;          /* callable: any tensor to one that can be read, or TypeError */
    const mt_torch_ops *shim; /* NULL: not built, or for another torch */
    PyObject *keep_alive;     /* the capsules behind dlpack and shim */
} mt_state;

extern PyModuleDef mt_module;

/* The state of an object's module; type may be a subclass made in Python. NULL with an error. */
mt_state *mt_state_of_type(PyTypeObject *type);

/* Connects to torch unless that is done. -1 with an error when torch is missing or too old. */
int mt_state_connect(mt_state *st);

/* Takes the connection's parts from Python: see memtools/_base/torch.py. */
PyObject *mt_state_take_connection(PyObject *module, PyObject *args);

/* Each registers its type in the module. */
int mt_py_gatehist_register(PyObject *module, mt_state *st);
int mt_py_kvpool_register(PyObject *module, mt_state *st);
int mt_py_kvlease_register(PyObject *module, mt_state *st);
int mt_py_leakdetector_register(PyObject *module, mt_state *st);
int mt_py_sampler_register(PyObject *module, mt_state *st);
int mt_py_gradset_register(PyObject *module, mt_state *st);

/* The CUDA runtime, opened at the first call; NULL with a DeviceError. */
mt_cudart *mt_state_cudart(mt_state *st);

#endif
