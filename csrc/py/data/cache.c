/* cache.c -- how this file works.
 *
 * memtools._core.ByteCache is a mapping over one mt_lru. find() goes through the entries of a hash and
 * compares keys, which may run code that changes the cache: then it begins anew. mt_py_cache_put()
 * runs all Python code that it needs (measure, the limit, find) before it changes anything, and drops
 * what went out at its end. A limit that was not given is asked for at the first entry, in each
 * process: a child of fork() finds its own.
 *
 * An entry is a block of malloc and no object: the collector visits what is in it through the cache.
 */
#include "py/data/cache.h"

#include <structmember.h>

#include "core/base/size.h"
#include "os/base/forkmark.h"
#include "py/base/errors.h"
#include "py/base/objects.h"
#include "py/budget/budget.h"

enum { MOST_RESTARTS = 1000 }; /* of a search, because keys changed the cache while compared */

/* --- entries --------------------------------------------------------------------------------- */

/* Drops entries that are out of the cache. Runs Python code. */
static void
drop_entries(mt_lru_entry *out)
{
    while (out != NULL) {
        mt_py_cached *entry = (mt_py_cached *)out;
        out = out->chain;
        Py_DECREF(entry->key);
        Py_DECREF(entry->value);
        PyMem_RawFree(entry);
    }
}

/* Takes over the reference to the key. */
static mt_py_cached *
new_entry(const void *space, PyObject *key, uint64_t hash, PyObject *value, size_t bytes)
{
    mt_py_cached *entry = PyMem_RawMalloc(sizeof *entry);

    if (entry == NULL) {
        Py_DECREF(key);
        PyErr_NoMemory();
        return NULL;
    }
    entry->base = (mt_lru_entry){.hash = hash, .bytes = bytes};
    entry->space = space;
    entry->key = key;
    entry->value = Py_NewRef(value);
    return entry;
}

/* Those of the list that are of the mapping are counted no longer. */
static void
uncount(ByteCache *self, const mt_lru_entry *out)
{
    for (; out != NULL; out = out->chain)
        self->mapped -= ((const mt_py_cached *)out)->space == NULL;
}

/* In a child: the entries are its own now, its counts begin, and it finds its own default limit. */
static void
notice_fork(ByteCache *self)
{
    if (*self->home != 0) return;
    *self->home = 1;
    self->hits = self->misses = self->not_kept = 0;
    self->evicted_before = self->lru.evicted;
    self->limit_is_old = self->default_limit != NULL;
}

/* --- keys ------------------------------------------------------------------------------------ */

static uint64_t
hashed_on(uint64_t so_far, uint64_t hash)
{
    so_far += hash * UINT64_C(0xC2B2AE3D27D4EB4F);
    return (so_far << 31 | so_far >> 33) * UINT64_C(0x9E3779B185EBCA87);
}

int
mt_py_key_hash(mt_py_key *key, const void *space)
{
    uint64_t hash = (uint64_t)(uintptr_t)space >> 4;
    PyObject *const *items = key->alone != NULL ? &key->alone : key->items;

    for (Py_ssize_t i = 0, n = key->alone != NULL ? 1 : key->n; i < n; i++) {
        Py_hash_t one = PyObject_Hash(items[i]);
        if (one == -1) return -1;
        hash = hashed_on(hash, (uint64_t)one);
    }
    key->hash = hash;
    return 0;
}

/* The object that is kept: a new reference. */
static PyObject *
key_object(const mt_py_key *key)
{
    PyObject *tuple;

    if (key->alone != NULL) return Py_NewRef(key->alone);
    if ((tuple = PyTuple_New(key->n)) == NULL) return NULL;
    for (Py_ssize_t i = 0; i < key->n; i++)
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(key->items[i]));
    return tuple;
}

/* Whether what is kept is this key; -1 with an error. Runs Python code, but not for texts and
 * numbers. What is kept in the space of a function is a tuple of items where `alone` of the key would
 * be NULL, or else a lone argument that is not a tuple. */
static int
is_same(PyObject *kept, const mt_py_key *key)
{
    int same = 1;

    if (key->alone != NULL)
        return kept == key->alone ? 1 : PyObject_RichCompareBool(kept, key->alone, Py_EQ);
    if (!PyTuple_CheckExact(kept) || PyTuple_GET_SIZE(kept) != key->n) return 0;
    for (Py_ssize_t i = 0; i < key->n && same == 1; i++)
        same = PyObject_RichCompareBool(PyTuple_GET_ITEM(kept, i), key->items[i], Py_EQ);
    return same;
}

