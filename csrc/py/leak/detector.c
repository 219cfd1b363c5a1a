/* detector.c -- how this file works.
 *
 * memtools._core.LeakDetector is an object around one mt_leak. update() takes one reading for each
 * signal that it names, update_many() an array for each: both read all their arguments first, which
 * may run Python, look then whether the steps go on, and add at last what cannot fail any more.
 * The words of the core's enums, and the figures of a verdict as a tuple, follow; the sentences are
 * memtools.leak's. */
#include "py/base/state.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "py/base/errors.h"
#include "py/base/number.h"
#include "py/base/objects.h"
#include "core/leak/leak.h"

typedef struct LeakDetector {
    PyObject_HEAD
    mt_leak *core;
} LeakDetector;

static const char *const SIGNALS[MT_LEAK_SIGNALS] = {"heap",   "python", "tensors", "children",
                                                     "device", "shm",    "rss"};
static const char *const KINDS[] = {"early",   "quiet",   "fills",  "fragmentation",
                                    "suspect", "growing", "likely", "leak"};
static const char *const TRUST[] = {"none", "low", "fair", "good", "high"};
static const int64_t STEPS = (int64_t)1 << 53; /* what a double counts exactly */

/* --- arguments ------------------------------------------------------------------------------- */

/* MT_LEAK_NONE with an error for a name that is none. */
static mt_leak_signal
signal_of(PyObject *name, const char *doing)
{
    mt_leak_signal i = MT_LEAK_HEAP;

    if (!PyUnicode_Check(name)) {
        PyErr_Format(PyExc_TypeError, "%s: a signal is a str, not %s", doing,
                     Py_TYPE(name)->tp_name);
        return MT_LEAK_NONE;
    }
    while (i < MT_LEAK_NONE && PyUnicode_CompareWithASCIIString(name, SIGNALS[i]) != 0)
        i++;
    if (i == MT_LEAK_NONE)
        PyErr_Format(PyExc_ValueError,
                     "%s: there is no signal %R; the signals are heap, python, tensors, "
                     "children, device and shm, which are exact, and rss",
                     doing, name);
    return i;
}

static bool
step_of(PyObject *number, const char *doing, const char *name, int64_t *out)
{
    PyObject *index, *text;
    int overflow = 0;

    if (!PyIndex_Check(number)) {
        PyErr_Format(PyExc_TypeError, "%s: %s is an int, got %s", doing, name,
                     Py_TYPE(number)->tp_name);
        return false;
    }
    if ((index = PyNumber_Index(number)) == NULL) return false;
    *out = PyLong_AsLongLongAndOverflow(index, &overflow);
    if (overflow == 0 && *out >= -STEPS && *out <= STEPS) {
        Py_DECREF(index);
        return true;
    }
    if ((text = mt_py_whole_text(index)) != NULL)
        PyErr_Format(PyExc_ValueError, "%s: %s %U is beyond 2**53; count steps from 0", doing, name,
                     text);
    Py_XDECREF(text);
    Py_DECREF(index);
    return false;
}

/* The signals that a call names. */
typedef struct signals {
    mt_leak_signal at[MT_LEAK_SIGNALS];
    size_t n;
} signals;

/* Takes what is given for a signal. False with an error. */
typedef bool take_signal(void *to, mt_leak_signal signal, PyObject *value);

/* The step, by position or by name, and each signal, by its name alone. Reading them may run Python:
 * whether the step comes after the last one is asked behind all of them. */
static bool
read_arguments(PyObject *const *args, Py_ssize_t n, PyObject *names, const char *doing,
               int64_t *step, take_signal *take, void *to)
{
    Py_ssize_t given = names == NULL ? 0 : PyTuple_GET_SIZE(names), skip = -1;
    mt_leak_signal signal;

    for (Py_ssize_t i = 0; i < given; i++)
        if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), "step") == 0) skip = i;
    if (n + (skip >= 0) != 1) {
        PyErr_Format(PyExc_TypeError, "%s takes one step, and bytes by the name of their signal",
                     doing);
        return false;
    }
    if (!step_of(args[skip >= 0 ? skip : 0], doing, "step", step)) return false;
    for (Py_ssize_t i = 0; i < given; i++) {
        if (i == skip) continue;
        signal = signal_of(PyTuple_GET_ITEM(names, i), doing);
        if (signal == MT_LEAK_NONE || !take(to, signal, args[n + i])) return false;
    }
    return true;
}

