/* sampler.c -- how this file works.
 *
 * memtools._core.Sampler is an object around one mt_sampler, which reads memory on a thread of its
 * own and never needs the GIL. sampler_new checks the arguments, opens the probe, the thread's
 * timer and the sampler over both, and keeps the record's writer alive. start() and stop() release
 * the GIL, because they wait for the thread. What the thread has found is read under the sampler's
 * lock. */
#include "py/base/state.h"

#include "py/monitor/devices.h"
#include "py/base/errors.h"
#include "py/base/number.h"
#include "py/base/objects.h"
#include "py/monitor/probe.h"
#include "py/record/record.h"
#include "core/monitor/watermark.h"
#include "core/monitor/sampler.h"
#include "os/record/endmark.h"
#include "os/port/store.h"
#include "os/base/forks.h"
#include "os/monitor/probe.h"
#include "os/port/thread.h"

#define SHORTEST_NS 100000ll        /* a tenth of a millisecond: beyond, no timer is that exact */
#define LONGEST_NS  3600000000000ll /* an hour */

typedef struct Sampler {
    PyObject_HEAD
    mt_state *state;  /* kept alive by the type */
    PyObject *writer; /* or NULL: its record is written by the thread */
    mt_sampler *sampler;
    int devices;
} Sampler;

/* --- life ------------------------------------------------------------------------------------- */

typedef struct wish {
    PyObject *writer;
    long long interval_ns;
    int devices;
    uint64_t limit;
    char root[MT_PATH_ROOM];
} wish;

/* The children are as old as the sampler lets them be: it asks rarely. */
static const mt_probe_ages ages = {.slow_ns = 20000000, .limit_ns = 1000000000, .children_ns = 0};

static mt_status
open_sampler(Sampler *self, const wish *w, mt_record *record, mt_error *err)
{
    mt_sampler_setup with = {.record = record,
                             .mapped_again = mt_store_linux_mapped_again(),
                             .birth = mt_birth_now(),
                             .each_second = mt_endmark_renew,
                             .interval_ns = (uint64_t)w->interval_ns,
                             .limit = w->limit,
                             .devices = (size_t)w->devices};
    mt_status st = mt_py_open_probe(self->state, w->root, &ages, w->devices, &with.probe, err);

    if (st != MT_OK) return st;
    st = mt_ticker_new(&mt_alloc_libc, &mt_thread_sys_posix, mt_thread_name, &with.ticker, err);
    if (st != MT_OK) {
        with.probe.close(with.probe.ctx);
        return st;
    }
    st = mt_sampler_new(&mt_alloc_libc, &with, &self->sampler, err);
    if (st != MT_OK) {
        with.ticker.close(with.ticker.ctx);
        with.probe.close(with.probe.ctx);
    }
    return st;
}