static int
is_key_of(const mt_py_cached *entry, const mt_py_key *key)
{
    PyObject *kept = Py_NewRef(entry->key);
    int same = is_same(kept, key);

    Py_DECREF(kept);
    return same;
}

/* The entry of a key; NULL for none, or with an error. */
static mt_py_cached *
find(const ByteCache *self, const void *space, const mt_py_key *key)
{
    const mt_lru *lru = &self->lru;

    for (int restarts = 0; restarts < MOST_RESTARTS; restarts++) {
        mt_lru_entry *entry = mt_lru_first(lru, key->hash);
        uint64_t changes = lru->changes;
        for (; entry != NULL; entry = mt_lru_next(entry)) {
            mt_py_cached *cached = (mt_py_cached *)entry;
            int same = cached->space != space ? 0 : is_key_of(cached, key);
            if (same < 0) return NULL;
            if (lru->changes != changes) break;
            if (same) return cached;
        }
        if (lru->changes == changes) return NULL;
    }
    PyErr_SetString(PyExc_RuntimeError,
                    "keys change the ByteCache each time that it compares them; use keys whose "
                    "__eq__ leaves it alone");
    return NULL;
}

/* --- reading --------------------------------------------------------------------------------- */

PyObject *
mt_py_cache_get(ByteCache *self, const void *space, const mt_py_key *key)
{
    mt_py_cached *entry;

    notice_fork(self);
    entry = find(self, space, key);
    if (entry == NULL) {
        self->misses += PyErr_Occurred() == NULL;
        return NULL;
    }
    mt_lru_touch(&self->lru, &entry->base);
    self->hits++;
    return Py_NewRef(entry->value);
}

/* --- the limit ------------------------------------------------------------------------------- */

static int
after_gc(void)
{
    PyErr_SetString(PyExc_RuntimeError,
                    "this ByteCache is being garbage-collected and can no longer be used");
    return -1;
}

/* Counts in this ledger, of which it takes over the caller's reference. */
static int
join(ByteCache *self, mt_ledger *ledger)
{
    const char *name = PyUnicode_AsUTF8(self->name); /* never NULL: bytecache_new() has asked */
    mt_lru_entry *out = NULL;
    mt_error err;
    mt_status st = mt_lru_join(&self->lru, ledger, name, &out, &err);

    mt_ledger_drop(ledger);
    if (st == MT_OK) self->limit_is_old = false;
    uncount(self, out);
    drop_entries(out);
    if (st == MT_OK) return 0;
    mt_py_raise(self->state, &err, "ByteCache()");
    return -1;
}

/* Finds the default limit where that is due. -1 with an error. */
static int
settle_limit(ByteCache *self)
{
    PyObject *limit;
    mt_ledger *ledger;

    notice_fork(self);
    if (!self->limit_is_old) return self->lru.ledger != NULL ? 0 : after_gc();
    if (self->default_limit == NULL) return after_gc();
    if ((limit = PyObject_CallNoArgs(self->default_limit)) == NULL) return -1;
    ledger = mt_py_ledger(self->state, limit, "ByteCache");
    Py_DECREF(limit);
    if (ledger == NULL) return -1;
    if (self->limit_is_old) return join(self, ledger);
    mt_ledger_drop(ledger); /* another thread was faster */
    return 0;
}

/* --- writing --------------------------------------------------------------------------------- */

/* The bytes of an entry. -1 with an error. */
static int
measured(ByteCache *self, PyObject *key, PyObject *value, size_t *bytes)
{
    PyObject *args[] = {key, value}, *measure = self->measure, *answer, *number = NULL;

    if (measure == NULL) return after_gc();
    Py_INCREF(measure);
    answer = PyObject_Vectorcall(measure, args, 2, NULL);
    Py_DECREF(measure);
    if (answer == NULL) return -1;
    if (!PyIndex_Check(answer))
        PyErr_Format(PyExc_TypeError, "size() returns the bytes of a value as an int, got %s",
                     Py_TYPE(answer)->tp_name);
    else
        number = PyNumber_Index(answer);
    Py_DECREF(answer);
    if (number == NULL) return -1;
    *bytes = PyLong_AsSize_t(number);
    if (*bytes == (size_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError,
                     "size() returns the bytes of a value, 0 or more and below 2**64, got %R",
                     number);
        Py_DECREF(number);
        return -1;
    }
    Py_DECREF(number);
    return 0;
}

