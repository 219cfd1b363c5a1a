/* growth.c -- how this file works.
 *
 * memtools._core.GrowthTable is an object around one mt_growth (core/census/growth.h). _look() walks
 * (walk.h), shows each container, buffer, kept graph, linked chain and variable of several running
 * calls to the table, and takes from it those that only ever grew. What such a candidate gained
 * without the candidates below it is its own; several in one list or dict that is not a namespace are
 * joined. A container that stays as long as it is, with more and more bytes below it that no candidate
 * explains, is a candidate as well: its entries gain, each by a little or each once. The result has the
 * objects on the way to each candidate, from which memtools._census makes the name. Between the first
 * object and the result no Python code runs, and the collector is off. */
#include "py/census/census.h"

#include <stdlib.h>
#include <string.h>

#include "py/base/objects.h"
#include "py/base/ptrset.h"
#include "os/base/pages.h"
#include "py/census/chains.h"
#include "py/census/walk.h"
#include "core/census/growth.h"

enum {
    MOST_ROWS = 64,         /* candidates that one look returns, those that gained most first */
    MOST_ABOVE = 32,        /* objects on the way to one, from the nearest on */
    MOST_CLIMB = 10000,     /* steps up to the next candidate above */
    LEAST_SLOTS = 16,       /* entries of a list that may be there to be filled */
    LEAST_HEAVY = 32 << 10, /* bytes of a container whose entries may gain; it has LEAST_SHOWN */
    LEAST_SHOWN = 16, /* objects that one of C shows the collector: what has more is a container */
};

static const uint64_t PLACE_OF_GRAPH = UINT64_C(0x9FB21C651E98DF25);
static const uint64_t ADDRESS_OF_SLOTS = UINT64_C(0xA0761D6478BD642F);
static const uint64_t ADDRESS_OF_HEAVY = UINT64_C(0x589965CC75374CC3);
static const uint64_t PLACE_OF_CHAIN = UINT64_C(0xD6E8FEB86659FD93);
static const uint64_t PLACE_OF_CALLS = UINT64_C(0xE7037ED1A0B428DB);

/* What a candidate is; memtools._census.growth numbers them so, too. */
typedef enum candidate_kind {
    CONTAINER,
    GRAPH,
    CHAIN,
    CYCLE,
    SLOTS,
    CALLS,
    ENTRIES
} candidate_kind;

typedef struct GrowthTable {
    PyObject_HEAD
    mt_growth core;
    uint64_t then;     /* what autograd was at in the look before */
    bool makes_cycles; /* backward(create_graph=True) was seen to run */
} GrowthTable;

/* One that only ever gained. */
typedef struct candidate {
    size_t node;
    mt_growth_gain gain;
    double pace;  /* bytes a step, with all below */
    double net;   /* without the candidates below */
    size_t above; /* the candidate that it is below of, or SIZE_MAX */
    size_t group; /* of the same parent: the first of them; SIZE_MAX: another one stands for it */
    size_t count; /* of a group: how many */
    size_t kept;  /* nodes of autograd's graphs that the tensors in it keep, one by one */
    candidate_kind what;
    bool is_group;
} candidate;

typedef struct look {
    GrowthTable *self;
    mt_walk *walk;
    candidate *found;
    size_t n, cap;
    mt_ptrset by_node; /* node + 1, as an address: its candidate */
} look;

/* Whether it is autograd's nodes that grow, and not what Python holds. */
static bool
is_graph(candidate_kind what)
{
    return what == GRAPH || what == CYCLE;
}

/* --- showing ---------------------------------------------------------------------------------- */

static int
add_candidate(look *l, size_t node, const mt_growth_gain *gain, candidate_kind what)
{
    candidate *found = mt_alloc_grown(&mt_alloc_pages, l->found, &l->cap, l->n + 1, sizeof *found);
    double steps = (double)(gain->until - gain->since);

    if (found == NULL) return -1;
    l->found = found;
    l->found[l->n] = (candidate){.node = node,
                                 .gain = *gain,
                                 .pace = (double)gain->bytes / steps,
                                 .net = (double)gain->bytes / steps,
                                 .above = SIZE_MAX,
                                 .group = l->n,
                                 .count = 1,
                                 .what = what};
    l->n++;
    if (is_graph(what)) return 0;
    if (mt_ptrset_reserve(&l->by_node, l->by_node.n + 1) < 0) return -1;
    (void)mt_ptrset_add(&l->by_node, (const void *)(uintptr_t)(node + 1), l->n - 1);
    return 0;
}

