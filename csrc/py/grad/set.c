/* set.c -- memtools._core.GradSet: the gradients of a list of parameters, measured, multiplied
 * and added up in C. See csrc/core/grad/set.h.
 *
 *   parameters ──► .grad, now ──► flat ones: spans of the native set, GIL given up during the pass
 *                             └─► others: their numbers, "left" to the caller
 */
#include "py/base/state.h"

#include <math.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "core/grad/set.h"
#include "py/base/errors.h"
#include "py/base/objects.h"
#include "py/tensor/many.h"

typedef struct GradSet {
    PyObject_HEAD
    mt_state *state;      /* kept alive by the type */
    PyObject *parameters; /* a tuple of torch.Tensor */
    mt_gradset *set;
    Py_ssize_t n, spans; /* parameters, and those of them that the last call read */
    mt_torch_flat *grads, *targets;
    mt_grad_span *span;
    Py_ssize_t *owner; /* of each span: the number of its parameter */
    float **into;
    mt_ptrset addresses;           /* of the flat tensors that were looked at; room for n */
    mt_torch_seen *seen;           /* what remember() saw; NULL: nothing yet */
    const mt_torch_ops *seen_with; /* the shim that saw it */
    bool busy;
} GradSet;

/* --- reading --------------------------------------------------------------------------------- */

/* All arrays are as long as the list, and the list does not change while a pass runs. */
static bool
begin(GradSet *self)
{
    if (!self->busy) return self->busy = true;
    PyErr_SetString(PyExc_RuntimeError, "another thread is in a call of this GradSet; make one "
                                        "for each thread");
    return false;
}

static mt_py_flats
flats(GradSet *self, mt_torch_flat *at)
{
    return (mt_py_flats){.at = at, .n = self->n};
}

/* The spans of what is flat, and the native list of them. */
static int
make_spans(GradSet *self, const char *doing)
{
    mt_error err;

    self->spans = 0;
    for (Py_ssize_t i = 0; i < self->n; i++) {
        const mt_torch_flat *grad = &self->grads[i];
        mt_grad_span *span = &self->span[self->spans];
        if (grad->is != MT_TORCH_FLAT) continue;
        *span = (mt_grad_span){.data = grad->data, .n = grad->count};
        mt_py_flat_dtype(grad, &span->dtype);
        self->owner[self->spans++] = i;
    }
    if (mt_gradset_set(self->set, self->span, (size_t)self->spans, &err) == MT_OK) return 0;
    mt_py_raise(self->state, &err, doing);
    return -1;
}

/* The same memory as the gradient of two parameters is multiplied once by us and once by the
 * caller, in that order: not by two threads at a time. */
static void
leave_shared(GradSet *self, const mt_py_flats *grads)
{
    Py_ssize_t earlier, k = 0;

    mt_ptrset_clear(&self->addresses);
    while ((k = mt_py_flat_shared(grads, k, &self->addresses, &earlier)) >= 0) {
        mt_py_flats one = {&self->grads[k], 1, grads->shim};
        mt_py_flat_drop(&one);
        self->grads[k].is = MT_TORCH_OTHER;
    }
}

/* Holds the gradients until mt_py_flat_drop(). -1 with an error, and nothing held. */
static int
read_grads(GradSet *self, bool writing, const char *doing, mt_py_flats *grads)
{
    *grads = flats(self, self->grads);
    if (mt_state_connect(self->state) < 0) return -1;
    if (mt_py_flat_read(self->state, self->parameters, true, writing, grads) < 0) return -1;
    if (writing) leave_shared(self, grads);
    if (make_spans(self, doing) == 0) return 0;
    mt_py_flat_drop(grads);
    return -1;
}

/* The numbers of gradients that there are, but not read. NULL with an error. */
static PyObject *
left_tuple(const GradSet *self)
{
    PyObject *list = PyList_New(0), *tuple;

    for (Py_ssize_t i = 0; list != NULL && i < self->n; i++) {
        if (self->grads[i].is != MT_TORCH_OTHER) continue;
        if (mt_py_append(list, PyLong_FromSsize_t(i)) < 0) Py_CLEAR(list);
    }
    if (list == NULL) return NULL;
    tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    return tuple;
}

/* --- passes ---------------------------------------------------------------------------------- */

