/* statistics.c -- how this file works.
 *
 * What goes out of a history at once: statistics as tuples, all entries as one tensor, all of it as
 * pieces of bytes and back. Making Python objects may run finalizers, which may append to the very history or
 * close it: so figures are copied to memory of C first (sums_copy), and a tensor is filled only where
 * the history has not changed since it was made. */
#include "py/gate/history.h"

#include <string.h>

#include "py/base/errors.h"
#include "py/base/number.h"
#include "py/base/objects.h"
#include "core/gate/state.h"

static PyObject *
double_at(const void *x, size_t i)
{
    return PyFloat_FromDouble(((const double *)x)[i]);
}

/* A copy of sums, in memory that Python's collector knows nothing of. Making Python objects may run
 * finalizers, and those may append to the very history or close it. */
typedef struct sums_copy {
    uint64_t entries;
    size_t experts;
    mt_gatesums sums;
} sums_copy;

static bool
sums_copy_new(sums_copy *c, size_t experts)
{
    c->experts = experts;
    c->sums.importance = PyMem_Calloc(experts + 1, sizeof(double));
    c->sums.load = PyMem_Calloc(experts + 1, sizeof(uint64_t));
    if (c->sums.importance == NULL || c->sums.load == NULL) PyErr_NoMemory();
    return c->sums.importance != NULL && c->sums.load != NULL;
}

static void
sums_copy_free(sums_copy *c)
{
    PyMem_Free(c->sums.importance);
    PyMem_Free(c->sums.load);
}

static void
sums_copy_take(sums_copy *c, uint64_t entries, const mt_gatesums *from)
{
    c->entries = entries;
    mt_gatesums_copy(&c->sums, from, c->experts);
}

/* (entries, tokens, nonfinite, importance sums, load counts) */
static PyObject *
sums_copy_tuple(const void *copies, size_t i)
{
    const sums_copy *c = (const sums_copy *)copies + i;

    return Py_BuildValue("KKKNN", (unsigned long long)c->entries,
                         (unsigned long long)c->sums.tokens, (unsigned long long)c->sums.nonfinite,
                         mt_py_list(c->experts, double_at, c->sums.importance),
                         mt_py_list(c->experts, mt_py_uint64_at, c->sums.load));
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

/* The sums of the newest n records, by one pass over them. */
static bool
recount(GateHistory *self, size_t n, sums_copy *out)
{
    mt_gatestats stats;
    mt_error err;

    mt_gatestats_init(&stats, &mt_alloc_libc, mt_gatehist_configuration(self->core)->top_k);
    if (out->experts > 0 && mt_gatestats_reserve(&stats, out->experts, &err) != MT_OK) {
        mt_py_raise(self->state, &err, "GateHistory.stats()");
        return false;
    }
    mt_gatehist_recount(self->core, n, &stats);
    sums_copy_take(out, stats.entries, &stats.total);
    mt_gatestats_fini(&stats);
    return true;
}

/* Argument: None for everything ever appended, or how many of the newest records. */
PyObject *
mt_py_gatehist_sums(PyObject *op, PyObject *window)
{
    GateHistory *self = (GateHistory *)op;
    mt_py_whole n = MT_PY_WHOLE("window", PY_SSIZE_T_MIN, PY_SSIZE_T_MAX, 0);
    const mt_gatestats *stats;
    PyObject *result = NULL;
    sums_copy copy = {0};

    if (window != Py_None && !mt_py_whole_take(window, &n)) return NULL;
    if (!keeps_statistics(self)) return NULL;
    if (n.value < 0 || (size_t)n.value > mt_gatehist_len(self->core))
        return PyErr_Format(PyExc_ValueError, "window is %zd entries, the history holds %zu",
                            n.value, mt_gatehist_len(self->core));
    stats = mt_gatehist_stats(self->core);
    if (sums_copy_new(&copy, stats->experts)) {
        if (window == Py_None) sums_copy_take(&copy, stats->entries, &stats->total);
        if (window == Py_None || recount(self, (size_t)n.value, &copy))
            result = sums_copy_tuple(&copy, 0);
    }
    sums_copy_free(&copy);
    return result;
}

static bool
copy_windows(const mt_gatestats *stats, sums_copy *copies, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!sums_copy_new(&copies[i], stats->experts)) return false;
        mt_gatestats_window(stats, i, &copies[i].sums, &copies[i].entries);
    }
    return true;
}