/* A hash of up to 256 bytes. */
static uint64_t
growth_hash_of(const unsigned char *bytes, size_t n)
{
    uint64_t h = n + 1;

    for (size_t i = 0; i < n; i++)
        h = (h ^ bytes[i]) * UINT64_C(0x100000001B3);
    return h | 1;
}

/* What a buffer begins and ends with. It is read only where it has grown, so that files which are
 * mapped are left alone. */
static void
sign_buffer(look *l, size_t node, uint32_t watch)
{
    const void *memory;
    size_t bytes = mt_walk_memory(l->walk, node, &memory), some = bytes < 256 ? bytes : 256;
    uint64_t begin = 0, end = 0;

    if (memory != NULL && bytes > 0) {
        begin = growth_hash_of(memory, some);
        end = growth_hash_of((const unsigned char *)memory + bytes - some, some);
    }
    mt_growth_sign(&l->self->core, watch, begin, end);
}

/* The table takes a thing in: *watch as mt_growth_see() gives it. */
static int
growth_see(look *l, const mt_growth_thing *thing, uint32_t *watch)
{
    return mt_growth_see(&l->self->core, thing, watch, NULL) == MT_OK ? 0 : -1;
}

/* Makes a thing a candidate if it only ever gained. */
static int
growth_judge(look *l, size_t node, uint32_t watch, candidate_kind what)
{
    const mt_walk_node *at = mt_walk_at(l->walk, node);
    bool may_fill = what == CONTAINER && (at->kind == MT_WALK_CACHE || at->kind == MT_WALK_DEQUE);
    mt_growth_gain gain;

    if (!mt_growth_judge(&l->self->core, watch, may_fill, &gain)) return 0;
    /* Names come late in any program: a namespace collects only where they come again and again. */
    if (at->kind == MT_WALK_SPACE && (gain.rises < 3 || 4 * gain.length < gain.until - gain.since))
        return 0;
    return add_candidate(l, node, &gain, what);
}

/* Whether it is one of the blocks that itertools.tee links, of which each takes 57 entries. */
static bool
is_block(PyObject *op)
{
    return strcmp(Py_TYPE(op)->tp_name, "itertools._tee_dataobject") == 0;
}

static int
show_node(look *l, size_t i)
{
    const mt_walk_node *node = mt_walk_at(l->walk, i);
    mt_growth_thing thing = {.place = node->place, .length = node->length, .bytes = node->bytes};
    candidate_kind what = CONTAINER;
    uint32_t watch;

    switch ((mt_walk_kind)node->kind) {
    case MT_WALK_OBJECT:
        if (node->length < LEAST_SHOWN || PyTuple_Check(node->op) || is_block(node->op)) return 0;
        thing.address = (uint64_t)(uintptr_t)node->op;
        break;
    case MT_WALK_KEPT:
        thing.address = (uint64_t)(uintptr_t)node->op;
        thing.known_empty = true;
        break;
    case MT_WALK_CYCLES:
        what = CYCLE;
        break;
    case MT_WALK_LIST:
    case MT_WALK_DICT:
    case MT_WALK_SET:
    case MT_WALK_DEQUE:
    case MT_WALK_CACHE:
    case MT_WALK_SPACE:
        thing.address = (uint64_t)(uintptr_t)node->op;
        thing.known_empty = node->kind != MT_WALK_SPACE && mt_walk_is_programs(l->walk, i);
        if (thing.length > 0 || thing.known_empty) break;
        if (mt_growth_known(&l->self->core, thing.address) == NULL) return 0;
        break;
    case MT_WALK_TUPLE:
        thing.single = true;
        break;
    case MT_WALK_BUFFER:
    case MT_WALK_TENSOR:
        thing.length = thing.bytes = (uint64_t)node->length * MT_WALK_UNIT;
        thing.single = true;
        if (thing.bytes < MT_GROWTH_LEAST_BYTES) return 0;
        break;
    default:
        return 0;
    }
    if (growth_see(l, &thing, &watch) < 0) return -1;
    if (watch == MT_GROWTH_NONE) return 0;
    if (node->kind == MT_WALK_BUFFER || node->kind == MT_WALK_TENSOR) sign_buffer(l, i, watch);
    return growth_judge(l, i, watch, what);
}

