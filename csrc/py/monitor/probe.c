/* probe.c -- how this file works.
 *
 * memtools._core.Probe is an object around three parts of core and os: a probe that reads the
 * kernel's files (os/monitor/probe.h), the peaks of intervals that overlap (core/monitor/peaks.h)
 * and phases, which are named intervals (core/monitor/phase.h). A reading becomes a Sample, a named
 * tuple whose first fields are those of mt_sample in their order. All methods hold the GIL, which
 * is the lock that the probe needs. All probes of this machine's own root share one set of peaks,
 * mt_state.peaks: the kernel has one mark for the process, and two would set it back under each
 * other. */
#include "py/monitor/probe.h"

#include <fcntl.h>
#include <string.h>

#include "core/monitor/phase.h"
#include "os/monitor/peak.h"
#include "os/port/store.h"
#include "os/monitor/probe.h"
#include "os/monitor/shm.h"
#include "py/base/errors.h"
#include "py/base/objects.h"

enum { ROWS = 64, READ = offsetof(mt_sample, children_swap) / sizeof(uint64_t), FIELDS = READ + 3 };

typedef struct Probe {
    PyObject_HEAD
    mt_state *state;
    mt_probe_linux *probe;
    mt_peaks *peaks;
    mt_phases *phases;
    mt_interval since; /* the last reset_peak() */
    bool is_open;      /* there was one */
} Probe;

PyObject *
mt_py_number(uint64_t value)
{
    if (value == MT_UNKNOWN) Py_RETURN_NONE;
    if (value == MT_UNLIMITED) return PyLong_FromLong(-1);
    return PyLong_FromUnsignedLongLong(value);
}

/* --- life ------------------------------------------------------------------------------------- */

static bool
never_reset(void *ctx)
{
    (void)ctx;
    return false;
}

/* The kernel has one mark for the process, and each interpreter a list of the intervals that share
 * it: only the main one may set it back, and only its peaks are exact. */
static mt_status
open_peaks(const char *root, mt_natives *natives, mt_peaks **out, mt_error *err)
{
    mt_mark_ops mark;
    mt_status st = mt_mark_linux_new(&mt_alloc_libc, &mt_proc_sys_libc, root, &mark, err);

    if (st != MT_OK) return st;
    mark.mapped_again = natives == NULL ? NULL : mt_store_linux_mapped_again();
    if (root[0] == 0 && PyInterpreterState_Get() != PyInterpreterState_Main())
        mark.reset = never_reset;
    return mt_peaks_new(&mt_alloc_libc, &mark, out, err);
}

/* pre: the rest of self is zeros. */
static mt_status
open_probe(Probe *self, const char *root, const mt_probe_ages *ages, mt_error *err)
{
    mt_state *state = self->state;
    mt_status st;

    st = mt_probe_linux_new(&mt_alloc_libc, &mt_proc_sys_libc, root, ages, &self->probe, err);
    if (st == MT_OK && root[0] == 0) {
        if (state->peaks == NULL) st = open_peaks(root, state->natives, &state->peaks, err);
        if (st == MT_OK) self->peaks = mt_peaks_hold(state->peaks);
    } else if (st == MT_OK) {
        st = open_peaks(root, NULL, &self->peaks, err);
    }
    if (st != MT_OK) return st;
    return mt_phases_new(&mt_alloc_libc, self->peaks, ROWS, &self->phases, err);
}

bool
mt_py_root(const char *given, const char *who, char out[MT_PATH_ROOM])
{
    size_t len = strlen(given);

    while (len > 0 && given[len - 1] == '/')
        len--;
    if (len > MT_PATH_ROOM / 2) {
        PyErr_Format(PyExc_ValueError, "%s(): root has %zu bytes, at most %d are possible", who,
                     len, MT_PATH_ROOM / 2);
        return false;
    }
    memcpy(out, given, len);
    out[len] = 0;
    return true;
}

bool
mt_py_limit(PyObject *given, const char *who, uint64_t *out)
{
    *out = MT_UNLIMITED;
    if (given == Py_None) return true;
    *out = PyLong_AsUnsignedLongLong(given);
    if (*out == (uint64_t)-1 && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError))
        return false;
    if (*out > 0 && *out < MT_UNLIMITED) return true;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s(): limit must be a number of bytes above 0, got %R", who,
                 given);
    return false;
}