/* Asks the others in a budget for what would be missing of `bytes` if all entries of this cache went.
 * Other threads run meanwhile. */
static void
ask_others(const ByteCache *self, size_t bytes)
{
    mt_ledger *ledger = mt_ledger_hold(self->lru.ledger);

    bytes -= mt_size_min(bytes, self->lru.bytes);
    /* Without the member: it has nothing to give, and may leave meanwhile. */
    Py_BEGIN_ALLOW_THREADS;
    mt_ledger_reclaim(ledger, NULL, bytes);
    mt_ledger_drop(ledger);
    Py_END_ALLOW_THREADS;
}

/* One try. The status of mt_lru_put; MT_EAGAIN with an error of Python; MT_OK also where an entry of
 * the space is in already. `object` is the key as it is kept. */
static mt_status
try_put(ByteCache *self, const void *space, const mt_py_key *key, PyObject *object, PyObject *value,
        size_t bytes, mt_error *err)
{
    mt_py_cached *entry = new_entry(space, Py_NewRef(object), key->hash, value, bytes), *old;
    mt_lru_entry *out = NULL;
    mt_status st = MT_OK;

    if (entry == NULL) return MT_EAGAIN;
    old = find(self, space, key);
    if (old == NULL && PyErr_Occurred())
        st = MT_EAGAIN;
    else if (old == NULL || space == NULL)
        st = mt_lru_put(&self->lru, &entry->base, old != NULL ? &old->base : NULL, &out, err);
    else
        mt_lru_touch(&self->lru, &old->base);
    if (st != MT_OK || (old != NULL && space != NULL)) {
        entry->base.chain = NULL;
        out = &entry->base; /* nothing else went out */
    } else {
        self->mapped += space == NULL;
        uncount(self, out);
    }
    drop_entries(out);
    return st;
}

static mt_py_kept
put_object(ByteCache *self, const void *space, const mt_py_key *key, PyObject *object,
           PyObject *value, size_t *bytes, mt_error *err)
{
    mt_status st;

    if (measured(self, object, value, bytes) < 0 || settle_limit(self) < 0) return MT_PY_FAILED;
    st = try_put(self, space, key, object, value, *bytes, err);
    if (st == MT_ELIMIT && *bytes <= mt_ledger_limit(self->lru.ledger)) {
        ask_others(self, *bytes);
        st = try_put(self, space, key, object, value, *bytes, err);
    }
    if (st == MT_OK) return MT_PY_KEPT;
    if (st == MT_ELIMIT) {
        self->not_kept++;
        return MT_PY_NOT_KEPT;
    }
    if (st != MT_EAGAIN) mt_py_raise(self->state, err, "ByteCache");
    return MT_PY_FAILED;
}

mt_py_kept
mt_py_cache_put(ByteCache *self, const void *space, const mt_py_key *key, PyObject *value,
                size_t *bytes, mt_error *err)
{
    PyObject *object = key_object(key);
    mt_py_kept kept;

    if (object == NULL) return MT_PY_FAILED;
    kept = put_object(self, space, key, object, value, bytes, err);
    Py_DECREF(object);
    return kept;
}

void
mt_py_cache_clear(ByteCache *self, const void *space, bool all)
{
    mt_lru_entry *out = NULL, *entry, *newer;

    if (all) {
        out = mt_lru_clear(&self->lru);
    } else {
        for (entry = self->lru.oldest; entry != NULL; entry = newer) {
            newer = entry->newer;
            if (((mt_py_cached *)entry)->space != space) continue;
            mt_lru_drop(&self->lru, entry);
            entry->chain = out;
            out = entry;
        }
    }
    uncount(self, out);
    drop_entries(out);
}

/* --- the mapping ----------------------------------------------------------------------------- */

static PyObject *
get_item(PyObject *op, PyObject *key)
{
    mt_py_key looked_for = {.alone = key};

    if (mt_py_key_hash(&looked_for, NULL) < 0) return NULL;
    return mt_py_cache_get((ByteCache *)op, NULL, &looked_for);
}

