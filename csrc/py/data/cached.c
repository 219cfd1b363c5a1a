/* cached.c -- memtools._core.CachedFunction: a function whose results lie in a ByteCache.
 *
 * How this file works. A call makes a key of its arguments: a lone one that is not a tuple is the key
 * itself, so that 3 and 3.0 are the same key, and anything else becomes a tuple, but only if it has to
 * be kept. The entries of a CachedFunction are those of its own space in the cache, so that several
 * functions may share one. While the function runs, anything may happen to the cache, which is looked
 * up again afterwards. */
#include "py/data/cache.h"

#include <structmember.h>

#include "py/base/objects.h"

typedef struct CachedFunction {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *function;
    ByteCache *cache;
    mt_state *state; /* lives as long as the type does */
    int typed;
    PyObject *dict, *weakrefs;
} CachedFunction;

/* --- keys ------------------------------------------------------------------------------------ */

static bool
is_key_alone(const CachedFunction *self, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    return n == 1 && names == NULL && !self->typed && !PyTuple_Check(args[0]);
}

enum { FEW = 12 }; /* items of a key that lie on the stack */

/* How many items the key of a call has: values, then a mark and (name, value) of each keyword, then
 * the types of all where `typed`. */
static Py_ssize_t
items_of(const CachedFunction *self, Py_ssize_t n, Py_ssize_t named)
{
    return n + (named > 0 ? 1 + 2 * named : 0) + (self->typed ? n + named : 0);
}

/* Borrowed items. */
static void
fill_items(const CachedFunction *self, PyObject *const *args, Py_ssize_t n, PyObject *names,
           PyObject **items)
{
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names), i;

    for (i = 0; i < n; i++)
        *items++ = args[i];
    if (named > 0) *items++ = (PyObject *)self->state->CachedFunction;
    for (i = 0; i < named; i++) {
        *items++ = PyTuple_GET_ITEM(names, i);
        *items++ = args[n + i];
    }
    for (i = 0; self->typed && i < n + named; i++)
        *items++ = (PyObject *)Py_TYPE(args[i]);
}

/* --- a call ---------------------------------------------------------------------------------- */

static PyObject *
after_gc(void)
{
    PyErr_SetString(PyExc_RuntimeError,
                    "this cached function is being garbage-collected and can no longer be called");
    return NULL;
}

/* Calls the function and keeps its result under the key. */
static PyObject *
call_function(CachedFunction *self, PyObject *const *args, size_t nargsf, PyObject *names,
              const mt_py_key *key)
{
    PyObject *result;
    mt_error err;
    size_t bytes;

    if (Py_EnterRecursiveCall(" in a cached function")) return NULL; /* one may wrap another */
    result = PyObject_Vectorcall(self->function, args, nargsf, names);
    Py_LeaveRecursiveCall();
    if (result == NULL) return NULL;
    if (self->cache == NULL) return result; /* the collector came by meanwhile */
    if (mt_py_cache_put(self->cache, self, key, result, &bytes, &err) == MT_PY_FAILED)
        Py_CLEAR(result);
    return result;
}

/* The result that is kept under the key, or else the function's. */
static PyObject *
look_up(CachedFunction *self, PyObject *const *args, size_t nargsf, PyObject *names, mt_py_key *key)
{
    PyObject *value;

    if (mt_py_key_hash(key, self) < 0) return NULL;
    if (self->cache == NULL) return after_gc();
    value = mt_py_cache_get(self->cache, self, key);
    if (value != NULL || PyErr_Occurred()) return value;
    if (self->function == NULL) return after_gc();
    return call_function(self, args, nargsf, names, key);
}

static PyObject *
cached_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *names)
{
    CachedFunction *self = (CachedFunction *)op;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    PyObject *few[FEW], **items = few, *value;
    mt_py_key key = {.alone = NULL};

    if (self->function == NULL || self->cache == NULL) return after_gc();
    if (is_key_alone(self, args, n, names)) {
        key.alone = args[0];
        return look_up(self, args, nargsf, names, &key);
    }
    key.n = items_of(self, n, names == NULL ? 0 : PyTuple_GET_SIZE(names));
    if (key.n > FEW && (items = PyMem_New(PyObject *, (size_t)key.n)) == NULL)
        return PyErr_NoMemory();
    fill_items(self, args, n, names, items);
    key.items = items;
    value = look_up(self, args, nargsf, names, &key);
    if (items != few) PyMem_Free((void *)items);
    return value;
}

/* --- the type -------------------------------------------------------------------------------- */

