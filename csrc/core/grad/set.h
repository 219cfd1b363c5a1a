/* set.h -- all gradients of a model as one list of chunks, gone through by several threads.
 *
 *   spans    [ wte, 38.6M            ][ b ][ w, 590k ]       one per gradient, flat
 *   chunks   |..32k..|..32k..| ... |..|    |..|..|..|        never across two gradients
 *   shares   [--- 4 or more chunks ---][--- ... ---][-]      what a thread takes at a time
 *   parts    s       s       s     s  s    s  s  s           each chunk's own sum
 *
 * A thread takes the next share when it has done one, so a thread that the machine gives little
 * time delays no other. Parts are added in the order of the chunks: the same bits for any number of
 * threads.
 *
 * No lock: the caller serialises the calls on one set. Nothing is allocated but in set(). */
#ifndef MT_GRAD_SET_H
#define MT_GRAD_SET_H

#include "base/alloc.h"
#include "grad/math.h"
#include "port/parallel.h"
#include "base/status.h"

/* One gradient: n elements that lie one after the other. */
typedef struct mt_grad_span {
    void *data;
    size_t n;
    mt_dtype dtype; /* mt_dtype_writable() */
} mt_grad_span;

typedef struct mt_grad_total {
    mt_grad_sum sum;
    size_t first_bad; /* the first span with an infinity or a NaN; SIZE_MAX for none */
} mt_grad_total;

typedef struct mt_gradset mt_gradset;

/* Empty. pre: *mem outlives it. MT_ENOMEM. */
mt_status mt_gradset_new(const mt_alloc *mem, mt_gradset **out, mt_error *err);
void mt_gradset_free(mt_gradset *set);

/* From here on these are the gradients; the memory stays the caller's. On failure the set is as it
 * was. MT_ENOMEM, MT_EOVERFLOW. */
mt_status mt_gradset_set(mt_gradset *set, const mt_grad_span *spans, size_t n, mt_error *err);

/* The passes. At most `threads` threads of *par work at a time; the caller's own alone where it is
 * NULL or threads is 1. Workers compute in the floating-point environment of the caller. pre:
 * threads >= 1; the spans' memory is there. */
void mt_gradset_measure(mt_gradset *set, const mt_parallel_ops *par, int threads,
                        mt_grad_total *out);
void mt_gradset_scale(mt_gradset *set, double factor, const mt_parallel_ops *par, int threads);

#endif
