/* torch_shim.h -- what only torch's C++ can tell, as a table of C functions.
 *
 * memtools._torch fills it and hands it over in a capsule; memtools._core uses it where it is there
 * and asks slower public Python calls where it is not. The C++ side is built for one exact torch:
 * Python compares versions before loading it. Functions hold the GIL, never throw, and take objects
 * that the caller has checked to be torch.Tensor. */
#ifndef MT_TORCH_SHIM_H
#define MT_TORCH_SHIM_H

#include <stdint.h>

#define MT_TORCH_CAPSULE "memtools._torch.ops"

enum { MT_TORCH_OPS_VERSION = 1 };

/* A 2-D tensor's memory, borrowed. type and bits are DLPack's. */
typedef struct mt_torch_view {
    const void *data;
    int64_t shape[2];
    int64_t strides[2]; /* in elements */
    unsigned char type;
    unsigned char bits;
    int cuda; /* 0: host memory; 1: CUDA device `device` */
    int device;
} mt_torch_view;

typedef struct mt_torch_ops {
    int version; /* MT_TORCH_OPS_VERSION of the header it was built with */
    /* 1 while autograd runs a backward pass on this thread, else 0. */
    int (*in_backward)(void);
    /* 1 and *out when the tensor is plain: two dimensions of float64, float32, float16 or bfloat16
     * in strided memory that holds its very values, on the host or a CUDA device. 0 for all others:
     * the caller finds out by Python what they are. A tenth of what DLPack's exchange costs. */
    int (*view)(void *tensor, mt_torch_view *out);
} mt_torch_ops;

#endif