static bool
come_after(const LeakDetector *self, const signals *used, int64_t step, const char *doing)
{
    for (size_t i = 0; i < used->n; i++) {
        mt_leak_readings seen = mt_leak_seen(self->core, used->at[i]);
        if (seen.count == 0 || step > seen.last) continue;
        PyErr_Format(PyExc_ValueError,
                     "%s: step %lld of %s comes after step %lld; pass steps that grow, or call "
                     "reset() where their count begins again",
                     doing, (long long)step, SIGNALS[used->at[i]], (long long)seen.last);
        return false;
    }
    return true;
}

/* --- one step -------------------------------------------------------------------------------- */

typedef struct readings {
    signals used;
    uint64_t bytes[MT_LEAK_SIGNALS]; /* in the order of `used` */
} readings;

/* A take_signal: bytes, or UINT64_MAX for None. */
static bool
take_reading(void *to, mt_leak_signal signal, PyObject *value)
{
    readings *r = to;
    uint64_t *out = &r->bytes[r->used.n];
    PyObject *index, *text;

    assert(r->used.n < MT_LEAK_SIGNALS); /* each name comes once */
    r->used.at[r->used.n++] = signal;
    *out = UINT64_MAX;
    if (value == Py_None) return true;
    if (!PyIndex_Check(value)) {
        PyErr_Format(PyExc_TypeError, "update(): %s is an int of bytes, or None, not %s",
                     SIGNALS[signal], Py_TYPE(value)->tp_name);
        return false;
    }
    if ((index = PyNumber_Index(value)) == NULL) return false;
    *out = PyLong_AsUnsignedLongLong(index);
    if (*out == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        if ((text = mt_py_whole_text(index)) != NULL)
            PyErr_Format(PyExc_ValueError,
                         "update(): %s is %U bytes, not from 0 to 2**64 - 1; pass None for a "
                         "reading that is not known",
                         SIGNALS[signal], text);
        Py_XDECREF(text);
    }
    Py_DECREF(index);
    return !PyErr_Occurred();
}

static PyObject *
detector_update(PyObject *op, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    LeakDetector *self = (LeakDetector *)op;
    readings r = {.used.n = 0};
    int64_t step;

    if (!read_arguments(args, n, names, "update()", &step, take_reading, &r) ||
        !come_after(self, &r.used, step, "update()"))
        return NULL;
    for (size_t i = 0; i < r.used.n; i++)
        mt_leak_add(self->core, r.used.at[i], step, r.bytes[i]);
    Py_RETURN_NONE;
}

/* --- whole series ---------------------------------------------------------------------------- */

typedef struct column {
    Py_buffer view;
    char type; /* l: int64, L: uint64, d: float64 */
} column;

typedef struct table {
    signals used;
    column of[MT_LEAK_SIGNALS]; /* in the order of `used`; view.obj is NULL where there is none */
    Py_ssize_t rows;            /* 0 without a column */
} table;

static void
release_table(table *t)
{
    for (size_t i = 0; i < MT_LEAK_SIGNALS; i++)
        if (t->of[i].view.obj != NULL) PyBuffer_Release(&t->of[i].view);
}

/* l, L or d; 0 for a format of another kind. */
static char
type_of_format(const char *format)
{
    if (format == NULL) return 0;
    if (strchr("@=<", *format) != NULL && *format != 0) format++;
    if (strcmp(format, "l") == 0 || strcmp(format, "q") == 0) return 'l';
    if (strcmp(format, "L") == 0 || strcmp(format, "Q") == 0) return 'L';
    return strcmp(format, "d") == 0 ? 'd' : 0;
}

