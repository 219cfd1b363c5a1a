/* one.c -- how this file works.
 *
 * A tensor is read by the shim where it is there, else through DLPack's exchange API, which makes
 * no copy. One that cannot be read as it is (a subclass, a lazy negation, a strange layout) goes
 * once through mt_state.plain, a function of Python that makes a plain one of it or raises
 * TypeError. */
#include "py/tensor/one.h"

#include "py/base/errors.h"
#include "py/base/objects.h"

/* torch sets a Python error whose text ends in a C++ backtrace; ours is one sentence. */
static int
unreadable(PyObject *tensor)
{
    PyErr_Format(PyExc_TypeError,
                 "append() cannot read this %s: it has no plain memory of float64, float32, "
                 "float16, bfloat16 or float8 (a functorch, fake or zero tensor?); pass real gates",
                 Py_TYPE(tensor)->tp_name);
    return -1;
}

static const struct {
    uint8_t code, bits;
} dlpack_of[MT_DTYPE_COUNT] = {
    [MT_F32] = {kDLFloat, 32},
    [MT_F64] = {kDLFloat, 64},
    [MT_F16] = {kDLFloat, 16},
    [MT_BF16] = {kDLBfloat, 16},
    [MT_F8_E4M3FN] = {kDLFloat8_e4m3fn, 8},
    [MT_F8_E5M2] = {kDLFloat8_e5m2, 8},
    [MT_F8_E4M3FNUZ] = {kDLFloat8_e4m3fnuz, 8},
    [MT_F8_E5M2FNUZ] = {kDLFloat8_e5m2fnuz, 8},
};

bool
mt_py_dtype_of(unsigned code, unsigned bits, mt_dtype *out)
{
    for (mt_dtype dtype = MT_F32; dtype < MT_DTYPE_COUNT; dtype++)
        if (dlpack_of[dtype].code == code && dlpack_of[dtype].bits == bits) {
            *out = dtype;
            return true;
        }
    return false;
}

int
mt_py_in_backward(mt_state *st)
{
    PyObject *id;
    long value;

    if (st->shim != NULL) return st->shim->in_backward();
    if ((id = PyObject_CallNoArgs(st->graph_task_id)) == NULL) return -1;
    value = PyLong_AsLong(id);
    Py_DECREF(id);
    if (value == -1 && PyErr_Occurred()) return -1;
    return value != -1;
}

static bool
is_torch_tensor(mt_state *st, PyObject *tensor)
{
    return Py_IS_TYPE(tensor, st->tensor) || Py_IS_TYPE(tensor, st->parameter);
}

int
mt_py_is_plain(mt_state *st, PyObject *tensor)
{
    int neg;

    if (!is_torch_tensor(st, tensor)) return 0;
    neg = mt_py_truth(PyObject_CallOneArg(st->is_neg, tensor));
    return neg < 0 ? -1 : !neg;
}

/* What lies on a device is fetched by one copy of its bytes, so it must be packed. */
static bool
fetchable(const mt_py_tensor *t)
{
    return !t->on_device || mt_rows_is_packed(&t->rows);
}

/* The shim's way, which makes up its own mind about what is plain. */
static bool
view_by_shim(mt_state *st, PyObject *tensor, mt_py_tensor *out)
{
    mt_torch_view view;
    mt_dtype dtype;

    if (st->shim == NULL || !is_torch_tensor(st, tensor)) return false;
    if (st->shim->view(tensor, &view) != 1 || view.shape[1] == 0) return false;
    if (!mt_py_dtype_of(view.type, view.bits, &dtype)) return false;
    out->rows = (mt_rows){.data = view.data,
                          .dtype = dtype,
                          .rows = (size_t)view.shape[0],
                          .cols = (size_t)view.shape[1],
                          .row_stride = (ptrdiff_t)view.strides[0],
                          .col_stride = (ptrdiff_t)view.strides[1]};
    out->on_device = view.cuda != 0;
    out->device = view.device;
    if (!fetchable(out)) return false;
    out->owner = Py_NewRef(tensor);
    return true;
}

