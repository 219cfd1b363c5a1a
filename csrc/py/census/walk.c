/* walk.c -- how this file works.
 *
 * mt_walk_new() adds the roots of one sort after the other and walks on from each sort until nothing
 * is left (walk_drain). A node that is taken from the queue is entered: its entries come to reach(), which
 * asks what objects of this type are (`ways`, found out once for each type), adds what they cost to
 * who holds them, and makes a node for what can hold others. A container of more than LARGE entries
 * waits until the queue is empty, and is entered in full only as long as the walk is short; else a
 * sample of its newest entries stands for those that the look before has not seen. A quick walk has so
 * many entries for each sort of roots: what is large waits for what is small, what is longer than at
 * the look before comes first of it, and the rest is left out. At the end the
 * tensors' graphs are shared out, and the bytes of each node are added to its parent's. Leaves that
 * only a cycle of autograd keeps come last, from the collector's list (add_cycles). */
#include "py/census/walk.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

#include "py/census/buffers.h"
#include "py/census/frames.h"
#include "py/census/maps.h"
#include "os/base/pages.h"

enum {
    LARGE = 1024,         /* entries of a container that has to wait, ... */
    QUITE_LARGE = 128,    /* ... and in a quick walk, where it is not a namespace */
    SAMPLE = 256,         /* of its entries that are entered where there is no time for all */
    LONG_TUPLE = 64,      /* entries of a tuple that is watched by its place */
    MOST_NODES = 1000000, /* beyond which the walk ends: 0.3 s of them */
    MOST_GRAPH_NODES = 200000,
    TENSOR_BYTES = 444, /* the tensor, its Python object, the storage and what malloc adds */
    NODE_BYTES = 576,   /* of autograd's graph, in the middle */
    ARRAY_BYTES = 128,
    NUMBER_BYTES = 32,
    FRAME_BYTES = 128, /* variables and stack of a function, in the middle */
    RECENT = 1024,     /* types that are found without a search */
};

/* Entries that a walk goes through: up to SHORT of them all containers are entered in full, beyond
 * LONG the walk ends. One costs 20 to 60 ns. */
static const uint64_t SHORT = 2000000, LONG = 12000000;

/* The same of a quick walk, for each sort of roots of the program, and of libraries. */
static const uint64_t QUICK = 200000, QUICK_OF_LIBRARIES = 600000;

static const uint64_t PLACE_OF_KEY = UINT64_C(0xA24BAED4963EE407);
static const uint64_t PLACE_OF_CYCLES = UINT64_C(0xC2B2AE3D27D4EB4F);
static const uint64_t PLACE_OF_KEPT = UINT64_C(0x8CB92BA72F3D8DD7);

/* What objects of a type are to the walk. */
typedef enum way {
    UNKNOWN,
    NOTHING, /* they cost nothing, and nothing of the program is below them */
    NUMBER,
    TEXT,
    BYTES,
    BYTEARRAY,
    BUFFER, /* shows its memory by the buffer protocol, in C */
    STREAM, /* io.BytesIO and io.StringIO */
    MAP,    /* mmap.mmap */
    CTYPES, /* an array or a structure of ctypes */
    LEAF,   /* holds nothing */
    LIST,
    TUPLE,
    DICT,
    SET,
    DEQUE,
    CACHE,
    NDARRAY,
    TENSOR,
    MEMORYVIEW,
    FUNCTION,
    BUILTIN,
    TYPE,
    OBJECT,
} way;

/* Beside a type's way. */
enum {
    IS_LIBRARYS = 32, /* a library defines it */
    HOLDS = 64,       /* it is derived from a type that holds nothing, and its instances may */
    SIZED = 128,      /* a method of C in Python's own modules knows the size of an instance */
};

/* A container of which a sample stands for `stands_for` entries. */
typedef struct scale {
    uint64_t own, before; /* its own bytes; the bytes of the entries that the sample is not about */
    uint64_t sampled, stands_for;
    uint32_t length;
} scale;

typedef struct variable {
    PyObject *name; /* borrowed from the code */
} variable;

struct mt_walk {
    mt_walk_places places;
    const mt_growth *known;
    mt_walk_node *nodes;
    size_t n, cap, next;    /* next: the first that was not entered */
    size_t programs_n;      /* the first so many are those that the program's own roots lead to */
    unsigned char *heights; /* of the nodes, once the sums are made */
    uint32_t *waiting;      /* large containers */
    size_t waiting_n, waiting_cap, waiting_next;
    size_t longer_n; /* of a quick walk: up to here they are longer than at the look before */
    scale *scales;
    size_t scales_n, scales_cap;
    variable *variables;
    size_t variables_n, variables_cap;
    uint32_t *graph_nodes; /* the node of each root of `graphs`, in the order of adding */
    size_t graph_nodes_n, graph_nodes_cap;
    mt_graphs graphs;
    mt_ptrset seen, blocks, types, programs, libraries;
    struct {
        PyTypeObject *type;
        unsigned way;
    } recent[RECENT];
    uint64_t work, full_until; /* up to so much work large containers are entered in full */
    bool in_libraries;         /* the roots are those of libraries now */
    bool failed;               /* no memory */
    bool cut;                  /* it has ended */
    bool is_partial;           /* a quick walk has left things out */
    /* while a node is entered: */
    uint32_t current;          /* the node; MT_GROWTH_NONE among the roots */
    uint64_t slot, skip, take; /* of tp_traverse: entries to pass by, and then to reach */
    PyObject *space;           /* the instance's own dict */
    PyObject *last_dict;       /* that was reached, without it */
    /* while frames are read: */
    PyObject *code;
    bool code_wanted;
};

uint64_t
mt_walk_place(uint64_t place, uint64_t slot)
{
    uint64_t h = (place ^ slot) * UINT64_C(0x9E3779B97F4A7C15) + (slot << 7 | 1);

    return h ^ h >> 29;
}

/* --- what objects are, by their type ---------------------------------------------------------- */

/* The name of the module that defines a type, borrowed, or NULL if it is not a plain str. */
static PyObject *
module_of(PyTypeObject *type)
{
    static PyObject *key;
    PyObject *module;

    if (key == NULL && (key = PyUnicode_InternFromString("__module__")) == NULL) return NULL;
    if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE) || type->tp_dict == NULL) return NULL;
    module = PyDict_GetItemWithError(type->tp_dict, key);
    return module != NULL && PyUnicode_CheckExact(module) ? module : NULL;
}

static bool
walk_begins_with(PyObject *text, const char *begin)
{
    size_t n = strlen(begin);

    if (!PyUnicode_IS_READY(text) || !PyUnicode_IS_ASCII(text)) return false;
    if ((size_t)PyUnicode_GET_LENGTH(text) < n) return false;
    return memcmp(PyUnicode_1BYTE_DATA(text), begin, n) == 0;
}

