/* one.h -- torch tensors in and out, by DLPack's C exchange API.
 *
 *   PyObject ──read()──► mt_rows over the tensor's own memory   (borrowed: no copy, no capsule)
 *   PyObject ◄──new()─── memory that torch allocated            (owned by the new tensor)
 *
 * All functions hold the GIL. */
#ifndef MT_PY_TENSOR_ONE_H
#define MT_PY_TENSOR_ONE_H

#include "py/base/state.h"
#include "core/base/rows.h"

typedef struct mt_py_tensor {
    mt_rows rows;    /* rows.data is a device address when on_device */
    PyObject *owner; /* a new reference to the tensor that rows points into */
    bool on_device;
    int device;
} mt_py_tensor;

/* 1 while autograd runs backward on this thread: a forward pass that runs now is a recomputation
 * under activation checkpointing. 0 when not, -1 with an error. */
int mt_py_in_backward(mt_state *st);

/* The element type that DLPack and the shim write as this code and number of bits. */
bool mt_py_dtype_of(unsigned code, unsigned bits, mt_dtype *out);

/* 1 when the exchange API alone is to be trusted with this tensor, 0 when not, -1 with an error. It
 * reads a lazily negated tensor with the wrong sign, and a subclass may keep its values elsewhere.
 */
int mt_py_is_plain(mt_state *st, PyObject *tensor);

/* Looks into a 2-D tensor of gates. What has no plain memory (meta, fake, sparse, quantised,
 * complex) is a TypeError, a wrong rank a ValueError; -1 then. Whatever can be made plain without
 * guessing (a lazily negated view, a tensor subclass, another device, gaps on a CUDA device) is.
 * The view lasts until done(), while no Python code runs. */
int mt_py_tensor_read(mt_state *st, PyObject *tensor, mt_py_tensor *out);
void mt_py_tensor_done(mt_py_tensor *t);

/* A new CPU tensor [rows, cols] of undefined content, and where its bytes are. */
PyObject *mt_py_tensor_new(mt_state *st, const mt_rows *shape, void **data);

/* The stream that torch currently uses on the device. -1 with an error. */
int mt_py_current_stream(mt_state *st, int device, void **stream);

#endif
