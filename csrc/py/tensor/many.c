/* many.c -- how this file works.
 *
 * With the shim one call reads all tensors. Without it each one is read through DLPack's exchange
 * API and a few calls of Python whether its elements lie in one piece of host memory and are what
 * they seem to be; those that do are held by a reference until mt_py_flat_drop. */
#include "py/tensor/many.h"

#include <stdint.h>
#include <string.h>

#include "py/base/objects.h"
#include "py/tensor/one.h"

bool
mt_py_flat_dtype(const mt_torch_flat *flat, mt_dtype *out)
{
    return mt_py_dtype_of(flat->type, flat->bits, out) && mt_dtype_writable(*out);
}

/* --- without the shim ------------------------------------------------------------------------ */

/* Whether the strides are, in some order, those of packed memory: each dimension's is the product
 * of the sizes of those inside it. */
static bool
is_dense(const DLTensor *dl)
{
    int64_t stride = 1;
    uint64_t left = 0;

    if (dl->ndim > 64) return false;
    for (int d = 0; d < dl->ndim; d++)
        if (dl->shape[d] != 1) left |= (uint64_t)1 << d;
    while (left != 0) {
        int inner = 0;
        while (inner < dl->ndim && !(left >> inner & 1 && dl->strides[inner] == stride))
            inner++;
        if (inner == dl->ndim) return false;
        stride *= dl->shape[inner];
        left &= ~((uint64_t)1 << inner);
    }
    return true;
}

/* 1 for a tensor whose memory holds its very values, and may be written to; 0 for another, -1 with
 * an error. */
static int
is_plain(mt_state *st, PyObject *tensor, bool writing)
{
    int plain = mt_py_is_plain(st, tensor), frozen;

    if (plain <= 0 || !writing) return plain;
    frozen = mt_py_truth(PyObject_CallMethod(tensor, "is_inference", NULL));
    return frozen < 0 ? -1 : !frozen;
}

static void
many_take(PyObject *tensor, const DLTensor *dl, mt_torch_flat *out)
{
    size_t count = 1;

    for (int d = 0; d < dl->ndim; d++)
        count *= (size_t)dl->shape[d];
    if (dl->device.device_type != kDLCPU || dl->dtype.lanes != 1 || dl->strides == NULL) return;
    if (count > 0 && (dl->data == NULL || !is_dense(dl))) return;
    *out = (mt_torch_flat){.is = MT_TORCH_FLAT,
                           .type = dl->dtype.code,
                           .bits = dl->dtype.bits,
                           .data = (char *)dl->data + dl->byte_offset,
                           .count = count,
                           .tensor = Py_NewRef(tensor)};
}

static int
read_tensor(mt_state *st, PyObject *tensor, bool writing, mt_torch_flat *out)
{
    int plain = is_plain(st, tensor, writing);
    mt_dtype dtype;
    DLTensor dl;

    out->is = MT_TORCH_OTHER;
    if (plain <= 0) return plain;
    if (st->dlpack->dltensor_from_py_object_no_sync(tensor, &dl) != 0) {
        PyErr_Clear();
        return 0;
    }
    many_take(tensor, &dl, out);
    if (out->is == MT_TORCH_FLAT && !mt_py_flat_dtype(out, &dtype)) {
        Py_DECREF(out->tensor);
        *out = (mt_torch_flat){.is = MT_TORCH_OTHER};
    }
    return 0;
}

static int
many_read_one(mt_state *st, PyObject *tensor, bool of_grad, bool writing, mt_torch_flat *out)
{
    PyObject *subject = of_grad ? PyObject_GetAttrString(tensor, "grad") : Py_NewRef(tensor);
    int failed = 0;

    *out = (mt_torch_flat){.is = MT_TORCH_NONE};
    if (subject == NULL) return -1;
    if (subject != Py_None) failed = read_tensor(st, subject, writing, out);
    Py_DECREF(subject);
    return failed;
}

/* --- both ways ------------------------------------------------------------------------------- */

/* A loop of vectors may rely on elements that lie at multiples of their size. */
static void
leave_unaligned(mt_py_flats *f)
{
    for (Py_ssize_t i = 0; i < f->n; i++) {
        mt_py_flats one = {&f->at[i], 1, f->shim};
        if (f->at[i].is != MT_TORCH_FLAT) continue;
        if ((uintptr_t)f->at[i].data % (f->at[i].bits / 8u) == 0) continue;
        mt_py_flat_drop(&one);
        f->at[i].is = MT_TORCH_OTHER;
    }
}

int
mt_py_flat_read(mt_state *st, PyObject *tensors, bool of_grad, bool writing, mt_py_flats *f)
{
    PyObject **items = &PyTuple_GET_ITEM(tensors, 0);
    Py_ssize_t n = f->n;

    f->shim = st->shim;
    if (f->shim != NULL) {
        f->shim->flat((void *const *)items, (size_t)n, of_grad, writing, f->at);
    } else {
        for (f->n = 0; f->n < n; f->n++)
            if (many_read_one(st, items[f->n], of_grad, writing, &f->at[f->n]) < 0) {
                mt_py_flat_drop(f);
                f->n = n;
                return -1;
            }
    }
    leave_unaligned(f);
    return 0;
}

int
mt_py_flat_written(const mt_py_flats *f)
{
    PyObject *list, *bridge, *done = NULL;
    int failed = 0;

    if (f->shim != NULL) {
        f->shim->flat_written(f->at, (size_t)f->n);
        return 0;
    }
    if ((list = PyList_New(0)) == NULL) return -1;
    for (Py_ssize_t i = 0; i < f->n && !failed; i++)
        if (f->at[i].is == MT_TORCH_FLAT) failed = PyList_Append(list, f->at[i].tensor);
    bridge = failed ? NULL : PyImport_ImportModule("memtools._base.torch");
    if (bridge != NULL) done = PyObject_CallMethod(bridge, "written", "O", list);
    Py_XDECREF(bridge);
    Py_XDECREF(done);
    Py_DECREF(list);
    return done == NULL ? -1 : 0;
}

void
mt_py_flat_drop(mt_py_flats *f)
{
    if (f->shim != NULL) {
        f->shim->flat_drop(f->at, (size_t)f->n);
        return;
    }
    for (Py_ssize_t i = 0; i < f->n; i++) {
        if (f->at[i].is != MT_TORCH_FLAT) continue;
        f->at[i].is = MT_TORCH_NONE;
        Py_DECREF(f->at[i].tensor);
    }
}