/* A NaN and UINT64_MAX are not known. *valid is false for a reading that cannot be. */
static uint64_t
cell(const column *c, Py_ssize_t i, bool *valid)
{
    int64_t whole;
    double real;

    if (c->type == 'L') return ((const uint64_t *)c->view.buf)[i];
    if (c->type == 'l') {
        if ((whole = ((const int64_t *)c->view.buf)[i]) < 0) *valid = false;
        return (uint64_t)whole;
    }
    real = ((const double *)c->view.buf)[i];
    if (isnan(real)) return UINT64_MAX;
    if (!(real >= 0 && real < 0x1p63)) *valid = false;
    return *valid ? (uint64_t)real : 0;
}

static bool
all_valid(const column *c, mt_leak_signal signal, Py_ssize_t rows)
{
    bool valid = true;

    for (Py_ssize_t i = 0; i < rows; i++) {
        cell(c, i, &valid);
        if (valid) continue;
        PyErr_Format(PyExc_ValueError,
                     "update_many(): %s[%zd] is no number of bytes from 0 on; put NaN into a "
                     "float64 array for a reading that is not known",
                     SIGNALS[signal], i);
        return false;
    }
    return true;
}

/* A take_signal. */
static bool
take_column(void *to, mt_leak_signal signal, PyObject *array)
{
    table *t = to;
    column *c = &t->of[t->used.n];

    assert(t->used.n < MT_LEAK_SIGNALS); /* each name comes once */
    if (!PyObject_CheckBuffer(array) ||
        PyObject_GetBuffer(array, &c->view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        c->view.obj = NULL;
        PyErr_Clear();
    }
    c->type = c->view.obj == NULL || c->view.ndim != 1 ? 0 : type_of_format(c->view.format);
    if (c->type == 0 || c->view.itemsize != 8) {
        PyErr_Format(PyExc_TypeError,
                     "update_many(): %s is no array of int64, uint64 or float64 with one dimension "
                     "in one piece; numpy.ascontiguousarray(x, numpy.int64) makes one",
                     SIGNALS[signal]);
        return false;
    }
    if (t->used.n > 0 && c->view.shape[0] != t->rows) {
        PyErr_Format(PyExc_ValueError,
                     "update_many(): %s has %zd readings, another signal has %zd; pass arrays of "
                     "the same length",
                     SIGNALS[signal], c->view.shape[0], t->rows);
        return false;
    }
    t->rows = c->view.shape[0];
    t->used.at[t->used.n++] = signal;
    return all_valid(c, signal, t->rows);
}

/* Adds row i; true when the kind may be another. */
static bool
add_row(LeakDetector *self, const table *t, int64_t step, Py_ssize_t i)
{
    bool evaluated = false, valid = true;

    for (size_t k = 0; k < t->used.n; k++)
        evaluated |= mt_leak_add(self->core, t->used.at[k], step, cell(&t->of[k], i, &valid));
    return evaluated;
}

/* All rows are added even where the list cannot be made. Without collections: one could run code that
 * adds steps among these, which would not grow any more. */
static PyObject *
add_rows(LeakDetector *self, const table *t, int64_t first)
{
    int collects = PyGC_Disable();
    PyObject *changes = PyList_New(0), *change;
    mt_leak_kind before = mt_leak_kind_now(self->core), kind;

    for (Py_ssize_t i = 0; i < t->rows; i++) {
        if (!add_row(self, t, first + i, i)) continue;
        if ((kind = mt_leak_kind_now(self->core)) == before) continue;
        before = kind;
        if (changes == NULL) continue;
        change = Py_BuildValue("(Ls)", (long long)first + i, KINDS[kind]);
        if (mt_py_append(changes, change) < 0) Py_CLEAR(changes);
    }
    if (collects) (void)PyGC_Enable();
    return changes;
}

static PyObject *
detector_update_many(PyObject *op, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    LeakDetector *self = (LeakDetector *)op;
    PyObject *changes = NULL;
    table t = {.rows = 0};
    int64_t step;

    if (read_arguments(args, n, names, "update_many()", &step, take_column, &t) &&
        come_after(self, &t.used, step, "update_many()"))
        changes = add_rows(self, &t, step);
    release_table(&t);
    return changes;
}

/* --- answers --------------------------------------------------------------------------------- */

static PyObject *
detector_reset(PyObject *op, PyObject *Py_UNUSED(none))
{
    mt_leak_reset(((LeakDetector *)op)->core);
    Py_RETURN_NONE;
}

/* (kind, signal or None, confidence, rate, error, shape, rss_rate or NaN, since) */
static PyObject *
detector_judge(PyObject *op, PyObject *Py_UNUSED(none))
{
    mt_leak_verdict v;

    mt_leak_judge(((LeakDetector *)op)->core, &v);
    return Py_BuildValue("(szsddddL)", KINDS[v.kind],
                         v.signal == MT_LEAK_NONE ? NULL : SIGNALS[v.signal], TRUST[v.trust],
                         v.rate, v.error, v.shape, v.rss_rate, (long long)v.since);
}

/* (signal, limit): (lo, mid, hi) in steps, or None before the first evaluation. */
static PyObject *
detector_forecast(PyObject *op, PyObject *args)
{
    LeakDetector *self = (LeakDetector *)op;
    mt_leak_signal signal;
    mt_forecast f;
    PyObject *name;
    double limit;

    if (!PyArg_ParseTuple(args, "Od:_forecast", &name, &limit)) return NULL;
    if ((signal = signal_of(name, "forecast()")) == MT_LEAK_NONE) return NULL;
    if (!mt_leak_forecast(self->core, signal, limit, &f)) Py_RETURN_NONE;
    return Py_BuildValue("(ddd)", f.lo, f.mid, f.hi);
}

/* (name, bytes or inf, rate or inf, until or None, signal or None) */
static PyObject *
detector_expect(PyObject *op, PyObject *args)
{
    mt_leak_growth g = {.until = INT64_MAX, .signal = MT_LEAK_NONE};
    PyObject *until, *signal;
    const char *name;
    mt_error err;

    if (!PyArg_ParseTuple(args, "sddOO:_expect", &name, &g.bytes, &g.rate, &until, &signal))
        return NULL;
    if (strlen(name) >= sizeof g.name)
        return PyErr_Format(PyExc_ValueError,
                            "expect_growth(): the name %R has %zu bytes, at most %zu are kept; "
                            "pass a shorter one",
                            PyTuple_GET_ITEM(args, 0), strlen(name), sizeof g.name - 1);
    memcpy(g.name, name, strlen(name));
    if (until != Py_None && !step_of(until, "expect_growth()", "until", &g.until)) return NULL;
    if (signal != Py_None && (g.signal = signal_of(signal, "expect_growth()")) == MT_LEAK_NONE)
        return NULL;
    if (mt_leak_expect(((LeakDetector *)op)->core, &g, &err) == MT_OK) Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError,
                        "expect_growth(): %zu growths are declared, which is all there is room "
                        "for; declare several buffers as one",
                        err.limit);
}

