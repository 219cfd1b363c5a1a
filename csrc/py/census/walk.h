/* walk.h -- one walk through all that the program can reach, and what it costs.
 *
 * Breadth first from the program's own names, so that each object is found by its shortest way, and
 * has one parent: the object that reached it first.
 *
 *   roots in this order         nodes, in the order of discovery        sums, in reverse order
 *   1 modules of the program    0 namespace of __main__                 0   131,632
 *   2 variables of its frames   1   list rows        parent 0           1   131,072 + 560
 *   3 context variables, atexit 2     tensor         parent 1           2   131,072
 *   4 modules of libraries      3   namespace of torch ...
 *   5 variables of their frames
 *
 * A node is made for what can hold others, and for a buffer of 4 KiB or more; numbers and short
 * texts only add to the bytes of who holds them, unless a class of the program is derived from them. Memory that several show (storages, the data of
 * NumPy's arrays) counts once, where it is found first.
 *
 * Not entered, as they hold nothing of the program's: functions of libraries, except for what the
 * closure of a callback has, code, modules (which are roots), descriptors, weak references, classes
 * of libraries before their modules are due, and this package's own objects.
 *
 * Where backward(create_graph=True) runs, a leaf and its .grad keep each other in C++, and outlive
 * the model that they were of. No path leads to them: so there, and only there, the caller opens the
 * collector's list before the walk, which ends with it and adds such leaves (MT_WALK_CYCLES).
 *
 * The caller holds the GIL and has switched the collector off. The walk calls tp_traverse and reads
 * fields; it takes no reference, makes no Python object and runs no Python code, so no object changes
 * or dies meanwhile. */
#ifndef MT_PY_CENSUS_WALK_H
#define MT_PY_CENSUS_WALK_H

#include "py/base/state.h"

#include "core/census/growth.h"
#include "py/base/ptrset.h"
#include "py/census/graphs.h"
#include "py/census/heap.h"
#include "py/census/kept.h"

typedef enum mt_walk_kind {
    MT_WALK_OBJECT, /* holds others: instances, tuples, functions, cells, elements of XML ... */
    MT_WALK_LIST,
    MT_WALK_DICT,
    MT_WALK_SET,
    MT_WALK_DEQUE,
    MT_WALK_CACHE,    /* functools.lru_cache */
    MT_WALK_SPACE,    /* the dict of a module, a class or an instance: its keys are names */
    MT_WALK_PART,     /* the dict inside of a cache */
    MT_WALK_TUPLE,    /* of 64 entries or more */
    MT_WALK_BUFFER,   /* text, bytes or an array of 4 KiB or more, or one that holds others */
    MT_WALK_TENSOR,   /* of any size */
    MT_WALK_VARIABLE, /* of a running function: a root. op is its code */
    MT_WALK_CYCLES, /* all leaves that nothing but the graph of their .grad keeps: a root. op is the
                         newest of them */
    MT_WALK_KEPT,   /* what the interpreter keeps: a root. op is a ContextVar or module atexit */
} mt_walk_kind;

typedef struct mt_walk_node {
    PyObject *op;      /* borrowed */
    uint64_t place;    /* a hash of the way to it */
    uint64_t bytes;    /* its own, and after the walk those below it too */
    uint32_t parent;   /* a node, or MT_GROWTH_NONE: a root */
    unsigned kind : 4; /* mt_walk_kind */
    unsigned is_scaled : 1;
    unsigned length : 27; /* entries, or objects that it shows the collector; of a buffer or
                             tensor its memory in units of 64 bytes */
} mt_walk_node;

enum { MT_WALK_UNIT = 64, MT_WALK_MOST_LENGTH = (1 << 27) - 1 };

/* What a walk has to know of the program. */
typedef struct mt_walk_places {
    PyTypeObject *deque, *cache;
    PyTypeObject *ndarray; /* NULL without NumPy */
    PyTypeObject *tensor;  /* NULL without torch */
    const mt_torch_ops *shim;
    PyObject *libraries; /* tuple of str: where the files of libraries lie */
    PyObject *users;     /* tuple of str: folders below these whose files are the program's */
    PyObject *package;   /* str: where this package lies */
    PyObject *own;       /* tuple of types whose instances are not entered */
    const mt_heap *heap; /* what the collector tracks, where leaves may be lost; else NULL */
    const mt_kept *kept;
    bool quick; /* less work: a large heap is walked in part */
} mt_walk_places;

typedef struct mt_walk mt_walk;

/* Walks. `known` has the rows of the look before, for containers too large to enter. `then` is the
 * number that autograd was at in the look before. NULL without memory, with an error. */
mt_walk *mt_walk_new(const mt_walk_places *places, const mt_growth *known, uint64_t then);
void mt_walk_free(mt_walk *walk);

size_t mt_walk_count(const mt_walk *walk);
const mt_walk_node *mt_walk_at(const mt_walk *walk, size_t node);

/* Whether a module or a running function of the program leads to it, and not only those of libraries. */
bool mt_walk_is_programs(const mt_walk *walk, size_t node);

/* How far the tree goes on below a node: nodes below each other, 255 for all that are more. */
unsigned mt_walk_height(const mt_walk *walk, size_t node);

/* Whether it would have taken too long, or longer than a quick walk may, and left things out. */
bool mt_walk_was_cut(const mt_walk *walk);

/* Where the memory of a buffer or tensor lies that this process can read, and its bytes; 0 where that
 * is not known. */
size_t mt_walk_memory(const mt_walk *walk, size_t node, const void **memory);

/* Of an array of objects: how many it has, and how many of them are not None. False for others. */
bool mt_walk_slots(const mt_walk *walk, size_t node, uint64_t *all, uint64_t *filled);

/* The name of a MT_WALK_VARIABLE, borrowed; NULL for a value on a stack. */
PyObject *mt_walk_variable(const mt_walk *walk, size_t node);

/* The graphs of tensors that were reached, oldest first; *node is the tensor's. */
size_t mt_walk_graphs(const mt_walk *walk);
const mt_graph *mt_walk_graph(const mt_walk *walk, size_t graph, size_t *node);

/* Whether a .grad was seen that has a graph: the next look needs `heap`. */
bool mt_walk_makes_cycles(const mt_walk *walk);

/* What autograd will number its next node, for `then` of the next look. */
uint64_t mt_walk_now(const mt_walk *walk);

/* The place of something below another place. */
uint64_t mt_walk_place(uint64_t place, uint64_t slot);

#endif