static int
rows_from_dlpack(const DLTensor *dl, mt_dtype dtype, PyObject *tensor, mt_py_tensor *out)
{
    const char *data;

    if (dl->ndim != 2) {
        PyErr_Format(PyExc_ValueError,
                     "append() takes gates of shape [n, n_experts], got %d dimensions; flatten the "
                     "others: gates.reshape(-1, gates.shape[-1])",
                     (int)dl->ndim);
        return -1;
    }
    if (dl->shape[1] == 0) {
        PyErr_SetString(PyExc_ValueError, "append() takes gates of at least one expert, got 0");
        return -1;
    }
    if (dl->data == NULL && dl->shape[0] > 0) return unreadable(tensor);
    data = dl->data == NULL ? NULL : (const char *)dl->data + dl->byte_offset;
    out->rows = mt_rows_packed(data, dtype, (size_t)dl->shape[0], (size_t)dl->shape[1]);
    if (dl->strides != NULL) {
        out->rows.row_stride = (ptrdiff_t)dl->strides[0];
        out->rows.col_stride = (ptrdiff_t)dl->strides[1];
    }
    out->on_device = dl->device.device_type == kDLCUDA;
    out->device = dl->device.device_id;
    return 0;
}

/* 1 when it was read, 0 when the tensor has to be made plain first, -1 with an error. */
static int
try_read(mt_state *st, PyObject *tensor, mt_py_tensor *out)
{
    DLDeviceType device;
    mt_dtype dtype;
    DLTensor dl;

    if (st->dlpack->dltensor_from_py_object_no_sync(tensor, &dl) != 0) {
        PyErr_Clear();
        return 0;
    }
    device = dl.device.device_type;
    if (device != kDLCPU && device != kDLCUDAHost && device != kDLCUDA) return 0;
    if (dl.dtype.lanes != 1) return 0;
    if (!mt_py_dtype_of(dl.dtype.code, dl.dtype.bits, &dtype)) return 0;
    if (rows_from_dlpack(&dl, dtype, tensor, out) < 0) return -1;
    if (!fetchable(out)) return 0;
    out->owner = Py_NewRef(tensor);
    return 1;
}

int
mt_py_tensor_read(mt_state *st, PyObject *tensor, mt_py_tensor *out)
{
    int plain, read;
    PyObject *made;

    if (view_by_shim(st, tensor, out)) return 0;
    if ((plain = mt_py_is_plain(st, tensor)) < 0) return -1;
    if (plain && (read = try_read(st, tensor, out)) != 0) return read < 0 ? -1 : 0;
    if ((made = PyObject_CallOneArg(st->plain, tensor)) == NULL) return -1;
    read = try_read(st, made, out);
    if (read == 0) unreadable(tensor);
    Py_DECREF(made);
    return read == 1 ? 0 : -1;
}

void
mt_py_tensor_done(mt_py_tensor *t)
{
    Py_CLEAR(t->owner);
}

/* torch's allocator reports here instead of setting the error itself. */
static void
set_error(void *ctx, const char *kind, const char *message)
{
    (void)ctx;
    (void)kind;
    PyErr_SetString(PyExc_MemoryError, message);
}

PyObject *
mt_py_tensor_new(mt_state *st, const mt_rows *shape, void **data)
{
    int64_t sizes[2] = {(int64_t)shape->rows, (int64_t)shape->cols};
    DLTensor prototype = {.device = {kDLCPU, 0},
                          .ndim = 2,
                          .dtype = {dlpack_of[shape->dtype].code, dlpack_of[shape->dtype].bits, 1},
                          .shape = sizes};
    DLManagedTensorVersioned *managed;
    void *tensor;

    if (st->dlpack->managed_tensor_allocator(&prototype, &managed, NULL, set_error) != 0)
        return NULL;
    *data = (char *)managed->dl_tensor.data + managed->dl_tensor.byte_offset;
    if (st->dlpack->managed_tensor_to_py_object_no_sync(managed, &tensor) != 0) {
        managed->deleter(managed); /* torch does not, on failure */
        return NULL;
    }
    return tensor;
}

int
mt_py_current_stream(mt_state *st, int device, void **stream)
{
    return st->dlpack->current_work_stream(kDLCUDA, device, stream);
}