/* The newest reading of each signal that has one: {signal: (step, bytes, readings,
 * the step of its oldest reading)}. */
static PyObject *
detector_last(PyObject *op, PyObject *Py_UNUSED(none))
{
    const mt_leak *core = ((LeakDetector *)op)->core;
    PyObject *all = PyDict_New(), *line;

    for (mt_leak_signal i = MT_LEAK_HEAP; all != NULL && i < MT_LEAK_NONE; i++) {
        mt_leak_readings seen = mt_leak_seen(core, i);
        if (seen.count == 0) continue;
        line = Py_BuildValue("(LdKL)", (long long)seen.last, seen.bytes,
                             (unsigned long long)seen.count, (long long)seen.first);
        if (line == NULL || PyDict_SetItemString(all, SIGNALS[i], line) < 0) Py_CLEAR(all);
        Py_XDECREF(line);
    }
    return all;
}

static PyObject *
get_steps_known(PyObject *op, void *Py_UNUSED(which))
{
    return PyLong_FromLongLong(mt_leak_steps(((LeakDetector *)op)->core));
}

static PyObject *
get_kind(PyObject *op, void *Py_UNUSED(which))
{
    return PyUnicode_FromString(KINDS[mt_leak_kind_now(((LeakDetector *)op)->core)]);
}