typedef struct pass {
    mt_parallel_ops ops;
    const mt_parallel_ops *par;
    int threads;
} pass;

/* threads: 0 for as many as torch uses, else at most so many. */
static int
plan(const mt_torch_ops *shim, int threads, pass *out)
{
    int most = shim != NULL ? shim->threads() : 1;

    if (threads < 0) {
        PyErr_Format(PyExc_ValueError, "threads=%d; give 1 or more, or 0 for as many as torch uses",
                     threads);
        return -1;
    }
    out->threads = threads == 0 || threads > most ? most : threads;
    if (out->threads < 1) out->threads = 1;
    out->par = NULL;
    if (shim == NULL || out->threads == 1) return 0;
    out->ops = (mt_parallel_ops){.run = shim->parallel};
    out->par = &out->ops;
    return 0;
}

enum { FIELDS = 7 };

static PyObject *
measure_tuple(const GradSet *self, const mt_grad_total *total)
{
    PyObject *tuple = PyStructSequence_New(self->state->GradMeasure);
    Py_ssize_t bad = total->first_bad == SIZE_MAX ? -1 : self->owner[total->first_bad];
    PyObject *items[FIELDS];

    if (tuple == NULL) return NULL;
    items[0] = PyFloat_FromDouble(total->sum.squares);
    items[1] = PyLong_FromSize_t(total->elements);
    items[2] = PyLong_FromSsize_t(self->spans);
    items[3] = PyLong_FromUnsignedLongLong(total->sum.infs);
    items[4] = PyLong_FromUnsignedLongLong(total->sum.nans);
    items[5] = PyLong_FromSsize_t(bad);
    items[6] = left_tuple(self);
    for (Py_ssize_t i = 0; i < FIELDS; i++)
        PyStructSequence_SetItem(tuple, i, items[i]);
    for (Py_ssize_t i = 0; i < FIELDS; i++)
        if (items[i] == NULL) {
            Py_DECREF(tuple);
            return NULL;
        }
    return tuple;
}

static PyObject *
measure(GradSet *self, int threads)
{
    PyObject *result = NULL;
    mt_grad_total total;
    mt_py_flats grads;
    pass p;

    if (read_grads(self, false, "GradSet.measure()", &grads) < 0) return NULL;
    if (plan(grads.shim, threads, &p) == 0) {
        Py_BEGIN_ALLOW_THREADS;
        mt_gradset_measure(self->set, p.par, p.threads, &total);
        Py_END_ALLOW_THREADS;
        result = measure_tuple(self, &total);
    }
    mt_py_flat_drop(&grads);
    return result;
}

static PyObject *
gradset_measure(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"threads", NULL};
    GradSet *self = (GradSet *)op;
    PyObject *result;
    int threads = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|i:measure", names, &threads)) return NULL;
    if (!begin(self)) return NULL;
    result = measure(self, threads);
    self->busy = false;
    return result;
}

/* What may fail comes first: after the pass there is nothing to undo it with. */
static PyObject *
multiply(GradSet *self, double factor, double limit, int threads)
{
    bool changes = factor != 1 || !isinf(limit);
    PyObject *left = NULL;
    mt_py_flats grads;
    pass p;

    if (read_grads(self, changes, "GradSet.multiply()", &grads) < 0) return NULL;
    if (plan(grads.shim, threads, &p) == 0) left = left_tuple(self);
    if (left != NULL && changes && mt_py_flat_written(&grads) < 0) Py_CLEAR(left);
    if (left != NULL && changes) {
        Py_BEGIN_ALLOW_THREADS;
        mt_gradset_scale(self->set, factor, limit, p.par, p.threads);
        Py_END_ALLOW_THREADS;
    }
    mt_py_flat_drop(&grads);
    return left;
}

static PyObject *
gradset_multiply(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"factor", "limit", "threads", NULL};
    GradSet *self = (GradSet *)op;
    double factor, limit = INFINITY;
    PyObject *result;
    int threads = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|di:multiply", names, &factor, &limit,
                                     &threads))
        return NULL;
    if (!(limit >= 0)) {
        PyErr_SetString(PyExc_ValueError,
                        "limit is the largest size that an element may have: 0 or more, not "
                        "negative or NaN");
        return NULL;
    }
    if (!begin(self)) return NULL;
    result = multiply(self, factor, limit, threads);
    self->busy = false;
    return result;
}