/* Whether a node is a leaf of such a cycle: these are named together. */
static bool
is_in_cycles(const look *l, const mt_walk_node *node)
{
    return node->parent != MT_GROWTH_NONE &&
           mt_walk_at(l->walk, node->parent)->kind == MT_WALK_CYCLES;
}

/* A graph that has nodes from before the look before: that of this step, however long, has none. */
static int
show_graph(look *l, size_t i)
{
    size_t node;
    const mt_graph *graph = mt_walk_graph(l->walk, i, &node);
    mt_growth_thing thing = {.place =
                                 mt_walk_place(mt_walk_at(l->walk, node)->place, PLACE_OF_GRAPH),
                             .length = graph->nodes,
                             .bytes = 576 * graph->nodes};
    uint32_t watch;

    if (graph->nodes == 0 || (graph->old == 0 && l->self->then > 0)) return 0;
    if (is_in_cycles(l, mt_walk_at(l->walk, node))) return 0;
    if (growth_see(l, &thing, &watch) < 0) return -1;
    if (watch == MT_GROWTH_NONE) return 0;
    return growth_judge(l, node, watch, graph->of_grad ? CYCLE : GRAPH);
}

/* A chain is known by who holds its head: `last` is another object at each step. One that only ever
 * gained keeps its first link or its last one; the nodes of a list that is made again are others. */
static int
show_chain(look *l, const mt_chain *chain)
{
    const mt_walk_node *head = mt_walk_at(l->walk, chain->node);
    mt_growth_thing thing = {.place = mt_walk_place(head->place, PLACE_OF_CHAIN),
                             .length = chain->links,
                             .bytes = head->bytes,
                             .single = true};
    uint32_t watch;

    if (growth_see(l, &thing, &watch) < 0) return -1;
    if (watch == MT_GROWTH_NONE) return 0;
    mt_growth_sign(&l->self->core, watch, (uint64_t)(uintptr_t)head->op,
                   (uint64_t)(uintptr_t)mt_walk_at(l->walk, chain->last)->op);
    if (l->by_node.n > 0 &&
        mt_ptrset_find(&l->by_node, (const void *)(chain->node + 1)) != MT_PTRSET_NONE)
        return 0; /* a container that grows by itself */
    return growth_judge(l, chain->node, watch, CHAIN);
}

/* A walk that was cut knows chains by a part of them: they are left out as other things are. */
static int
show_chains(look *l)
{
    mt_chains chains = {.n = 0};
    int failed = 0;

    if (mt_walk_was_cut(l->walk)) return 0;
    failed = mt_chains_find(l->walk, &chains);
    for (size_t i = 0; i < chains.n && !failed; i++)
        failed = show_chain(l, &chains.at[i]);
    mt_chains_free(&chains);
    return failed;
}

/* How many entries a list or an array of objects has, and how many of them are not None. */
static bool
slots_of(const look *l, size_t i, uint64_t *all, uint64_t *filled)
{
    const mt_walk_node *node = mt_walk_at(l->walk, i);

    if (node->kind == MT_WALK_BUFFER) return mt_walk_slots(l->walk, i, all, filled);
    *all = (uint64_t)PyList_GET_SIZE(node->op);
    *filled = 0;
    for (uint64_t at = 0; at < *all && *all >= LEAST_SLOTS; at++)
        *filled += PyList_GET_ITEM(node->op, (Py_ssize_t)at) != Py_None;
    return true;
}

/* A list or array that had its length from the beginning, and gets its entries in the place of None,
 * as a cache of samples does: how many are there is what grows. One that ever got longer is none. */
static int
show_slots(look *l, size_t i)
{
    const mt_walk_node *node = mt_walk_at(l->walk, i);
    uint64_t address = (uint64_t)(uintptr_t)node->op;
    mt_growth_thing thing = {.address = address ^ ADDRESS_OF_SLOTS, .bytes = node->bytes};
    const mt_growth_row *before;
    uint32_t watch;
    uint64_t n;

    if (node->kind != MT_WALK_LIST && node->kind != MT_WALK_BUFFER) return 0;
    if (!slots_of(l, i, &n, &thing.length) || n < LEAST_SLOTS) return 0;
    before = mt_growth_known(&l->self->core, address);
    if (before != NULL && before->watch != MT_GROWTH_NONE) return 0;
    if (thing.length == n && mt_growth_known(&l->self->core, thing.address) == NULL) return 0;
    if (growth_see(l, &thing, &watch) < 0) return -1;
    return watch == MT_GROWTH_NONE ? 0 : growth_judge(l, i, watch, SLOTS);
}

