/* chains.c -- finding linked chains in the tree of a walk: see chains.h.
 *
 * A parent comes before its children in a walk, so one pass from the last node to the first counts
 * links from the end of a chain to its head. Nearly all nodes have only a few others below them, as
 * their height in the walk shows: they are left out, and their objects are not touched. */
#include "py/census/chains.h"

#include "os/base/pages.h"

/* Of a node. Zeros: no link is below it. */
typedef struct link_facts {
    uint32_t links; /* of its own type */
    uint32_t next;  /* the link below it; 0 for none, as node 0 is below no other */
    bool is_below;  /* another link leads to it */
    bool is_head;
} link_facts;

static bool
chains_is_high(const mt_walk *walk, size_t node)
{
    return mt_walk_height(walk, node) >= MT_CHAIN_BELOW;
}

/* Whether a node may be a link: a namespace and a variable are where chains are held. */
static bool
may_link(const mt_walk_node *node)
{
    return node->kind != MT_WALK_SPACE && node->kind != MT_WALK_VARIABLE;
}

/* The link above a node, or MT_GROWTH_NONE. */
static uint32_t
link_above(const mt_walk *walk, const mt_walk_node *node)
{
    uint32_t up = node->parent;

    for (int i = 0; i < MT_CHAIN_APART && up != MT_GROWTH_NONE; i++) {
        const mt_walk_node *above = mt_walk_at(walk, up);
        if (may_link(above) && Py_TYPE(above->op) == Py_TYPE(node->op)) return up;
        up = above->parent;
    }
    return MT_GROWTH_NONE;
}

static void
chains_count(const mt_walk *walk, link_facts *all)
{
    for (size_t i = mt_walk_count(walk); i-- > 0;) {
        const mt_walk_node *node = mt_walk_at(walk, i);
        uint32_t up;
        if (!chains_is_high(walk, i)) continue;
        if (!may_link(node)) continue;
        if ((up = link_above(walk, node)) == MT_GROWTH_NONE) continue;
        all[i].is_below = true;
        if (all[up].links > all[i].links) continue;
        all[up].links = all[i].links + 1;
        all[up].next = (uint32_t)i;
    }
}

/* Whether it is what lies between the links of a chain whose head was found: the tuple of a closure
 * is a link as well as the function is. */
static bool
is_between(const mt_walk *walk, const link_facts *all, size_t i)
{
    uint32_t up = mt_walk_at(walk, i)->parent;

    for (int n = 0; n < MT_CHAIN_APART && up != MT_GROWTH_NONE; n++) {
        if (all[up].is_head && all[up].links <= all[i].links + 1) return true;
        up = mt_walk_at(walk, up)->parent;
    }
    return false;
}

static int
add_head(mt_chains *chains, const link_facts *all, size_t i)
{
    mt_chain *larger =
        mt_alloc_grown(&mt_alloc_pages, chains->at, &chains->cap, chains->n + 1, sizeof *larger);
    size_t last = i;

    if (larger == NULL) return -1;
    while (all[last].next != 0)
        last = all[last].next;
    chains->at = larger;
    chains->at[chains->n++] = (mt_chain){.node = i, .last = last, .links = all[i].links};
    return 0;
}

int
mt_chains_find(const mt_walk *walk, mt_chains *chains)
{
    size_t n = mt_walk_count(walk);
    link_facts *all = mt_alloc_zeroed(&mt_alloc_pages, n + 1, sizeof *all);
    int failed = all == NULL ? -1 : 0;

    *chains = (mt_chains){.n = 0};
    if (failed) return failed;
    chains_count(walk, all);
    for (size_t i = 0; i < n && !failed; i++) {
        if (!chains_is_high(walk, i)) continue;
        if (all[i].links < MT_CHAIN_LEAST || all[i].is_below || is_between(walk, all, i)) continue;
        all[i].is_head = true;
        failed = add_head(chains, all, i);
    }
    mt_alloc_pages.put(mt_alloc_pages.ctx, all, (n + 1) * sizeof *all);
    return failed;
}

void
mt_chains_free(mt_chains *chains)
{
    mt_alloc_pages.put(mt_alloc_pages.ctx, chains->at, chains->cap * sizeof *chains->at);
    *chains = (mt_chains){.n = 0};
}
