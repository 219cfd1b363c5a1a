/* reports.c -- how this file works.
 *
 * There is one host allocator in a process, and one `table` of its blocks. It lives as long as the
 * process, as a thread may report to it at any time. A Blocks object takes part in it from
 * start() to stop(); the first one has torch report, and the last one has it stop and forgets all.
 *
 *     Blocks.start() ─┐                      ┌─ in_use, peak, sites(), site_of()
 *     Blocks.start() ─┴─► table.users: 2     │
 *     torch's allocator ──► born, died ──► table.live (core/blocks/live.h)
 *                              ├─ while an object traces: table.sites (sites.h)
 *                              └─ while one of them records: recording.h
 */
#include "py/blocks/reports.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "core/blocks/live.h"
#include "os/base/forks.h"
#include "py/base/errors.h"
#include "py/base/objects.h"
#include "py/blocks/recording.h"
#include "py/blocks/sites.h"

typedef struct Blocks {
    PyObject_HEAD
    mt_birth birth;           /* where it was started; all zeros: it was not */
    const mt_torch_ops *shim; /* at start(): at the interpreter's end the module may go first */
    bool is_tracing, is_recording;
} Blocks;

/* Under the GIL, but for what the allocator's threads use: live and sites have locks of their own. */
static struct {
    bool is_made;
    unsigned users;
    const Blocks *recorder; /* whose recording there is; NULL: there is none. Borrowed */
    atomic_uint tracers;
    mt_birth birth;
    mt_live live;
    mt_sites sites;
} table;

/* --- reports, on any thread, with or without the GIL -------------------------------------------- */

static void
listen_birth(void *Py_UNUSED(ctx), const void *block, size_t bytes)
{
    uint32_t site = 0;

    if (!mt_birth_is_here(&table.birth)) return; /* a forked child */
    if (atomic_load_explicit(&table.tracers, memory_order_relaxed) > 0)
        site = mt_sites_here(&table.sites);
    mt_live_born(&table.live, block, bytes, site);
    /* After the table: a recording begins with the blocks that the table knows. */
    if (mt_py_recording_is_on()) mt_py_recording_born(block, bytes, site);
}

static void
listen_death(void *Py_UNUSED(ctx), const void *block)
{
    mt_live_died(&table.live, block);
    if (mt_py_recording_is_on()) mt_py_recording_died(block);
}

static const mt_torch_listener listener = {.born = listen_birth, .died = listen_death};

/* --- start and stop ------------------------------------------------------------------------------ */

static void
make_table(void)
{
    if (table.is_made && mt_birth_is_here(&table.birth)) return;
    /* In a forked child the parent's table is left as it lies: its lock may be held. */
    table.birth = mt_birth_now();
    table.users = 0;
    table.recorder = NULL;
    atomic_store(&table.tracers, 0);
    mt_live_init(&table.live, &mt_alloc_libc, &table.birth);
    mt_py_recording_init(&table.birth);
    mt_sites_init(&table.sites);
    table.is_made = true;
}

/* False also for an object that was started in the process that this one was forked from. */
static bool
is_on(const Blocks *self)
{
    return self->birth.forks != NULL && mt_birth_is_here(&self->birth);
}

static void
set_tracing(Blocks *self, bool is_tracing)
{
    if (is_tracing && !self->is_tracing) atomic_fetch_add(&table.tracers, 1);
    if (!is_tracing && self->is_tracing) atomic_fetch_sub(&table.tracers, 1);
    self->is_tracing = is_tracing;
}

/* What it has recorded can still be read. */
static void
end_recording(Blocks *self)
{
    if (!self->is_recording) return;
    mt_py_recording_end(self->shim);
    atomic_fetch_sub(&table.tracers, 1);
    self->is_recording = false;
}

static void
reports_stop(Blocks *self)
{
    if (!is_on(self)) {
        self->birth = (mt_birth){.forks = NULL};
        self->is_tracing = self->is_recording = false;
        return;
    }
    set_tracing(self, false);
    end_recording(self);
    if (table.recorder == self) {
        mt_py_recording_forget();
        table.recorder = NULL;
    }
    self->birth = (mt_birth){.forks = NULL};
    if (--table.users > 0) return;
    (void)self->shim->listen(NULL);
    mt_live_clear(&table.live);
}

