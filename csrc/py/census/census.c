/* census.c -- how this file works.
 *
 * _census() opens the heap (heap.h) and looks at each object once: its type's line is counted, its
 * address becomes bits of a filter, and a tensor is asked by the shim for its shape and storage and
 * counted in the line of its group. A storage that several tensors show counts once, for the group of
 * the largest of them. Without the shim tensors are only listed, and Python asks them. _fresh() goes
 * through the heap again and lists the newest objects of a type whose addresses are not in a filter
 * of before. No Python code runs between opening and closing the heap. _instances() lists all objects
 * of some types, by the heap where there is no faster way (arcs.h). */
#include "py/census/census.h"

#include <string.h>

#include "py/base/objects.h"
#include "py/base/ptrset.h"
#include "py/census/arcs.h"
#include "py/census/heap.h"
#include "core/census/counts.h"

enum { KEY_WORDS = 64, BITS_PER_OBJECT = 16, BITS_OF_ONE = 4, WORD = 8, AHEAD = 12 };

/* --- a filter of addresses: four bits of one word for each, 16 to 32 bits an object ----------- */

typedef struct seen {
    char *words;
    unsigned shift; /* 64 - log2 of how many words there are */
} seen;

static size_t
seen_bytes(size_t objects)
{
    size_t bytes = 1024;

    while (8 * bytes < BITS_PER_OBJECT * objects)
        bytes *= 2;
    return bytes;
}

static seen
seen_over(char *bytes, Py_ssize_t n)
{
    seen s = {.words = bytes, .shift = 64};

    for (n /= WORD; n > 1; n /= 2)
        s.shift--;
    return s;
}

/* The word of an address, and the bits in it that stand for the address. */
static char *
word_of(const seen *s, const PyObject *op, uint64_t *bits)
{
    uint64_t hash = mt_ptr_hash(op), other = (hash ^ hash >> 32) * UINT64_C(0xC2B2AE3D27D4EB4F);

    *bits = 0;
    for (int i = 0; i < BITS_OF_ONE; i++)
        *bits |= UINT64_C(1) << (other >> (58 - 6 * i) & 63);
    return s->words + WORD * (hash >> s->shift);
}

static void
census_see(const seen *s, const PyObject *op)
{
    uint64_t bits, word;
    char *at = word_of(s, op, &bits);

    memcpy(&word, at, WORD);
    word |= bits;
    memcpy(at, &word, WORD);
}

static bool
was_seen(const seen *s, const PyObject *op)
{
    uint64_t bits, word;

    memcpy(&word, word_of(s, op, &bits), WORD);
    return (word & bits) == bits;
}

/* --- counting --------------------------------------------------------------------------------- */

typedef struct census {
    PyTypeObject *tensor;     /* NULL: no torch */
    const mt_torch_ops *shim; /* NULL: tensors are listed */
    mt_counts types;          /* key: the type; tag: a `kind` */
    mt_counts groups;         /* key: type, dimensions, shape, dtype, device; tag: one of them */
    mt_counts storages;       /* key: where; count: the largest claim; tag: the claimer's group */
    PyObject *tensors;
    size_t last; /* line of the type before */
} census;

enum kind { NOT_ASKED, NO_TENSOR, TENSOR };

/* -1 without memory. The line of the object's type. */
static int
type_line(census *c, PyObject *op, size_t *line)
{
    int64_t key = (int64_t)(intptr_t)Py_TYPE(op);

    if (c->last < c->types.n && *mt_counts_key(&c->types, c->last) == key) {
        *line = c->last;
        return 0;
    }
    if (mt_counts_line_of(&c->types, &key, 1, line, NULL) != MT_OK) return -1;
    c->last = *line;
    if (c->types.lines[*line].tag == NOT_ASKED) {
        bool tensor = c->tensor != NULL && PyType_IsSubtype(Py_TYPE(op), c->tensor);
        c->types.lines[*line].tag = tensor ? TENSOR : NO_TENSOR;
    }
    return 0;
}

/* The group that has the largest tensor over a storage answers for all of it; of equal ones the
 * first in the order of keys, so that two looks agree. */
static int
claim(census *c, const mt_torch_facts *facts, size_t group)
{
    int64_t key = (int64_t)(intptr_t)facts->storage;
    mt_counts_line *s;
    size_t line;

    if (facts->storage == NULL) return 0;
    if (mt_counts_line_of(&c->storages, &key, 1, &line, NULL) != MT_OK) return -1;
    s = &c->storages.lines[line];
    if (facts->storage_bytes > s->bytes) s->bytes = facts->storage_bytes;
    if (s->tag == 0 || facts->bytes > s->count ||
        (facts->bytes == s->count && mt_counts_compare(&c->groups, group, s->tag - 1) < 0)) {
        s->count = facts->bytes;
        s->tag = group + 1;
    }
    return 0;
}