/* --- the type -------------------------------------------------------------------------------- */

/* (span, (bar of each signal in the order of SIGNALS)); 0 for what is usual. */
static PyObject *
detector_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", "", NULL};
    mt_leak_options o;
    LeakDetector *self;
    mt_state *st = mt_state_of_type(type);
    mt_error err;

    if (st == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "d(ddddddd):LeakDetector", names,
                                                   &o.span, &o.bar[0], &o.bar[1], &o.bar[2],
                                                   &o.bar[3], &o.bar[4], &o.bar[5], &o.bar[6]))
        return NULL;
    if ((self = (LeakDetector *)type->tp_alloc(type, 0)) == NULL) return NULL;
    if (mt_leak_new(&mt_alloc_libc, &o, &self->core, &err) == MT_OK) return (PyObject *)self;
    Py_DECREF(self);
    return mt_py_raise(st, &err, "LeakDetector()");
}

static void
detector_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    mt_leak_free(((LeakDetector *)op)->core);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"update", MT_PY_FUNCTION(detector_update), METH_FASTCALL | METH_KEYWORDS,
     "update($self, step, **bytes_by_signal)\n--\n\n"
     "Add the readings of one step. Takes 0.2 us.\n\n"
     "Args:\n"
     "    step: the number of the step, greater than that of the call before.\n"
     "    bytes_by_signal: for each signal its reading in bytes, an int of 0 or more by the name\n"
     "        of the signal, such as `heap=`; None for a reading that is not known.\n\n"
     "Raises ValueError for an unknown signal, a step that does not come after the one before,\n"
     "or a negative reading; then nothing was added."},
    {"update_many", MT_PY_FUNCTION(detector_update_many), METH_FASTCALL | METH_KEYWORDS,
     "update_many($self, step, **arrays_by_signal)\n--\n\n"
     "Add the readings of many steps. Takes 10 to 30 ns for each reading.\n\n"
     "Args:\n"
     "    step: the number of the first step; the others follow one by one.\n"
     "    arrays_by_signal: for each signal an array of readings in bytes by its name, of dtype\n"
     "        int64, uint64 or float64 and all of one length; NaN for a reading that is not\n"
     "        known.\n\n"
     "Returns the steps at which the kind changed, as a list of (step, kind).\n\n"
     "Raises as update does; then nothing was added."},
    {"reset", detector_reset, METH_NOARGS,
     "reset($self, /)\n--\n\n"
     "Forget all readings, because another phase of the program begins.\n\n"
     "Growth that was declared by `expect_growth` stays declared."},
    {"_judge", detector_judge, METH_NOARGS, "_judge($self, /)\n--\n\n"},
    {"_forecast", detector_forecast, METH_VARARGS, "_forecast($self, signal, limit, /)\n--\n\n"},
    {"_expect", detector_expect, METH_VARARGS,
     "_expect($self, name, bytes, rate, until, signal, /)\n--\n\n"},
    {"_last", detector_last, METH_NOARGS, "_last($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"kind", get_kind, NULL, "The verdict's kind alone; takes 50 ns.", NULL},
    {"steps_known", get_steps_known, NULL,
     "Steps from the first to the newest reading, of the signal that was read longest. Below\n"
     "`STEPS_NEEDED`, 32, it is too early to say that nothing grows.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native half of memtools.LeakDetector."},
    {Py_tp_new, detector_new},
    {Py_tp_dealloc, detector_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {0, NULL},
};

/* It holds no object, so it cannot be in a cycle. */
static PyType_Spec spec = {
    .name = "memtools._core.LeakDetector",
    .basicsize = sizeof(LeakDetector),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_leakdetector_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->LeakDetector);
}