static bool
is_of_package(PyObject *module)
{
    return walk_begins_with(module, "memtools") &&
           (PyUnicode_GET_LENGTH(module) == 8 || PyUnicode_READ_CHAR(module, 8) == '.');
}

/* Whether a class of this module is the program's. */
static bool
is_programs(const mt_walk *w, PyObject *module)
{
    PyObject *loaded = PyDict_GetItemWithError(PyImport_GetModuleDict(), module);

    if (loaded == NULL || !PyModule_Check(loaded)) return false;
    return mt_ptrset_find(&w->programs, PyModule_GetDict(loaded)) != MT_PTRSET_NONE;
}

static bool
is_one_of(const PyTypeObject *type, PyTypeObject *const *types, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (type == types[i]) return true;
    return false;
}

static bool
is_nothing(const mt_walk *w, PyTypeObject *type, PyObject *module)
{
    PyTypeObject *const types[] = {
        &PyBool_Type,
        &PyCode_Type,
        Py_TYPE(Py_None),
        &PyEllipsis_Type,
        &PyProperty_Type,
        Py_TYPE(Py_NotImplemented),
        &PyGetSetDescr_Type,
        &PyMemberDescr_Type,
        &PyMethodDescr_Type,
        &PyWrapperDescr_Type,
        &PyClassMethodDescr_Type,
    };

    if (is_one_of(type, types, sizeof types / sizeof *types)) return true;
    if (PyType_IsSubtype(type, &PyModule_Type)) return true;
    if (PyType_IsSubtype(type, &_PyWeakref_RefType)) return true;
    if (is_one_of(type,
                  (PyTypeObject *const[]){&_PyWeakref_ProxyType, &_PyWeakref_CallableProxyType}, 2))
        return true;
    if (strcmp(Py_TYPE(type)->tp_name, "EnumType") == 0) return true;
    if (module == NULL) return strncmp(type->tp_name, "memtools.", 9) == 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(w->places.own); i++)
        if ((PyObject *)type == PyTuple_GET_ITEM(w->places.own, i)) return true;
    return is_of_package(module) || walk_begins_with(module, "_frozen_importlib") ||
           walk_begins_with(module, "importlib") || walk_begins_with(module, "typing");
}

static way
way_of_builtin(PyTypeObject *type)
{
    if (PyType_HasFeature(type, Py_TPFLAGS_LONG_SUBCLASS))
        return PyType_IS_GC(type) ? OBJECT
                                  : NUMBER; /* the one with attributes, the other without */
    if (type == &PyFloat_Type || type == &PyComplex_Type) return NUMBER;
    if (PyType_HasFeature(type, Py_TPFLAGS_UNICODE_SUBCLASS)) return TEXT;
    if (PyType_HasFeature(type, Py_TPFLAGS_BYTES_SUBCLASS)) return BYTES;
    if (PyType_IsSubtype(type, &PyByteArray_Type)) return BYTEARRAY;
    if (PyType_HasFeature(type, Py_TPFLAGS_LIST_SUBCLASS)) return LIST;
    if (PyType_HasFeature(type, Py_TPFLAGS_TUPLE_SUBCLASS)) return TUPLE;
    if (PyType_HasFeature(type, Py_TPFLAGS_DICT_SUBCLASS)) return DICT;
    if (PyType_IsSubtype(type, &PySet_Type) || PyType_IsSubtype(type, &PyFrozenSet_Type))
        return SET;
    if (PyType_HasFeature(type, Py_TPFLAGS_TYPE_SUBCLASS)) return TYPE;
    if (type == &PyFunction_Type) return FUNCTION;
    if (type == &PyCFunction_Type) return BUILTIN;
    if (type == &PyMemoryView_Type) return MEMORYVIEW;
    if (strcmp(type->tp_name, "array.array") == 0) return BUFFER;
    if (mt_py_is_stream(type)) return STREAM;
    if (mt_py_is_map(type)) return MAP;
    if (mt_py_is_ctypes(type)) return CTYPES;
    return UNKNOWN;
}

static way
way_of(const mt_walk *w, PyTypeObject *type, PyObject *module)
{
    const mt_walk_places *p = &w->places;
    way found;

    if (is_nothing(w, type, module)) return NOTHING;
    if ((found = way_of_builtin(type)) != UNKNOWN) return found;
    if (PyType_IsSubtype(type, p->deque)) return DEQUE;
    if (type == p->cache) return CACHE;
    if (p->ndarray != NULL && PyType_IsSubtype(type, p->ndarray)) return NDARRAY;
    if (p->tensor != NULL && PyType_IsSubtype(type, p->tensor)) return TENSOR;
    return type->tp_traverse != NULL && PyType_IS_GC(type) ? OBJECT : LEAF;
}

/* Whether it has a frame of its own. Such types have items and yet no field that counts them. */
static bool
has_frame(PyTypeObject *type)
{
    return type == &PyGen_Type || type == &PyCoro_Type || type == &PyAsyncGen_Type ||
           type == &PyFrame_Type;
}

/* The __sizeof__ of a type, borrowed, or NULL. _PyType_Lookup() numbers each type that it is asked for
 * the first time, and so it copies the pages of a forked process where types lie. */
static PyObject *
sizer_of(PyTypeObject *type)
{
    static PyObject *name;
    PyObject *found = NULL;

    if (name == NULL && (name = PyUnicode_InternFromString("__sizeof__")) == NULL) return NULL;
    for (Py_ssize_t i = 0; type->tp_mro != NULL && i < PyTuple_GET_SIZE(type->tp_mro); i++) {
        const PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(type->tp_mro, i);
        if (base->tp_dict == NULL) return _PyType_Lookup(type, name); /* the interpreter has it */
        if ((found = PyDict_GetItemWithError(base->tp_dict, name)) != NULL) break;
    }
    return found;
}

/* Whether that is a method of C in one of Python's own modules, which runs no code of the program. What
 * `object` has knows no more than the type does. */
static bool
is_sized(PyTypeObject *type)
{
    PyObject *method = sizer_of(type), *names, *module;
    const char *dot;
    bool is_pythons;

    if (method == NULL || Py_TYPE(method) != &PyMethodDescr_Type) return false;
    type = ((PyMethodDescrObject *)method)->d_common.d_type;
    if (type == &PyBaseObject_Type) return false;
    if ((dot = strchr(type->tp_name, '.')) == NULL) return true; /* of builtins */
    names = PySys_GetObject("stdlib_module_names");
    module = PyUnicode_FromStringAndSize(type->tp_name, dot - type->tp_name);
    is_pythons = names != NULL && PyFrozenSet_CheckExact(names) && module != NULL &&
                 PySet_Contains(names, module) == 1;
    Py_XDECREF(module);
    return is_pythons;
}

