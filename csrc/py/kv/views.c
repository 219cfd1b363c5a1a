/* views.c -- tensors over a lease's addresses.
 *
 *   storage   | slot of row 0          | slot of row 1          | ...    one for all views
 *   view      |  first |-- [H, T, D] --|  first |-- [H, T, D] --|        [B, H, T, D]
 *             |------------------------|                                 B's stride: one slot
 *
 * How this file works. The first view of a lease makes the storage: by the shim, or without it as a
 * tensor by DLPack. Either calls back when the last view has died. Every view after that is sizes,
 * strides and two offsets into the storage. update() ends here with mt_py_kvlease_views; layer()
 * and buffers() first have the core make ready what they show. */
#include "py/kv/pool.h"

#include <string.h>

#include "py/base/errors.h"
#include "py/base/number.h"
#include "py/base/objects.h"

static size_t
span_bytes(const KVLease *self)
{
    return mt_kvlease_max_rows(self->core) * mt_kvlease_geom(self->core)->slot_bytes;
}

/* --- the storage --------------------------------------------------------------------------- */

static mt_kvhold *
hold_new(const KVLease *self)
{
    mt_kvhold *hold = mt_kvhold_new(self->pool->guests, self->core, self->number);

    if (hold == NULL) PyErr_NoMemory();
    return hold;
}

/* Where no storage came to be: both references are ours. */
static void
hold_cancel(mt_kvhold *hold)
{
    mt_kvhold_done(hold);
    mt_kvhold_drop(hold);
}

static void
bytes_tensor_done(DLManagedTensorVersioned *tensor)
{
    mt_kvhold_done(tensor->manager_ctx);
}

/* All slots as bytes. helpers.base calls it, with inference mode off. */
static PyObject *
bytes_tensor(PyObject *op, PyObject *Py_UNUSED(none))
{
    KVLease *self = (KVLease *)op;
    mt_kvhold *hold = hold_new(self);
    int cuda = self->pool->cuda_device;
    void *tensor;

    if (hold == NULL) return NULL;
    hold->bytes = (int64_t)span_bytes(self);
    hold->tensor = (DLManagedTensorVersioned){
        .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
        .manager_ctx = hold,
        .deleter = bytes_tensor_done,
        .dl_tensor = {.data = mt_kvlease_base(self->core),
                      .device = cuda < 0 ? (DLDevice){kDLCPU, 0} : (DLDevice){kDLCUDA, cuda},
                      .ndim = 1,
                      .dtype = {kDLUInt, 8, 1},
                      .shape = &hold->bytes},
    };
    if (self->state->dlpack->managed_tensor_to_py_object_no_sync(&hold->tensor, &tensor) != 0) {
        hold_cancel(hold); /* torch does not, on failure */
        return NULL;
    }
    self->hold = hold;
    return tensor;
}

static int
make_base(KVLease *self)
{
    static const PyMethodDef def = {"bytes_tensor", bytes_tensor, METH_NOARGS, NULL};
    PyObject *make = PyCFunction_New((PyMethodDef *)&def, (PyObject *)self);

    if (make == NULL) return -1;
    self->base = PyObject_CallMethod(self->pool->helpers, "base", "OO", make, self->pool->dtype);
    Py_DECREF(make);
    if (self->base != NULL) return 0;
    mt_kvhold_drop(self->hold);
    self->hold = NULL;
    return -1;
}

static int
make_storage(KVLease *self)
{
    const mt_torch_ops *shim = self->state->shim;
    mt_kvhold *hold = hold_new(self);

    if (hold == NULL) return -1;
    self->storage = shim->storage_new(mt_kvlease_base(self->core), span_bytes(self),
                                      self->pool->cuda_device, mt_kvhold_done, hold);
    if (self->storage == NULL) {
        hold_cancel(hold);
        PyErr_NoMemory();
        return -1;
    }
    self->shim = shim;
    self->hold = hold;
    mt_kvhold_watch(hold, shim, self->storage);
    return 0;
}

