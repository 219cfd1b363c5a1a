/* reader.c -- memtools._core.record_read: a run.mem as plain data. memtools/record/record.py makes
 * the public classes of it. */
#include "py/record/record.h"

#include <errno.h>
#include <string.h>

#include "core/record/reader.h"
#include "py/base/objects.h"
#include "os/record/file.h"

static PyObject *
raise_file(const mt_error *err, PyObject *path)
{
    PyObject *made;

    if (err->detail == NULL) {
        errno = err->native;
        return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    }
    made = PyObject_CallFunction(PyExc_OSError, "isO", err->native, err->detail, path);
    if (made != NULL) PyErr_SetObject((PyObject *)Py_TYPE(made), made);
    Py_XDECREF(made);
    return NULL;
}

static PyObject *
raise_format(const mt_error *err, PyObject *path)
{
    if (err->limit > 0)
        return PyErr_Format(PyExc_ValueError, "%R is no whole record: %s, %zu of %zu bytes", path,
                            err->detail, err->asked, err->limit);
    if (err->asked > MT_RECORD_VERSION)
        return PyErr_Format(PyExc_ValueError,
                            "%R has %s (%zu), this memtools reads %u; upgrade memtools", path,
                            err->detail, err->asked, MT_RECORD_VERSION);
    return PyErr_Format(PyExc_ValueError, "%R is not a record that can be read: %s", path,
                        err->detail);
}

PyObject *
mt_py_raise_record(mt_state *st, const mt_error *err, PyObject *path)
{
    if (err->status == MT_EFILE) return raise_file(err, path);
    if (err->status == MT_EFORMAT) return raise_format(err, path);
    (void)st;
    return PyErr_Format(PyExc_MemoryError, "the record %R: no memory in %s (errno %d)", path,
                        err->call, err->native);
}

/* --- numbers, in the form of array('Q') --- */

static uint64_t *
words_of(PyObject *columns, size_t i)
{
    return (uint64_t *)(void *)PyBytes_AS_STRING(PyList_GET_ITEM(columns, (Py_ssize_t)i));
}

/* Item i of a list of columns: bytes for so many words, which are to be filled. */
static PyObject *
new_words(const void *words, size_t i)
{
    (void)i;
    return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * *(const size_t *)words));
}

/* (number, time, value of column 0, ...) of each sample that can be read. */
static PyObject *
samples_of(const mt_recordview *v)
{
    size_t columns = v->size.series.columns, n = 0, i = 0;
    PyObject *out;

    for (uint64_t k = v->rows_from; k < v->rows_end; k++)
        n += mt_series_row(&v->series, k) != NULL;
    if ((out = mt_py_list(2 + columns, new_words, &n)) == NULL) return NULL;
    for (uint64_t k = v->rows_from; k < v->rows_end; k++) {
        const uint64_t *row = mt_series_row(&v->series, k);
        if (row == NULL) continue;
        words_of(out, 0)[i] = k;
        for (size_t c = 0; c < 1 + columns; c++)
            words_of(out, 1 + c)[i] = row[c];
        i++;
    }
    return out;
}

/* (first time, last time, samples, least and most and last of column 0, ...) of each bucket. */
static PyObject *
buckets_of(const mt_recordview *v)
{
    size_t columns = v->size.series.columns, n = mt_series_used(&v->series);
    PyObject *out = mt_py_list(3 + 3 * columns, new_words, &n);
    mt_extent extent[MT_SERIES_COLUMNS_MAX];

    if (out == NULL) return NULL;
    for (size_t i = 0; i < n; i++) {
        mt_bucket bucket = mt_series_bucket(&v->series, i, extent);
        words_of(out, 0)[i] = bucket.first_ns;
        words_of(out, 1)[i] = bucket.last_ns;
        words_of(out, 2)[i] = bucket.samples;
        for (size_t c = 0; c < columns; c++) {
            words_of(out, 3 + 3 * c)[i] = extent[c].least;
            words_of(out, 4 + 3 * c)[i] = extent[c].most;
            words_of(out, 5 + 3 * c)[i] = extent[c].last;
        }
    }
    return out;
}

/* --- texts --- */

/* None for MT_UNKNOWN. */
static PyObject *
number_or_none(uint64_t value)
{
    return value == MT_UNKNOWN ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(value);
}