/* KeyError takes a key that is a tuple for its arguments. */
static PyObject *
raise_key(PyObject *key)
{
    PyObject *args = PyTuple_Pack(1, key);

    if (args != NULL) PyErr_SetObject(PyExc_KeyError, args);
    Py_XDECREF(args);
    return NULL;
}

static PyObject *
bytecache_subscript(PyObject *op, PyObject *key)
{
    PyObject *value = get_item(op, key);

    return value != NULL || PyErr_Occurred() ? value : raise_key(key);
}

static PyObject *
bytecache_get(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    PyObject *value;

    if (n < 1 || n > 2)
        return PyErr_Format(PyExc_TypeError, "get() takes a key and a default, got %zd arguments",
                            n);
    value = get_item(op, args[0]);
    if (value != NULL || PyErr_Occurred()) return value;
    return Py_NewRef(n == 2 ? args[1] : Py_None);
}

static int
bytecache_contains(PyObject *op, PyObject *key)
{
    ByteCache *self = (ByteCache *)op;
    mt_py_key looked_for = {.alone = key};

    if (mt_py_key_hash(&looked_for, NULL) < 0) return -1;
    notice_fork(self);
    if (find(self, NULL, &looked_for) != NULL) return 1;
    return PyErr_Occurred() ? -1 : 0;
}

/* Takes an entry of the mapping out and returns its value as a new reference; NULL without an error
 * where there is none. */
static PyObject *
take_item(ByteCache *self, const mt_py_key *key)
{
    mt_py_cached *entry;
    PyObject *value;

    notice_fork(self);
    if ((entry = find(self, NULL, key)) == NULL) return NULL;
    value = Py_NewRef(entry->value);
    mt_lru_drop(&self->lru, &entry->base);
    self->mapped--;
    entry->base.chain = NULL;
    drop_entries(&entry->base);
    return value;
}

static int
delete_item(ByteCache *self, const mt_py_key *key)
{
    PyObject *value = take_item(self, key);

    if (value == NULL && !PyErr_Occurred()) raise_key(key->alone);
    Py_XDECREF(value);
    return value == NULL ? -1 : 0;
}

/* One step: another thread cannot take the entry between the look at it and its removal. */
static PyObject *
bytecache_pop(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    ByteCache *self = (ByteCache *)op;
    mt_py_key looked_for;
    PyObject *value;

    if (n < 1 || n > 2)
        return PyErr_Format(PyExc_TypeError, "pop() takes a key and a default, got %zd arguments",
                            n);
    looked_for = (mt_py_key){.alone = args[0]};
    if (mt_py_key_hash(&looked_for, NULL) < 0) return NULL;
    value = take_item(self, &looked_for);
    if (value == NULL && PyErr_Occurred()) return NULL;
    *(value != NULL ? &self->hits : &self->misses) += 1;
    if (value != NULL) return value;
    return n == 2 ? Py_NewRef(args[1]) : raise_key(args[0]);
}

/* What `cache[key] = value` raises for a value that is not kept. The wording is memtools.data's. */
static int
raise_not_kept(ByteCache *self, size_t bytes, const mt_error *err)
{
    size_t limit = mt_ledger_limit(self->lru.ledger);
    PyObject *module;

    if (bytes <= limit) {
        mt_py_raise_budget(self->state, self->lru.ledger, err, "ByteCache",
                           "put() leaves such a value out in place of raising");
        return -1;
    }
    if ((module = PyImport_ImportModule("memtools.data.cache")) == NULL) return -1;
    Py_XDECREF(PyObject_CallMethod(module, "too_large", "KK", (unsigned long long)bytes,
                                   (unsigned long long)limit));
    Py_DECREF(module);
    return -1;
}

static int
bytecache_ass_subscript(PyObject *op, PyObject *key, PyObject *value)
{
    ByteCache *self = (ByteCache *)op;
    mt_py_key looked_for = {.alone = key};
    mt_error err;
    size_t bytes;

    if (mt_py_key_hash(&looked_for, NULL) < 0) return -1;
    if (value == NULL) return delete_item(self, &looked_for);
    switch (mt_py_cache_put(self, NULL, &looked_for, value, &bytes, &err)) {
    case MT_PY_KEPT:
        return 0;
    case MT_PY_NOT_KEPT:
        return raise_not_kept(self, bytes, &err);
    default:
        return -1;
    }
}