/* A variable of one running call. */
typedef struct variable {
    uint64_t place; /* the same for all calls of the function */
    size_t node;
} variable;

static int
growth_by_place(const void *a, const void *b)
{
    const variable *left = a, *right = b;

    if (left->place != right->place) return left->place < right->place ? -1 : 1;
    return left->node < right->node ? -1 : left->node > right->node;
}

/* One variable of several calls of a function that run at the same time, as in threads that wait. */
static int
show_variable(look *l, const variable *first, size_t n)
{
    mt_growth_thing thing = {.place = mt_walk_place(first->place, PLACE_OF_CALLS), .length = n};
    uint32_t watch;

    for (size_t i = 0; i < n; i++)
        thing.bytes += mt_walk_at(l->walk, first[i].node)->bytes;
    if (n < 2) return 0;
    if (growth_see(l, &thing, &watch) < 0) return -1;
    return watch == MT_GROWTH_NONE ? 0 : growth_judge(l, first->node, watch, CALLS);
}

/* Calls that begin, and never end, hold what their variables hold: no container is longer for it. */
static int
show_calls(look *l)
{
    size_t nodes = mt_walk_count(l->walk), n = 0, cap = 0;
    variable *all = NULL, *larger;
    int failed = 0;

    for (size_t i = 0; i < nodes && !failed; i++) {
        const mt_walk_node *node = mt_walk_at(l->walk, i);
        if (node->kind != MT_WALK_VARIABLE) continue;
        larger = mt_alloc_grown(&mt_alloc_pages, all, &cap, n + 1, sizeof *larger);
        failed = larger == NULL;
        if (failed) break;
        all = larger;
        all[n++] = (variable){node->place, i};
    }
    if (n > 1) qsort(all, n, sizeof *all, growth_by_place);
    for (size_t i = 0, end; i < n && !failed; i = end) {
        for (end = i + 1; end < n && all[end].place == all[i].place;)
            end++;
        failed = show_variable(l, &all[i], end - i) < 0;
    }
    if (all != NULL) mt_alloc_pages.put(mt_alloc_pages.ctx, all, cap * sizeof *all);
    return failed ? -1 : 0;
}

/* --- containers whose entries gain ------------------------------------------------------------- */

/* A container that stays as long as it is, and gains bytes. */
typedef struct heavy {
    size_t node;
    mt_growth_gain gain;
    double unexplained; /* bytes a step that no candidate below it gains */
} heavy;

typedef struct heavies {
    heavy *at;
    size_t n, cap;
    mt_ptrset by_node; /* node + 1, as an address: which one it is */
} heavies;

static bool
may_be_heavy(const mt_walk_node *node)
{
    if (node->bytes < LEAST_HEAVY || node->length < LEAST_SHOWN) return false;
    switch ((mt_walk_kind)node->kind) {
    case MT_WALK_LIST:
    case MT_WALK_DICT:
    case MT_WALK_SET:
    case MT_WALK_DEQUE:
    case MT_WALK_TUPLE:
    case MT_WALK_OBJECT:
        return true;
    default:
        return false;
    }
}

static size_t
heavy_at(const heavies *all, size_t node)
{
    if (all->by_node.n == 0) return MT_PTRSET_NONE;
    return mt_ptrset_find(&all->by_node, (const void *)(uintptr_t)(node + 1));
}

static int
show_heavy(look *l, heavies *all, size_t i)
{
    const mt_walk_node *node = mt_walk_at(l->walk, i);
    mt_growth_thing thing = {.address = (uint64_t)(uintptr_t)node->op ^ ADDRESS_OF_HEAVY,
                             .length = node->bytes,
                             .bytes = node->bytes,
                             .single = true};
    mt_growth_gain gain;
    uint32_t watch;
    heavy *larger;

    if (!may_be_heavy(node)) return 0;
    if (growth_see(l, &thing, &watch) < 0) return -1;
    if (watch == MT_GROWTH_NONE) return 0;
    mt_growth_sign(&l->self->core, watch, node->length,
                   node->length); /* another one: begins again */
    if (!mt_growth_judge(&l->self->core, watch, false, &gain)) return 0;
    larger = mt_alloc_grown(&mt_alloc_pages, all->at, &all->cap, all->n + 1, sizeof *larger);
    if (larger == NULL || mt_ptrset_reserve(&all->by_node, all->n + 1) < 0) return -1;
    all->at = larger;
    (void)mt_ptrset_add(&all->by_node, (const void *)(uintptr_t)(i + 1), all->n);
    all->at[all->n++] = (heavy){i, gain, (double)gain.bytes / (double)(gain.until - gain.since)};
    return 0;
}

