/* torch_shim.h -- what only torch's C++ can find out, as a table of C functions.
 *
 * memtools._torch fills it and hands it over in a capsule; memtools._core uses it where it is there
 * and asks slower public Python calls where it is not. The C++ side is built for one exact torch:
 * Python compares versions before loading it. Functions hold the GIL unless they say otherwise,
 * never throw, and take objects that the caller has checked to be torch.Tensor. */
#ifndef MT_TORCH_SHIM_H
#define MT_TORCH_SHIM_H

#include <stddef.h>
#include <stdint.h>

#define MT_TORCH_CAPSULE "memtools._torch.ops"

enum { MT_TORCH_OPS_VERSION = 12 };

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

/* A 4-D tensor's memory, borrowed, of any dtype. */
typedef struct mt_torch_view4 {
    const void *data;
    int64_t shape[4];
    int64_t strides[4]; /* in elements */
    int dtype;          /* as `dtype` below numbers them */
    int cuda;
    int device;
    int keeps_graph; /* requires grad, while grad mode is on */
} mt_torch_view4;

/* The shape that two tensors over one storage have in common. */
typedef struct mt_torch_shape {
    int dtype;
    int dims; /* at most 5 */
    int64_t shape[5];
    int64_t strides[5]; /* in elements */
} mt_torch_shape;

/* What a census wants to know of a tensor, borrowed. */
typedef struct mt_torch_facts {
    const int64_t *shape; /* `dims` of them */
    int dims;             /* -1: finding out would run Python code, or there is no such thing */
    const void *dtype;    /* the torch.dtype object */
    int64_t device;       /* a number for each device; -1 where finding out would run Python code */
    const void *storage;  /* where its memory begins; NULL for none (meta, sparse, empty) */
    size_t storage_bytes;
    size_t bytes; /* of its elements */
} mt_torch_facts;

/* What autograd hangs onto a tensor, all borrowed, read from the TensorImpl itself: nothing is made
 * for it in Python, where the first read of t.grad_fn or t.grad leaves an object of 64 B and more.
 *
 *   tensor ──grad_fn──► Node 812 ──► Node 811 ──► Node 640 ──► ...      graph_walk() from here
 *     └────.grad──────► TensorImpl ──grad_fn──► Node                    only by create_graph=True
 *
 * A number of order is autograd's sequence number: a node has a higher one than all that were made
 * before it *on the same thread*. */
typedef struct mt_torch_links {
    const void *tensor; /* the TensorImpl: one for each tensor, whatever Python objects show it */
    const void *node;   /* its grad_fn; NULL for a leaf, and for what requires no gradient */
    uint64_t number;    /* of that node; 0 without one */
    const void *grad;   /* the TensorImpl of .grad; NULL for none */
    void *grad_object; /* the PyObject that shows .grad; NULL where Python has never asked for it */
    const void *storage; /* where the memory of .grad begins; NULL for none */
    size_t storage_bytes;
    const void *grad_node; /* grad_fn of .grad: backward(create_graph=True) has made a cycle that no
                              collector sees; else NULL */
    uint64_t grad_number;
} mt_torch_links;

/* The node of a leaf has this number: it is older and newer than all others. */
#define MT_TORCH_LEAF UINT64_MAX

/* What a visitor of graph_walk() wants next. */
enum { MT_TORCH_ENTER = 1, MT_TORCH_PASS = 0, MT_TORCH_STOP = -1 };

/* Sees a node of an autograd graph. It says ENTER for one whose own inputs it wants to see too, PASS
 * for one that it knows already (a node that several lead to is shown several times: the table of
 * those that were seen is the visitor's), STOP to end the walk. It must not run Python code. */
typedef int (*mt_torch_visit)(void *ctx, const void *node, uint64_t number);

/* What torch's allocator has of one CUDA device, in bytes. */
typedef struct mt_torch_memory {
    uint64_t allocated;      /* in tensors */
    uint64_t allocated_peak; /* the most of it since the program last reset torch's peak */
    uint64_t reserved;       /* from the driver */
    uint64_t inactive_split; /* reserved, not allocated, in segments that are partly in use */
} mt_torch_memory;

