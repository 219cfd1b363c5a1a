/* many.h -- the memory of many tensors at once, each of which lies flat on the host.
 *
 *   tuple of tensors ──read()──► mt_torch_flat[n]   where each one's elements, or its gradient's,
 *                                                   are, and a reference that keeps them there,
 *                   ◄──drop()──                     the GIL given up meanwhile or not
 *
 * The shim does it in one call; without it, DLPack and a few calls of Python for each. All
 * functions hold the GIL. */
#ifndef MT_PY_TENSOR_MANY_H
#define MT_PY_TENSOR_MANY_H

#include "py/base/state.h"
#include "core/base/dtype.h"

typedef struct mt_py_flats {
    mt_torch_flat *at; /* the caller's array */
    Py_ssize_t n;
    const mt_torch_ops *shim; /* by which they were read */
} mt_py_flats;

/* Reads f->n tensors, or what their .grad is, to f->at. OTHER is not an error. -1 with an error
 * of Python, and nothing held. pre: at and n are set; the tuple holds n torch.Tensor. */
int mt_py_flat_read(mt_state *st, PyObject *tensors, bool of_grad, bool writing, mt_py_flats *f);

/* Reports to autograd that the flat ones are written to. -1 with an error. */
int mt_py_flat_written(const mt_py_flats *f);

void mt_py_flat_drop(mt_py_flats *f);

/* The element type. False for one that gradients do not have. */
bool mt_py_flat_dtype(const mt_torch_flat *flat, mt_dtype *out);

#endif