static size_t next_above(const look *l, size_t node);

/* Takes what is explained at a node from all that lie above it. */
static void
explain(const look *l, heavies *all, size_t node, double pace)
{
    uint32_t up = mt_walk_at(l->walk, node)->parent;

    for (int i = 0; i < MOST_CLIMB && up != MT_GROWTH_NONE; i++) {
        size_t found = heavy_at(all, up);
        if (found != MT_PTRSET_NONE) all->at[found].unexplained -= pace;
        up = mt_walk_at(l->walk, up)->parent;
    }
}

/* Whether the next one above it is of the same type, as in a chain of them: that one is named. */
static bool
is_in_one_like_it(const look *l, const heavies *all, size_t node)
{
    uint32_t up = mt_walk_at(l->walk, node)->parent;

    for (int i = 0; i < MT_CHAIN_APART && up != MT_GROWTH_NONE; i++) {
        if (heavy_at(all, up) != MT_PTRSET_NONE)
            return Py_TYPE(mt_walk_at(l->walk, up)->op) == Py_TYPE(mt_walk_at(l->walk, node)->op);
        up = mt_walk_at(l->walk, up)->parent;
    }
    return false;
}

/* From the innermost outwards, each that gains twice what is explained below it. What lies in a
 * candidate is that one's. */
static int
name_heavy(look *l, heavies *all)
{
    size_t candidates = l->n;

    if (all->n == 0 || mt_ptrset_reserve(&l->by_node, 1) < 0) return all->n == 0 ? 0 : -1;
    for (size_t i = 0; i < candidates; i++)
        explain(l, all, l->found[i].node, l->found[i].net);
    for (size_t i = all->n; i-- > 0;) {
        const heavy *h = &all->at[i];
        double pace = (double)h->gain.bytes / (double)(h->gain.until - h->gain.since);
        if (2 * h->unexplained < pace || is_in_one_like_it(l, all, h->node)) continue;
        if (mt_ptrset_find(&l->by_node, (const void *)(uintptr_t)(h->node + 1)) != MT_PTRSET_NONE ||
            next_above(l, h->node) != SIZE_MAX)
            continue;
        explain(l, all, h->node, h->unexplained);
        if (add_candidate(l, h->node, &h->gain, ENTRIES) < 0) return -1;
        l->found[l->n - 1].net = h->unexplained;
    }
    return 0;
}

/* A walk that was cut knows only a part of the bytes below a node. */
static int
add_heavy(look *l, heavies *all)
{
    int failed = 0;

    if (mt_walk_was_cut(l->walk)) return 0;
    for (size_t i = 0; i < mt_walk_count(l->walk) && !failed; i++)
        failed = show_heavy(l, all, i);
    return failed;
}

static int
show_all(look *l)
{
    for (size_t i = 0; i < mt_walk_count(l->walk); i++)
        if (show_node(l, i) < 0 || show_slots(l, i) < 0) return -1;
    if (show_calls(l) < 0) return -1;
    for (size_t i = 0; i < mt_walk_graphs(l->walk); i++)
        if (show_graph(l, i) < 0) return -1;
    return show_chains(l);
}

/* --- whose growth it is ----------------------------------------------------------------------- */

/* The next candidate above a node, or SIZE_MAX. */
static size_t
next_above(const look *l, size_t node)
{
    uint32_t up = mt_walk_at(l->walk, node)->parent;

    for (int i = 0; i < MOST_CLIMB && up != MT_GROWTH_NONE; i++) {
        size_t found = mt_ptrset_find(&l->by_node, (const void *)(uintptr_t)(up + 1));
        if (found != MT_PTRSET_NONE) return found;
        up = mt_walk_at(l->walk, up)->parent;
    }
    return SIZE_MAX;
}

static void
nest(look *l)
{
    if (l->by_node.n == 0) return;
    for (size_t i = 0; i < l->n; i++) {
        candidate *c = &l->found[i];
        if (is_graph(c->what)) {
            size_t itself = mt_ptrset_find(&l->by_node, (const void *)(uintptr_t)(c->node + 1));
            c->above = itself != MT_PTRSET_NONE ? itself : next_above(l, c->node);
        } else {
            c->above = next_above(l, c->node);
        }
        if (c->above != SIZE_MAX) l->found[c->above].net -= c->pace;
    }
}