enum { MT_TORCH_NONE = 0, MT_TORCH_FLAT = 1, MT_TORCH_OTHER = 2 };

/* A tensor whose elements lie in host memory one after the other, in any order of dimensions. */
typedef struct mt_torch_flat {
    int is; /* NONE: no tensor; OTHER: one that is not like this, and nothing below is set */
    unsigned char type;
    unsigned char bits; /* of float64, float32, float16 or bfloat16, as DLPack counts them */
    void *data;
    size_t count;
    void *tensor, *storage; /* references, until flat_drop() */
} mt_torch_flat;

/* A tensor's gradient at one moment. Zeros: none. */
typedef struct mt_torch_seen {
    void *grad; /* a weak reference: what it holds may be freed, its address is not used again */
    uint32_t version; /* how often it had been written to */
} mt_torch_seen;

enum { MT_TORCH_SAME = 0, MT_TORCH_WRITTEN = 1, MT_TORCH_REPLACED = 2, MT_TORCH_DROPPED = 3 };

/* Receives the blocks that torch's host allocator gives out and gets back. Both are called on the
 * thread that allocates, with or without the GIL, and must not call torch or Python. */
typedef struct mt_torch_listener {
    void (*born)(void *ctx, const void *block, size_t bytes); /* given out, bytes as asked for */
    void (*died)(void *ctx, const void *block); /* about to go back; a block of any age */
    void *ctx;
} mt_torch_listener;

/* What begins and ends on a thread: an operator of torch's or what torch reports like one, a node of
 * autograd's, or a range that the program or a part of torch has named. */
enum { MT_TORCH_OPERATOR = 0, MT_TORCH_NODE = 1, MT_TORCH_RANGE = 2 };

/* What an observer wants to know again at the end: two words of its own. */
typedef struct mt_torch_begun {
    uint64_t place, order;
} mt_torch_begun;

/* Receives what torch does, on each of its threads. All are called with or without the GIL, and
 * must not call torch or Python.
 *
 *     begun(NODE, "MmBackward0") ──► a          what begins within something ends before it does;
 *       begun(OPERATOR, "aten::mm") ──► b       what begins on one thread and ends on another one is
 *       made(b, block, 4096, ...)               not reported to end
 *       ended(b)
 *     ended(a) */
typedef struct mt_torch_observer {
    /* The name is there for the call alone. */
    mt_torch_begun (*begun)(void *ctx, int kind, const char *name);
    /* An operator's result: a tensor of the host's that is all of the block at this address, of so many
     * bytes. dtype as `dtype` numbers them. */
    void (*made)(void *ctx, mt_torch_begun begun, const void *block, size_t bytes, int dtype,
                 const int64_t *sizes, int dims);
    void (*ended)(void *ctx, mt_torch_begun begun);
    void *ctx;
} mt_torch_observer;