static int
count_tensor(census *c, PyObject *op)
{
    int64_t key[KEY_WORDS];
    mt_torch_facts facts;
    size_t words = 2, line;

    if (c->shim->facts(op, &facts) != 1) return 0; /* half-built: no tensor yet */
    key[0] = (int64_t)(intptr_t)Py_TYPE(op);
    key[1] = facts.dims;
    for (int i = 0; i < facts.dims && words < KEY_WORDS - 2; i++)
        key[words++] = facts.shape[i];
    key[words++] = (int64_t)(intptr_t)facts.dtype;
    key[words++] = facts.device;
    if (mt_counts_line_of(&c->groups, key, words, &line, NULL) != MT_OK) return -1;
    c->groups.lines[line].count++;
    c->groups.lines[line].tag = (uint64_t)(uintptr_t)op;
    return claim(c, &facts, line);
}

static int
census_count(census *c, PyObject *op)
{
    size_t line;

    if (type_line(c, op, &line) < 0) return -1;
    c->types.lines[line].count++;
    if (c->types.lines[line].tag != TENSOR) return 0;
    return c->shim != NULL ? count_tensor(c, op) : PyList_Append(c->tensors, op);
}

static int
count_all(census *c, const mt_heap *heap, const seen *s)
{
    size_t n = mt_py_heap_len(heap);

    for (size_t i = 0; i < n; i++) {
        PyObject *op = mt_py_heap_at(heap, i);
        if (i + AHEAD < n) __builtin_prefetch(mt_py_heap_at(heap, i + AHEAD));
        census_see(s, op);
        if (census_count(c, op) < 0) return -1;
    }
    for (size_t i = 0; i < c->storages.n; i++) {
        const mt_counts_line *line = &c->storages.lines[i];
        c->groups.lines[line->tag - 1].bytes += line->bytes;
    }
    return 0;
}

/* --- the answer ------------------------------------------------------------------------------- */

static PyObject *
type_row(const void *from, size_t i)
{
    const mt_counts *types = from;
    const mt_counts_line *line = &types->lines[i];

    return Py_BuildValue("OKO", (PyObject *)(intptr_t)*mt_counts_key(types, i),
                         (unsigned long long)line->count, line->tag == TENSOR ? Py_True : Py_False);
}

static PyObject *
group_row(const void *from, size_t i)
{
    const mt_counts_line *line = &((const mt_counts *)from)->lines[i];

    return Py_BuildValue("OKK", (PyObject *)(uintptr_t)line->tag, (unsigned long long)line->count,
                         (unsigned long long)line->bytes);
}

static PyObject *
census_answer(census *c, const mt_heap *heap)
{
    size_t n = mt_py_heap_len(heap);
    PyObject *bits = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)seen_bytes(n));
    PyObject *types = NULL, *groups = NULL, *result = NULL;
    seen s;

    if (bits == NULL) return NULL;
    memset(PyBytes_AS_STRING(bits), 0, seen_bytes(n));
    s = seen_over(PyBytes_AS_STRING(bits), PyBytes_GET_SIZE(bits));
    if (count_all(c, heap, &s) < 0) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
    } else if ((types = mt_py_list(c->types.n, type_row, &c->types)) != NULL &&
               (groups = mt_py_list(c->groups.n, group_row, &c->groups)) != NULL) {
        result = Py_BuildValue("OOOOK", types, groups, c->tensors, bits, (unsigned long long)n);
    }
    Py_XDECREF(types);
    Py_XDECREF(groups);
    Py_DECREF(bits);
    return result;
}