/* (number, time, duration, step, kind, text or payload): a str, or bytes. */
static PyObject *
event_of(uint64_t k, const mt_event_view *e)
{
    PyObject *body =
        e->payload == NULL
            ? PyUnicode_FromStringAndSize(e->text, (Py_ssize_t)e->text_bytes)
            : PyBytes_FromStringAndSize((const char *)e->payload, (Py_ssize_t)e->payload_bytes);

    return Py_BuildValue("(KKKNs#N)", (unsigned long long)k, (unsigned long long)e->time_ns,
                         (unsigned long long)e->duration_ns, number_or_none(e->step), e->kind,
                         (Py_ssize_t)e->kind_bytes, body);
}

static PyObject *
events_of(const mt_recordview *v)
{
    PyObject *list = PyList_New(0);
    mt_event_view e;

    for (uint64_t k = v->events_from; list != NULL && k < v->events_end; k++)
        if (mt_recordview_event(v, k, &e) && mt_py_append(list, event_of(k, &e)) < 0)
            Py_CLEAR(list);
    return list;
}

/* [(name, count, ns, peak)] */
static PyObject *
phases_of(const mt_recordview *v)
{
    PyObject *list = PyList_New(0);
    mt_phase_view p;

    for (size_t i = 0; list != NULL && i < v->phases; i++)
        if (mt_recordview_phase(v, i, &p) &&
            mt_py_append(list, Py_BuildValue("(s#KKN)", p.name, (Py_ssize_t)p.name_bytes,
                                             (unsigned long long)p.count, (unsigned long long)p.ns,
                                             number_or_none(p.peak))) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *
column_of(const void *columns, size_t c)
{
    const mt_record_column *column = (const mt_record_column *)columns + c;

    return Py_BuildValue("(ss)", column->name, column->unit);
}

/* --- all --- */

typedef struct pair {
    const char *name;
    PyObject *value; /* taken over; NULL: it could not be made */
} pair;

static PyObject *
number(uint64_t value)
{
    return PyLong_FromUnsignedLongLong(value);
}

static PyObject *
dict_of(const pair *pairs, size_t n)
{
    PyObject *dict = PyDict_New();

    for (size_t i = 0; i < n; i++) {
        bool made = dict != NULL && pairs[i].value != NULL;
        if (!made || PyDict_SetItemString(dict, pairs[i].name, pairs[i].value) < 0) Py_CLEAR(dict);
        Py_XDECREF(pairs[i].value);
    }
    return dict;
}

static PyObject *
data_of(const mt_recordview *v, size_t bytes, bool written)
{
    const pair pairs[] = {
        {"bytes", number(bytes)},
        {"start_ns", number(v->start_wall_ns)},
        {"clock_ns", number(v->start_clock_ns)},
        {"pid", number(v->pid)},
        {"page_bytes", number(v->page_bytes)},
        {"command", PyBytes_FromStringAndSize(v->command, (Py_ssize_t)v->command_bytes)},
        {"closed_ns", v->closed ? number(v->closed_ns) : Py_NewRef(Py_None)},
        {"signal", number(v->signal)},
        {"signal_ns", number(v->signal_ns)},
        {"written", PyBool_FromLong(written)},
        {"columns", mt_py_list(v->size.series.columns, column_of, v->columns)},
        {"first", number(v->rows_from)},
        {"total", number(v->rows_end)},
        {"samples", samples_of(v)},
        {"width", number(mt_series_width(&v->series))},
        {"buckets", buckets_of(v)},
        {"events_first", number(v->events_from)},
        {"events_total", number(v->events_end)},
        {"events_gone", number(v->events_gone)},
        {"events", events_of(v)},
        {"phases", phases_of(v)},
    };

    return dict_of(pairs, sizeof pairs / sizeof *pairs);
}

PyObject *
mt_py_record_read(PyObject *module, PyObject *path)
{
    mt_state *st = PyModule_GetState(module);
    PyObject *encoded, *data;
    mt_recordview view;
    size_t bytes;
    bool written;
    void *copy;
    mt_error err;
    mt_status status;

    if (!PyUnicode_FSConverter(path, (void *)&encoded)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = mt_recordfile_read(&mt_recordfile_sys_libc, &mt_alloc_libc, PyBytes_AS_STRING(encoded),
                                &copy, &bytes, &written, &err);
    if (status == MT_OK && (status = mt_record_open(&view, copy, bytes, &err)) != MT_OK)
        mt_alloc_libc.put(NULL, copy, bytes);
    Py_END_ALLOW_THREADS;
    Py_DECREF(encoded);
    if (status != MT_OK) return mt_py_raise_record(st, &err, path);
    data = data_of(&view, bytes, written);
    mt_alloc_libc.put(NULL, copy, bytes);
    return data;
}