/* (root="/", fresh=False) */
static PyObject *
probe_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"root", "fresh", NULL};
    static const mt_probe_ages fresh_ages = {.limit_ns = 1000000000};
    mt_state *st = mt_state_of_type(type);
    char root[MT_PATH_ROOM];
    const char *given = "/";
    mt_error err = {0};
    Probe *self;
    int fresh = 0;

    if (st == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|sp:Probe", names, &given, &fresh))
        return NULL;
    if (!mt_py_root(given, "Probe", root) || (self = (Probe *)type->tp_alloc(type, 0)) == NULL)
        return NULL;
    self->state = st;
    if (open_probe(self, root, fresh ? &fresh_ages : &mt_probe_ages_usual, &err) == MT_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    return mt_py_raise(st, &err, "Probe()");
}

static void
probe_dealloc(PyObject *op)
{
    Probe *self = (Probe *)op;
    PyTypeObject *type = Py_TYPE(op);

    if (self->is_open) mt_peaks_end(self->peaks, &self->since);
    mt_phases_free(self->phases);
    mt_peaks_drop(self->peaks);
    mt_probe_linux_free(self->probe);
    type->tp_free(op);
    Py_DECREF(type);
}

/* --- readings --------------------------------------------------------------------------------- */

static PyObject *
probe_rss(PyObject *op, PyObject *Py_UNUSED(none))
{
    return mt_py_number(mt_probe_linux_rss(((Probe *)op)->probe));
}

PyObject *
mt_py_sample(mt_state *st, const mt_sample *sample)
{
    PyObject *made = PyStructSequence_New(st->Sample), *value;
    uint64_t values[FIELDS];

    memcpy(values, sample, READ * sizeof *values);
    values[READ] = mt_sample_process(sample);
    values[READ + 1] = mt_sample_job(sample);
    values[READ + 2] = mt_sample_job_swap(sample);
    for (Py_ssize_t i = 0; made != NULL && i < FIELDS; i++) {
        if ((value = mt_py_number(values[i])) == NULL)
            Py_CLEAR(made);
        else
            PyStructSequence_SetItem(made, i, value);
    }
    return made;
}

/* read(fields=HOST) */
static PyObject *
probe_read(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    Probe *self = (Probe *)op;
    mt_sample sample;
    long mask = MT_READ_HOST;

    if (n > 1) return PyErr_Format(PyExc_TypeError, "read() takes one argument, got %zd", n);
    if (n == 1 && (mask = PyLong_AsLong(args[0])) == -1 && PyErr_Occurred()) return NULL;
    if (mask < 0 || mask > MT_READ_ALL)
        return PyErr_Format(PyExc_ValueError, "fields must be a sum of READ_ constants, got %ld",
                            mask);
    mt_probe_linux_read(self->probe, (unsigned)mask, &sample);
    if (mask & MT_READ_RSS) mt_sample_count_once(&sample, mt_store_linux_mapped_again());
    return mt_py_sample(self->state, &sample);
}

static PyObject *
probe_host(PyObject *op, PyObject *Py_UNUSED(none))
{
    Probe *self = (Probe *)op;
    mt_sample sample;

    mt_probe_linux_host(self->probe, &sample);
    mt_sample_count_once(&sample, mt_store_linux_mapped_again());
    return mt_py_sample(self->state, &sample);
}

typedef struct child_line {
    uint64_t pid, made;
    char name[MT_CHILD_NAME];
} child_line;

static PyObject *
child_tuple(const void *lines, size_t i)
{
    const child_line *line = &((const child_line *)lines)[i];

    return Py_BuildValue(
        "(KNN)", (unsigned long long)line->pid, mt_py_number(line->made),
        PyUnicode_DecodeUTF8(line->name, (Py_ssize_t)strlen(line->name), "replace"));
}

/* Copied first: to make a list may start a collection, which runs code that may ask this probe. */
static PyObject *
probe_children(PyObject *op, PyObject *Py_UNUSED(none))
{
    const mt_children *children = mt_probe_linux_children(((Probe *)op)->probe);
    size_t n = mt_children_len(children);
    child_line *lines = PyMem_New(child_line, n + 1);
    PyObject *list;

    if (lines == NULL) return PyErr_NoMemory();
    for (size_t i = 0; i < n; i++) {
        lines[i].pid = mt_children_pid(children, i);
        lines[i].made = mt_children_made(children, i);
        mt_children_name(children, i, lines[i].name);
    }
    list = mt_py_list(n, child_tuple, lines);
    PyMem_Free(lines);
    return list;
}

static PyObject *
probe_children_made(PyObject *op, PyObject *Py_UNUSED(none))
{
    return mt_py_number(mt_children_made_by_all(mt_probe_linux_children(((Probe *)op)->probe)));
}

PyObject *
mt_py_note_shm(PyObject *Py_UNUSED(module), PyObject *given)
{
    const char *name = PyUnicode_Check(given) ? PyUnicode_AsUTF8(given) : NULL;

    PyErr_Clear();
    if (given == Py_None)
        mt_shm_share_notes();
    else if (name != NULL)
        mt_shm_note(name);
    Py_RETURN_NONE;
}

static void
note_path(PyObject *args, Py_ssize_t at)
{
    PyObject *given =
        PyTuple_Check(args) && PyTuple_GET_SIZE(args) > at ? PyTuple_GET_ITEM(args, at) : NULL;
    const char *path = NULL;

    if (given != NULL && PyUnicode_Check(given))
        path = PyUnicode_AsUTF8(given);
    else if (given != NULL && PyBytes_Check(given))
        path = PyBytes_AS_STRING(given);
    if (path != NULL)
        mt_shm_note_path(path);
    else
        PyErr_Clear(); /* a name that is not text */
}

/* A hook of sys.audit(), which cannot be taken back: of events other than these two it compares the
 * first letter. */
static int
on_audit_event(const char *event, PyObject *args, void *Py_UNUSED(data))
{
    PyObject *flags;

    if (event[0] != 'o') return 0;
    if (strcmp(event, "open") == 0) { /* (path, mode, flags) */
        if (!PyTuple_Check(args) || PyTuple_GET_SIZE(args) < 3) return 0;
        flags = PyTuple_GET_ITEM(args, 2);
        if (PyLong_CheckExact(flags) && PyLong_AsUnsignedLongMask(flags) & O_CREAT)
            note_path(args, 0);
    }
    if (strcmp(event, "os.rename") == 0) note_path(args, 1);
    return 0;
}

PyObject *
mt_py_watch_files(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    static bool watches;

    if (!watches && mt_shm_saw_strays() && mt_shm_share_notes()) {
        watches = true;
        if (PySys_AddAuditHook(on_audit_event, NULL) < 0) PyErr_Clear(); /* another hook refuses */
    }
    Py_RETURN_NONE;
}

static PyObject *
path_or_none(const char *path)
{
    if (path == NULL || path[0] == 0) Py_RETURN_NONE;
    return PyUnicode_DecodeFSDefault(path);
}

/* (version, limit or None or -1, folder that states it, above, why not, pressure, of the host) */
static PyObject *
probe_source(PyObject *op, PyObject *Py_UNUSED(none))
{
    const mt_cgroup *cg = mt_probe_linux_cgroup(((Probe *)op)->probe);
    char stated_by[MT_PATH_ROOM];

    memcpy(stated_by, cg->dir, cg->stated_by);
    stated_by[cg->stated_by] = 0;
    return Py_BuildValue("(iNNNzNN)", cg->version, mt_py_number(cg->limit), path_or_none(stated_by),
                         PyBool_FromLong(cg->above), cg->why, path_or_none(cg->pressure_path),
                         PyBool_FromLong(cg->pressure_of_host));
}

/* (cgroup version, folders of its own group and of those above it that are mounted here) */
static PyObject *
probe_groups(PyObject *op, PyObject *Py_UNUSED(none))
{
    const mt_cgroup *cg = mt_probe_linux_cgroup(((Probe *)op)->probe);
    PyObject *folders = PyList_New(0), *folder;

    if (folders == NULL) return NULL;
    for (size_t len = cg->version == 0 ? 0 : strlen(cg->dir); len > 0;
         len = mt_cgroup_above(cg, len)) {
        folder = PyUnicode_DecodeFSDefaultAndSize(cg->dir, (Py_ssize_t)len);
        if (folder == NULL || PyList_Append(folders, folder) < 0) {
            Py_XDECREF(folder);
            Py_DECREF(folders);
            return NULL;
        }
        Py_DECREF(folder);
    }
    return Py_BuildValue("(iN)", cg->version, folders);
}

/* --- peaks ------------------------------------------------------------------------------------ */

static PyObject *
probe_reset_peak(PyObject *op, PyObject *Py_UNUSED(none))
{
    Probe *self = (Probe *)op;

    if (self->is_open) mt_peaks_end(self->peaks, &self->since);
    mt_peaks_begin(self->peaks, &self->since);
    self->is_open = true;
    return PyBool_FromLong(self->since.exact);
}

static PyObject *
probe_peak(PyObject *op, PyObject *Py_UNUSED(none))
{
    Probe *self = (Probe *)op;

    if (!self->is_open)
        return PyErr_Format(PyExc_RuntimeError, "peak() returns the peak since reset_peak(), which "
                                                "was not called; call it where you start to count");
    mt_peaks_look(self->peaks);
    return Py_BuildValue("(NN)", mt_py_number(self->since.peak),
                         PyBool_FromLong(self->since.exact));
}

static PyObject *
probe_enter(PyObject *op, PyObject *given)
{
    Py_ssize_t len;
    const char *name = PyUnicode_AsUTF8AndSize(given, &len);
    uint64_t token;

    if (name == NULL) return NULL;
    if (memchr(name, 0, (size_t)len) != NULL)
        return PyErr_Format(PyExc_ValueError, "enter(): a phase's name has no zero character");
    if ((token = mt_phases_enter(((Probe *)op)->phases, name, (size_t)len)) == 0)
        return PyErr_Format(PyExc_RuntimeError,
                            "enter(): %d phases are open already; leave those that have ended",
                            MT_PHASE_OPEN);
    return PyLong_FromUnsignedLongLong(token);
}

static PyObject *
probe_leave(PyObject *op, PyObject *arg)
{
    uint64_t token = PyLong_AsUnsignedLongLong(arg);
    mt_phase_seen seen;

    if (token == UINT64_MAX && PyErr_Occurred()) return NULL;
    if (!mt_phases_leave(((Probe *)op)->phases, token, &seen))
        return PyErr_Format(PyExc_RuntimeError, "leave(): this phase is not open; it was left "
                                                "already, or another probe entered it");
    return Py_BuildValue("(NKN)", mt_py_number(seen.peak), (unsigned long long)seen.ns,
                         PyBool_FromLong(seen.exact));
}

static PyObject *
row_tuple(const void *rows, size_t i)
{
    const mt_phase_row *r = &((const mt_phase_row *)rows)[i];

    return Py_BuildValue(
        "(NKKKNK)", PyUnicode_DecodeUTF8(r->name, (Py_ssize_t)strlen(r->name), "replace"),
        (unsigned long long)r->count, (unsigned long long)r->total_ns,
        (unsigned long long)r->most_ns, mt_py_number(r->peak), (unsigned long long)r->inexact);
}

static PyObject *
probe_phases(PyObject *op, PyObject *Py_UNUSED(none))
{
    mt_phase_row rows[ROWS];

    return mt_py_list(mt_phases_rows(((Probe *)op)->phases, rows, ROWS), row_tuple, rows);
}

static PyObject *
probe_current(PyObject *op, PyObject *Py_UNUSED(none))
{
    char name[MT_PHASE_NAME];

    if (!mt_phases_current(((Probe *)op)->phases, name)) Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8(name, (Py_ssize_t)strlen(name), "replace");
}

#define NOARGS(name, doc) {#name, probe_##name, METH_NOARGS, #name "($self, /)\n--\n\n" doc}
static PyMethodDef methods[] = {
    NOARGS(rss, "Resident bytes now, or None: one read of 30 bytes."),
    NOARGS(host,
           "A Sample of all but the heap, for those who ask often: the descendants and shared "
           "memory by a reading that is at most 20 times as old as it took."),
    NOARGS(
        children,
        "(pid, bytes or None, name) of each living descendant, by the newest reading of them; "
        "empty where they cannot be listed. Its bytes are those that were its own when it was "
        "first read, and what it has allocated since: not pages that it copies of its parent's."),
    NOARGS(children_made, "The sum of these bytes, or None."),
    NOARGS(source, "Where the memory limit comes from: (cgroup version, bytes or -1 for none, "
                   "directory, whether it is set above that, why it is unknown, pressure file, "
                   "whether that is the whole machine's)."),
    NOARGS(groups, "(cgroup version or 0, folders of this process's control group and of those "
                   "above it, the own one first)."),
    NOARGS(reset_peak, "Count peak() from now on; False where the kernel does not allow it."),
    NOARGS(peak, "(highest resident bytes since reset_peak(), whether that is exact)."),
    NOARGS(phases, "Of each name: (name, passages, ns, longest ns, highest peak, how many of the "
                   "peaks are not exact)."),
    NOARGS(current, "The name of the phase that was entered last and is open, or None."),
    {"read", MT_PY_FUNCTION(probe_read), METH_FASTCALL,
     "read($self, fields=31, /)\n--\n\n"
     "A Sample with the fields asked for, by bits: 1 rss and private, 2 control group, 4 its "
     "pressure, 8 machine, 16 swap, 32 heap, 64 children, 256 shared memory; the others are None."},
    {"enter", probe_enter, METH_O,
     "enter($self, name, /)\n--\n\n"
     "Begin a phase; a token for leave(). RuntimeError when 64 are open."},
    {"leave", probe_leave, METH_O,
     "leave($self, token, /)\n--\n\n"
     "End a phase: (peak, ns, whether the peak is exact). "
     "RuntimeError for one that is not open."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Readings of this process's memory, its machine and its control group, in bytes."},
    {Py_tp_new, probe_new},
    {Py_tp_dealloc, probe_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

/* No Py_TPFLAGS_HAVE_GC: it holds no object. */
static PyType_Spec spec = {
    .name = "memtools._core.Probe",
    .basicsize = sizeof(Probe),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

/* --- registration ----------------------------------------------------------------------------- */

/* In the order of mt_sample, but for its last two, and then what follows from them. */
static PyTypeObject *
new_sample_type(void)
{
    static const char *const names[FIELDS] = {"time_ns",     "rss",
                                              "private",     "swap",
                                              "heap_used",   "heap_free",
                                              "cgroup_used", "cgroup_limit",
                                              "pressure",    "available",
                                              "total",       "swap_free",
                                              "children",    "children_private",
                                              "shm",         "mapped_again",
                                              "process",     "job",
                                              "job_swap"};
    PyStructSequence_Field fields[FIELDS + 1] = {{NULL, NULL}};
    PyStructSequence_Desc desc = {"memtools._core.Sample",
                                  "One reading: bytes, or None where it was not to be had.", fields,
                                  FIELDS};

    for (int i = 0; i < FIELDS; i++)
        fields[i].name = names[i];
    return PyStructSequence_NewType(&desc);
}

int
mt_py_probe_register(PyObject *module, mt_state *st)
{
    mt_mark_linux_look();
    if ((st->Sample = new_sample_type()) == NULL || PyModule_AddType(module, st->Sample) < 0)
        return -1;
    if (mt_py_add_type(module, &spec, &st->Probe) < 0) return -1;
    return PyModule_AddIntConstant(module, "READ_RSS", MT_READ_RSS) < 0 ||
                   PyModule_AddIntConstant(module, "READ_PRESSURE", MT_READ_PRESSURE) < 0 ||
                   PyModule_AddIntConstant(module, "READ_ROOM", MT_READ_CGROUP | MT_READ_SYSTEM) <
                       0 ||
                   PyModule_AddIntConstant(module, "READ_HEAP", MT_READ_HEAP) < 0 ||
                   PyModule_AddIntConstant(module, "READ_CHILDREN", MT_READ_CHILDREN) < 0 ||
                   PyModule_AddIntConstant(module, "READ_SHM", MT_READ_SHM) < 0
               ? -1
               : 0;
}