/* The way, and what is known beside it. */
static unsigned
way_by_search(mt_walk *w, PyTypeObject *type)
{
    size_t known = w->types.n == 0 ? MT_PTRSET_NONE : mt_ptrset_find(&w->types, type);
    PyObject *module;
    unsigned found;

    if (known != MT_PTRSET_NONE) return (unsigned)known;
    module = module_of(type);
    found = way_of(w, type, module);
    if (found >= TEXT && found < LEAF && PyType_IS_GC(type))
        found |= HOLDS;
    else if ((found == OBJECT || found == LEAF) && !has_frame(type) && is_sized(type))
        found |= SIZED;
    if (module == NULL || !is_programs(w, module)) found |= IS_LIBRARYS;
    if (mt_ptrset_reserve(&w->types, w->types.n + 1) < 0)
        w->failed = true;
    else
        (void)mt_ptrset_add(&w->types, type, found);
    return found;
}

static inline unsigned
way_of_type(mt_walk *w, PyTypeObject *type)
{
    size_t i = (size_t)((uintptr_t)type >> 6) % RECENT;

    if (w->recent[i].type != type) {
        w->recent[i].way = way_by_search(w, type);
        w->recent[i].type = type;
    }
    return w->recent[i].way;
}

/* --- what they cost --------------------------------------------------------------------------- */

/* As malloc gives it. */
static uint64_t
rounded(uint64_t bytes)
{
    return ((bytes + 15) & ~UINT64_C(15)) + (bytes > 512 ? 16 : 0);
}

static uint64_t
dict_bytes(Py_ssize_t length)
{
    uint64_t n = 8;

    if (length == 0) return 80;
    while (2 * n < 3 * (uint64_t)length)
        n *= 2;
    return 80 + rounded(32 + n * (n > 65536 ? 4 : n > 256 ? 2 : 1) + n * 2 / 3 * 24);
}

static uint64_t
set_bytes(PyObject *op)
{
    const PySetObject *set = (const PySetObject *)op;

    return 224 + (set->table == set->smalltable ? 0 : rounded(((uint64_t)set->mask + 1) * 16));
}

/* Of an instance or what is like it: its size, the collector's header and its values. */
static uint64_t
object_bytes(PyTypeObject *type, PyObject *op)
{
    uint64_t bytes = (uint64_t)type->tp_basicsize;

    if (has_frame(type))
        bytes += FRAME_BYTES;
    else if (type->tp_itemsize > 0 && Py_SIZE(op) > 0)
        bytes += (uint64_t)Py_SIZE(op) * (uint64_t)type->tp_itemsize;
    if (PyType_IS_GC(type)) bytes += 16;
    if (type->tp_flags & Py_TPFLAGS_MANAGED_DICT) bytes += 16 + 64;
    return rounded(bytes);
}

/* The same where a method of C knows the size: it has in it what the object has of malloc. */
static uint64_t
sized_bytes(PyTypeObject *type, PyObject *op)
{
    PyObject *size = PyObject_CallOneArg(sizer_of(type), op);
    Py_ssize_t bytes = size == NULL ? -1 : PyLong_AsSsize_t(size);

    Py_XDECREF(size);
    if (bytes < 0) PyErr_Clear();
    return bytes < type->tp_basicsize
               ? object_bytes(type, op)
               : object_bytes(type, op) + rounded((uint64_t)(bytes - type->tp_basicsize));
}

/* That of a class derived from str lies apart from its characters. */
static uint64_t
text_bytes(PyObject *op)
{
    uint64_t characters = (uint64_t)PyUnicode_KIND(op) * ((uint64_t)PyUnicode_GET_LENGTH(op) + 1);

    if (PyUnicode_IS_COMPACT(op)) return rounded(48 + characters);
    return object_bytes(Py_TYPE(op), op) + rounded(characters);
}

/* NumPy's array as all its versions since 1.7 lay it out (PyArrayObject_fields, a part of its ABI, which
 * NumPy 2 kept); the element's kind lies where it always was. */
typedef struct array_fields {
    PyObject_HEAD
    char *data;
    int nd;
    intptr_t *dimensions, *strides;
    PyObject *base;
    struct {
        PyObject_HEAD
        PyTypeObject *typeobj;
        char kind;
    } *descr;
} array_fields;

static uint64_t
array_length(const array_fields *a)
{
    uint64_t n = 1;

    for (int i = 0; i < a->nd; i++)
        n *= (uint64_t)a->dimensions[i];
    return n;
}

static uint64_t
array_size(const array_fields *a)
{
    uint64_t most = 0;

    for (int i = 0; i < a->nd; i++) {
        uint64_t n = (uint64_t)a->dimensions[i];
        uint64_t stride = (uint64_t)(a->strides[i] < 0 ? -a->strides[i] : a->strides[i]);
        if (n == 0) return 0;
        if (n * stride > most) most = n * stride;
    }
    return most;
}

/* --- nodes ------------------------------------------------------------------------------------ */

/* Whether an address is new to a table. */
static bool
is_new(mt_walk *w, mt_ptrset *set, const void *at)
{
    if (mt_ptrset_reserve(set, set->n + 1) < 0) {
        w->failed = true;
        return false;
    }
    return mt_ptrset_add(set, at, 0) == MT_PTRSET_NONE;
}

/* Bytes of memory that several objects may show: 0 for what was found before. */
static uint64_t
walk_block_bytes(mt_walk *w, const void *data, uint64_t bytes)
{
    return data != NULL && bytes > 0 && is_new(w, &w->blocks, data) ? rounded(bytes) : 0;
}

/* Room for one more item of an array of the walk. */
static bool
room(mt_walk *w, void **items, size_t *cap, size_t n, size_t size)
{
    void *larger = mt_alloc_grown(&mt_alloc_pages, *items, cap, n + 1, size);

    if (larger == NULL) w->failed = true;
    if (larger != NULL) *items = larger;
    return larger != NULL;
}

/* An array that room() has made. */
static void
walk_give_back(void *items, size_t cap, size_t size)
{
    mt_alloc_pages.put(mt_alloc_pages.ctx, items, cap * size);
}

static mt_walk_node *
add_node(mt_walk *w, PyObject *op, mt_walk_kind kind, uint64_t slot, uint64_t bytes)
{
    uint64_t above = w->current == MT_GROWTH_NONE ? 0 : w->nodes[w->current].place;
    mt_walk_node *node;

    if (w->n >= MOST_NODES) w->cut = true; /* what this object holds is left out */
    if (w->n >= MOST_NODES || !room(w, (void **)&w->nodes, &w->cap, w->n, sizeof *w->nodes))
        return NULL;
    node = &w->nodes[w->n++];
    *node = (mt_walk_node){.op = op,
                           .place = mt_walk_place(above, slot),
                           .bytes = bytes,
                           .parent = w->current,
                           .kind = (unsigned)kind & 15};
    return node;
}