/* A list of losses that were not detached: each entry keeps a graph of its own, and none of these
 * grows. Their nodes go to the container that holds the tensors. */
static void
count_kept(look *l)
{
    if (l->by_node.n == 0) return;
    for (size_t i = 0; i < mt_walk_graphs(l->walk); i++) {
        size_t node, above;
        const mt_graph *graph = mt_walk_graph(l->walk, i, &node);
        if (graph->nodes == 0 || graph->of_grad) continue;
        if (mt_ptrset_find(&l->by_node, (const void *)(uintptr_t)(node + 1)) != MT_PTRSET_NONE)
            continue; /* one tensor that is made again */
        if ((above = next_above(l, node)) != SIZE_MAX) l->found[above].kept += graph->nodes;
    }
}

/* Whether a node is a list or a dict that is neither a namespace nor a candidate. */
static bool
is_collection(const look *l, uint32_t node)
{
    unsigned kind = mt_walk_at(l->walk, node)->kind;

    if (kind != MT_WALK_LIST && kind != MT_WALK_DICT) return false;
    return mt_ptrset_find(&l->by_node, (const void *)(uintptr_t)(node + 1)) == MT_PTRSET_NONE;
}

/* The collection of which a candidate is a part: the nearest one of LEAST_SHOWN entries, as `stats` is
 * of `stats[user]["events"]`; else the one that holds it; or SIZE_MAX. */
static size_t
collection_of(const look *l, const candidate *c)
{
    uint32_t first = mt_walk_at(l->walk, c->node)->parent, up = first;

    for (; up != MT_GROWTH_NONE && is_collection(l, up); up = mt_walk_at(l->walk, up)->parent)
        if (mt_walk_at(l->walk, up)->length >= LEAST_SHOWN) return up;
    return up == first ? SIZE_MAX : first;
}

/* What the candidates of one collection gain together, and the most that one of them does. */
typedef struct together {
    double net, most;
    uint64_t length;
    size_t count, kept, at; /* at: who gains most */
} together;

/* Where several gain about alike, the one that gains most stands for the collection. Where one of
 * them gains nearly all, each stays by itself. */
static void
take_together(look *l, const together *all, const size_t *of)
{
    for (size_t i = 0; i < l->n; i++) {
        const together *t = of[i] == SIZE_MAX ? NULL : &all[of[i]];
        candidate *c = &l->found[i];
        if (t == NULL || t->count < 2 || t->most >= 0.8 * t->net) continue;
        c->group = t->at;
        if (t->at != i) continue;
        c->net = t->net;
        c->gain.length = t->length;
        c->count = t->count;
        c->kept = t->kept;
        c->is_group = true;
    }
}

/* Adds up those that lie in one collection, which is not a candidate itself. of[i]: whose sum it is. */
static void
growth_add_up(const look *l, mt_ptrset *first, together *all, size_t *of)
{
    for (size_t i = 0; i < l->n; i++) {
        const candidate *c = &l->found[i];
        bool alone = is_graph(c->what) || c->what == SLOTS || c->what == ENTRIES || c->gain.slows;
        size_t in = alone ? SIZE_MAX : collection_of(l, c), other;
        together *t;
        of[i] = SIZE_MAX;
        if (in == SIZE_MAX) continue;
        other = mt_ptrset_add(first, (const void *)(in + 1), i);
        of[i] = other == MT_PTRSET_NONE ? i : other;
        t = &all[of[i]];
        t->net += c->net;
        t->length += c->gain.length;
        t->kept += c->kept;
        if (t->count++ > 0 && c->net <= t->most) continue;
        t->most = c->net;
        t->at = i;
    }
}

/* Those of one collection become one candidate. */
static int
group(look *l)
{
    mt_ptrset first = {.slots = NULL};
    together *all = PyMem_Calloc(l->n + 1, sizeof *all);
    size_t *of = PyMem_Calloc(l->n + 1, sizeof *of);
    bool well = all != NULL && of != NULL && mt_ptrset_reserve(&first, l->n + 1) == 0;

    if (well && l->by_node.n > 0) {
        growth_add_up(l, &first, all, of);
        take_together(l, all, of);
    }
    mt_ptrset_fini(&first);
    PyMem_Free(all);
    PyMem_Free(of);
    return well ? 0 : -1;
}

