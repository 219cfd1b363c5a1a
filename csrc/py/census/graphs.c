/* graphs.c -- sharing out autograd's nodes among the tensors that keep them: see graphs.h. */
#include "py/census/graphs.h"

#include <stdlib.h>

#include "os/base/pages.h"

void
mt_graphs_begin(mt_graphs *graphs, const mt_torch_ops *shim)
{
    *graphs = (mt_graphs){.shim = shim, .now = shim->next_number()};
}

void
mt_graphs_end(mt_graphs *graphs)
{
    mt_alloc_pages.put(mt_alloc_pages.ctx, graphs->roots, graphs->cap * sizeof *graphs->roots);
    mt_ptrset_fini(&graphs->seen);
    graphs->roots = NULL;
    graphs->n = graphs->cap = graphs->nodes = 0;
}

int
mt_graphs_add(mt_graphs *graphs, PyObject *tensor)
{
    mt_torch_links links;
    mt_graph *larger;

    if (graphs->shim->links(tensor, &links) != 1) return 0;
    if (links.node == NULL && links.grad_node == NULL) return 0;
    larger = mt_alloc_grown(&mt_alloc_pages, graphs->roots, &graphs->cap, graphs->n + 1,
                            sizeof *graphs->roots);
    if (larger == NULL) return -1;
    graphs->roots = larger;
    graphs->roots[graphs->n] = (mt_graph){
        .root = tensor,
        .node = links.node != NULL ? links.node : links.grad_node,
        .number = links.node != NULL ? links.number : links.grad_number,
        .order = graphs->n,
        .of_grad = links.node == NULL,
    };
    graphs->n++;
    return 0;
}

/* For qsort. */
static int
older_first(const void *a, const void *b)
{
    const mt_graph *left = a, *right = b;

    if (left->is_passed != right->is_passed) return left->is_passed ? 1 : -1;
    if (left->number != right->number) return left->number < right->number ? -1 : 1;
    return left->order < right->order ? -1 : 1;
}

typedef struct sharing {
    mt_graphs *graphs;
    mt_graph *root; /* whose nodes are counted now */
    size_t most;
    uint64_t then;
    bool meets; /* it leads to a node that another root has reached */
} sharing;

/* A mt_torch_visit: what another root has reached is passed by, with all that it leads to. */
static int
share(void *ctx, const void *node, uint64_t number)
{
    sharing *s = ctx;
    mt_graphs *graphs = s->graphs;
    size_t root = (size_t)(s->root - graphs->roots), of;

    if (number == MT_TORCH_LEAF) return MT_TORCH_PASS;
    if (mt_ptrset_reserve(&graphs->seen, graphs->seen.n + 1) < 0) return MT_TORCH_STOP;
    of = mt_ptrset_find(&graphs->seen, node);
    if (of != MT_PTRSET_NONE) {
        s->meets |= of != root;
        return MT_TORCH_PASS;
    }
    if (graphs->nodes == s->most) {
        graphs->cut = true;
        return MT_TORCH_STOP;
    }
    (void)mt_ptrset_add(&graphs->seen, node, root);
    graphs->nodes++;
    s->root->nodes++;
    s->root->old += number < s->then;
    return MT_TORCH_ENTER;
}

/* Shares out the nodes that `root` leads to; -1 without memory. */
static int
share_root(sharing *s, mt_graph *root)
{
    mt_graphs *graphs = s->graphs;
    bool ended;

    s->root = root;
    s->meets = false;
    ended = graphs->shim->graph_walk(root->root, root->of_grad, share, s) != MT_TORCH_STOP;
    return ended || graphs->cut ? 0 : -1;
}

/* Forgets what was shared out. */
static void
begin_again(mt_graphs *graphs)
{
    if (graphs->seen.slots != NULL) mt_ptrset_clear(&graphs->seen);
    graphs->nodes = 0;
    graphs->cut = false;
    for (size_t i = 0; i < graphs->n; i++)
        graphs->roots[i].nodes = graphs->roots[i].old = 0;
}

/* Newest first, each root gets what no newer one reached. One that has a node of its own, and leads
 * to nodes of newer ones, is passed. Where nodes are cut that is not known. */
static int
find_passed(sharing *s)
{
    mt_graphs *graphs = s->graphs;

    for (size_t i = graphs->n; i-- > 0 && !graphs->cut;) {
        mt_graph *root = &graphs->roots[i];
        if (share_root(s, root) < 0) return -1;
        root->is_passed = s->meets && root->nodes > 0;
    }
    for (size_t i = 0; i < graphs->n && graphs->cut; i++)
        graphs->roots[i].is_passed = false;
    begin_again(graphs);
    return 0;
}

int
mt_graphs_count(mt_graphs *graphs, size_t most, uint64_t then)
{
    sharing s = {.graphs = graphs, .most = most, .then = then};

    if (graphs->n > 1) {
        qsort(graphs->roots, graphs->n, sizeof *graphs->roots, older_first);
        if (find_passed(&s) < 0) return -1;
        qsort(graphs->roots, graphs->n, sizeof *graphs->roots, older_first);
    }
    for (size_t i = 0; i < graphs->n && !graphs->cut; i++)
        if (share_root(&s, &graphs->roots[i]) < 0) return -1;
    return 0;
}