/* A tuple of str, or NULL with an error. */
static PyObject *
texts(PyObject *folders)
{
    PyObject *all = PySequence_Tuple(folders);

    for (Py_ssize_t i = 0; all != NULL && i < PyTuple_GET_SIZE(all); i++) {
        if (PyUnicode_Check(PyTuple_GET_ITEM(all, i))) continue;
        PyErr_Format(PyExc_TypeError, "Blocks.start() takes a str for each folder, got %s",
                     Py_TYPE(PyTuple_GET_ITEM(all, i))->tp_name);
        Py_CLEAR(all);
    }
    return all;
}

/* -1 with an error. */
static int
reports_start(Blocks *self, mt_state *st, PyObject *libraries, PyObject *users, PyObject *entries)
{
    if (mt_state_connect(st) < 0) return -1;
    if (st->shim == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "torch's allocator is followed by memtools._torch, which is not there");
        return -1;
    }
    if (is_on(self)) return 0;
    make_table();
    if (table.users == 0) {
        mt_live_clear(&table.live);
        if (mt_sites_reset(&table.sites, libraries, users, entries) < 0) return -1;
        if (!st->shim->listen(&listener)) {
            PyErr_SetString(PyExc_RuntimeError,
                            "torch's host allocator was replaced by one whose blocks cannot be "
                            "followed");
            return -1;
        }
    }
    table.users++;
    self->birth = table.birth;
    self->shim = st->shim;
    self->is_tracing = self->is_recording = false;
    return 0;
}

