/* set.c -- how this file works: memtools._core.GradSet, the gradients of a list of parameters,
 * measured and multiplied in C. See csrc/core/grad/set.h.
 *
 *   parameters ──► .grad, now ──► flat ones: spans of the native set, GIL given up during the pass
 *                             └─► others: their numbers, "left" to the caller
 *
 * Every call looks the gradients up: read_grads takes a reference to each that lies flat in
 * host memory and makes the native list of them, the pass runs by torch's threads, and the
 * references are dropped. What may fail comes before a pass that writes. The arrays are as long as
 * the list of parameters and serve every call, so that only one call may run at a time. remember()
 * and changed() compare what the shim sees of the gradients with what it saw. */
#include "py/base/state.h"

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "core/grad/set.h"
#include "py/base/errors.h"
#include "py/base/objects.h"
#include "py/base/ptrset.h"
#include "py/tensor/many.h"

typedef struct GradSet {
    PyObject_HEAD
    mt_state *state;      /* kept alive by the type */
    PyObject *parameters; /* a tuple of torch.Tensor */
    mt_gradset *set;
    Py_ssize_t n, spans; /* parameters, and those of them that the last call read */
    mt_torch_flat *grads;
    mt_grad_span *span;
    Py_ssize_t *owner;             /* of each span: the number of its parameter */
    mt_ptrset addresses;           /* of the flat tensors that were looked at; room for n */
    mt_torch_seen *seen;           /* what remember() saw; NULL: nothing yet */
    const mt_torch_ops *seen_with; /* the shim that saw it */
    bool busy;
} GradSet;

/* --- reading --------------------------------------------------------------------------------- */

/* All arrays are as long as the list, and the list does not change while a pass runs. */
static bool
gradset_begin(GradSet *self)
{
    if (!self->busy) return self->busy = true;
    PyErr_SetString(PyExc_RuntimeError, "another thread is in a call of this GradSet; make one "
                                        "for each thread");
    return false;
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
    mt_ptrset_clear(&self->addresses);
    for (Py_ssize_t i = 0; i < self->n; i++) {
        mt_torch_flat *grad = &self->grads[i];
        mt_py_flats one = {grad, 1, grads->shim};
        if (grad->is != MT_TORCH_FLAT || grad->count == 0) continue;
        if (mt_ptrset_add(&self->addresses, grad->data, (size_t)i) == MT_PTRSET_NONE) continue;
        mt_py_flat_drop(&one);
        grad->is = MT_TORCH_OTHER;
    }
}