PyObject *
mt_py_census(PyObject *module, PyObject *args)
{
    mt_state *st = PyModule_GetState(module);
    PyObject *tensor, *result = NULL;
    census c = {.last = SIZE_MAX};
    mt_heap heap;
    int by_shim;

    if (!PyArg_ParseTuple(args, "Op:_census", &tensor, &by_shim)) return NULL;
    if (tensor != Py_None && !PyType_Check(tensor))
        return PyErr_Format(PyExc_TypeError, "tensor is a type or None, not %s",
                            Py_TYPE(tensor)->tp_name);
    if (tensor != Py_None) c.tensor = (PyTypeObject *)tensor;
    if (by_shim && c.tensor == st->tensor) c.shim = st->shim; /* which reads no other objects */
    mt_counts_init(&c.types, &mt_py_alloc);
    mt_counts_init(&c.groups, &mt_py_alloc);
    mt_counts_init(&c.storages, &mt_py_alloc);
    if ((c.tensors = PyList_New(0)) == NULL) return NULL;
    if (mt_py_heap_open(&heap) == 0) {
        result = census_answer(&c, &heap);
        mt_py_heap_close(&heap);
    }
    mt_counts_fini(&c.types);
    mt_counts_fini(&c.groups);
    mt_counts_fini(&c.storages);
    Py_DECREF(c.tensors);
    return result;
}

/* --- what is new ------------------------------------------------------------------------------ */

static int
add_fresh(PyObject *list, const mt_heap *heap, PyTypeObject *type, const seen *s, Py_ssize_t limit)
{
    for (size_t i = mt_py_heap_len(heap); i-- > 0 && PyList_GET_SIZE(list) < limit;) {
        PyObject *op = mt_py_heap_at(heap, i);
        if (Py_IS_TYPE(op, type) && !was_seen(s, op) && op != list && PyList_Append(list, op) < 0)
            return -1;
    }
    return 0;
}

PyObject *
mt_py_fresh(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *type, *bits, *list;
    Py_ssize_t limit;
    mt_heap heap;
    seen s;

    if (!PyArg_ParseTuple(args, "O!Sn:_fresh", &PyType_Type, &type, &bits, &limit)) return NULL;
    if ((size_t)PyBytes_GET_SIZE(bits) < seen_bytes(0))
        return PyErr_Format(PyExc_ValueError, "seen is what _census() gave, not %zd bytes",
                            PyBytes_GET_SIZE(bits));
    if ((list = PyList_New(0)) == NULL) return NULL;
    if (mt_py_heap_open(&heap) < 0) {
        Py_DECREF(list);
        return NULL;
    }
    s = seen_over(PyBytes_AS_STRING(bits), PyBytes_GET_SIZE(bits));
    if (add_fresh(list, &heap, (PyTypeObject *)type, &s, limit) < 0) Py_CLEAR(list);
    mt_py_heap_close(&heap);
    return list;
}

/* --- objects of some types -------------------------------------------------------------------- */

static int
add_instances(PyObject *list, const mt_heap *heap, const mt_ptrset *types)
{
    size_t n = mt_py_heap_len(heap);

    for (size_t i = 0; i < n; i++) {
        PyObject *op = mt_py_heap_at(heap, i);
        if (i + AHEAD < n) __builtin_prefetch(mt_py_heap_at(heap, i + AHEAD));
        if (op != list && mt_ptrset_find(types, Py_TYPE(op)) != MT_PTRSET_NONE &&
            PyList_Append(list, op) < 0)
            return -1;
    }
    return 0;
}

/* -1 with an error. */
static int
take_types(mt_ptrset *types, PyObject *classes)
{
    Py_ssize_t n = PyTuple_GET_SIZE(classes);

    if (mt_ptrset_reserve(types, (size_t)n + 1) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *type = PyTuple_GET_ITEM(classes, i);
        if (!PyType_Check(type)) {
            PyErr_Format(PyExc_TypeError, "classes holds types; item %zd is %.100s", i,
                         Py_TYPE(type)->tp_name);
            return -1;
        }
        (void)mt_ptrset_add(types, type, 0);
    }
    return 0;
}

/* By the list of all objects. -1 with an error. */
static int
list_instances(PyObject *list, const mt_ptrset *types)
{
    mt_heap heap;
    int failed;

    if (mt_py_heap_open(&heap) < 0) return -1;
    failed = add_instances(list, &heap, types);
    mt_py_heap_close(&heap);
    return failed;
}

PyObject *
mt_py_instances(PyObject *Py_UNUSED(module), PyObject *classes)
{
    PyObject *list = NULL;
    mt_ptrset types = {0};
    int done;

    if (!PyTuple_Check(classes))
        return PyErr_Format(PyExc_TypeError, "classes must be a tuple, not %.100s",
                            Py_TYPE(classes)->tp_name);
    if (take_types(&types, classes) == 0 && (list = PyList_New(0)) != NULL) {
        done = mt_py_arcs_instances(list, &types); /* right after its birth: see there */
        if (done == 0) done = list_instances(list, &types);
        if (done < 0) Py_CLEAR(list);
    }
    mt_ptrset_fini(&types);
    return list;
}