typedef struct mt_torch_ops {
    int version; /* MT_TORCH_OPS_VERSION of the header it was built with */
    /* 1 while autograd runs a backward pass on this thread, else 0. */
    int (*in_backward)(void);
    /* 1 and *out when the tensor is plain: two dimensions of float64, float32, float16 or bfloat16
     * in strided memory that holds its very values, on the host or a CUDA device. 0 for all others:
     * the caller finds out by Python what they are. A tenth of what DLPack's exchange costs. */
    int (*view)(void *tensor, mt_torch_view *out);
    /* The same for four dimensions and any dtype that is not quantised. */
    int (*view4)(void *tensor, mt_torch_view4 *out);
    /* The number of a torch.dtype object, or -1 for another object. */
    int (*dtype)(void *dtype);
    /* A storage over memory that is not torch's, with one reference; cuda_device -1 is the host.
     * done(ctx) runs once, when the last tensor over it has died and the reference is dropped: on
     * any thread, without the GIL, perhaps inside drop. NULL without memory; done does not run. */
    void *(*storage_new)(void *data, size_t bytes, int cuda_device, void (*done)(void *ctx),
                         void *ctx);
    void (*storage_drop)(void *storage);
    /* References, the one that storage_new gave included. */
    size_t (*storage_uses)(const void *storage);
    /* Two new normal tensors over the storage, whatever mode is on, which start at these elements.
     * All tensors of one storage have one version counter, by which autograd notices that what it
     * saved was written to. -1 with a Python error. */
    int (*tensors)(void *storage, const mt_torch_shape *shape, const int64_t first[2],
                   void *out[2]);
    /* Reports to autograd that the storage's memory was written to, as an operation in place does. */
    void (*storage_written)(void *storage);
    /* 1 and *out, for a tensor of any kind; runs no Python code. 0 for one without an
     * implementation behind it. */
    int (*facts)(void *tensor, mt_torch_facts *out);
    /* 1 and *out, for a tensor of any kind, with zeros for what there is not; makes nothing and runs
     * no Python code. 0 for one without an implementation behind it. A view whose base was written
     * to in place has the grad_fn it had before: the new one would be made by asking. */
    int (*links)(void *tensor, mt_torch_links *out);
    /* Shows the nodes that a tensor's grad_fn leads to, the grad_fn itself first; with of_grad those
     * of its .grad's. Depth does not matter: the way back is kept in 8 B for each node that waits,
     * freed at the end. Saved tensors are never touched, as unpacking them may run hooks (activation
     * checkpointing would compute again). The graph stays alive until the walk is over, whatever
     * other threads do. Returns 0, what the visitor returned to end it (STOP), or STOP without
     * memory; 0 at once for a tensor without a graph. */
    int (*graph_walk)(void *tensor, int of_grad, mt_torch_visit visit, void *ctx);
    /* The number of order that the next node of this thread will get. */
    uint64_t (*next_number)(void);
    /* 1 and *out; 0 where this process's torch has not begun to use CUDA, or has no such device, or
     * an allocator that does not count. The one function that wants no GIL: it takes the
     * allocator's own lock, and makes no context. Where CUDA graphs have pools of their own, torch
     * copies a table of them, which allocates. */
    int (*memory)(int device, mt_torch_memory *out);
    /* n tensors, or with of_grad what their .grad is, to out[n]. For writing, memory that is shared
     * until it is written to is made the tensor's own; one that refuses to be written to is OTHER.
     * What is FLAT stays where it is until flat_drop(), whatever becomes of the tensor meanwhile.
     */
    void (*flat)(void *const *tensors, size_t n, int of_grad, int writing, mt_torch_flat *out);
    void (*flat_drop)(mt_torch_flat *flat, size_t n);
    /* Reports to autograd that the FLAT ones among them are written to, as an operation in place does.
     */
    void (*flat_written)(const mt_torch_flat *flat, size_t n);
    /* The gradients of n tensors, now: seen[n] is zeros or what the last call left there. */
    void (*grads_see)(void *const *tensors, size_t n, mt_torch_seen *seen);
    /* The most that happened to one of them since: written to, replaced, dropped. */
    int (*grads_changed)(void *const *tensors, size_t n, const mt_torch_seen *seen);
    void (*grads_forget)(mt_torch_seen *seen, size_t n);
    /* How many threads parallel() uses at most: torch.get_num_threads(). */
    int (*threads)(void);
    /* task(arg, begin, end) for parts of [0, n), on torch's own threads and the caller's; back when
     * all are done. Wants no GIL. ctx is not used. */
    void (*parallel)(void *ctx, int64_t n, void (*task)(void *arg, int64_t begin, int64_t end),
                     void *arg);
    /* From now on the listener receives each block of the host that torch asks its allocator for, on
     * every thread, and the release of those blocks. NULL: there is none any more, and torch asks
     * the allocator that was there before. A listener may be called for a moment after that, so it
     * and its ctx live as long as the process. 0 where the allocator hands out blocks that cannot be
     * followed; then nothing has changed. */
    int (*listen)(const mt_torch_listener *listener);
    /* From now on the observer receives what torch does, on every thread; some 0.2 us for each
     * operator. NULL: there is none any more. An observer may be called after that, by what has begun
     * before it, so it and its ctx live as long as the process. A profiler of the program's goes on
     * beside it. 0 without memory. */
    int (*observe)(const mt_torch_observer *observer);
    /* The name of a dtype by its number, as torch.float32 has "float32"; "" for no such dtype. */
    const char *(*dtype_name)(int dtype);
} mt_torch_ops;

#endif