/* (interval_ns, writer=None, root="/", devices=0, limit=None) */
static PyObject *
sampler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"interval_ns", "writer", "root", "devices", "limit", NULL};
    mt_state *st = mt_state_of_type(type);
    PyObject *limit = Py_None;
    const char *root = "/";
    mt_record *record = NULL;
    mt_error err = {0};
    Sampler *self;
    size_t columns;
    wish w = {.writer = Py_None};

    if (st == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "L|OsiO:Sampler", names, &w.interval_ns,
                                     &w.writer, &root, &w.devices, &limit))
        return NULL;
    if (w.interval_ns < SHORTEST_NS || w.interval_ns > LONGEST_NS)
        return PyErr_Format(PyExc_ValueError,
                            "Sampler(): interval_ns must be %lld (0.1 ms) to %lld (1 hour), got "
                            "%lld",
                            SHORTEST_NS, LONGEST_NS, w.interval_ns);
    if (w.devices < 0 || w.devices > MT_SAMPLE_DEVICES)
        return PyErr_Format(PyExc_ValueError, "Sampler(): devices must be 0 to %d, got %d",
                            MT_SAMPLE_DEVICES, w.devices);
    if (!mt_py_limit(limit, "Sampler", &w.limit) || !mt_py_root(root, "Sampler", w.root))
        return NULL;
    if (w.devices > 0 && mt_state_connect(st) < 0) return NULL;
    if (w.writer != Py_None && (record = mt_py_record(st, w.writer)) == NULL) return NULL;
    columns = MT_SAMPLER_HOST + MT_SAMPLER_DEVICE * (size_t)w.devices;
    if (record != NULL && record->size.series.columns != columns)
        return PyErr_Format(PyExc_ValueError,
                            "Sampler(): the record has %zu columns, a sampler of %d devices writes "
                            "%zu; make one with the columns of memtools/_monitor/run.py",
                            record->size.series.columns, w.devices, columns);
    if ((self = (Sampler *)type->tp_alloc(type, 0)) == NULL) return NULL;
    self->state = st;
    self->devices = w.devices;
    if (record != NULL) self->writer = Py_NewRef(w.writer);
    if (open_sampler(self, &w, record, &err) == MT_OK) return (PyObject *)self;
    Py_DECREF(self);
    return mt_py_raise(st, &err, "Sampler()");
}

/* A reading that is under way may wait for a lock of torch's whose holder waits for the GIL. */
static void
py_sampler_stop(Sampler *self)
{
    Py_BEGIN_ALLOW_THREADS;
    mt_sampler_stop(self->sampler);
    Py_END_ALLOW_THREADS;
}

static void
sampler_dealloc(PyObject *op)
{
    Sampler *self = (Sampler *)op;
    PyTypeObject *type = Py_TYPE(op);

    if (self->sampler != NULL) py_sampler_stop(self);
    mt_sampler_free(self->sampler);
    Py_XDECREF(self->writer);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
sampler_start(PyObject *op, PyObject *Py_UNUSED(none))
{
    Sampler *self = (Sampler *)op;
    mt_error err = {0};
    mt_status st;

    Py_BEGIN_ALLOW_THREADS;
    st = mt_sampler_start(self->sampler, &err);
    Py_END_ALLOW_THREADS;
    if (st == MT_OK) Py_RETURN_NONE;
    if (err.detail != NULL)
        return PyErr_Format(PyExc_RuntimeError,
                            "Sampler.start(): %s; stop() it first, or make a new one", err.detail);
    return PyErr_Format(PyExc_RuntimeError,
                        "Sampler.start(): the system gives no thread (%s, errno %d); end other "
                        "threads or raise their limit (ulimit -u)",
                        err.call, err.native);
}

static PyObject *
sampler_stop(PyObject *op, PyObject *Py_UNUSED(none))
{
    py_sampler_stop((Sampler *)op);
    Py_RETURN_NONE;
}

/* --- steps and marks -------------------------------------------------------------------------- */

#define MOST_STEPS ((Py_ssize_t)1 << 48) /* that end at once */

static PyObject *
sampler_step(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    mt_py_whole steps = MT_PY_WHOLE("step(): n", 0, MOST_STEPS, 1);

    if (n > 1) return PyErr_Format(PyExc_TypeError, "step() takes one argument, got %zd", n);
    if (n == 1 && !mt_py_whole_take(args[0], &steps)) return NULL;
    return PyLong_FromUnsignedLong(
        mt_sampler_step(((Sampler *)op)->sampler, (uint64_t)steps.value));
}

/* watch(fraction, device=None) */
static PyObject *
sampler_watch(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    Sampler *self = (Sampler *)op;
    unsigned char of = MT_MARK_HOST;
    double fraction;
    long device;
    int mark;

    if (n < 1 || n > 2)
        return PyErr_Format(PyExc_TypeError,
                            "watch() takes a fraction and a device, got %zd arguments", n);
    if ((fraction = PyFloat_AsDouble(args[0])) == -1 && PyErr_Occurred()) return NULL;
    if (!(fraction > 0 && fraction <= 1))
        return PyErr_Format(PyExc_ValueError,
                            "watch(): a watermark is a part of the limit, above 0 and at most 1, "
                            "got %R",
                            args[0]);
    if (n == 2 && args[1] != Py_None) {
        if ((device = PyLong_AsLong(args[1])) == -1 && PyErr_Occurred()) return NULL;
        if (device < 0 || device >= self->devices)
            return PyErr_Format(PyExc_ValueError,
                                "watch(): the sampler was made for %d devices, got device %ld",
                                self->devices, device);
        of = (unsigned char)(MT_MARK_DEVICE + device);
    }
    if ((mark = mt_sampler_watch(self->sampler, of, fraction)) >= 0) return PyLong_FromLong(mark);
    return PyErr_Format(PyExc_RuntimeError,
                        "watch(): %d watermarks are set already, or this is a forked child; "
                        "unwatch() one, or make a new Sampler",
                        MT_WATERMARKS);
}

static PyObject *
sampler_unwatch(PyObject *op, PyObject *arg)
{
    long mark = PyLong_AsLong(arg);

    if (mark == -1 && PyErr_Occurred()) return NULL;
    if (mark >= 0 && mark < MT_WATERMARKS &&
        mt_sampler_unwatch(((Sampler *)op)->sampler, (unsigned)mark))
        Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError, "unwatch(): there is no watermark %ld", mark);
}