/* As the length of a node. */
static unsigned
length_of(uint64_t length)
{
    return (length < MT_WALK_MOST_LENGTH ? (unsigned)length : MT_WALK_MOST_LENGTH) &
           MT_WALK_MOST_LENGTH;
}

/* A tensor, or a buffer, with so many bytes of memory that it is the first to show. */
static mt_walk_node *
add_memory(mt_walk *w, PyObject *op, mt_walk_kind kind, uint64_t slot, uint64_t own,
           uint64_t memory)
{
    mt_walk_node *node = add_node(w, op, kind, slot, own + memory);

    if (node != NULL) node->length = length_of(memory / MT_WALK_UNIT);
    return node;
}

/* Whether a node is that of a container which waits until the queue is empty. */
static bool
waits(const mt_walk *w, const mt_walk_node *node)
{
    bool is_quick = w->places.quick && node->kind != MT_WALK_SPACE;
    bool is_memory = node->kind == MT_WALK_BUFFER || node->kind == MT_WALK_TENSOR;

    if (is_memory || node->kind == MT_WALK_CACHE || node->kind == MT_WALK_VARIABLE) return false;
    return node->length > (is_quick ? QUITE_LARGE : LARGE);
}

static void
add_container(mt_walk *w, PyObject *op, mt_walk_kind kind, uint64_t slot, Py_ssize_t length,
              uint64_t bytes)
{
    mt_walk_node *node = add_node(w, op, kind, slot, bytes);
    const mt_growth_row *before;
    uint32_t other;

    if (node == NULL) return;
    node->length = length_of((uint64_t)length);
    if (!waits(w, node)) return;
    if (!room(w, (void **)&w->waiting, &w->waiting_cap, w->waiting_n, sizeof *w->waiting)) return;
    w->waiting[w->waiting_n++] = (uint32_t)(w->n - 1);
    if (!w->places.quick) return;
    before = mt_growth_known(w->known, (uint64_t)(uintptr_t)op);
    if (before == NULL || before->length >= (uint64_t)length) return;
    if (w->longer_n < w->waiting_next) w->longer_n = w->waiting_next;
    other = w->waiting[w->longer_n];
    w->waiting[w->longer_n++] = w->waiting[w->waiting_n - 1];
    w->waiting[w->waiting_n - 1] = other;
}

/* What holds nothing: a node where it is large, else bytes of who holds it. An instance of a class
 * that is derived from such a type may have attributes. */
static void
add_leaf(mt_walk *w, PyObject *op, uint64_t slot, uint64_t bytes)
{
    if (bytes >= MT_GROWTH_LEAST_BYTES)
        (void)add_memory(w, op, MT_WALK_BUFFER, slot, 0, bytes);
    else if (way_of_type(w, Py_TYPE(op)) & HOLDS)
        (void)add_node(w, op, MT_WALK_OBJECT, slot, bytes);
    else if (w->current != MT_GROWTH_NONE)
        w->nodes[w->current].bytes += bytes;
}

static void
add_tensor(mt_walk *w, PyObject *op, uint64_t slot)
{
    const mt_torch_ops *shim = w->places.shim;
    uint64_t own = TENSOR_BYTES, memory = 0;
    size_t roots = w->graphs.n;
    mt_torch_facts facts;
    mt_torch_links links;

    if (shim != NULL && shim->facts(op, &facts) == 1)
        memory = walk_block_bytes(w, facts.storage, facts.storage_bytes);
    if (shim != NULL && shim->links(op, &links) == 1 && links.grad != NULL &&
        is_new(w, &w->blocks, links.grad))
        own += TENSOR_BYTES + walk_block_bytes(w, links.storage, links.storage_bytes);
    if (add_memory(w, op, MT_WALK_TENSOR, slot, own, memory) == NULL || shim == NULL) return;
    if (mt_graphs_add(&w->graphs, op) < 0) w->failed = true;
    if (w->graphs.n == roots) return;
    if (room(w, (void **)&w->graph_nodes, &w->graph_nodes_cap, w->graph_nodes_n,
             sizeof *w->graph_nodes))
        w->graph_nodes[w->graph_nodes_n++] = (uint32_t)(w->n - 1);
}

static void
add_array(mt_walk *w, PyObject *op, uint64_t slot)
{
    const array_fields *a = (const array_fields *)op;
    uint64_t memory = 0;
    bool has_more = a->base != NULL || a->descr->kind == 'O';

    if (a->base == NULL) memory = walk_block_bytes(w, a->data, array_size(a));
    if (has_more || memory >= MT_GROWTH_LEAST_BYTES)
        (void)add_memory(w, op, MT_WALK_BUFFER, slot, ARRAY_BYTES, memory);
    else
        add_leaf(w, op, slot, ARRAY_BYTES + memory);
}

static void
add_dict(mt_walk *w, PyObject *op, uint64_t slot)
{
    Py_ssize_t length = PyDict_GET_SIZE(op);
    bool of_class = w->current != MT_GROWTH_NONE && PyType_Check(w->nodes[w->current].op) &&
                    w->nodes[w->current].kind == MT_WALK_OBJECT;
    mt_walk_kind kind = op == w->space || of_class ? MT_WALK_SPACE : MT_WALK_DICT;

    if (op != w->space) w->last_dict = op;
    add_container(w, op, kind, slot, length, dict_bytes(length));
    /* An instance's attributes have one place each, whether its dict exists or not. */
    if (op == w->space && !w->failed && w->n > 0 && w->nodes[w->n - 1].op == op)
        w->nodes[w->n - 1].place = w->nodes[w->current].place;
}