static PyObject *
bytecache_put(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    mt_py_key looked_for;
    mt_py_kept kept;
    mt_error err;
    size_t bytes;

    if (n != 2)
        return PyErr_Format(PyExc_TypeError, "put() takes a key and a value, got %zd arguments", n);
    looked_for = (mt_py_key){.alone = args[0]};
    if (mt_py_key_hash(&looked_for, NULL) < 0) return NULL;
    kept = mt_py_cache_put((ByteCache *)op, NULL, &looked_for, args[1], &bytes, &err);
    return kept == MT_PY_FAILED ? NULL : PyBool_FromLong(kept == MT_PY_KEPT);
}

static Py_ssize_t
bytecache_length(PyObject *op)
{
    return (Py_ssize_t)((ByteCache *)op)->mapped;
}

/* References to the keys and values of the mapping, the least recently used first, in PyMem memory:
 * nothing that runs the collector happens while the entries are gone through. NULL with MemoryError. */
static PyObject **
take_entries(const ByteCache *self, size_t *n)
{
    PyObject **taken = (PyObject **)PyMem_Calloc(self->mapped + 1, 2 * sizeof *taken);

    *n = 0;
    if (taken == NULL) return (PyObject **)PyErr_NoMemory();
    for (const mt_lru_entry *entry = self->lru.oldest; entry != NULL; entry = entry->newer) {
        const mt_py_cached *cached = (const mt_py_cached *)entry;
        if (cached->space != NULL) continue;
        taken[(*n)++] = Py_NewRef(cached->key);
        taken[(*n)++] = Py_NewRef(cached->value);
    }
    return taken;
}

static PyObject *
pair_at(const void *from, size_t i)
{
    PyObject *const *taken = (PyObject *const *)from;

    return PyTuple_Pack(2, taken[2 * i], taken[2 * i + 1]);
}

static PyObject *
bytecache_entries(PyObject *op, PyObject *Py_UNUSED(none))
{
    size_t n;
    PyObject **taken = take_entries((ByteCache *)op, &n);
    PyObject *list = taken == NULL ? NULL : mt_py_list(n / 2, pair_at, (const void *)taken);

    for (size_t i = 0; i < n; i++)
        Py_DECREF(taken[i]);
    PyMem_Free((void *)taken);
    return list;
}

static PyObject *
bytecache_clear_all(PyObject *op, PyObject *Py_UNUSED(none))
{
    notice_fork((ByteCache *)op);
    mt_py_cache_clear((ByteCache *)op, NULL, true);
    Py_RETURN_NONE;
}

static PyObject *
bytecache_zero(PyObject *op, PyObject *Py_UNUSED(none))
{
    ByteCache *self = (ByteCache *)op;

    notice_fork(self);
    self->hits = self->misses = self->not_kept = 0;
    self->evicted_before = self->lru.evicted;
    Py_RETURN_NONE;
}

/* (hits, misses, limit or None, bytes, entries, evictions, not kept) */
static PyObject *
bytecache_info(PyObject *op, PyObject *Py_UNUSED(none))
{
    ByteCache *self = (ByteCache *)op;
    PyObject *limit;

    if (settle_limit(self) < 0) return NULL;
    limit = mt_ledger_limit(self->lru.ledger) == SIZE_MAX
                ? Py_NewRef(Py_None)
                : PyLong_FromSize_t(mt_ledger_limit(self->lru.ledger));
    return Py_BuildValue("(KKNKKKK)", (unsigned long long)self->hits,
                         (unsigned long long)self->misses, limit,
                         (unsigned long long)self->lru.bytes, (unsigned long long)self->lru.entries,
                         (unsigned long long)(self->lru.evicted - self->evicted_before),
                         (unsigned long long)self->not_kept);
}

/* --- the type -------------------------------------------------------------------------------- */

static int
set_up(ByteCache *self, PyObject *limit)
{
    mt_ledger *ledger;
    mt_error err;

    if (mt_home_linux.get(&self->home, &err) != MT_OK) {
        mt_py_raise(self->state, &err, "ByteCache()");
        return -1;
    }
    if (self->default_limit != NULL) return 0;
    ledger = mt_py_ledger(self->state, limit, "ByteCache");
    return ledger == NULL ? -1 : join(self, ledger);
}

