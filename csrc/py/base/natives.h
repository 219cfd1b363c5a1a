/* natives.h -- what of the module a KV pool uses in C, as long as any of its pages is in use.
 *
 *   module ──────────────┐
 *   guests of a pool ────┴──► natives: the CUDA runtime
 *
 * A tensor over the pages of a pool may be the last thing that dies in a process, after the module
 * and its state. The pool ends with it, updates the gauge and gives device memory back. So both are
 * counted, and the module is one of those that hold them. Thread-safe, and without the GIL. */
#ifndef MT_PY_BASE_NATIVES_H
#define MT_PY_BASE_NATIVES_H

#include <stdatomic.h>

#include "cuda/runtime.h"

typedef struct mt_natives {
    atomic_size_t refs;
    mt_cudart *cudart; /* opened by the first CUDA tensor; NULL: not yet */
} mt_natives;

/* One reference. NULL without memory. */
mt_natives *mt_natives_new(void);
mt_natives *mt_natives_hold(mt_natives *natives);
void mt_natives_drop(mt_natives *natives); /* NULL is ignored */

#endif