/* --- accumulation ---------------------------------------------------------------------------- */

static int
wrong_target(Py_ssize_t i, const char *why)
{
    PyErr_Format(PyExc_ValueError,
                 "into[%zd] %s; make it by torch.zeros_like(gradient, dtype=torch.float32)", i,
                 why);
    return -1;
}

/* One for each gradient that is read, of its shape and layout. */
static int
check_targets(GradSet *self)
{
    for (Py_ssize_t s = 0; s < self->spans; s++) {
        Py_ssize_t i = self->owner[s];
        const mt_torch_flat *target = &self->targets[i];
        mt_dtype dtype;
        if (target->is != MT_TORCH_FLAT)
            return wrong_target(i, "is no dense tensor on the CPU that can be written to");
        if (!mt_py_flat_dtype(target, &dtype) || dtype != MT_F32)
            return wrong_target(i, "is not float32");
        if (!mt_py_flat_alike(target, &self->grads[i]))
            return wrong_target(i, "has not the shape and strides of the gradient");
        self->into[s] = target->data;
    }
    return 0;
}

/* A target whose parameter has no gradient here is not written to. */
static void
forget_spare_targets(GradSet *self, const mt_py_flats *targets)
{
    for (Py_ssize_t i = 0; i < self->n; i++) {
        mt_py_flats one = {&self->targets[i], 1, targets->shim};
        if (self->grads[i].is == MT_TORCH_FLAT) continue;
        mt_py_flat_drop(&one);
        self->targets[i].is = MT_TORCH_NONE;
    }
}

static int
refuse_shared(GradSet *self, const mt_py_flats *targets)
{
    Py_ssize_t k, earlier;

    mt_ptrset_clear(&self->addresses);
    if ((k = mt_py_flat_shared(targets, 0, &self->addresses, &earlier)) < 0) return 0;
    PyErr_Format(PyExc_ValueError,
                 "into[%zd] and into[%zd] are the same memory; give each gradient its own", earlier,
                 k);
    return -1;
}

static PyObject *
add(GradSet *self, const mt_py_flats *targets, bool first, bool measured, int threads)
{
    mt_grad_total total = {.first_bad = SIZE_MAX};
    pass p;

    if (check_targets(self) < 0 || plan(targets->shim, threads, &p) < 0) return NULL;
    forget_spare_targets(self, targets);
    if (refuse_shared(self, targets) < 0) return NULL;
    if (mt_py_flat_written(targets) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    mt_gradset_accumulate(self->set, self->into, first, p.par, p.threads, measured ? &total : NULL);
    Py_END_ALLOW_THREADS;
    return measured ? measure_tuple(self, &total) : left_tuple(self);
}

static PyObject *
add_to(GradSet *self, PyObject *into, bool first, bool measured, int threads)
{
    mt_py_flats grads, targets = flats(self, self->targets);
    PyObject *result;

    if (read_grads(self, false, "GradSet.add_to()", &grads) < 0) return NULL;
    if (mt_py_flat_read(self->state, into, false, true, &targets) < 0) {
        mt_py_flat_drop(&grads);
        return NULL;
    }
    result = add(self, &targets, first, measured, threads);
    mt_py_flat_drop(&targets);
    mt_py_flat_drop(&grads);
    return result;
}

/* --- whether somebody changed them ----------------------------------------------------------- */

static PyObject *
gradset_remember(PyObject *op, PyObject *Py_UNUSED(none))
{
    GradSet *self = (GradSet *)op;

    if (mt_state_connect(self->state) < 0) return NULL;
    if (self->state->shim == NULL) Py_RETURN_FALSE;
    if (self->seen == NULL) {
        self->seen = PyMem_Calloc((size_t)self->n + 1, sizeof *self->seen);
        if (self->seen == NULL) return PyErr_NoMemory();
        self->seen_with = self->state->shim;
    }
    self->seen_with->grads_see((void *const *)&PyTuple_GET_ITEM(self->parameters, 0),
                               (size_t)self->n, self->seen);
    Py_RETURN_TRUE;
}

static PyObject *
gradset_changed(PyObject *op, PyObject *Py_UNUSED(none))
{
    GradSet *self = (GradSet *)op;

    if (self->seen == NULL) return PyLong_FromLong(MT_TORCH_SAME);
    return PyLong_FromLong(self->seen_with->grads_changed(
        (void *const *)&PyTuple_GET_ITEM(self->parameters, 0), (size_t)self->n, self->seen));
}

static void
forget(GradSet *self)
{
    if (self->seen != NULL) self->seen_with->grads_forget(self->seen, (size_t)self->n);
    PyMem_Free(self->seen);
}

/* A new tuple of torch.Tensor. NULL with an error. */
static PyObject *
tensor_tuple(mt_state *st, PyObject *sequence, const char *name)
{
    PyObject *tuple = PySequence_Tuple(sequence);

    if (tuple == NULL || mt_state_connect(st) < 0) {
        Py_XDECREF(tuple);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        if (PyObject_TypeCheck(item, st->tensor)) continue;
        PyErr_Format(PyExc_TypeError, "%s[%zd] is a torch.Tensor, got %s", name, i,
                     Py_TYPE(item)->tp_name);
        Py_DECREF(tuple);
        return NULL;
    }
    return tuple;
}

static PyObject *
gradset_add_to(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"into", "first", "measure", "threads", NULL};
    GradSet *self = (GradSet *)op;
    PyObject *into, *targets, *result = NULL;
    int first = 0, measured = 0, threads = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$ppi:add_to", names, &into, &first, &measured,
                                     &threads))
        return NULL;
    if ((targets = tensor_tuple(self->state, into, "into")) == NULL) return NULL;
    if (PyTuple_GET_SIZE(targets) != self->n) {
        PyErr_Format(PyExc_ValueError, "into has %zd tensors for %zd parameters; give one for each",
                     PyTuple_GET_SIZE(targets), self->n);
    } else if (begin(self)) {
        result = add_to(self, targets, first, measured, threads);
        self->busy = false;
    }
    Py_DECREF(targets);
    return result;
}