static int
most_first(const void *a, const void *b)
{
    const candidate *left = a, *right = b;

    if (left->net != right->net) return left->net > right->net ? -1 : 1;
    return left->node < right->node ? -1 : left->node > right->node;
}

/* Drops candidates that another one stands for, and sorts the rest. */
static void
sort(look *l)
{
    size_t n = 0;

    for (size_t i = 0; i < l->n; i++)
        if (l->found[i].group == i && (l->found[i].net > 0 || is_graph(l->found[i].what)))
            l->found[n++] = l->found[i];
    l->n = n;
    if (n > 1) qsort(l->found, n, sizeof *l->found, most_first);
    if (l->n > MOST_ROWS) l->n = MOST_ROWS;
}

/* --- the answer ------------------------------------------------------------------------------- */

/* [the thing, what holds it, ...]; the last may be (code, name) of a variable. */
static PyObject *
way_to(const look *l, size_t node)
{
    PyObject *list = PyList_New(0);
    uint32_t at = (uint32_t)node;

    for (int i = 0; list != NULL && i < MOST_ABOVE && at != MT_GROWTH_NONE; i++) {
        const mt_walk_node *n = mt_walk_at(l->walk, at);
        PyObject *item;
        if (n->kind == MT_WALK_VARIABLE) {
            PyObject *name = mt_walk_variable(l->walk, at);
            item = PyTuple_Pack(2, n->op, name == NULL ? Py_None : name);
        } else {
            item = Py_NewRef(n->op);
        }
        if (mt_py_append(list, item) < 0) Py_CLEAR(list);
        at = n->parent;
    }
    return list;
}

static PyObject *
row(const void *from, size_t i)
{
    const look *l = from;
    const candidate *c = &l->found[i];
    const mt_walk_node *node = mt_walk_at(l->walk, c->node);
    size_t named = c->is_group ? collection_of(l, c) : c->node;
    PyObject *way = way_to(l, named);
    uint64_t length = mt_walk_at(l->walk, named)->length;

    if (c->what != CONTAINER && c->what != ENTRIES && !c->is_group)
        length = c->gain.now;
    else if (node->kind == MT_WALK_BUFFER || node->kind == MT_WALK_TENSOR)
        length *= MT_WALK_UNIT;
    if (way == NULL) return NULL;
    return Py_BuildValue("NiKKKdKKIOOK", way, (int)(c->is_group ? CONTAINER : c->what),
                         (unsigned long long)c->count, (unsigned long long)length,
                         (unsigned long long)c->gain.length, c->net,
                         (unsigned long long)c->gain.since, (unsigned long long)c->gain.until,
                         (unsigned)c->gain.rises, c->gain.fell ? Py_True : Py_False,
                         c->gain.slows ? Py_True : Py_False, (unsigned long long)c->kept);
}

/* The bytes of all that was reached. */
static uint64_t
growth_reached(const look *l)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < mt_walk_count(l->walk); i++)
        if (mt_walk_at(l->walk, i)->parent == MT_GROWTH_NONE)
            bytes += mt_walk_at(l->walk, i)->bytes;
    return bytes;
}

/* Who gains, sorted. -1 without memory. */
static int
growth_find(look *l, heavies *all)
{
    nest(l);
    count_kept(l);
    if (name_heavy(l, all) < 0 || group(l) < 0) return -1;
    sort(l);
    return 0;
}

static PyObject *
growth_answer(look *l, heavies *all)
{
    PyObject *rows;
    bool cut = mt_walk_was_cut(l->walk);

    if (show_all(l) < 0 || add_heavy(l, all) < 0 ||
        mt_growth_end(&l->self->core, cut, NULL) != MT_OK) {
        mt_growth_give_up(&l->self->core);
        return PyErr_NoMemory();
    }
    l->self->then = mt_walk_now(l->walk);
    l->self->makes_cycles = mt_walk_makes_cycles(l->walk);
    if (growth_find(l, all) < 0) return PyErr_NoMemory();
    if ((rows = mt_py_list(l->n, row, l)) == NULL) return NULL;
    return Py_BuildValue("NKOK", rows, (unsigned long long)mt_walk_count(l->walk),
                         cut ? Py_True : Py_False, (unsigned long long)growth_reached(l));
}

