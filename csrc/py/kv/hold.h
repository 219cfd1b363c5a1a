/* hold.h -- what keeps a lease's pages while tensors over them live.
 *
 *   KVPool ──► guests (one per pool) ──► hold ──► hold         one per lease that ever made views
 *                                          │ lease: held
 *                                        ▲   ▲
 *             storage of the views ──────┘   └────── KVLease
 *           (its deleter's ctx: done)                (drop)
 *
 * Both refer to the hold, because the deleter does not only run at the end of the last view: torch
 * may give the storage other memory, as share_memory_() and queues between processes do. The lease
 * is then no longer held, and KVLease finds that out by is_done.
 *
 * The deleter runs on any thread and without the GIL, perhaps long after lease and pool are gone
 * from Python, perhaps in a forked child, which must leave the parent's pages alone, perhaps after
 * the module is gone. So a hold has no Python object in it, guests count their own references, and
 * hold what of the module the pool uses in C. Thread-safe. */
#ifndef MT_PY_KV_HOLD_H
#define MT_PY_KV_HOLD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/base/lock.h"
#include "core/kv/kv.h"
#include "os/base/forks.h"
#include "third_party/dlpack/dlpack.h"
#include "torch/torch_shim.h"
#include "py/base/natives.h"

typedef struct mt_kvguests mt_kvguests;
typedef struct mt_kvhold mt_kvhold;

/* A released lease whose views live. */
typedef struct mt_kvlinger {
    uint64_t number; /* of the lease */
    size_t rows, tokens;
    size_t views; /* references to the storage; 0 where that is not known */
} mt_kvlinger;

/* For hold.c and the functions below. */
struct mt_kvguests {
    mt_birth birth;
    mt_natives *natives;
    mt_lock lock; /* guards the rest */
    size_t refs;  /* the pool's, and one of each hold */
    mt_kvhold *first;
};

struct mt_kvhold {
    mt_kvguests *guests;
    mt_kvlease *lease;
    mt_kvhold *next, **link;
    const mt_torch_ops *shim; /* NULL: its views cannot be counted */
    const void *storage;      /* alive as long as the hold is in the list: done() takes it out */
    atomic_bool done;         /* the storage's end: out of the list, and the lease no longer held */
    bool dropped;             /* the lease's end: with done, the hold's own */
    bool released;
    mt_kvlinger linger;
    DLManagedTensorVersioned tensor; /* without the shim: of bytes, over all slots of the lease */
    int64_t bytes;
};

/* *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_kvguests_new(mt_natives *natives, mt_kvguests **out, mt_error *err);
void mt_kvguests_drop(mt_kvguests *guests); /* NULL is ignored */

/* False in a forked child: nothing of the pool may be touched there. */
static inline bool
mt_kvguests_at_home(const mt_kvguests *guests)
{
    return mt_birth_is_here(&guests->birth);
}

/* Fills at most cap lines and returns how many there are. */
size_t mt_kvguests_lingering(mt_kvguests *guests, mt_kvlinger *out, size_t cap);

/* Holds the lease until done. The caller owns both references, the storage's and the lease's. NULL
 * without memory. */
mt_kvhold *mt_kvhold_new(mt_kvguests *guests, mt_kvlease *lease, uint64_t number);
/* The storage's reference goes, as its deleter: the lease is no longer held. */
void mt_kvhold_done(void *hold);
/* Whether that has happened; false for NULL. Takes no lock. */
static inline bool
mt_kvhold_is_done(const mt_kvhold *hold)
{
    return hold != NULL && atomic_load_explicit(&hold->done, memory_order_acquire);
}
/* The lease's reference goes. NULL is ignored. */
void mt_kvhold_drop(mt_kvhold *hold);
/* The storage that calls done, so that its views can be counted. */
void mt_kvhold_watch(mt_kvhold *hold, const mt_torch_ops *shim, const void *storage);
/* The lease is about to be released: if the hold is not done by then, its views linger. */
void mt_kvhold_linger(mt_kvhold *hold, size_t rows, size_t tokens);

#endif