static PyObject *
Blocks_start(Blocks *self, PyObject *args)
{
    mt_state *st = mt_state_of_type(Py_TYPE(self));
    PyObject *given[3] = {NULL, NULL, NULL}, *libraries, *users = NULL, *entries = NULL;
    int status = -1;

    if (st == NULL || !PyArg_ParseTuple(args, "O|OO:start", &given[0], &given[1], &given[2]))
        return NULL;
    if ((libraries = texts(given[0])) == NULL) return NULL;
    users = given[1] == NULL ? PyTuple_New(0) : texts(given[1]);
    if (users != NULL) entries = given[2] == NULL ? PyTuple_New(0) : texts(given[2]);
    if (entries != NULL) status = reports_start(self, st, libraries, users, entries);
    Py_XDECREF(entries);
    Py_DECREF(libraries);
    Py_XDECREF(users);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
Blocks_stop(Blocks *self, PyObject *Py_UNUSED(none))
{
    reports_stop(self);
    Py_RETURN_NONE;
}

static int
reports_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void
dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    reports_stop((Blocks *)self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- queries ------------------------------------------------------------------------------------ */

/* False with an error. */
static bool
require_on(const Blocks *self, const char *doing)
{
    if (is_on(self)) return true;
    PyErr_Format(PyExc_RuntimeError, "Blocks.%s: not started in this process; call start() first",
                 doing);
    return false;
}

static PyObject *
Blocks_trace(Blocks *self, PyObject *on)
{
    int is_traced = PyObject_IsTrue(on);

    if (is_traced < 0 || !require_on(self, "trace()")) return NULL;
    set_tracing(self, is_traced);
    Py_RETURN_NONE;
}

static PyObject *
Blocks_record(Blocks *self, PyObject *on)
{
    int is_recorded = PyObject_IsTrue(on);

    if (is_recorded < 0 || !require_on(self, "record()")) return NULL;
    if (is_recorded && table.recorder != NULL && table.recorder != self &&
        table.recorder->is_recording) {
        PyErr_SetString(PyExc_RuntimeError,
                        "Blocks.record(): another object records; it must end its recording first");
        return NULL;
    }
    end_recording(self);
    if (!is_recorded) Py_RETURN_NONE;
    table.recorder = self;
    atomic_fetch_add(&table.tracers, 1);
    self->is_recording = true;
    if (mt_py_recording_begin(self->shim, &table.live) < 0) {
        end_recording(self);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
Blocks_mark(Blocks *self, PyObject *args)
{
    PyObject *blocks;
    long category;

    if (!PyArg_ParseTuple(args, "Ol:mark", &blocks, &category)) return NULL;
    if (!require_on(self, "mark()")) return NULL;
    if (!self->is_recording) {
        PyErr_SetString(PyExc_RuntimeError,
                        "Blocks.mark(): nothing is recorded; call record(True) first");
        return NULL;
    }
    return mt_py_recording_mark(blocks, category);
}

static PyObject *
Blocks_contents(Blocks *self, PyObject *Py_UNUSED(none))
{
    mt_state *st = mt_state_of_type(Py_TYPE(self));

    if (st == NULL || !require_on(self, "contents()")) return NULL;
    if (table.recorder != self) Py_RETURN_NONE;
    return mt_py_recording_contents(st);
}

static PyObject *
Blocks_turn(Blocks *self, PyObject *Py_UNUSED(none))
{
    if (!require_on(self, "turn()")) return NULL;
    return PyLong_FromUnsignedLong(mt_live_turn(&table.live));
}

typedef struct site_line {
    mt_live_sum sum;
    uint32_t site;
} site_line;

static int
reports_by_bytes(const void *a, const void *b)
{
    const site_line *x = a, *y = b;

    if (x->sum.bytes != y->sum.bytes) return x->sum.bytes < y->sum.bytes ? 1 : -1;
    return x->site < y->site ? -1 : x->site > y->site;
}

static PyObject *
site_line_at(const void *from, size_t i)
{
    const site_line *line = (const site_line *)from + i;

    return Py_BuildValue("(IKK)", (unsigned)line->site, (unsigned long long)line->sum.bytes,
                         (unsigned long long)line->sum.blocks);
}

/* The lines of the sites where something lives, those of most bytes first. NULL without memory. */
static site_line *
lines_of(uint32_t first, uint32_t last, size_t *n)
{
    size_t count = mt_sites_count(&table.sites);
    mt_live_sum *sums = calloc(count, sizeof *sums);
    site_line *lines = calloc(count, sizeof *lines);

    *n = 0;
    if (sums != NULL && lines != NULL) {
        mt_live_sum_sites(&table.live, first, last, sums, count);
        for (uint32_t i = 0; i < count; i++)
            if (sums[i].blocks > 0) lines[(*n)++] = (site_line){sums[i], i};
        qsort(lines, *n, sizeof *lines, reports_by_bytes);
    }
    if (sums == NULL) {
        free(lines);
        lines = NULL;
    }
    free(sums);
    return lines;
}

static PyObject *
Blocks_sites(Blocks *self, PyObject *args)
{
    unsigned first, last;
    site_line *lines;
    PyObject *list;
    size_t n;

    if (!PyArg_ParseTuple(args, "II:sites", &first, &last)) return NULL;
    if (!require_on(self, "sites()")) return NULL;
    if ((lines = lines_of(first, last, &n)) == NULL) return PyErr_NoMemory();
    list = mt_py_list(n, site_line_at, lines);
    free(lines);
    return list;
}

static PyObject *
Blocks_frames(Blocks *self, PyObject *site)
{
    size_t number = PyLong_AsSize_t(site);

    if (number == (size_t)-1 && PyErr_Occurred()) return NULL;
    if (!require_on(self, "frames()")) return NULL;
    return mt_sites_frames(&table.sites, number > UINT32_MAX ? 0 : (uint32_t)number);
}

static PyObject *
Blocks_site_of(Blocks *self, PyObject *address)
{
    size_t number = PyLong_AsSize_t(address);
    mt_block block;

    if (number == (size_t)-1 && PyErr_Occurred()) return NULL;
    if (!require_on(self, "site_of()")) return NULL;
    block = mt_live_at(&table.live, (const void *)number);
    if (block.address == 0) Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(block.site);
}

static PyObject *
Blocks_highest(Blocks *self, PyObject *Py_UNUSED(none))
{
    mt_live_figures figures;

    if (!require_on(self, "highest()")) return NULL;
    figures = mt_live_highest(&table.live);
    return Py_BuildValue("KK", (unsigned long long)figures.peak,
                         (unsigned long long)figures.in_use);
}

static PyObject *
get_is_on(PyObject *self, void *Py_UNUSED(which))
{
    return PyBool_FromLong(is_on((Blocks *)self));
}

/* Zero where it is not on. */
static PyObject *
get_figure(PyObject *self, void *offset)
{
    mt_live_figures figures = {0};

    if (is_on((Blocks *)self)) figures = mt_live_read(&table.live);
    return PyLong_FromUnsignedLongLong(*(uint64_t *)((char *)&figures + (size_t)offset));
}

#define FIGURE(name, doc) {#name, get_figure, NULL, doc, (void *)offsetof(mt_live_figures, name)}

static PyGetSetDef getters[] = {
    {"is_on", get_is_on, NULL, "Whether it is started, in this process.", NULL},
    FIGURE(in_use,
           "Bytes of the blocks that live now, of those given out since the first start()."),
    FIGURE(peak, "The most that in_use has been since then."),
    FIGURE(missed, "Blocks that could not be followed for want of memory; in_use is without them."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    MT_PY_METHOD(
        Blocks, start, METH_VARARGS,
        "start($self, libraries, users=(), entries=(), /)\n--\n\n"
        "Follow the blocks of torch's host allocator; nothing where that is done. Imports "
        "torch. Files below the folders `libraries` are not the user's code, but for those "
        "of `users`. No frames are looked at outside of `entries`, such as "
        "\"/transformers/trainer.py:Trainer.train\". What the first object that is started has "
        "got counts."),
    MT_PY_METHOD(Blocks, stop, METH_NOARGS, "stop($self, /)\n--\n\nFollow them no more."),
    MT_PY_METHOD(Blocks, trace, METH_O,
                 "trace($self, on, /)\n--\n\n"
                 "Note the lines that allocate each block from now on, or no longer."),
    MT_PY_METHOD(Blocks, turn, METH_NOARGS,
                 "turn($self, /)\n--\n\n"
                 "End a generation of blocks; return the number of the one that begins."),
    MT_PY_METHOD(Blocks, sites, METH_VARARGS,
                 "sites($self, first, last, /)\n--\n\n"
                 "(site, bytes, blocks) of what lives and was given out in the generations from "
                 "first to last, the largest first; site 0 is what was not traced."),
    MT_PY_METHOD(Blocks, frames, METH_O,
                 "frames($self, site, /)\n--\n\n"
                 "(file, line, function) of up to three frames of the user's code, the innermost "
                 "first; of a library's where there are none."),
    MT_PY_METHOD(Blocks, site_of, METH_O,
                 "site_of($self, address, /)\n--\n\n"
                 "The site of the block that begins at this address, or None."),
    MT_PY_METHOD(Blocks, highest, METH_NOARGS,
                 "highest($self, /)\n--\n\n"
                 "(highest, in_use): the most that in_use has been since the last call of this "
                 "method of any object, and what it is now."),
    MT_PY_METHOD(
        Blocks, record, METH_O,
        "record($self, on, /)\n--\n\n"
        "Begin a new recording of the life of each block, with the lines that allocate it, "
        "or end it. One object of a process records at a time."),
    MT_PY_METHOD(
        Blocks, mark, METH_VARARGS,
        "mark($self, blocks, category, /)\n--\n\n"
        "Give blocks that live now, as (address, bytes), a category while they are recorded: "
        "1 parameter, 2 gradient, 3 optimizer state, 4 input, 5 buffer. The first one "
        "stays. One that is older than the reports counts as living all the time; returns "
        "how many such there were."),
    MT_PY_METHOD(Blocks, contents, METH_NOARGS,
                 "contents($self, /)\n--\n\n"
                 "What lived at the peak of what this object has recorded last, or None."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Blocks()\n--\n\nThe blocks of host memory that torch's allocator has given out."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, reports_traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memtools._core.Blocks",
    .basicsize = sizeof(Blocks),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_blocks_register(PyObject *module, mt_state *st)
{
    if (mt_py_contents_register(module, st) < 0) return -1;
    return mt_py_add_type(module, &spec, &st->Blocks);
}
