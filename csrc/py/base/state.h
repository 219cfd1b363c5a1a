/* state.h -- what the module keeps: error classes, its types, and the connection to torch.
 *
 * One per interpreter, in the module object. The torch half is empty until
 * memtools._base.torch.connect() fills it, which the first tensor triggers. What handlers of
 * signals, of fork() and of the interpreter's exit need is the process's, and lies in their
 * files. */
#ifndef MT_PY_BASE_STATE_H
#define MT_PY_BASE_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "cuda/memory.h"
#include "third_party/dlpack/dlpack.h"
#include "torch/torch_shim.h"
#include "py/base/natives.h"

typedef struct mt_managed_call mt_managed_call; /* see managed.h */
struct mt_peaks;                                /* see core/monitor/peaks.h */

/* Every object that the module holds, as X(type of C, name). */
#define MT_STATE_OBJECTS(X)                                                                        \
    X(PyObject, errors) /* the module memtools.errors */                                           \
    /* The module's own types. */                                                                  \
    X(PyTypeObject, GateHistory)                                                                   \
    X(PyTypeObject, KVPool)                                                                        \
    X(PyTypeObject, KVLease)                                                                       \
    X(PyTypeObject, Budget)                                                                        \
    X(PyTypeObject, BudgetPart)                                                                    \
    X(PyTypeObject, Probe)                                                                         \
    X(PyTypeObject, Sample)                                                                        \
    X(PyTypeObject, RecordWriter)                                                                  \
    X(PyTypeObject, Sampler)                                                                       \
    X(PyTypeObject, Policy)                                                                        \
    X(PyTypeObject, Managed)                                                                       \
    X(PyTypeObject, GradMeasure)                                                                   \
    X(PyTypeObject, GrowthTable)                                                                   \
    X(PyTypeObject, Blocks)                                                                        \
    X(PyTypeObject, Contents)                                                                      \
    /* See ending.h; NULL: not set. */                                                             \
    X(PyObject, on_uncaught)                                                                       \
    X(PyObject, excepthook_before)                                                                 \
    X(PyObject, excepthook_first)                                                                  \
    /* The connection to torch: NULL until there is one. */                                        \
    X(PyTypeObject, tensor)    /* torch.Tensor */                                                  \
    X(PyTypeObject, parameter) /* torch.nn.Parameter */                                            \
    X(PyObject, graph_task_id) /* callable: -1 outside of a backward pass */                       \
    X(PyObject, is_neg)        /* torch.Tensor.is_neg, for use without the shim */                 \
    X(PyObject, plain)         /* callable: any tensor to one that can be read, or TypeError */    \
    X(PyObject, keep_alive)    /* the capsules behind dlpack and shim */

#define MT_STATE_MEMBER(type, name) type *name; /* NOLINT(bugprone-macro-parentheses) */
typedef struct mt_state {
    MT_STATE_OBJECTS(MT_STATE_MEMBER)
    mt_natives *natives;
    struct mt_peaks *peaks; /* of this process, opened by the first Probe */
    bool in_excepthook;
    mt_managed_call *calls, *idle_calls; /* of managed functions: those that run, and spare ones */
    uint64_t call_tokens;                /* numbers that were given to them */
    mt_devmem *devmem;                   /* by the first device_memory() */
    const DLPackExchangeAPI *dlpack;     /* static in torch; NULL until connected */
    const mt_torch_ops *shim;            /* NULL: not connected, not built, or for another torch */
} mt_state;
#undef MT_STATE_MEMBER

extern PyModuleDef mt_module;

/* The state of an object's module; type may be a subclass made in Python. NULL with an error. */
mt_state *mt_state_of_type(PyTypeObject *type);

/* Connects to torch unless that is done. -1 with an error when torch is missing or too old. */
int mt_state_connect(mt_state *st);

/* Each registers its type in the module. */
int mt_py_gatehist_register(PyObject *module, mt_state *st);
int mt_py_kvpool_register(PyObject *module, mt_state *st);
int mt_py_kvlease_register(PyObject *module, mt_state *st);
int mt_py_sampler_register(PyObject *module, mt_state *st);
int mt_py_gradset_register(PyObject *module, mt_state *st);

/* The CUDA runtime, opened at the first call; NULL with a DeviceError. */
mt_cudart *mt_state_cudart(mt_state *st);

#endif
