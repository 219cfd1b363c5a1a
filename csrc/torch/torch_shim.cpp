// torch_shim.cpp -- memtools._torch: the only file that sees ATen.
#include "torch_shim.h"

#include "../third_party/dlpack/dlpack.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

namespace
{

int
in_backward() noexcept
{
    return torch::autograd::get_current_graph_task_id() != -1;
}

/* DLPack's type code of the common gate dtypes, 0 for others. */
unsigned char
type_code(c10::ScalarType dtype) noexcept
{
    switch (dtype) {
    case c10::ScalarType::Double:
    case c10::ScalarType::Float:
    case c10::ScalarType::Half:
        return kDLFloat;
    case c10::ScalarType::BFloat16:
        return kDLBfloat;
    default:
        return 0;
    }
}

/* Lazily negated or conjugated, wrapped by functorch or by a Python subclass: the memory, where
 * there is any, is not the value. */
bool
is_plain(const at::Tensor &t)
{
    constexpr c10::DispatchKeySet lazy(
        {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor,
         c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
         c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});

    return t.dim() == 2 && t.layout() == c10::kStrided && (t.is_cpu() || t.is_cuda()) &&
           !t.key_set().has_any(lazy) && t.has_storage();
}

int
view(void *tensor, mt_torch_view *out) noexcept
{
    try {
        const at::Tensor &t = THPVariable_Unpack(static_cast<PyObject *>(tensor));
        unsigned char type = type_code(t.scalar_type());
        if (type == 0 || !is_plain(t)) return 0;
        const void *data = t.const_data_ptr();
        if (data == nullptr && t.numel() > 0) return 0;
        *out = {data,
                {t.size(0), t.size(1)},
                {t.stride(0), t.stride(1)},
                type,
                static_cast<unsigned char>(8 * t.element_size()),
                t.is_cuda(),
                t.is_cuda() ? t.get_device() : 0};
        return 1;
    } catch (...) {
        return 0;
    }
}

const mt_torch_ops ops = {MT_TORCH_OPS_VERSION, in_backward, view};

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