/* The bytes of what shows its memory by the buffer protocol of a type of C. */
static uint64_t
buffer_bytes(PyObject *op)
{
    Py_buffer view;
    uint64_t bytes;

    if (PyObject_GetBuffer(op, &view, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return 0;
    }
    bytes = (uint64_t)view.len;
    PyBuffer_Release(&view);
    return rounded(bytes);
}

/* A map of memory, which several maps and arrays may show. */
static void
add_map(mt_walk *w, PyObject *op, uint64_t slot)
{
    const void *data;
    uint64_t bytes = mt_py_map_bytes(op, &data);

    add_leaf(w, op, slot, object_bytes(Py_TYPE(op), op) + walk_block_bytes(w, data, bytes));
}

/* Whether the node that is entered is the namespace of a module or a class, where functions are
 * defined. */
static bool
is_among_definitions(const mt_walk *w)
{
    const mt_walk_node *node;

    if (w->current == MT_GROWTH_NONE) return true;
    node = &w->nodes[w->current];
    return node->kind == MT_WALK_SPACE &&
           (node->parent == MT_GROWTH_NONE || PyType_Check(w->nodes[node->parent].op));
}

/* An object that something holds. */
static void
reach(mt_walk *w, PyObject *op, uint64_t slot)
{
    PyTypeObject *type = Py_TYPE(op);
    unsigned found = way_of_type(w, type);
    way how = (way)(found & (IS_LIBRARYS - 1));

    switch (how) {
    case UNKNOWN:
    case NOTHING:
        return;
    case NUMBER:
        if (w->current != MT_GROWTH_NONE && Py_REFCNT(op) < 1 << 20)
            w->nodes[w->current].bytes += NUMBER_BYTES;
        return;
    case TEXT:
        if (PyUnicode_CHECK_INTERNED(op)) return;
        break;
    case FUNCTION:
        if (mt_ptrset_find(&w->libraries, PyFunction_GET_GLOBALS(op)) != MT_PTRSET_NONE) {
            PyObject *closure = is_among_definitions(w) ? NULL : PyFunction_GET_CLOSURE(op);
            if (closure != NULL) reach(w, closure, slot); /* a callback with its arguments */
            return;
        }
        break;
    case BUILTIN:
        if (PyCFunction_GET_SELF(op) == NULL || PyModule_Check(PyCFunction_GET_SELF(op))) return;
        break;
    case TYPE:
        if (!(((PyTypeObject *)op)->tp_flags & Py_TPFLAGS_HEAPTYPE)) return;
        if (!w->in_libraries && way_of_type(w, (PyTypeObject *)op) & IS_LIBRARYS) return;
        break;
    default:
        break;
    }
    if (!is_new(w, &w->seen, op)) return;
    switch (how) {
    case TEXT:
        if (PyUnicode_IS_READY(op)) add_leaf(w, op, slot, text_bytes(op));
        return;
    case BYTES:
        add_leaf(w, op, slot, object_bytes(type, op));
        return;
    case BYTEARRAY:
        add_leaf(w, op, slot, 64 + rounded((uint64_t)((PyByteArrayObject *)op)->ob_alloc));
        return;
    case BUFFER:
        add_leaf(w, op, slot, 80 + buffer_bytes(op));
        return;
    case STREAM:
        add_leaf(w, op, slot, rounded(mt_py_stream_bytes(op)));
        return;
    case MAP:
        add_map(w, op, slot);
        return;
    case CTYPES:
        add_leaf(w, op, slot, object_bytes(type, op) + rounded(mt_py_ctypes_bytes(op)));
        return;
    case LEAF:
        add_leaf(w, op, slot, found & SIZED ? sized_bytes(type, op) : object_bytes(type, op));
        return;
    case LIST:
        add_container(w, op, MT_WALK_LIST, slot, PyList_GET_SIZE(op),
                      64 + rounded(8 * (uint64_t)((PyListObject *)op)->allocated));
        return;
    case TUPLE:
        add_container(w, op, PyTuple_GET_SIZE(op) < LONG_TUPLE ? MT_WALK_OBJECT : MT_WALK_TUPLE,
                      slot, PyTuple_GET_SIZE(op), rounded(40 + 8 * (uint64_t)PyTuple_GET_SIZE(op)));
        return;
    case DICT:
        add_dict(w, op, slot);
        return;
    case SET:
        add_container(w, op, MT_WALK_SET, slot, PySet_GET_SIZE(op), set_bytes(op));
        return;
    case DEQUE:
        add_container(w, op, MT_WALK_DEQUE, slot, Py_SIZE(op),
                      640 + 544 * ((uint64_t)Py_SIZE(op) / 64));
        return;
    case CACHE:
        add_container(w, op, MT_WALK_CACHE, slot, 0, object_bytes(type, op));
        return;
    case TENSOR:
        add_tensor(w, op, slot);
        return;
    case NDARRAY:
        add_array(w, op, slot);
        return;
    default:
        (void)add_node(w, op, MT_WALK_OBJECT, slot,
                       found & SIZED ? sized_bytes(type, op) : object_bytes(type, op));
        return;
    }
}

/* --- entering --------------------------------------------------------------------------------- */

/* A visitproc. Nonzero ends the traversal. */
static int
walk_visit(PyObject *op, void *arg)
{
    mt_walk *w = arg;

    w->slot++;
    if (w->skip > 0) {
        w->skip--;
        return 0;
    }
    if (w->take == 0) return 1;
    w->take--;
    w->work++;
    reach(w, op, w->slot);
    return w->failed;
}

static void
walk_traverse(mt_walk *w, PyObject *op, uint64_t skip, uint64_t take)
{
    traverseproc all = Py_TYPE(op)->tp_traverse;

    if (all == NULL || !PyObject_IS_GC(op)) return;
    w->slot = 0;
    w->skip = skip;
    w->take = take;
    (void)all(op, walk_visit, w);
}

/* The dict of an instance, borrowed, or NULL where there is none: it is never made for asking. A
 * managed one lies where Python 3.11 to 3.14 have it (MANAGED_DICT_OFFSET in pycore_object.h), with
 * the lowest bit set where it is not a dict; another place in a build without the GIL. */
#ifdef Py_GIL_DISABLED
#error "memtools knows where dicts lie in builds with the GIL only"
#endif
static PyObject *
space_of(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    if (type->tp_flags & Py_TPFLAGS_MANAGED_DICT) { /* in front of the collector's header */
        uintptr_t dict = ((uintptr_t *)op)[-3];
        return dict & 1 ? NULL : (PyObject *)dict;
    }
    if (type->tp_dictoffset <= 0) return NULL;
    return *(PyObject **)((char *)op + type->tp_dictoffset);
}

static uint64_t
key_slot(PyObject *key)
{
    if (PyUnicode_CheckExact(key)) return (uint64_t)((PyASCIIObject *)key)->hash;
    if (PyLong_CheckExact(key)) return (uint64_t)PyObject_Hash(key);
    return (uint64_t)(uintptr_t)key;
}

/* Entries from `first` on, at most `take`. */
static void
enter_dict(mt_walk *w, PyObject *op, bool is_space, uint64_t first, uint64_t take)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    uint64_t i = 0;

    while (!w->failed && PyDict_Next(op, &at, &key, &value)) {
        if (i++ < first) continue;
        if (i - first > take) return;
        w->work++;
        reach(w, value, is_space ? i : key_slot(key));
        if (!is_space) reach(w, key, key_slot(key) ^ PLACE_OF_KEY);
    }
}

static void
enter_sequence(mt_walk *w, PyObject **items, uint64_t first, uint64_t end)
{
    for (uint64_t i = first; i < end && !w->failed; i++) {
        if (items[i] != NULL) reach(w, items[i], i);
        w->work++;
    }
}