static PyObject *
sampler_passed_at(PyObject *op, PyObject *arg)
{
    long mark = PyLong_AsLong(arg);

    if (mark == -1 && PyErr_Occurred()) return NULL;
    if (mark < 0 || mark >= MT_WATERMARKS)
        return PyErr_Format(PyExc_ValueError, "passed_at(): there is no watermark %ld", mark);
    return PyLong_FromUnsignedLongLong(
        mt_sampler_passed_at(((Sampler *)op)->sampler, (unsigned)mark));
}

/* --- what it knows ---------------------------------------------------------------------------- */

static PyObject *
sampler_latest(PyObject *op, PyObject *Py_UNUSED(none))
{
    Sampler *self = (Sampler *)op;
    mt_sample sample;

    if (!mt_sampler_latest(self->sampler, &sample)) Py_RETURN_NONE;
    return mt_py_sample(self->state, &sample);
}

static PyObject *
sampler_devices(PyObject *op, PyObject *Py_UNUSED(none))
{
    mt_sample sample;

    if (!mt_sampler_latest(((Sampler *)op)->sampler, &sample)) return PyList_New(0);
    return mt_py_list(sample.devices, mt_py_device_tuple, sample.device);
}

static mt_sampler_figures
figures(PyObject *op)
{
    return mt_sampler_read(((Sampler *)op)->sampler);
}

static PyObject *
sampler_limit(PyObject *op, PyObject *Py_UNUSED(none))
{
    mt_limit limit = figures(op).limit;

    if (limit.bytes == MT_UNKNOWN) Py_RETURN_NONE;
    return Py_BuildValue("(Ns)", mt_py_number(limit.bytes), limit.from);
}

static PyObject *
sampler_used(PyObject *op, PyObject *Py_UNUSED(none))
{
    return mt_py_number(figures(op).limit.used);
}

static PyObject *
sampler_peak(PyObject *op, PyObject *Py_UNUSED(none))
{
    return mt_py_number(figures(op).peak);
}

/* (bytes, ns, steps), or None */
static PyObject *
sampler_swap_rise(PyObject *op, PyObject *Py_UNUSED(none))
{
    mt_fill_reading rise;

    if (!mt_sampler_swap_rise(((Sampler *)op)->sampler, &rise)) Py_RETURN_NONE;
    return Py_BuildValue("(KKK)", (unsigned long long)rise.bytes, (unsigned long long)rise.time_ns,
                         (unsigned long long)rise.steps);
}

