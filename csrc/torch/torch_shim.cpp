// torch_shim.cpp -- memtools._torch: the only file that sees ATen.
#include "torch_shim.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

namespace
{

int
in_backward() noexcept
{
    return torch::autograd::get_current_graph_task_id() != -1;
}

int
is_neg(void *tensor) noexcept
{
    try {
        return THPVariable_Unpack(static_cast<PyObject *>(tensor)).is_neg();
    } catch (...) {
        return -1;
    }
}

const mt_torch_ops ops = {MT_TORCH_OPS_VERSION, in_backward, is_neg};

// Attribute "ops" holds the capsule. The table is constant, so nothing needs freeing.
int
exec(PyObject *module) noexcept
{
    PyObject *capsule = PyCapsule_New(const_cast<mt_torch_ops *>(&ops), MT_TORCH_CAPSULE, nullptr);

    if (capsule == nullptr) return -1;
    int failed = PyModule_AddObjectRef(module, "ops", capsule);
    Py_DECREF(capsule);
    return failed;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void *>(exec)}, {0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "memtools._torch", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr,
};

} // namespace

PyMODINIT_FUNC
PyInit__torch()
{
    return PyModuleDef_Init(&definition);
}