/* Elements of an array of objects, which NumPy's own type does not show to the collector. */
static void
enter_array(mt_walk *w, const array_fields *a)
{
    if (a->base != NULL) {
        reach(w, a->base, 0);
        return;
    }
    if (a->descr->kind == 'O') enter_sequence(w, (PyObject **)(void *)a->data, 0, array_length(a));
}

/* The dict inside of a cache is a part of it, whose entries are the cache's. */
static void
enter_cache(mt_walk *w, PyObject *op, uint32_t node)
{
    size_t first = w->n;
    PyObject *inner;

    w->last_dict = NULL;
    walk_traverse(w, op, 0, UINT64_MAX);
    inner = w->last_dict;
    for (size_t i = first; inner != NULL && i < w->n; i++) {
        if (w->nodes[i].op != inner) continue;
        w->nodes[i].kind = MT_WALK_PART;
        w->nodes[node].length = w->nodes[i].length;
    }
}

/* Whether the type adds nothing to what it is derived from. */
static bool
is_exact(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    return type == &PyList_Type || type == &PyDict_Type || type == &PyTuple_Type;
}

static uint64_t
end_of(PyObject *sequence, uint64_t first, uint64_t take)
{
    uint64_t n = (uint64_t)Py_SIZE(sequence);

    return n < first || n - first < take ? n : first + take;
}

/* `take` entries from `first` on, and what an instance of a derived class has besides. */
static void
enter_part(mt_walk *w, uint32_t i, uint64_t first, uint64_t take)
{
    const mt_walk_node *node = &w->nodes[i];
    PyObject *op = node->op;
    unsigned found = way_of_type(w, Py_TYPE(op));
    bool is_space = node->kind == MT_WALK_SPACE &&
                    (node->parent != MT_GROWTH_NONE && !PyType_Check(w->nodes[node->parent].op));

    w->current = i;
    w->space = space_of(op);
    switch ((way)(found & (IS_LIBRARYS - 1))) {
    case LIST:
        enter_sequence(w, ((PyListObject *)op)->ob_item, first, end_of(op, first, take));
        break;
    case TUPLE:
        enter_sequence(w, ((PyTupleObject *)op)->ob_item, first, end_of(op, first, take));
        break;
    case DICT:
        enter_dict(w, op, is_space, first, take);
        break;
    case NDARRAY:
        enter_array(w, (const array_fields *)op);
        break;
    case MEMORYVIEW:
        if (PyMemoryView_GET_BUFFER(op)->obj != NULL) reach(w, PyMemoryView_GET_BUFFER(op)->obj, 0);
        return;
    case CACHE:
        enter_cache(w, op, i);
        return;
    case LEAF:
    case TEXT:
    case BYTES:
    case BYTEARRAY:
    case BUFFER:
    case MAP:
        break;
    default:
        walk_traverse(w, op, first, take);
        if (w->nodes[i].kind == MT_WALK_OBJECT) w->nodes[i].length = length_of(w->slot);
        return;
    }
    if (!is_exact(op)) walk_traverse(w, op, 0, UINT64_MAX);
}

static void
walk_enter(mt_walk *w, uint32_t i)
{
    const mt_walk_node *node = &w->nodes[i];

    if (node->kind == MT_WALK_VARIABLE || node->kind == MT_WALK_KEPT || waits(w, node)) return;
    enter_part(w, i, 0, UINT64_MAX);
}

/* The entries of a large container that the look before has not seen, or a sample of them. */
static void
enter_large(mt_walk *w, uint32_t i)
{
    mt_walk_node *node = &w->nodes[i];
    uint64_t length = node->length, first = 0, take;
    const mt_growth_row *before;
    PyObject *op = node->kind == MT_WALK_PART ? w->nodes[node->parent].op : node->op;
    scale s = {.own = node->bytes, .length = node->length};

    if (w->work + length <= w->full_until) {
        enter_part(w, i, 0, length);
        return;
    }
    before = mt_growth_known(w->known, (uint64_t)(uintptr_t)op);
    if (before != NULL && before->length <= length && node->kind != MT_WALK_SET) {
        first = before->length;
        s.before = before->bytes > s.own ? before->bytes - s.own : 0;
    }
    s.stands_for = length - first;
    take = s.stands_for < SAMPLE ? s.stands_for : SAMPLE;
    s.sampled = take;
    if (take < s.stands_for) first = length - take;
    if (!room(w, (void **)&w->scales, &w->scales_cap, w->scales_n, sizeof *w->scales)) return;
    w->scales[w->scales_n++] = s;
    node->length = length_of(w->scales_n - 1);
    node->is_scaled = true; /* its length is the number of the scale, until the sums are made */
    w->is_partial |= w->places.quick;
    if (take > 0) enter_part(w, i, first, take);
}

/* Walks on from all nodes that were not entered, up to so much work. False where some were left out. */
static bool
drain_until(mt_walk *w, uint64_t end)
{
    while (!w->failed) {
        while (w->next < w->n && !w->failed && !w->cut && w->work < end)
            walk_enter(w, (uint32_t)w->next++);
        if (w->cut || w->work >= end) return false;
        if (w->waiting_next >= w->waiting_n) return true;
        enter_large(w, w->waiting[w->waiting_next++]);
    }
    return false;
}

/* As drain_until, for one sort of roots. */
static void
walk_drain(mt_walk *w)
{
    uint64_t quick = w->in_libraries ? QUICK_OF_LIBRARIES : QUICK;

    w->full_until = w->places.quick ? w->work + quick / 2 : SHORT;
    if (drain_until(w, w->places.quick ? w->work + quick : LONG)) return;
    if (!w->places.quick) w->cut = true;
    if (w->failed || w->cut) return;
    w->is_partial = true; /* of the rest, what is longer than at the look before is entered */
    w->next = w->n;
    w->waiting_n = w->longer_n > w->waiting_next ? w->longer_n : w->waiting_next;
    w->full_until = w->work + quick / 2;
    (void)drain_until(w, w->work + quick);
    w->next = w->n;
    w->waiting_n = w->waiting_next = w->longer_n = 0;
}

/* --- roots ------------------------------------------------------------------------------------ */

static bool
is_below(PyObject *file, PyObject *folder)
{
    return PyUnicode_Tailmatch(file, folder, 0, PY_SSIZE_T_MAX, -1) == 1;
}

static bool
is_below_one(PyObject *file, PyObject *folders)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(folders); i++)
        if (is_below(file, PyTuple_GET_ITEM(folders, i))) return true;
    return false;
}

