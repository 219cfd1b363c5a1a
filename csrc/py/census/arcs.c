/* arcs.c -- how this file works.
 *
 * Each arc begins at the head of a list or at a module, and ends where another one begins. What is
 * found in an arc is a chain of its own, as several arcs are gone along at a time; from the head of
 * each list the arcs, and so their chains, follow each other in the order of the list.
 *
 * The lists are those of Python 3.11 to 3.13. 3.14 has others: there the caller asks gc.get_objects(). */
#define Py_BUILD_CORE_MODULE /* the layout of the collector's lists */
#include "py/census/arcs.h"

#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)

#include <stdbool.h>

#include <internal/pycore_interp.h>

#include "core/base/alloc.h"
#include "py/census/heap.h"

enum {
    LISTS = NUM_GENERATIONS + 1, /* and what is frozen */
    AT_ONCE = 16,                /* arcs: as many as a processor waits for, and a few */
    WORDS = 1024,                /* of the filter: 8 KiB, which stay in the nearest cache */
};

#define NONE MT_PTRSET_NONE

typedef struct arc {
    PyGC_Head *begin;   /* of an object, or of a list for the first LISTS arcs */
    size_t first, last; /* finds */
    size_t next;        /* the arc that begins where this one ends */
} arc;

typedef struct find {
    PyObject *op;
    size_t next; /* in the same arc */
} find;

typedef struct look {
    const mt_ptrset *types;
    mt_ptrset begins;       /* of arcs, with their numbers */
    uint64_t filter[WORDS]; /* a bit for each of them: most objects need not be looked up */
    arc *arcs;
    find *finds;
    size_t arcs_n, begun, finds_n, finds_room;
} look;

/* --- where the lists are cut ------------------------------------------------------------------ */

/* Whether the lists are where the header says, and whole. */
static bool
knows_lists(PyObject *newest)
{
    const struct _gc_runtime_state *gc = &PyInterpreterState_Get()->gc;

    return _PyGCHead_NEXT(_Py_AS_GC(newest)) == &gc->generations[0].head && !gc->collecting;
}

static uint64_t *
filter_word(look *l, const PyGC_Head *at, uint64_t *bit)
{
    uint64_t hash = mt_ptr_hash(at);

    *bit = UINT64_C(1) << (hash >> 48 & 63);
    return &l->filter[(hash >> 54) % WORDS];
}

static void
cut_at(look *l, PyGC_Head *at)
{
    uint64_t bit, *word = filter_word(l, at, &bit);

    if (mt_ptrset_add(&l->begins, at, l->arcs_n) != NONE) return;
    *word |= bit;
    l->arcs[l->arcs_n++] = (arc){.begin = at, .first = NONE, .last = NONE, .next = NONE};
}

/* The arc that begins here, or NONE. */
static size_t
arc_at(look *l, const PyGC_Head *at)
{
    uint64_t bit, *word = filter_word(l, at, &bit);

    return (*word & bit) == 0 ? NONE : mt_ptrset_find(&l->begins, at);
}

/* -1 without memory. */
static int
cut(look *l)
{
    struct _gc_runtime_state *gc = &PyInterpreterState_Get()->gc;
    PyObject *modules = PyImport_GetModuleDict(), *name, *module;
    size_t most = LISTS + (modules == NULL ? 0 : (size_t)PyDict_GET_SIZE(modules));
    Py_ssize_t at = 0;

    l->arcs = PyMem_Calloc(most, sizeof *l->arcs);
    if (l->arcs == NULL || mt_ptrset_reserve(&l->begins, most) < 0) return -1;
    for (size_t i = 0; i < NUM_GENERATIONS; i++)
        cut_at(l, &gc->generations[i].head);
    cut_at(l, &gc->permanent_generation.head);
    while (modules != NULL && PyDict_Next(modules, &at, &name, &module))
        if (PyObject_IS_GC(module) && PyObject_GC_IsTracked(module)) cut_at(l, _Py_AS_GC(module));
    return 0;
}