/* --- the type -------------------------------------------------------------------------------- */

static int
refuse_twice(PyObject *parameters)
{
    PyObject *seen = PySet_New(parameters);
    Py_ssize_t n = PyTuple_GET_SIZE(parameters);
    int failed = -1;

    if (seen == NULL) return -1;
    if (PySet_GET_SIZE(seen) == n)
        failed = 0;
    else
        PyErr_Format(PyExc_ValueError,
                     "%zd of %zd parameters are given more than once; give each once",
                     n - PySet_GET_SIZE(seen), n);
    Py_DECREF(seen);
    return failed;
}

static bool
make_arrays(GradSet *self)
{
    size_t n = (size_t)self->n;

    self->grads = PyMem_Calloc(n + 1, sizeof *self->grads);
    self->targets = PyMem_Calloc(n + 1, sizeof *self->targets);
    self->span = PyMem_Calloc(n + 1, sizeof *self->span);
    self->owner = PyMem_Calloc(n + 1, sizeof *self->owner);
    self->into = (float **)PyMem_Calloc(n + 1, sizeof *self->into);
    if (self->grads != NULL && self->targets != NULL && self->span != NULL && self->owner != NULL &&
        self->into != NULL && mt_ptrset_reserve(&self->addresses, n) == 0)
        return true;
    PyErr_NoMemory();
    return false;
}

static int
init(GradSet *self, PyObject *parameters)
{
    mt_error err;

    self->parameters = tensor_tuple(self->state, parameters, "parameters");
    if (self->parameters == NULL || refuse_twice(self->parameters) < 0) return -1;
    self->n = PyTuple_GET_SIZE(self->parameters);
    if (!make_arrays(self)) return -1;
    if (mt_gradset_new(&mt_alloc_libc, &self->set, &err) == MT_OK) return 0;
    mt_py_raise(self->state, &err, "GradSet()");
    return -1;
}

static PyObject *
gradset_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", NULL};
    mt_state *st = mt_state_of_type(type);
    PyObject *parameters;
    GradSet *self;

    if (st == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "O:GradSet", names, &parameters))
        return NULL;
    if ((self = (GradSet *)type->tp_alloc(type, 0)) == NULL) return NULL;
    self->state = st;
    if (init(self, parameters) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static int
gradset_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((GradSet *)op)->parameters);
    return 0;
}