/* Where the file lies that defines something: 'p' in this package, 'l' in a library, else 0. */
static char
walk_home_of(const mt_walk *w, PyObject *file)
{
    if (is_below_one(file, w->places.users)) return 0;
    if (is_below(file, w->places.package)) return 'p';
    return is_below_one(file, w->places.libraries) ? 'l' : 0;
}

/* Goes through sys.modules, and notes whose module each namespace is. */
static void
sort_modules(mt_walk *w, PyObject *file_key)
{
    PyObject *name, *module, *file;
    Py_ssize_t at = 0;

    while (!w->failed && PyDict_Next(PyImport_GetModuleDict(), &at, &name, &module)) {
        bool programs = false;
        PyObject *space;
        if (!PyModule_Check(module) || (space = PyModule_GetDict(module)) == NULL) continue;
        file = PyDict_GetItemWithError(space, file_key);
        if (PyUnicode_CheckExact(name) && PyUnicode_CompareWithASCIIString(name, "__main__") == 0)
            programs = true;
        else if (file != NULL && PyUnicode_CheckExact(file) && PyUnicode_CheckExact(name))
            programs = walk_home_of(w, file) == 0 && !is_of_package(name);
        (void)is_new(w, programs ? &w->programs : &w->libraries, space);
    }
}

/* The namespaces of the program's modules, or those of libraries without this package's. */
static void
add_modules(mt_walk *w)
{
    const mt_ptrset *wanted = w->in_libraries ? &w->libraries : &w->programs;
    PyObject *name, *module;
    Py_ssize_t at = 0;

    w->current = MT_GROWTH_NONE;
    w->space = NULL;
    while (!w->failed && PyDict_Next(PyImport_GetModuleDict(), &at, &name, &module)) {
        PyObject *space;
        if (!PyModule_Check(module) || (space = PyModule_GetDict(module)) == NULL) continue;
        if (!PyUnicode_CheckExact(name) || is_of_package(name)) continue;
        if (mt_ptrset_find(wanted, space) == MT_PTRSET_NONE || !is_new(w, &w->seen, space))
            continue;
        add_container(w, space, MT_WALK_SPACE, key_slot(name), PyDict_GET_SIZE(space),
                      dict_bytes(PyDict_GET_SIZE(space)));
    }
    walk_drain(w);
}

/* An mt_py_frame_visitor. */
static int
add_variable(void *ctx, PyObject *code, PyObject *name, PyObject *value)
{
    mt_walk *w = ctx;
    size_t before;
    uint64_t bytes;

    if (code != w->code) {
        char home = walk_home_of(w, ((PyCodeObject *)code)->co_filename);
        w->code = code;
        w->code_wanted = home != 'p' && (home == 'l') == w->in_libraries;
    }
    if (!w->code_wanted) return 0;
    if (!room(w, (void **)&w->variables, &w->variables_cap, w->variables_n, sizeof *w->variables))
        return 1;
    w->current = MT_GROWTH_NONE;
    if (add_node(w, code, MT_WALK_VARIABLE,
                 (uint64_t)(uintptr_t)code ^ (name == NULL ? 1 : key_slot(name)), 0) == NULL)
        return w->failed;
    before = w->n;
    w->current = (uint32_t)before - 1;
    w->nodes[w->current].length = length_of(w->variables_n);
    w->variables[w->variables_n++].name = name;
    w->space = NULL;
    reach(w, value, 0);
    bytes = w->nodes[before - 1].bytes;
    if (w->n == before && bytes == 0) { /* it was reached before, or holds nothing */
        w->n--;
        w->variables_n--;
    }
    return w->failed;
}

static void
add_frames(mt_walk *w)
{
    w->code = NULL;
    if (!w->failed && !w->cut) (void)mt_py_frames_visit(add_variable, w);
    walk_drain(w);
}

/* An mt_py_kept_visitor. */
static int
add_one_kept(void *ctx, PyObject *keeper, PyObject *value)
{
    mt_walk *w = ctx;
    uint64_t slot = PLACE_OF_KEPT ^ (uint64_t)(uintptr_t)keeper;

    if (w->current == MT_GROWTH_NONE || w->nodes[w->current].op != keeper) {
        w->current = MT_GROWTH_NONE;
        if (add_node(w, keeper, MT_WALK_KEPT, slot, 0) == NULL) return 1;
        w->current = (uint32_t)w->n - 1;
    }
    w->nodes[w->current].length++;
    reach(w, value, w->nodes[w->current].length);
    return w->failed || w->cut;
}

static void
add_kept(mt_walk *w)
{
    w->current = MT_GROWTH_NONE;
    w->space = NULL;
    if (!w->failed && !w->cut) (void)mt_py_kept_visit(w->places.kept, add_one_kept, w);
    walk_drain(w);
}

/* --- what no path leads to --------------------------------------------------------------------- */

bool
mt_walk_makes_cycles(const mt_walk *w)
{
    for (size_t i = 0; i < w->graphs.n; i++)
        if (w->graphs.roots[i].of_grad) return true;
    return w->places.heap != NULL;
}

/* A leaf that was not reached, with a .grad that has a graph. */
static bool
is_lost_leaf(mt_walk *w, PyObject *op)
{
    mt_torch_links links;

    if ((way_of_type(w, Py_TYPE(op)) & (IS_LIBRARYS - 1)) != TENSOR) return false;
    if (mt_ptrset_find(&w->seen, op) != MT_PTRSET_NONE) return false;
    return w->places.shim->links(op, &links) == 1 && links.node == NULL && links.grad_node != NULL;
}

/* A walk that was cut does not know what it would have reached. */
static void
add_cycles(mt_walk *w)
{
    const mt_heap *heap = w->places.heap;
    size_t first = w->n, found = 0;

    if (w->failed || mt_walk_was_cut(w) || w->places.shim == NULL || heap == NULL) return;
    w->current = MT_GROWTH_NONE;
    if (add_node(w, Py_None, MT_WALK_CYCLES, PLACE_OF_CYCLES, 0) == NULL) return;
    w->current = (uint32_t)first;
    for (size_t i = 0; i < mt_py_heap_len(heap) && !w->failed; i++) {
        PyObject *op = mt_py_heap_at(heap, i);
        if (!is_lost_leaf(w, op)) continue;
        w->nodes[first].op = op;
        found++;
        add_tensor(w, op, 0);
    }
    w->nodes[first].length = length_of(found);
}

/* --- sums ------------------------------------------------------------------------------------- */

static void
share_out_graphs(mt_walk *w, uint64_t then)
{
    if (w->places.shim == NULL || w->failed) return;
    if (mt_graphs_count(&w->graphs, MOST_GRAPH_NODES, then) < 0) w->failed = true;
    for (size_t i = 0; i < w->graphs.n; i++)
        w->nodes[w->graph_nodes[w->graphs.roots[i].order]].bytes +=
            NODE_BYTES * w->graphs.roots[i].nodes;
}