/* pre: busy. */
static int
ready_storage(KVLease *self)
{
    if (self->storage != NULL || self->base != NULL) return 0;
    if (self->viewed == NULL &&
        (self->viewed = PyMem_Calloc(self->pool->config.layers, sizeof *self->viewed)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (self->state->shim == NULL || self->pool->dtype_number < 0) return make_base(self);
    return make_storage(self);
}

/* --- what autograd saved ----------------------------------------------------------------------

   All views of a lease have one version counter. It moves when what one of them shows changes, so
   that a backward pass through it is refused:

       crop, reorder, select     always
       update                    where it writes over what a view of the layer shows: after a crop,
                                 past the end of a shorter row, or where more was asked to be shown
       a write through a view    by torch itself

   After it has moved, all views that were handed out are of an older version, and what they show
   is forgotten here: of the layers of one forward pass only the first moves the counter. */

int
mt_py_kvlease_changed(KVLease *self)
{
    PyObject *done;

    if (self->storage != NULL) self->shim->storage_written(self->storage);
    if (self->base == NULL) return 0;
    done = PyObject_CallMethod(self->pool->helpers, "overwritten", "O", self->base);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
mt_py_kvlease_overwrites(KVLease *self, size_t layer, const mt_kvstep *step)
{
    size_t rows = mt_kvlease_rows(self->core), viewed;
    bool over = false;

    if (self->viewed == NULL) return 0;
    viewed = self->viewed[layer];
    if (mt_kvlease_shortest(self->core, layer) >= viewed) return 0; /* nearly always */
    for (size_t row = 0; row < rows && !over; row++)
        over = mt_kvlease_length(self->core, layer, row) < viewed && mt_kvstep_count(step, row) > 0;
    if (!over) return 0;
    if (!self->all_viewed)
        memset(self->viewed, 0, self->pool->config.layers * sizeof *self->viewed);
    return mt_py_kvlease_changed(self);
}

static void
note_viewed(KVLease *self, size_t layer, size_t tokens)
{
    if (self->viewed[layer] < tokens) self->viewed[layer] = tokens;
}

/* --- the end ---------------------------------------------------------------------------------- */

/* pre: core is alive, and will be until this returns. */
void
mt_py_kvlease_drop_views(KVLease *self, size_t rows, size_t tokens)
{
    void *storage = self->storage;
    PyObject *base = self->base;
    mt_kvhold *hold = self->hold;

    self->storage = NULL;
    self->base = NULL;
    if (hold != NULL && mt_kvguests_at_home(self->pool->guests))
        mt_kvhold_linger(hold, rows, tokens);
    self->hold = NULL;
    mt_kvhold_drop(hold);
    PyMem_Free(self->viewed);
    self->viewed = NULL;
    if (storage != NULL) self->shim->storage_drop(storage);
    Py_XDECREF(base);
}

/* --- views ----------------------------------------------------------------------------------- */

static PyObject *
int64_at(const void *sizes, size_t i)
{
    return PyLong_FromLongLong(((const int64_t *)sizes)[i]);
}

static PyObject *
views_of_base(KVLease *self, const mt_torch_shape *s, const int64_t first[2])
{
    PyObject *base = Py_NewRef(self->base); /* Python code runs, and may release the lease */
    PyObject *shape = mt_py_list((size_t)s->dims, int64_at, s->shape);
    PyObject *strides = mt_py_list((size_t)s->dims, int64_at, s->strides);
    PyObject *views = NULL;

    if (shape != NULL && strides != NULL)
        views = PyObject_CallMethod(self->pool->helpers, "views", "OOOLL", base, shape, strides,
                                    (long long)first[0], (long long)first[1]);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_DECREF(base);
    return views;
}

static PyObject *
make_views(KVLease *self, const mt_torch_shape *shape, const int64_t first[2])
{
    PyObject *pair;
    void *made[2];

    if (ready_storage(self) < 0) return NULL;
    if (self->storage == NULL) return views_of_base(self, shape, first);
    if (self->shim->tensors(self->storage, shape, first, made) < 0) return NULL;
    pair = PyTuple_Pack(2, made[0], made[1]);
    Py_DECREF((PyObject *)made[0]);
    Py_DECREF((PyObject *)made[1]);
    return pair;
}

PyObject *
mt_py_kvlease_views(KVLease *self, size_t layer, size_t tokens, bool token_first)
{
    const mt_kvgeom *g = mt_kvlease_geom(self->core);
    size_t shift = self->pool->elem_shift;
    int head = token_first ? 2 : 1, token = token_first ? 1 : 2;
    mt_torch_shape s = {.dtype = self->pool->dtype_number, .dims = 4};
    int64_t first[2];
    PyObject *pair;

    s.shape[0] = (int64_t)mt_kvlease_rows(self->core);
    s.shape[head] = (int64_t)g->config.heads;
    s.shape[token] = (int64_t)tokens;
    s.shape[3] = (int64_t)g->config.head_dim;
    s.strides[0] = (int64_t)(g->slot_bytes >> shift);
    s.strides[head] = (int64_t)(g->head_stride >> shift);
    s.strides[token] = (int64_t)(g->token_bytes >> shift);
    s.strides[3] = 1;
    first[0] = (int64_t)(mt_kvgeom_offset(g, layer, 0) >> shift);
    first[1] = (int64_t)(mt_kvgeom_offset(g, layer, 1) >> shift);
    if ((pair = make_views(self, &s, first)) != NULL) note_viewed(self, layer, tokens);
    return pair;
}

/* --- layer() and buffers() ------------------------------------------------------------------- */

typedef struct shown {
    size_t layer, tokens;
} shown;

static mt_status
show(KVLease *self, const void *args, mt_error *err)
{
    const shown *s = args;

    return mt_kvlease_show(self->core, s->layer, s->tokens, err);
}

/* tokens: None for the layer's longest row. pre: busy. */
static PyObject *
layer_views(KVLease *self, size_t layer, size_t tokens, bool all, bool token_first)
{
    shown s = {layer, all ? mt_kvlease_longest(self->core, layer) : tokens};

    if (s.tokens > self->pool->config.max_tokens)
        return PyErr_Format(PyExc_IndexError,
                            "layer() cannot show %zu tokens: max_tokens of this pool is %zu",
                            s.tokens, self->pool->config.max_tokens);
    if (mt_py_kvlease_try(self, show, &s, "layer()") < 0) return NULL;
    return mt_py_kvlease_views(self, layer, s.tokens, token_first);
}

PyObject *
mt_py_kvlease_layer(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"i", "layout", "tokens", NULL};
    KVLease *self = (KVLease *)op;
    const char *layout = "BHTD";
    PyObject *i, *tokens = Py_None, *pair;
    mt_py_whole count = MT_PY_INDEX("layer(): tokens");
    size_t layer;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$sO:layer", names, &i, &layout, &tokens))
        return NULL;
    if (strcmp(layout, "BHTD") != 0 && strcmp(layout, "BTHD") != 0) {
        mt_py_refuse_word("layout must be \"BHTD\" or \"BTHD\"", layout);
        return NULL;
    }
    if (mt_py_layer_read(self, i, &layer) < 0) return NULL;
    if (tokens != Py_None && !mt_py_whole_take(tokens, &count)) return NULL;
    if (count.value < 0)
        return PyErr_Format(PyExc_ValueError, "tokens must be at least 0, got %zd", count.value);
    if (!mt_py_kvlease_enter(self)) return NULL;
    pair = layer_views(self, layer, (size_t)count.value, tokens == Py_None, layout[1] == 'T');
    mt_py_kvlease_leave(self);
    return pair;
}

static mt_status
expose(KVLease *self, const void *args, mt_error *err)
{
    const mt_kvconfig *c = &self->pool->config;
    mt_status st = MT_OK;

    (void)args;
    if (self->pool->cuda_device < 0) return mt_kvlease_expose(self->core, err);
    for (size_t layer = 0; layer < c->layers && st == MT_OK; layer++)
        st = mt_kvlease_show(self->core, layer, c->max_tokens, err);
    return st;
}

/* Bytes from each layer to the next; 0 when they differ. */
static size_t
layer_stride(const mt_kvgeom *g)
{
    size_t stride = g->config.layers > 1 ? mt_kvgeom_offset(g, 1, 0) : g->unit_bytes;

    for (size_t layer = 0; layer < g->config.layers; layer++)
        if (mt_kvgeom_offset(g, layer, 0) != layer * stride) return 0;
    return stride;
}

static PyObject *
buffer_views(KVLease *self)
{
    const mt_kvgeom *g = mt_kvlease_geom(self->core);
    size_t shift = self->pool->elem_shift, stride = layer_stride(g);
    mt_torch_shape s = {.dtype = self->pool->dtype_number, .dims = 5};
    size_t shape[5] = {g->config.layers, mt_kvlease_rows(self->core), g->config.heads,
                       g->config.max_tokens, g->config.head_dim};
    size_t bytes[5] = {stride, g->slot_bytes, g->head_stride, g->token_bytes, (size_t)1 << shift};
    int64_t first[2] = {0, (int64_t)(mt_kvgeom_offset(g, 0, 1) >> shift)};
    PyObject *pair;

    if (stride == 0)
        return PyErr_Format(PyExc_ValueError,
                            "buffers() takes layers at one stride: layer_group is %zu of %zu "
                            "layers, use 1 or %zu",
                            g->config.layer_group, g->config.layers, g->config.layers);
    for (int i = 0; i < 5; i++) {
        s.shape[i] = (int64_t)shape[i];
        s.strides[i] = (int64_t)(bytes[i] >> shift);
    }
    if (mt_py_kvlease_try(self, expose, NULL, "buffers()") < 0) return NULL;
    if ((pair = make_views(self, &s, first)) == NULL) return NULL;
    self->all_viewed = true;
    for (size_t layer = 0; layer < g->config.layers; layer++)
        note_viewed(self, layer, g->config.max_tokens);
    return pair;
}

PyObject *
mt_py_kvlease_buffers(PyObject *op, PyObject *Py_UNUSED(none))
{
    KVLease *self = (KVLease *)op;
    PyObject *pair;

    if (!mt_py_kvlease_enter(self)) return NULL;
    pair = buffer_views(self);
    mt_py_kvlease_leave(self);
    return pair;
}