PyObject *
mt_py_gatehist_windows(PyObject *op, PyObject *Py_UNUSED(none))
{
    GateHistory *self = (GateHistory *)op;
    sums_copy copies[MT_MARKS + 1] = {0};
    PyObject *result = NULL;
    size_t n;

    if (!keeps_statistics(self)) return NULL;
    n = mt_gatestats_windows(mt_gatehist_stats(self->core));
    if (copy_windows(mt_gatehist_stats(self->core), copies, n))
        result = mt_py_list(n, sums_copy_tuple, copies);
    for (size_t i = 0; i < n; i++)
        sums_copy_free(&copies[i]);
    return result;
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
    uint64_t appended;
    PyObject *tensor;
    mt_rows shape;
    void *data;
    size_t len;

    if (!mt_py_gatehist_is_open(self) || mt_state_connect(self->state) < 0 ||
        mt_py_gatehist_arrive_all(self) < 0)
        return NULL;
    len = mt_gatehist_len(self->core);
    if (len == 0 || !common_shape(self->core, &shape)) Py_RETURN_NONE;
    appended = mt_gatehist_appended(self->core);
    if ((tensor = mt_py_tensor_new(self->state, &shape, &data)) == NULL) return NULL;
    if (!mt_py_gatehist_unchanged(self, appended, len)) {
        Py_DECREF(tensor);
        return NULL;
    }
    at = data;
    for (size_t i = 0; i < len; i++) {
        mt_gatehist_copy(self->core, i, at);
        at += mt_gatehist_shape(self->core, i).rows * shape.cols * mt_dtype_size(shape.dtype);
    }
    return tensor;
}

/* An equal history of its own that counts in the same budget, whose other parts are asked once where
 * it refuses. */
PyObject *
mt_py_gatehist_clone(PyObject *op, PyObject *Py_UNUSED(none))
{
    GateHistory *self = (GateHistory *)op;
    mt_gatehist *core;
    mt_error err;

    for (bool asked = false;; asked = true) {
        if (!mt_py_gatehist_is_open(self) || mt_py_gatehist_arrive_all(self) < 0) return NULL;
        if (mt_gatehist_clone(self->core, &core, &err) == MT_OK)
            return mt_py_gatehist_wrap(Py_TYPE(op), self->state, core);
        if (asked || !mt_py_gatehist_ask_for(self, &err))
            return mt_py_gatehist_raise(self->state, self->core, &err, "copying a GateHistory");
    }
}

/* (experts, appended, entries counted, span, sums, index, records): state.h says what they are. No
 * Python code runs between the lengths and the copy: making bytes starts no collection. */
PyObject *
mt_py_gatehist_state(PyObject *op, PyObject *Py_UNUSED(none))
{
    GateHistory *self = (GateHistory *)op;
    PyObject *sums, *index, *records;
    mt_gatestate state;

    if (!mt_py_gatehist_is_open(self) || mt_py_gatehist_arrive_all(self) < 0) return NULL;
    state = mt_gatehist_state(self->core);
    sums = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)state.sums_bytes);
    index = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)state.index_bytes);
    records = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)state.records_bytes);
    if (sums == NULL || index == NULL || records == NULL) {
        Py_XDECREF(sums);
        Py_XDECREF(index);
        Py_XDECREF(records);
        return NULL;
    }
    mt_gatehist_state_copy(self->core, PyBytes_AS_STRING(sums), PyBytes_AS_STRING(index),
                           PyBytes_AS_STRING(records));
    return Py_BuildValue("(nKKKNNN)", (Py_ssize_t)state.experts, (unsigned long long)state.appended,
                         (unsigned long long)state.counted, (unsigned long long)state.span, sums,
                         index, records);
}

/* What _state() returned, into a new history. */
PyObject *
mt_py_gatehist_restore(PyObject *op, PyObject *args)
{
    GateHistory *self = (GateHistory *)op;
    mt_py_whole numbers[] = {
        MT_PY_WHOLE("experts", 0, PY_SSIZE_T_MAX, 0), MT_PY_WHOLE("appended", 0, PY_SSIZE_T_MAX, 0),
        MT_PY_WHOLE("counted", 0, PY_SSIZE_T_MAX, 0), MT_PY_WHOLE("span", 0, PY_SSIZE_T_MAX, 0)};
    Py_buffer sums, index, records;
    mt_gatestate from;
    mt_status status;
    mt_error err;

    if (!PyArg_ParseTuple(args, "O&O&O&O&y*y*y*:_restore", mt_py_whole_take, &numbers[0],
                          mt_py_whole_take, &numbers[1], mt_py_whole_take, &numbers[2],
                          mt_py_whole_take, &numbers[3], &sums, &index, &records))
        return NULL;
    from = (mt_gatestate){.experts = (size_t)numbers[0].value,
                          .appended = (uint64_t)numbers[1].value,
                          .counted = (uint64_t)numbers[2].value,
                          .span = (uint64_t)numbers[3].value,
                          .sums = sums.buf,
                          .index = index.buf,
                          .records = records.buf,
                          .sums_bytes = (size_t)sums.len,
                          .index_bytes = (size_t)index.len,
                          .records_bytes = (size_t)records.len};
    status =
        mt_py_gatehist_is_open(self) ? mt_gatehist_restore(self->core, &from, &err) : MT_EAGAIN;
    PyBuffer_Release(&sums);
    PyBuffer_Release(&index);
    PyBuffer_Release(&records);
    if (status == MT_EAGAIN) return NULL; /* it is closed */
    if (status != MT_OK)
        return mt_py_gatehist_raise(self->state, self->core, &err, "GateHistory.load()");
    Py_RETURN_NONE;
}
