/* gatehist_methods.c -- statistics as tuples, concatenation, and bytes in and out. */
#include "gatehist.h"

#include "errors.h"
#include "../core/gatefile.h"
#include "../os/vmem_linux.h"

static PyObject *
double_at(const void *x, size_t i)
{
    return PyFloat_FromDouble(((const double *)x)[i]);
}

static PyObject *
count_at(const void *x, size_t i)
{
    return PyLong_FromUnsignedLongLong(((const uint64_t *)x)[i]);
}

static PyObject *
list_of(const void *x, size_t n, PyObject *(*item)(const void *x, size_t i))
{
    PyObject *list = PyList_New((Py_ssize_t)n);

    for (size_t i = 0; list != NULL && i < n; i++) {
        PyObject *value = item(x, i);
        if (value == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, value);
    }
    return list;
}

/* (entries, tokens, nonfinite, importance sums, load counts) */
static PyObject *
sums_tuple(uint64_t entries, const mt_gatesums *sums, size_t experts)
{
    return Py_BuildValue("KKKNN", (unsigned long long)entries, (unsigned long long)sums->tokens,
                         (unsigned long long)sums->nonfinite,
                         list_of(sums->importance, experts, double_at),
                         list_of(sums->load, experts, count_at));
}

static bool
keeps_statistics(GateHistory *self)
{
    if (!mt_py_gatehist_is_open(self) || mt_py_gatehist_arrive_all(self) < 0) return false;
    if (mt_gatehist_configuration(self->core)->statistics) return true;
    PyErr_SetString(PyExc_ValueError, "this history was made with statistics=False; make it with "
                                      "statistics=True to have stats() and windows()");
    return false;
}

static PyObject *
recounted(GateHistory *self, size_t n)
{
    size_t experts = mt_gatehist_experts(self->core);
    mt_gatestats stats;
    mt_error err;
    PyObject *result;

    mt_gatestats_init(&stats, &mt_alloc_libc, mt_gatehist_configuration(self->core)->top_k);
    if (experts > 0 && mt_gatestats_reserve(&stats, experts, &err) != MT_OK)
        return mt_py_raise(self->state, &err, "GateHistory.stats()");
    mt_gatehist_recount(self->core, n, &stats);
    result = sums_tuple(stats.entries, &stats.total, experts);
    mt_gatestats_fini(&stats);
    return result;
}

/* Argument: None for everything ever appended, or how many of the newest records. */
PyObject *
mt_py_gatehist_sums(PyObject *op, PyObject *window)
{
    GateHistory *self = (GateHistory *)op;
    Py_ssize_t n = window == Py_None ? 0 : PyNumber_AsSsize_t(window, PyExc_OverflowError);
    const mt_gatestats *stats;

    if (n == -1 && PyErr_Occurred()) return NULL;
    if (!keeps_statistics(self)) return NULL;
    if (window == Py_None) {
        stats = mt_gatehist_stats(self->core);
        return sums_tuple(stats->entries, &stats->total, stats->experts);
    }
    if (n < 0 || (size_t)n > mt_gatehist_len(self->core))
        return PyErr_Format(PyExc_ValueError, "window is %zd entries, the history holds %zu", n,
                            mt_gatehist_len(self->core));
    return recounted(self, (size_t)n);
}

static PyObject *
window_at(const void *x, size_t i)
{
    const mt_gatestats *stats = x;
    size_t n = stats->experts;
    mt_gatesums sums = {.importance = PyMem_Calloc(n, sizeof(double)),
                        .load = PyMem_Calloc(n, sizeof(uint64_t))};
    PyObject *result = NULL;
    uint64_t entries;

    if (sums.importance != NULL && sums.load != NULL) {
        mt_gatestats_window(stats, i, &sums, &entries);
        result = sums_tuple(entries, &sums, n);
    } else {
        PyErr_NoMemory();
    }
    PyMem_Free(sums.importance);
    PyMem_Free(sums.load);
    return result;
}

PyObject *
mt_py_gatehist_windows(PyObject *op, PyObject *Py_UNUSED(none))
{
    GateHistory *self = (GateHistory *)op;
    const mt_gatestats *stats;

    if (!keeps_statistics(self)) return NULL;
    stats = mt_gatehist_stats(self->core);
    return list_of(stats, mt_gatestats_windows(stats), window_at);
}

PyObject *
mt_py_gatehist_reset_statistics(PyObject *op, PyObject *Py_UNUSED(none))
{
    GateHistory *self = (GateHistory *)op;

    if (!keeps_statistics(self)) return NULL;
    mt_gatehist_reset_stats(self->core);
    Py_RETURN_NONE;
}

/* The sum of rows; false when the dtypes differ. */
static bool
common_shape(const mt_gatehist *h, mt_rows *shape)
{
    *shape = mt_gatehist_shape(h, 0);
    for (size_t i = 1; i < mt_gatehist_len(h); i++) {
        mt_rows next = mt_gatehist_shape(h, i);
        if (next.dtype != shape->dtype) return false;
        shape->rows += next.rows;
    }
    return true;
}

/* All entries in one tensor: one pass over the records. None when that takes torch.cat's own type
 * promotion, because entries of several dtypes were recorded. */
PyObject *
mt_py_gatehist_cat(PyObject *op, PyObject *Py_UNUSED(none))
{
    GateHistory *self = (GateHistory *)op;
    unsigned char *at;
    PyObject *tensor;
    mt_rows shape;
    void *data;

    if (!mt_py_gatehist_is_open(self) || mt_state_connect(self->state) < 0 ||
        mt_py_gatehist_arrive_all(self) < 0)
        return NULL;
    if (mt_gatehist_len(self->core) == 0 || !common_shape(self->core, &shape)) Py_RETURN_NONE;
    if ((tensor = mt_py_tensor_new(self->state, &shape, &data)) == NULL) return NULL;
    at = data;
    for (size_t i = 0; i < mt_gatehist_len(self->core); i++) {
        mt_gatehist_copy(self->core, i, at);
        at += mt_gatehist_shape(self->core, i).rows * shape.cols * mt_dtype_size(shape.dtype);
    }
    return tensor;
}

PyObject *
mt_py_gatehist_bytes_out(PyObject *op, PyObject *Py_UNUSED(none))
{
    GateHistory *self = (GateHistory *)op;
    PyObject *bytes;

    if (!mt_py_gatehist_is_open(self) || mt_py_gatehist_arrive_all(self) < 0) return NULL;
    bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)mt_gatehist_dump_bytes(self->core));
    if (bytes != NULL) mt_gatehist_dump(self->core, PyBytes_AS_STRING(bytes));
    return bytes;
}

PyObject *
mt_py_gatehist_bytes_in(PyObject *type, PyObject *data)
{
    mt_state *st = mt_state_of_type((PyTypeObject *)type);
    mt_gatehist *core;
    mt_error err;
    Py_buffer view;
    mt_status status;

    if (st == NULL || PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return NULL;
    status =
        mt_gatehist_parse(&mt_alloc_libc, &mt_vmem_linux, view.buf, (size_t)view.len, &core, &err);
    PyBuffer_Release(&view);
    if (status != MT_OK) return mt_py_raise(st, &err, "GateHistory.load()");
    return mt_py_gatehist_wrap((PyTypeObject *)type, st, core);
}