/* No tp_clear: a tuple of tensors is part of a cycle only through something that can be cleared,
 * and a method that runs meanwhile relies on its parameters. */
static void
gradset_dealloc(PyObject *op)
{
    GradSet *self = (GradSet *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    Py_XDECREF(self->parameters);
    mt_gradset_free(self->set);
    forget(self);
    PyMem_Free(self->grads);
    PyMem_Free(self->targets);
    PyMem_Free(self->span);
    PyMem_Free(self->owner);
    PyMem_Free((void *)self->into);
    mt_ptrset_fini(&self->addresses);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
get_chunks(PyObject *op, void *Py_UNUSED(which))
{
    return PyLong_FromSize_t(mt_gradset_chunks(((GradSet *)op)->set));
}

static PyObject *
get_rebuilt(PyObject *op, void *Py_UNUSED(which))
{
    return PyLong_FromUnsignedLongLong(mt_gradset_rebuilt(((GradSet *)op)->set));
}

static PyGetSetDef getters[] = {
    {"chunks", get_chunks, NULL, "Pieces of at most 32,768 elements that a pass consists of.",
     NULL},
    {"rebuilt", get_rebuilt, NULL,
     "How often a call found other gradients, or the same ones elsewhere, than the call before.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"parameters", T_OBJECT, offsetof(GradSet, parameters), READONLY, "The tensors, as a tuple."},
    {"tensors", T_PYSSIZET, offsetof(GradSet, spans), READONLY,
     "How many gradients the last call read by itself."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    {"measure", MT_PY_FUNCTION(gradset_measure), METH_VARARGS | METH_KEYWORDS,
     "measure($self, /, threads=0)\n--\n\n"
     "The gradients' sum of squares, and what in them is not finite."},
    {"multiply", MT_PY_FUNCTION(gradset_multiply), METH_VARARGS | METH_KEYWORDS,
     "multiply($self, /, factor, limit=inf, threads=0)\n--\n\n"
     "Multiply the gradients in place, then clip by value; the numbers of those left."},
    {"add_to", MT_PY_FUNCTION(gradset_add_to), METH_VARARGS | METH_KEYWORDS,
     "add_to($self, /, into, *, first=False, measure=False, threads=0)\n--\n\n"
     "into[i] += gradient i, in float32, or = where first is true. Gives the measure of the "
     "results where that is asked for, else the numbers of those left."},
    {"remember", gradset_remember, METH_NOARGS,
     "remember($self, /)\n--\n\n"
     "Remember which tensors the gradients are and how often each was written to, without keeping "
     "their memory. False without the torch shim: nothing is remembered."},
    {"changed", gradset_changed, METH_NOARGS,
     "changed($self, /)\n--\n\n"
     "The most that happened to a gradient since remember(): 0 nothing, 1 written to, 2 replaced "
     "or made, 3 set to None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "GradSet(parameters, /)\n--\n\nThe gradients that these tensors have at each call. "
                "Other threads may drop them during a pass, but not at its start."},
    {Py_tp_new, gradset_new},
    {Py_tp_dealloc, gradset_dealloc},
    {Py_tp_traverse, gradset_traverse},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getters},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memtools._core.GradSet",
    .basicsize = sizeof(GradSet),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

static PyTypeObject *
measure_type(void)
{
    PyStructSequence_Field fields[FIELDS + 1] = {
        {"sum_squares", "of all elements that were read; not finite where they are not"},
        {"elements", "how many"},
        {"tensors", "gradients"},
        {"infs", "elements that are infinite"},
        {"nans", "elements that are not a number"},
        {"first_bad", "number of the first parameter whose gradient is not finite, or -1"},
        {"left", "numbers of parameters whose gradients were not read"},
        {NULL, NULL},
    };
    PyStructSequence_Desc desc = {"memtools._core.GradMeasure", "What GradSet.measure() found.",
                                  fields, FIELDS};

    return PyStructSequence_NewType(&desc);
}

int
mt_py_gradset_register(PyObject *module, mt_state *st)
{
    PyTypeObject *type = NULL;
    int failed = mt_py_add_type(module, &spec, &type);

    Py_XDECREF(type);
    if (failed || (st->GradMeasure = measure_type()) == NULL) return -1;
    return PyModule_AddType(module, st->GradMeasure);
}