/* --- the arcs --------------------------------------------------------------------------------- */

typedef struct walker {
    PyGC_Head *at;
    size_t arc;
} walker;

/* An object's type may lie in the line of memory after that of its head. */
static walker
coming_to(PyGC_Head *at, size_t arc)
{
    __builtin_prefetch(at);
    __builtin_prefetch((const void *)&((PyObject *)(at + 1))->ob_type);
    return (walker){at, arc};
}

static walker
next_arc(look *l)
{
    size_t arc = l->begun++;

    return coming_to(l->arcs[arc].begin, arc);
}

/* -1 without memory. */
static int
arcs_keep(look *l, arc *of, PyObject *op)
{
    find *larger =
        mt_alloc_grown(&mt_py_alloc, l->finds, &l->finds_room, l->finds_n + 1, sizeof *larger);

    if (larger == NULL) return -1;
    l->finds = larger;
    l->finds[l->finds_n] = (find){op, NONE};
    if (of->first == NONE)
        of->first = l->finds_n;
    else
        l->finds[of->last].next = l->finds_n;
    of->last = l->finds_n++;
    return 0;
}

/* -1 without memory. The head of a list is not an object. */
static int
arcs_see(look *l, const walker *w)
{
    PyObject *op = (PyObject *)(w->at + 1);

    if (w->arc < LISTS && w->at == l->arcs[w->arc].begin) return 0;
    if (mt_ptrset_find(l->types, Py_TYPE(op)) == NONE) return 0;
    return arcs_keep(l, &l->arcs[w->arc], op);
}

/* Goes on to the next object of its arc, or else to another arc; false when there is none. */
static bool
arcs_go_on(look *l, walker *w)
{
    PyGC_Head *next = _PyGCHead_NEXT(w->at);
    size_t arc = arc_at(l, next);

    if (arc == NONE) {
        *w = coming_to(next, w->arc);
        return true;
    }
    l->arcs[w->arc].next = arc;
    if (l->begun == l->arcs_n) return false;
    *w = next_arc(l);
    return true;
}

static int
walk(look *l)
{
    walker walkers[AT_ONCE];
    size_t n = 0;

    while (n < AT_ONCE && l->begun < l->arcs_n)
        walkers[n++] = next_arc(l);
    while (n > 0) {
        for (size_t i = 0; i < n; i++) {
            if (arcs_see(l, &walkers[i]) < 0) return -1;
            if (!arcs_go_on(l, &walkers[i])) walkers[i--] = walkers[--n];
        }
    }
    return 0;
}

/* --- the answer ------------------------------------------------------------------------------- */

static int
append_arc(const look *l, const arc *of, PyObject *list)
{
    for (size_t i = of->first; i != NONE; i = l->finds[i].next)
        if (l->finds[i].op != list && PyList_Append(list, l->finds[i].op) < 0) return -1;
    return 0;
}

static int
append_all(const look *l, PyObject *list)
{
    for (size_t head = 0; head < LISTS; head++) {
        size_t i = head;
        do {
            if (append_arc(l, &l->arcs[i], list) < 0) return -1;
            i = l->arcs[i].next;
        } while (i != head);
    }
    return 0;
}

int
mt_py_arcs_instances(PyObject *list, const mt_ptrset *types)
{
    look l = {.types = types};
    int done = 1;

    if (!knows_lists(list)) return 0;
    if (cut(&l) < 0 || walk(&l) < 0) {
        PyErr_NoMemory();
        done = -1;
    } else if (append_all(&l, list) < 0) {
        done = -1;
    }
    mt_ptrset_fini(&l.begins);
    PyMem_Free(l.arcs);
    PyMem_Free(l.finds);
    return done;
}

#else

int
mt_py_arcs_instances(PyObject *Py_UNUSED(list), const mt_ptrset *Py_UNUSED(types))
{
    return 0;
}

#endif