/* (function, cache, typed=False) */
static PyObject *
cached_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", "cache", "typed", NULL};
    mt_state *st = mt_state_of_type(type);
    PyObject *function, *cache;
    CachedFunction *self;
    int typed = 0;

    if (st == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "OO!|p:CachedFunction", names,
                                                   &function, st->ByteCache, &cache, &typed))
        return NULL;
    if (!PyCallable_Check(function))
        return PyErr_Format(PyExc_TypeError, "%s is not callable", Py_TYPE(function)->tp_name);
    if ((self = (CachedFunction *)type->tp_alloc(type, 0)) == NULL) return NULL;
    self->call = cached_vectorcall;
    self->state = st;
    self->typed = typed;
    self->function = Py_NewRef(function);
    self->cache = (ByteCache *)Py_NewRef(cache);
    return (PyObject *)self;
}

static int
cached_traverse(PyObject *op, visitproc visit, void *arg)
{
    CachedFunction *self = (CachedFunction *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->function);
    Py_VISIT(self->cache);
    Py_VISIT(self->dict);
    return 0;
}

/* Its entries go first: they know it by its address. */
static int
cached_clear(PyObject *op)
{
    CachedFunction *self = (CachedFunction *)op;

    if (self->cache != NULL) mt_py_cache_clear(self->cache, self, false);
    Py_CLEAR(self->cache);
    Py_CLEAR(self->function);
    Py_CLEAR(self->dict);
    return 0;
}

static void
cached_dealloc(PyObject *op)
{
    CachedFunction *self = (CachedFunction *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    Py_TRASHCAN_BEGIN(op, cached_dealloc)
    if (self->weakrefs != NULL) PyObject_ClearWeakRefs(op);
    cached_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
    Py_TRASHCAN_END
}

static PyObject *
cached_get(PyObject *op, PyObject *obj, PyObject *Py_UNUSED(type))
{
    return obj == NULL || obj == Py_None ? Py_NewRef(op) : PyMethod_New(op, obj);
}

static PyObject *
cached_repr(PyObject *op)
{
    PyObject *function = ((CachedFunction *)op)->function;

    return function == NULL ? after_gc() : PyUnicode_FromFormat("<cached %R>", function);
}

/* By its name, as functions are pickled; copies are itself. */
static PyObject *
cached_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    return PyObject_GetAttrString(op, "__qualname__");
}

static PyObject *
cached_self(PyObject *op, PyObject *Py_UNUSED(memo))
{
    return Py_NewRef(op);
}

static PyObject *
cached_cache_info(PyObject *op, PyObject *Py_UNUSED(none))
{
    CachedFunction *self = (CachedFunction *)op;

    if (self->cache == NULL) return after_gc();
    return PyObject_CallMethod((PyObject *)self->cache, "cache_info", NULL);
}

static PyObject *
cached_cache_clear(PyObject *op, PyObject *Py_UNUSED(none))
{
    CachedFunction *self = (CachedFunction *)op;

    if (self->cache == NULL) return after_gc();
    mt_py_cache_clear(self->cache, self, false);
    if (self->cache != NULL && self->cache->lru.entries == 0)
        return PyObject_CallMethod((PyObject *)self->cache, "_zero", NULL);
    Py_RETURN_NONE;
}

static PyObject *
cached_cache_parameters(PyObject *op, PyObject *Py_UNUSED(none))
{
    CachedFunction *self = (CachedFunction *)op;
    PyObject *limit;

    if (self->cache == NULL) return after_gc();
    if ((limit = PyObject_GetAttrString((PyObject *)self->cache, "limit")) == NULL) return NULL;
    return Py_BuildValue("{sNsO}", "maxsize", limit, "typed", self->typed ? Py_True : Py_False);
}

static PyGetSetDef getters[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"cache_info", cached_cache_info, METH_NOARGS,
     "cache_info($self, /)\n--\n\nThe figures of the cache, in bytes."},
    {"cache_clear", cached_cache_clear, METH_NOARGS,
     "cache_clear($self, /)\n--\n\n"
     "Drop the results of this function; counts begin at 0 if the cache is empty then."},
    {"cache_parameters", cached_cache_parameters, METH_NOARGS,
     "cache_parameters($self, /)\n--\n\nThe limit in bytes, and whether 3 and 3.0 are told apart."},
    {"__reduce__", cached_reduce, METH_NOARGS, "__reduce__($self, /)\n--\n\n"},
    {"__copy__", cached_self, METH_NOARGS, "__copy__($self, /)\n--\n\n"},
    {"__deepcopy__", cached_self, METH_O, "__deepcopy__($self, memo, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"cache", T_OBJECT_EX, offsetof(CachedFunction, cache), READONLY,
     "The ByteCache that holds the results."},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CachedFunction, call), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(CachedFunction, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CachedFunction, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A function whose results a ByteCache keeps."},
    {Py_tp_new, cached_new},
    {Py_tp_dealloc, cached_dealloc},
    {Py_tp_traverse, cached_traverse},
    {Py_tp_clear, cached_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_descr_get, cached_get},
    {Py_tp_repr, cached_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memtools._core.CachedFunction",
    .basicsize = sizeof(CachedFunction),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = slots,
};

int
mt_py_cachedfunction_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->CachedFunction);
}