/* (limit, measure, default_limit, name): limit is None where the default is to be found. */
static PyObject *
bytecache_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"limit", "measure", "default_limit", "name", NULL};
    mt_state *st = mt_state_of_type(type);
    PyObject *limit, *measure, *default_limit, *name;
    ByteCache *self;

    if (st == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OOOU:ByteCache", names, &limit, &measure,
                                     &default_limit, &name) ||
        PyUnicode_AsUTF8(name) == NULL)
        return NULL;
    if (!PyCallable_Check(measure) || !PyCallable_Check(default_limit))
        return PyErr_Format(PyExc_TypeError, "%s is not callable",
                            Py_TYPE(PyCallable_Check(measure) ? default_limit : measure)->tp_name);
    if ((self = (ByteCache *)type->tp_alloc(type, 0)) == NULL) return NULL;
    self->state = st;
    mt_lru_init(&self->lru, &mt_alloc_libc);
    self->measure = Py_NewRef(measure);
    self->name = Py_NewRef(name);
    self->limit_is_old = limit == Py_None;
    if (limit == Py_None) self->default_limit = Py_NewRef(default_limit);
    if (set_up(self, limit) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static int
bytecache_traverse(PyObject *op, visitproc visit, void *arg)
{
    ByteCache *self = (ByteCache *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->measure);
    Py_VISIT(self->default_limit);
    for (const mt_lru_entry *entry = self->lru.oldest; entry != NULL; entry = entry->newer) {
        Py_VISIT(((const mt_py_cached *)entry)->key);
        Py_VISIT(((const mt_py_cached *)entry)->value);
    }
    return 0;
}

static int
bytecache_clear(PyObject *op)
{
    ByteCache *self = (ByteCache *)op;

    Py_CLEAR(self->measure);
    Py_CLEAR(self->default_limit);
    mt_py_cache_clear(self, NULL, true);
    return 0;
}

static void
bytecache_dealloc(PyObject *op)
{
    ByteCache *self = (ByteCache *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    Py_TRASHCAN_BEGIN(op, bytecache_dealloc)
    if (self->weakrefs != NULL) PyObject_ClearWeakRefs(op);
    bytecache_clear(op);
    mt_lru_fini(&self->lru);
    mt_home_linux.put(self->home);
    Py_XDECREF(self->name);
    type->tp_free(op);
    Py_DECREF(type);
    Py_TRASHCAN_END
}

static PyMethodDef methods[] = {
    {"get", MT_PY_FUNCTION(bytecache_get), METH_FASTCALL,
     "get($self, key, default=None, /)\n--\n\n"
     "Return the value of a key, or `default` if there is none. Counts a hit or a miss, and makes "
     "the entry the newest."},
    {"put", MT_PY_FUNCTION(bytecache_put), METH_FASTCALL,
     "put($self, key, value, /)\n--\n\n"
     "Keep `value` under `key` if it fits, and return whether it was kept. One that is larger than "
     "the limit, or than what other parts leave of a Budget, is counted in `not_kept` and evicts "
     "nothing."},
    {"pop", MT_PY_FUNCTION(bytecache_pop), METH_FASTCALL,
     "pop($self, key, default=..., /)\n--\n\n"
     "Take the entry of a key out and return its value, or `default` if there is none. "
     "Counts a hit or a miss. Raises KeyError if there is neither."},
    {"clear", bytecache_clear_all, METH_NOARGS,
     "clear($self, /)\n--\n\nDrop all entries, those of decorated functions as well."},
    {"_entries", bytecache_entries, METH_NOARGS, "_entries($self, /)\n--\n\n"},
    {"_info", bytecache_info, METH_NOARGS, "_info($self, /)\n--\n\n"},
    {"_zero", bytecache_zero, METH_NOARGS, "_zero($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"nbytes", T_ULONGLONG, offsetof(ByteCache, lru) + offsetof(mt_lru, bytes), READONLY,
     "Bytes of all entries."},
    {"name", T_OBJECT, offsetof(ByteCache, name), READONLY, "What budgets call it."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ByteCache, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native half of memtools.data.ByteCache."},
    {Py_tp_new, bytecache_new},
    {Py_tp_dealloc, bytecache_dealloc},
    {Py_tp_traverse, bytecache_traverse},
    {Py_tp_clear, bytecache_clear},
    {Py_mp_subscript, bytecache_subscript},
    {Py_mp_ass_subscript, bytecache_ass_subscript},
    {Py_mp_length, bytecache_length},
    {Py_sq_contains, bytecache_contains},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memtools._core.ByteCache",
    .basicsize = sizeof(ByteCache),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_bytecache_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->ByteCache);
}