static PyObject *
get_running(PyObject *op, void *Py_UNUSED(which))
{
    return PyBool_FromLong(figures(op).runs);
}

/* The closure says where in the figures the count is. */
static PyObject *
get_count(PyObject *op, void *offset)
{
    mt_sampler_figures f = figures(op);

    return mt_py_uint64_at((const char *)&f + (intptr_t)offset, 0);
}

#define COUNT(name, figure, doc)                                                                   \
    {name, get_count, NULL, doc, (void *)offsetof(mt_sampler_figures, figure)}
static PyGetSetDef getters[] = {
    {"running", get_running, NULL, "Whether its thread runs; False in a forked child.", NULL},
    COUNT("step_count", steps, "Steps counted by step()."),
    COUNT("samples", samples, "Samples taken."),
    COUNT("cpu_ns", cpu_ns, "Processor time that its threads have used."),
    COUNT("interval_ns", interval_ns, "The interval that it keeps now: shorter near the limit."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    MT_PY_METHOD(
        sampler, start, METH_NOARGS,
        "start($self, /)\n--\n\n"
        "Start the thread. RuntimeError when it runs, in a forked child, and when the system "
        "gives no thread."),
    MT_PY_METHOD(sampler, stop, METH_NOARGS,
                 "stop($self, /)\n--\n\nTake a last sample and end the thread; idempotent."),
    MT_PY_METHOD(sampler, step, METH_FASTCALL,
                 "step($self, n=1, /)\n--\n\n"
                 "Count n steps; the watermarks passed since the last call, a bit each."),
    MT_PY_METHOD(
        sampler, watch, METH_FASTCALL,
        "watch($self, fraction, device=None, /)\n--\n\n"
        "Set a watermark at this part of the host's limit, or of a device's memory; its number, "
        "which is its bit in step()."),
    MT_PY_METHOD(sampler, unwatch, METH_O,
                 "unwatch($self, mark, /)\n--\n\nTake a watermark away. ValueError."),
    MT_PY_METHOD(sampler, passed_at, METH_O,
                 "passed_at($self, mark, /)\n--\n\n"
                 "Bytes in use when this watermark was passed last; 0 before. ValueError."),
    MT_PY_METHOD(
        sampler, latest, METH_NOARGS,
        "latest($self, /)\n--\n\n"
        "The last Sample, with what is read rarely as it was read last; None before the first."),
    MT_PY_METHOD(sampler, devices, METH_NOARGS,
                 "devices($self, /)\n--\n\n"
                 "(allocated, reserved, free, total, inactive_split, allocated_peak) bytes of each "
                 "device, by the last "
                 "sample."),
    MT_PY_METHOD(
        sampler, limit, METH_NOARGS,
        "limit($self, /)\n--\n\n"
        "(bytes, \"given\" or \"cgroup\" or \"machine\") of the lowest limit now, or None."),
    MT_PY_METHOD(sampler, used, METH_NOARGS,
                 "used($self, /)\n--\n\nBytes that count against limit() now."),
    MT_PY_METHOD(sampler, peak, METH_NOARGS,
                 "peak($self, /)\n--\n\nThe highest used() of all samples."),
    MT_PY_METHOD(
        sampler, swap_rise, METH_NOARGS,
        "swap_rise($self, /)\n--\n\n"
        "(bytes, ns, steps): by how much the job's swap rose in the last half minute; None "
        "where it does not rise for certain."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Samples memory on a thread of its own, without the GIL."},
    {Py_tp_new, sampler_new},
    {Py_tp_dealloc, sampler_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {0, NULL},
};

/* No Py_TPFLAGS_HAVE_GC: the one object it holds holds none itself. */
static PyType_Spec spec = {
    .name = "memtools._core.Sampler",
    .basicsize = sizeof(Sampler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_sampler_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->Sampler);
}
