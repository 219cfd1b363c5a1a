/* torch_shim.h -- what only torch's C++ can tell, as a table of C functions.
 *
 * memtools._torch fills it and hands it over in a capsule; memtools._core uses it where it is there
 * and asks slower public Python calls where it is not. The C++ side is built for one exact torch:
 * Python compares versions before loading it. Functions hold the GIL, never throw, and take objects
 * that the caller has checked to be torch.Tensor. */
#ifndef MT_TORCH_SHIM_H
#define MT_TORCH_SHIM_H

#define MT_TORCH_CAPSULE "memtools._torch.ops"

enum { MT_TORCH_OPS_VERSION = 1 };

typedef struct mt_torch_ops {
    int version; /* MT_TORCH_OPS_VERSION of the header it was built with */
    /* 1 while autograd runs a backward pass on this thread, else 0. */
    int (*in_backward)(void);
    /* 1 when the tensor's memory holds the negated values (a lazy view of a conjugate), 0 when not,
     * -1 when torch failed to say. */
    int (*is_neg)(void *tensor);
} mt_torch_ops;

#endif