/* What a sample stands for. */
static void
apply_scale(const mt_walk *w, mt_walk_node *node)
{
    const scale *s = &w->scales[node->length];
    uint64_t sampled = node->bytes > s->own ? node->bytes - s->own : 0;

    node->bytes = s->own + s->before;
    if (s->sampled > 0)
        node->bytes += (uint64_t)((double)sampled / (double)s->sampled * (double)s->stands_for);
    node->length = length_of(s->length);
    node->is_scaled = false;
}

/* -1 without memory. */
static int
walk_add_up(mt_walk *w)
{
    w->heights = mt_alloc_zeroed(&mt_alloc_pages, w->n + 1, 1);
    if (w->heights == NULL) return -1;
    for (size_t i = w->n; i-- > 0;) {
        mt_walk_node *node = &w->nodes[i];
        if (node->is_scaled) apply_scale(w, node);
        if (node->parent == MT_GROWTH_NONE) continue;
        w->nodes[node->parent].bytes += node->bytes;
        if (w->heights[node->parent] <= w->heights[i])
            w->heights[node->parent] = w->heights[i] + (w->heights[i] < UCHAR_MAX);
    }
    return 0;
}

/* --- the whole -------------------------------------------------------------------------------- */

static void
walk_all(mt_walk *w, PyObject *file_key)
{
    sort_modules(w, file_key);
    for (int libraries = 0; libraries < 2 && !w->failed; libraries++) {
        w->in_libraries = libraries;
        add_modules(w);
        add_frames(w);
        if (!libraries) add_kept(w);
        if (!libraries) w->programs_n = w->n;
    }
    add_cycles(w);
}

mt_walk *
mt_walk_new(const mt_walk_places *places, const mt_growth *known, uint64_t then)
{
    PyObject *file_key = PyUnicode_InternFromString("__file__");
    mt_walk *w = file_key == NULL ? NULL : PyMem_Calloc(1, sizeof *w);

    if (w == NULL) {
        Py_XDECREF(file_key);
        return (mt_walk *)PyErr_NoMemory();
    }
    w->places = *places;
    w->known = known;
    if (places->shim != NULL) mt_graphs_begin(&w->graphs, places->shim);
    if (mt_ptrset_reserve(&w->seen, known->last.n) < 0 || mt_ptrset_reserve(&w->programs, 64) < 0 ||
        mt_ptrset_reserve(&w->libraries, 64) < 0)
        w->failed = true;
    if (!w->failed) walk_all(w, file_key);
    Py_DECREF(file_key);
    share_out_graphs(w, then);
    if (!w->failed && walk_add_up(w) == 0) return w;
    mt_walk_free(w);
    PyErr_Clear();
    return (mt_walk *)PyErr_NoMemory();
}

void
mt_walk_free(mt_walk *w)
{
    mt_graphs_end(&w->graphs);
    mt_ptrset_fini(&w->seen);
    mt_ptrset_fini(&w->blocks);
    mt_ptrset_fini(&w->types);
    mt_ptrset_fini(&w->programs);
    mt_ptrset_fini(&w->libraries);
    walk_give_back(w->nodes, w->cap, sizeof *w->nodes);
    if (w->heights != NULL) walk_give_back(w->heights, w->n + 1, 1);
    walk_give_back(w->waiting, w->waiting_cap, sizeof *w->waiting);
    walk_give_back(w->scales, w->scales_cap, sizeof *w->scales);
    walk_give_back((void *)w->variables, w->variables_cap, sizeof *w->variables);
    walk_give_back(w->graph_nodes, w->graph_nodes_cap, sizeof *w->graph_nodes);
    PyMem_Free(w);
}

size_t
mt_walk_count(const mt_walk *w)
{
    return w->n;
}

const mt_walk_node *
mt_walk_at(const mt_walk *w, size_t node)
{
    assert(node < w->n);
    return &w->nodes[node];
}

bool
mt_walk_is_programs(const mt_walk *w, size_t node)
{
    return node < w->programs_n;
}

unsigned
mt_walk_height(const mt_walk *w, size_t node)
{
    assert(node < w->n);
    return w->heights[node];
}

bool
mt_walk_was_cut(const mt_walk *w)
{
    return w->cut || w->is_partial;
}

size_t
mt_walk_memory(const mt_walk *w, size_t node, const void **memory)
{
    PyObject *op = w->nodes[node].op;
    size_t known = mt_ptrset_find(&w->types, Py_TYPE(op));
    mt_torch_facts facts;

    *memory = NULL;
    switch ((way)(known & (IS_LIBRARYS - 1))) {
    case TEXT:
        *memory = PyUnicode_DATA(op);
        return (size_t)PyUnicode_GET_LENGTH(op) * (size_t)PyUnicode_KIND(op);
    case BYTES:
        *memory = PyBytes_AS_STRING(op);
        return (size_t)PyBytes_GET_SIZE(op);
    case BYTEARRAY:
        *memory = PyByteArray_AS_STRING(op);
        return (size_t)PyByteArray_GET_SIZE(op);
    case NDARRAY:
        *memory = ((const array_fields *)op)->data;
        return array_size((const array_fields *)op);
    case TENSOR:
        if (w->places.shim == NULL || w->places.shim->facts(op, &facts) != 1) return 0;
        if (facts.device >> 16 != 0 || facts.storage == NULL) return 0; /* not the host's */
        *memory = facts.storage;
        return facts.storage_bytes;
    default:
        return 0;
    }
}

bool
mt_walk_slots(const mt_walk *w, size_t node, uint64_t *all, uint64_t *filled)
{
    const array_fields *a = (const array_fields *)w->nodes[node].op;
    size_t known = mt_ptrset_find(&w->types, Py_TYPE(w->nodes[node].op));

    if ((known & (IS_LIBRARYS - 1)) != NDARRAY || a->base != NULL || a->descr->kind != 'O')
        return false;
    *all = array_length(a);
    *filled = 0;
    for (uint64_t i = 0; i < *all; i++) {
        PyObject *entry = ((PyObject **)(void *)a->data)[i];
        *filled += entry != NULL && entry != Py_None;
    }
    return true;
}

PyObject *
mt_walk_variable(const mt_walk *w, size_t node)
{
    assert(w->nodes[node].kind == MT_WALK_VARIABLE);
    return w->variables[w->nodes[node].length].name;
}

size_t
mt_walk_graphs(const mt_walk *w)
{
    return w->graphs.n;
}

const mt_graph *
mt_walk_graph(const mt_walk *w, size_t graph, size_t *node)
{
    *node = w->graph_nodes[w->graphs.roots[graph].order];
    return &w->graphs.roots[graph];
}

uint64_t
mt_walk_now(const mt_walk *w)
{
    return w->graphs.now;
}