static PyObject *
growth_look_at(GrowthTable *self, const mt_walk_places *places, uint64_t step)
{
    bool collecting = PyGC_Disable() != 0;
    look l = {.self = self};
    heavies all = {.at = NULL};
    PyObject *result = NULL;

    mt_growth_begin(&self->core, step);
    if ((l.walk = mt_walk_new(places, &self->core, self->then)) != NULL) {
        result = growth_answer(&l, &all);
        mt_walk_free(l.walk);
    }
    mt_alloc_pages.put(mt_alloc_pages.ctx, l.found, l.cap * sizeof *l.found);
    mt_ptrset_fini(&l.by_node);
    mt_alloc_pages.put(mt_alloc_pages.ctx, all.at, all.cap * sizeof *all.at);
    mt_ptrset_fini(&all.by_node);
    if (collecting) PyGC_Enable();
    return result;
}

/* Whether a tuple has nothing but objects of one type, for a type of C. */
static bool
all_are(PyObject *tuple, PyTypeObject *type)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(tuple, i), type)) return false;
    return true;
}

/* false with an error for a step that does not come after that of the look before. */
static bool
is_later(const GrowthTable *self, uint64_t step)
{
    if (self->core.looks == 0 || step > self->core.step) return true;
    (void)PyErr_Format(PyExc_ValueError, "step %llu does not come after step %llu",
                       (unsigned long long)step, (unsigned long long)self->core.step);
    return false;
}

static PyObject *
table_look(PyObject *op, PyObject *args)
{
    GrowthTable *self = (GrowthTable *)op;
    mt_state *st = mt_state_of_type(Py_TYPE(op));
    mt_walk_places places = {.shim = NULL};
    PyObject *result = NULL;
    mt_heap heap = {.list = NULL};
    mt_kept kept;
    PyObject *ndarray, *tensor;
    unsigned long long step;
    int by_shim, quick;

    if (st == NULL ||
        !PyArg_ParseTuple(args, "KO!O!OOpO!UO!O!p:_look", &step, &PyType_Type, &places.deque,
                          &PyType_Type, &places.cache, &ndarray, &tensor, &by_shim, &PyTuple_Type,
                          &places.libraries, &places.package, &PyTuple_Type, &places.own,
                          &PyTuple_Type, &places.users, &quick))
        return NULL;
    if ((ndarray != Py_None && !PyType_Check(ndarray)) ||
        (tensor != Py_None && !PyType_Check(tensor)) ||
        !all_are(places.libraries, &PyUnicode_Type) || !all_are(places.own, &PyType_Type) ||
        !all_are(places.users, &PyUnicode_Type)) {
        PyErr_SetString(PyExc_TypeError, "_look() takes types, and folders as str");
        return NULL;
    }
    places.quick = quick;
    if (ndarray != Py_None) places.ndarray = (PyTypeObject *)ndarray;
    if (tensor != Py_None) places.tensor = (PyTypeObject *)tensor;
    if (by_shim && places.tensor != NULL && places.tensor == st->tensor) places.shim = st->shim;
    /* A program may have put code of its own in the place of what is called here: so this comes
     * first, and what it did is found out afterwards. */
    if (self->makes_cycles && mt_py_heap_open(&heap) < 0) return NULL;
    if (self->makes_cycles) places.heap = &heap;
    if (mt_py_kept_open(&kept) == 0) {
        places.kept = &kept;
        result = is_later(self, step) ? growth_look_at(self, &places, step) : NULL;
        mt_py_kept_close(&kept);
    }
    if (places.heap != NULL) mt_py_heap_close(&heap);
    return result;
}

/* --- the type --------------------------------------------------------------------------------- */

static PyObject *
table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    GrowthTable *self;

    if (PyTuple_GET_SIZE(args) > 0 || (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0)) {
        PyErr_SetString(PyExc_TypeError, "GrowthTable() takes no arguments");
        return NULL;
    }
    if ((self = (GrowthTable *)type->tp_alloc(type, 0)) == NULL) return NULL;
    mt_growth_init(&self->core, &mt_alloc_pages);
    return (PyObject *)self;
}

static void
table_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    mt_growth_fini(&((GrowthTable *)op)->core);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"_look", table_look, METH_VARARGS,
     "_look($self, step, deque, cache, ndarray, tensor, shim, libraries, package, own, "
     "users, quick, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native half of memtools' GrowthCensus."},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

/* It holds no object, so it cannot be in a cycle. */
static PyType_Spec spec = {
    .name = "memtools._core.GrowthTable",
    .basicsize = sizeof(GrowthTable),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_growthtable_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->GrowthTable);
}
