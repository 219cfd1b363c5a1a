/* cache.h -- the Python object around one mt_lru, and the functions whose results lie in it.
 *
 *   ByteCache ── mt_lru ──► entry { space, key, value }
 *                              │
 *        space NULL: the cache is used as a mapping
 *        a CachedFunction: the key is made of the arguments of a call of it
 *
 * What guards what: the GIL guards everything. Python code runs where a key is hashed or compared, a
 * value is measured, the default limit is asked for, and an object is dropped. Nothing that was found
 * before such a place is used after it, and objects that went out of the cache are dropped last. */
#ifndef MT_PY_DATA_CACHE_H
#define MT_PY_DATA_CACHE_H

#include "py/base/state.h"
#include "core/data/lru.h"

typedef struct mt_py_cached { /* an entry */
    mt_lru_entry base;
    const void *space; /* a CachedFunction, which takes its entries out when it goes, or NULL */
    PyObject *key, *value;
} mt_py_cached;

typedef struct ByteCache {
    PyObject_HEAD
    mt_state *state; /* kept alive by the type */
    mt_lru lru;
    mt_home *home;           /* 0 in a child of fork() that did not use the cache yet */
    PyObject *measure;       /* measure(key, value): the bytes of an entry */
    PyObject *default_limit; /* default_limit(): bytes. NULL: the limit was given */
    PyObject *name;          /* a str: what budgets call it */
    bool limit_is_old;       /* the default limit was found before a fork(), or never */
    size_t mapped;           /* entries of the mapping */
    uint64_t hits, misses, not_kept, evicted_before; /* since clear() or the fork */
    PyObject *weakrefs;
} ByteCache;

/* A key that is looked for: an object, or the items of a tuple that is made only to be kept. */
typedef struct mt_py_key {
    PyObject *alone;        /* borrowed; NULL: the items count */
    PyObject *const *items; /* borrowed */
    Py_ssize_t n;
    uint64_t hash; /* in its space */
} mt_py_key;

/* Hashes the key that is otherwise set. -1 with an error. Runs Python code. */
int mt_py_key_hash(mt_py_key *key, const void *space);

/* The value of a key as a new reference, the entry being the newest now; counts a hit or a miss.
 * NULL without an error where there is none. */
PyObject *mt_py_cache_get(ByteCache *self, const void *space, const mt_py_key *key);

typedef enum mt_py_kept { MT_PY_FAILED = -1, MT_PY_KEPT, MT_PY_NOT_KEPT } mt_py_kept;

/* Puts a value in. Of a space an entry that came meanwhile stays as it is. NOT_KEPT counts as such:
 * the entry is larger than the limit or than what other parts leave of a budget; *bytes is its size
 * and *err says what the ledger has. FAILED with an error of Python. */
mt_py_kept mt_py_cache_put(ByteCache *self, const void *space, const mt_py_key *key,
                           PyObject *value, size_t *bytes, mt_error *err);

/* Drops the entries of a space; all where `all`. */
void mt_py_cache_clear(ByteCache *self, const void *space, bool all);

int mt_py_bytecache_register(PyObject *module, mt_state *st);
int mt_py_cachedfunction_register(PyObject *module, mt_state *st);

#endif