/* Holds the gradients until mt_py_flat_drop(). -1 with an error, and nothing held. */
static int
read_grads(GradSet *self, bool writing, const char *doing, mt_py_flats *grads)
{
    *grads = (mt_py_flats){.at = self->grads, .n = self->n};
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

/* As many threads as torch uses; without the shim this one. */
static void
plan(const mt_torch_ops *shim, pass *out)
{
    out->par = NULL;
    out->threads = shim != NULL ? shim->threads() : 1;
    assert(out->threads >= 1);
    if (out->threads == 1) return;
    out->ops = (mt_parallel_ops){.run = shim->parallel};
    out->par = &out->ops;
}

enum { FIELDS = 6 };

static PyObject *
measure_tuple(const GradSet *self, const mt_grad_total *total)
{
    PyObject *tuple = PyStructSequence_New(self->state->GradMeasure);
    Py_ssize_t bad = total->first_bad == SIZE_MAX ? -1 : self->owner[total->first_bad];
    PyObject *items[FIELDS];

    if (tuple == NULL) return NULL;
    items[0] = PyFloat_FromDouble(total->sum.squares);
    items[1] = PyLong_FromSsize_t(self->spans);
    items[2] = PyLong_FromUnsignedLongLong(total->sum.infs);
    items[3] = PyLong_FromUnsignedLongLong(total->sum.nans);
    items[4] = PyLong_FromSsize_t(bad);
    items[5] = left_tuple(self);
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
measure(GradSet *self)
{
    PyObject *result;
    mt_grad_total total;
    mt_py_flats grads;
    pass p;

    if (read_grads(self, false, "GradSet.measure()", &grads) < 0) return NULL;
    plan(grads.shim, &p);
    Py_BEGIN_ALLOW_THREADS;
    mt_gradset_measure(self->set, p.par, p.threads, &total);
    Py_END_ALLOW_THREADS;
    result = measure_tuple(self, &total);
    mt_py_flat_drop(&grads);
    return result;
}

static PyObject *
gradset_measure(PyObject *op, PyObject *Py_UNUSED(none))
{
    GradSet *self = (GradSet *)op;
    PyObject *result;

    if (!gradset_begin(self)) return NULL;
    result = measure(self);
    self->busy = false;
    return result;
}

static PyObject *
multiply(GradSet *self, double factor)
{
    bool changes = factor != 1;
    PyObject *left;
    mt_py_flats grads;
    pass p;

    if (read_grads(self, changes, "GradSet.multiply()", &grads) < 0) return NULL;
    left = left_tuple(self);
    if (left != NULL && changes && mt_py_flat_written(&grads) < 0) Py_CLEAR(left);
    if (left != NULL && changes) {
        plan(grads.shim, &p);
        Py_BEGIN_ALLOW_THREADS;
        mt_gradset_scale(self->set, factor, p.par, p.threads);
        Py_END_ALLOW_THREADS;
    }
    mt_py_flat_drop(&grads);
    return left;
}

static PyObject *
gradset_multiply(PyObject *op, PyObject *factor)
{
    GradSet *self = (GradSet *)op;
    double by = PyFloat_AsDouble(factor);
    PyObject *result;

    if (by == -1 && PyErr_Occurred()) return NULL;
    if (!gradset_begin(self)) return NULL;
    result = multiply(self, by);
    self->busy = false;
    return result;
}

/* --- whether they have changed ----------------------------------------------------------- */

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

/* A new tuple of torch.Tensor. NULL with an error. */
static PyObject *
tensor_tuple(mt_state *st, PyObject *sequence)
{
    PyObject *tuple = PySequence_Tuple(sequence);

    if (tuple == NULL || mt_state_connect(st) < 0) {
        Py_XDECREF(tuple);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        if (PyObject_TypeCheck(item, st->tensor)) continue;
        PyErr_Format(PyExc_TypeError, "parameters[%zd] must be a torch.Tensor, got %s", i,
                     Py_TYPE(item)->tp_name);
        Py_DECREF(tuple);
        return NULL;
    }
    return tuple;
}

static int
init(GradSet *self, PyObject *parameters)
{
    mt_error err;
    size_t n;

    self->parameters = tensor_tuple(self->state, parameters);
    if (self->parameters == NULL || refuse_twice(self->parameters) < 0) return -1;
    self->n = PyTuple_GET_SIZE(self->parameters);
    n = (size_t)self->n;
    self->grads = PyMem_Calloc(n + 1, sizeof *self->grads);
    self->span = PyMem_Calloc(n + 1, sizeof *self->span);
    self->owner = PyMem_Calloc(n + 1, sizeof *self->owner);
    if (self->grads == NULL || self->span == NULL || self->owner == NULL ||
        mt_ptrset_reserve(&self->addresses, n) != 0) {
        PyErr_NoMemory();
        return -1;
    }
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
    if (self->seen != NULL) self->seen_with->grads_forget(self->seen, (size_t)self->n);
    PyMem_Free(self->seen);
    PyMem_Free(self->grads);
    PyMem_Free(self->span);
    PyMem_Free(self->owner);
    mt_ptrset_fini(&self->addresses);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"parameters", T_OBJECT, offsetof(GradSet, parameters), READONLY, "The tensors, as a tuple."},
    {"tensors", T_PYSSIZET, offsetof(GradSet, spans), READONLY,
     "How many gradients the last call read by itself."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    {"measure", gradset_measure, METH_NOARGS,
     "measure($self, /)\n--\n\n"
     "The gradients' sum of squares, and what in them is not finite."},
    {"multiply", gradset_multiply, METH_O,
     "multiply($self, factor, /)\n--\n\n"
     "Multiply the gradients in place; the numbers of those left."},
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
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memtools._core.GradSet",
    .basicsize = sizeof(GradSet),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_gradset_register(PyObject *module, mt_state *st)
{
    PyStructSequence_Field fields[FIELDS + 1] = {
        {"sum_squares", "of all elements that were read; not finite where they are not"},
        {"tensors", "gradients that were read"},
        {"infs", "elements that are infinite"},
        {"nans", "elements that are not a number"},
        {"first_bad", "number of the first parameter whose gradient is not finite, or -1"},
        {"left", "numbers of parameters whose gradients were not read"},
        {NULL, NULL},
    };
    PyStructSequence_Desc desc = {"memtools._core.GradMeasure", "What GradSet.measure() found.",
                                  fields, FIELDS};
    PyTypeObject *type = NULL;
    int failed = mt_py_add_type(module, &spec, &type);

    Py_XDECREF(type);
    if (failed || (st->GradMeasure = PyStructSequence_NewType(&desc)) == NULL) return -1;
    return PyModule_AddType(module, st->GradMeasure);
}
