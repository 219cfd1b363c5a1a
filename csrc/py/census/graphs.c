/* graphs.c -- sharing out autograd's nodes among the tensors that keep them: see graphs.h. */
#include "py/census/graphs.h"

#include <stdlib.h>

#include "os/base/pages.h"
#include "py/base/objects.h"

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
        .oldest = MT_TORCH_LEAF,
    };
    graphs->n++;
    return 0;
}

/* For qsort. */
static int
older_first(const void *a, const void *b)
{
    const mt_graph *left = a, *right = b;

    if (left->number != right->number) return left->number < right->number ? -1 : 1;
    return left->order < right->order ? -1 : 1;
}

typedef struct sharing {
    mt_graphs *graphs;
    mt_graph *root; /* whose nodes are counted now */
    size_t most;
    uint64_t then;
} sharing;

/* A mt_torch_visit: what an older root has reached is passed by, with all that it leads to. */
static int
share(void *ctx, const void *node, uint64_t number)
{
    sharing *s = ctx;
    mt_graphs *graphs = s->graphs;

    if (number == MT_TORCH_LEAF) return MT_TORCH_PASS;
    if (mt_ptrset_reserve(&graphs->seen, graphs->seen.n + 1) < 0) return MT_TORCH_STOP;
    if (mt_ptrset_find(&graphs->seen, node) != MT_PTRSET_NONE) return MT_TORCH_PASS;
    if (graphs->nodes == s->most) {
        graphs->cut = true;
        return MT_TORCH_STOP;
    }
    (void)mt_ptrset_add(&graphs->seen, node, (size_t)(s->root - graphs->roots));
    graphs->nodes++;
    s->root->nodes++;
    s->root->old += number < s->then;
    if (number < s->root->oldest) s->root->oldest = number;
    return MT_TORCH_ENTER;
}

int
mt_graphs_count(mt_graphs *graphs, size_t most, uint64_t then)
{
    sharing s = {.graphs = graphs, .most = most, .then = then};

    if (graphs->n > 1) qsort(graphs->roots, graphs->n, sizeof *graphs->roots, older_first);
    for (size_t i = 0; i < graphs->n && !graphs->cut; i++) {
        s.root = &graphs->roots[i];
        if (graphs->shim->graph_walk(s.root->root, s.root->of_grad, share, &s) == MT_TORCH_STOP &&
            !graphs->cut)
            return -1;
    }
    return 0;
}

/* --- from Python ------------------------------------------------------------------------------ */

static PyObject *
graph_row(const void *from, size_t i)
{
    const mt_graph *graph = &((const mt_graph *)from)[i];

    return Py_BuildValue("OKKKO", graph->root, (unsigned long long)graph->nodes,
                         (unsigned long long)graph->old, (unsigned long long)graph->oldest,
                         graph->of_grad ? Py_True : Py_False);
}

static PyObject *
share_out(mt_graphs *graphs, PyObject *tensors, size_t most, uint64_t then)
{
    PyObject *rows, *result;

    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++)
        if (mt_graphs_add(graphs, PyTuple_GET_ITEM(tensors, i)) < 0) return PyErr_NoMemory();
    if (mt_graphs_count(graphs, most, then) < 0) return PyErr_NoMemory();
    if ((rows = mt_py_list(graphs->n, graph_row, graphs->roots)) == NULL) return NULL;
    result = Py_BuildValue("OKO", rows, (unsigned long long)graphs->now,
                           graphs->cut ? Py_True : Py_False);
    Py_DECREF(rows);
    return result;
}

/* False with an error. */
static bool
are_tensors(const mt_state *st, PyObject *tensors)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        PyTypeObject *type = Py_TYPE(PyTuple_GET_ITEM(tensors, i));
        if (PyType_IsSubtype(type, st->tensor)) continue;
        PyErr_Format(PyExc_TypeError, "tensors are torch.Tensor, not %s", type->tp_name);
        return false;
    }
    return true;
}

PyObject *
mt_py_graphs(PyObject *module, PyObject *args)
{
    mt_state *st = PyModule_GetState(module);
    PyObject *list, *tensors, *result = NULL;
    unsigned long long then;
    mt_graphs graphs;
    Py_ssize_t most;

    if (!PyArg_ParseTuple(args, "O!nK:_graphs", &PyList_Type, &list, &most, &then)) return NULL;
    if (most < 0) return PyErr_Format(PyExc_ValueError, "most is 0 or more, not %zd", most);
    if (st->shim == NULL) Py_RETURN_NONE;
    /* A tuple: the rows name tensors, and making them may run code that empties the list. */
    if ((tensors = PyList_AsTuple(list)) == NULL) return NULL;
    if (are_tensors(st, tensors)) {
        mt_graphs_begin(&graphs, st->shim);
        result = share_out(&graphs, tensors, (size_t)most, then);
        mt_graphs_end(&graphs);
    }
    Py_DECREF(tensors);
    return result;
}
