/* writer.c -- memtools._core.RecordWriter. */
#include "py/record/record.h"

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

#include "py/base/errors.h"
#include "py/base/objects.h"
#include "core/base/clock.h"
#include "os/record/endmark.h"
#include "os/record/file.h"

typedef struct RecordWriter {
    PyObject_HEAD
    PyObject *path; /* a str */
    PyObject *kept; /* a str, or NULL: where an older record was kept */
    bool begun;     /* record is initialised */
    bool at_exit;   /* end_with_status is registered */
    char *failed;   /* raw memory: the payload of the end event where the exit code is 1; or NULL */
    size_t failed_bytes;
    uint64_t ended_ns; /* of the end event, where at_exit */
    mt_record record;
    mt_recordfile file;
} RecordWriter;

mt_record *
mt_py_record(mt_state *st, PyObject *writer)
{
    if (PyObject_TypeCheck(writer, st->RecordWriter)) return &((RecordWriter *)writer)->record;
    PyErr_Format(PyExc_TypeError, "a RecordWriter is needed, got %s", Py_TYPE(writer)->tp_name);
    return NULL;
}

/* Raises what went wrong with the file: OSError with the path, or MemoryError. Returns NULL. */
static PyObject *
raise_file(const mt_error *err, PyObject *path)
{
    PyObject *made;

    if (err->status != MT_EFILE)
        return PyErr_Format(PyExc_MemoryError, "the record %R: no memory in %s (errno %d)", path,
                            err->call, err->native);
    if (err->detail == NULL) {
        errno = err->native;
        return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    }
    made = PyObject_CallFunction(PyExc_OSError, "isO", err->native, err->detail, path);
    if (made != NULL) PyErr_SetObject((PyObject *)Py_TYPE(made), made);
    Py_XDECREF(made);
    return NULL;
}

/* --- arguments --- */

/* UTF-8 of a str without zero bytes; borrowed. NULL with a sentence. */
static const char *
text_of(PyObject *text, const char *what, Py_ssize_t *bytes)
{
    const char *utf8;

    if (!PyUnicode_Check(text)) {
        PyErr_Format(PyExc_TypeError, "%s must be a str, not %s", what, Py_TYPE(text)->tp_name);
        return NULL;
    }
    if ((utf8 = PyUnicode_AsUTF8AndSize(text, bytes)) == NULL) return NULL;
    if (memchr(utf8, 0, (size_t)*bytes) == NULL) return utf8;
    PyErr_Format(PyExc_ValueError, "%s has a zero byte in it: %R; leave it out", what, text);
    return NULL;
}

static int
take_field(PyObject *text, const char *what, char *to, size_t bytes)
{
    Py_ssize_t n;
    const char *utf8 = text_of(text, what, &n);

    if (utf8 == NULL) return -1;
    if ((size_t)n >= bytes) {
        PyErr_Format(PyExc_ValueError, "%s must have at most %zu bytes of UTF-8, %R has %zd", what,
                     bytes - 1, text, n);
        return -1;
    }
    memcpy(to, utf8, (size_t)n);
    return 0;
}

/* "name" or ("name", "unit"). */
static int
take_column(PyObject *given, mt_record_column *column)
{
    if (!PyTuple_Check(given))
        return take_field(given, "a column's name", column->name, MT_RECORD_NAME);
    if (PyTuple_GET_SIZE(given) != 2) {
        PyErr_Format(PyExc_ValueError, "a column must be a name or (name, unit), got %R", given);
        return -1;
    }
    if (take_field(PyTuple_GET_ITEM(given, 0), "a column's name", column->name, MT_RECORD_NAME) < 0)
        return -1;
    return take_field(PyTuple_GET_ITEM(given, 1), "a column's unit", column->unit, MT_RECORD_UNIT);
}

/* The text of an event, which is a str, or its payload, which is bytes. */
static int
take_body(RecordWriter *self, PyObject *body, mt_record_event *e)
{
    size_t most = mt_record_payload_most(&self->record.size);
    Py_ssize_t bytes;

    if (!PyBytes_Check(body)) {
        if ((e->text = text_of(body, "text", &bytes)) == NULL) return -1;
        e->text_bytes = (size_t)bytes;
        return 0;
    }
    e->payload = PyBytes_AS_STRING(body);
    e->payload_bytes = (size_t)PyBytes_GET_SIZE(body);
    if (e->payload_bytes <= most) return 0;
    PyErr_Format(PyExc_ValueError,
                 "event(): a payload of %zu bytes, this record takes at most %zu; shorten it",
                 e->payload_bytes, most);
    return -1;
}

/* To columns[MT_SERIES_COLUMNS_MAX], which are zeros; how many, or -1. */
static Py_ssize_t
take_columns(PyObject *given, mt_record_column *columns)
{
    PyObject *items = mt_py_tuple(given, "columns is a sequence of names or (name, unit)");
    Py_ssize_t n = items == NULL ? -1 : PyTuple_GET_SIZE(items);

    if (n == 0 || n > MT_SERIES_COLUMNS_MAX) {
        PyErr_Format(PyExc_ValueError, "a record has 1 to 64 columns, got %zd", n);
        n = -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (take_column(PyTuple_GET_ITEM(items, i), &columns[i]) < 0) n = -1;
    Py_XDECREF(items);
    if (n > 0) {
        const char *fault = mt_record_columns_fault(columns, (size_t)n);
        if (fault == NULL) return n;
        PyErr_Format(PyExc_ValueError, "RecordWriter(): %s; rename one", fault);
    }
    return -1;
}

/* Arguments each ended by a zero byte, as far as they fit. */
static int
take_command(PyObject *given, char *to, size_t *used)
{
    PyObject *items = mt_py_tuple(given, "command is a sequence of str");

    *used = 0;
    for (Py_ssize_t i = 0; items != NULL && i < PyTuple_GET_SIZE(items); i++) {
        PyObject *arg = PyTuple_GET_ITEM(items, i), *bytes;
        size_t n;
        if (!PyUnicode_Check(arg)) {
            PyErr_Format(PyExc_TypeError, "command must be a sequence of str, not of %s",
                         Py_TYPE(arg)->tp_name);
            Py_CLEAR(items);
            break;
        }
        if ((bytes = PyUnicode_EncodeFSDefault(arg)) == NULL) {
            Py_CLEAR(items);
            break;
        }
        n = strlen(PyBytes_AS_STRING(bytes)) + 1;
        if (n > MT_RECORD_COMMAND - *used) n = MT_RECORD_COMMAND - *used;
        memcpy(to + *used, PyBytes_AS_STRING(bytes), n);
        *used += n;
        Py_DECREF(bytes);
    }
    Py_XDECREF(items);
    return items == NULL ? -1 : 0;
}

/* --- begin --- */

typedef struct beginning {
    RecordWriter *self;
    mt_record_size size;
    mt_record_column columns[MT_SERIES_COLUMNS_MAX];
    mt_record_start start;
    char command[MT_RECORD_COMMAND];
} beginning;

static void
format(void *region, const mt_birth *birth, void *ctx)
{
    beginning *b = ctx;

    mt_record_init(&b->self->record, region, &b->size, b->columns, &b->start, birth);
    b->self->begun = true;
}

static int
create(RecordWriter *self, beginning *b)
{
    PyObject *path = PyUnicode_EncodeFSDefault(self->path);
    char kept[PATH_MAX];
    mt_status st;
    mt_error err;

    if (path == NULL) return -1;
    b->self = self;
    b->start = (mt_record_start){.wall_ns = mt_wall_ns(),
                                 .clock_ns = mt_now_ns(),
                                 .pid = (uint64_t)getpid(),
                                 .page_bytes = (uint64_t)sysconf(_SC_PAGESIZE),
                                 .command = b->command,
                                 .command_bytes = b->start.command_bytes};
    Py_BEGIN_ALLOW_THREADS;
    st = mt_recordfile_create(&mt_recordfile_sys_libc, PyBytes_AS_STRING(path),
                              mt_record_parts_of(&b->size).end, format, b, &self->file, kept, &err);
    Py_END_ALLOW_THREADS;
    Py_DECREF(path);
    if (st == MT_OK) {
        if (kept[0] == 0) return 0;
        self->kept = PyUnicode_DecodeFSDefault(kept);
        return self->kept == NULL ? -1 : 0;
    }
    raise_file(&err, self->path);
    return -1;
}

/* (path, columns, rows, buckets, events, phases, command, payloads) */
static int
take_arguments(PyObject *args, PyObject *kwargs, PyObject **path, beginning *b)
{
    static char *names[] = {"path",   "columns", "rows",     "buckets", "events",
                            "phases", "command", "payloads", NULL};
    Py_ssize_t n, rows = 8192, buckets = 1024, events = 1024, phases = 128, payloads = 256 << 10;
    PyObject *columns, *command = Py_None;
    const char *fault;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O|nnnnOn:RecordWriter", names,
                                     PyUnicode_FSDecoder, path, &columns, &rows, &buckets, &events,
                                     &phases, &command, &payloads))
        return -1;
    if (command == Py_None && (command = PySys_GetObject("orig_argv")) == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "sys.orig_argv is gone; pass command=");
        return -1;
    }
    if ((n = take_columns(columns, b->columns)) < 0) return -1;
    if (take_command(command, b->command, &b->start.command_bytes) < 0) return -1;
    /* A negative number becomes one that is too large. */
    b->size = (mt_record_size){.series = {(size_t)n, (size_t)rows, (size_t)buckets},
                               .events = (size_t)events,
                               .phases = (size_t)phases,
                               .payloads = (size_t)payloads};
    if ((fault = mt_record_size_fault(&b->size)) == NULL) return 0;
    PyErr_Format(PyExc_ValueError, "RecordWriter(): %s", fault);
    return -1;
}

static PyObject *
recordwriter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    mt_state *st = mt_state_of_type(type);
    beginning b = {.self = NULL};
    PyObject *path = NULL;
    RecordWriter *self;

    if (st == NULL) return NULL;
    if (take_arguments(args, kwargs, &path, &b) < 0 ||
        (self = (RecordWriter *)type->tp_alloc(type, 0)) == NULL) {
        Py_XDECREF(path);
        return NULL;
    }
    self->path = path;
    if (create(self, &b) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

/* --- end --- */

static void
end(RecordWriter *self)
{
    if (self->file.bytes > 0) mt_record_close(&self->record, mt_now_ns());
    mt_endmark_remove(self->file.at);
    mt_recordfile_unmap(&self->file);
}

static void
recordwriter_dealloc(PyObject *op)
{
    RecordWriter *self = (RecordWriter *)op;
    PyTypeObject *type = Py_TYPE(op);

    end(self);
    PyMem_RawFree(self->failed);
    if (self->begun) mt_record_fini(&self->record);
    Py_XDECREF(self->path);
    Py_XDECREF(self->kept);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
recordwriter_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    end((RecordWriter *)op);
    Py_RETURN_NONE;
}

/* Within exit(), when the interpreter has gone: of the object, only what is not Python's is used.
 */
static void
end_with_status(int status, void *op)
{
    RecordWriter *self = op;
    bool failed = (status & 0xFF) == 1 && self->failed != NULL;
    char code[32];
    int n = snprintf(code, sizeof code, "{\"code\":%d}", status & 0xFF);
    mt_record_event e = {.time_ns = self->ended_ns,
                         .step = MT_UNKNOWN,
                         .kind = "end",
                         .kind_bytes = 3,
                         .payload = failed ? self->failed : code,
                         .payload_bytes = failed ? self->failed_bytes : (size_t)n};

    mt_record_write_event(&self->record, &e);
    end(self);
}

/* The object is never freed then: its memory is that of the process. The payload is copied here, so
 * that the end takes no memory, which may have run out, and nothing of Python's. */
static PyObject *
recordwriter_close_at_exit(PyObject *op, PyObject *args)
{
    RecordWriter *self = (RecordWriter *)op;
    mt_record_event e = {.payload = NULL};
    unsigned long long time_ns;
    PyObject *failed;

    if (!PyArg_ParseTuple(args, "SK:_close_at_exit", &failed, &time_ns)) return NULL;
    if (take_body(self, failed, &e) < 0) return NULL;
    PyMem_RawFree(self->failed);
    self->failed = NULL;
    if (e.payload_bytes > 0) {
        if ((self->failed = PyMem_RawMalloc(e.payload_bytes)) == NULL) return PyErr_NoMemory();
        memcpy(self->failed, e.payload, e.payload_bytes);
    }
    self->failed_bytes = e.payload_bytes;
    self->ended_ns = time_ns;
    if (self->at_exit) Py_RETURN_NONE;
    /* on_exit is glibc's: atexit does not pass the status. torch itself comes for glibc only. */
    if (on_exit(end_with_status, op) != 0) return PyErr_NoMemory();
    Py_INCREF(op);
    self->at_exit = true;
    Py_RETURN_NONE;
}

static PyObject *
recordwriter_mark_signals(PyObject *op, PyObject *Py_UNUSED(none))
{
    RecordWriter *self = (RecordWriter *)op;

    if (self->file.at != NULL && mt_birth_is_here(&self->file.birth))
        (void)mt_endmark_add(self->file.at);
    Py_RETURN_NONE;
}

static PyObject *
recordwriter_exit(PyObject *op, PyObject *Py_UNUSED(exception))
{
    return recordwriter_close(op, NULL);
}

static PyObject *
recordwriter_enter(PyObject *op, PyObject *Py_UNUSED(none))
{
    return Py_NewRef(op);
}

/* After close a caller gets an error; in a forked child the call does nothing. */
static int
recordwriter_is_open(const RecordWriter *self, const char *method)
{
    if (self->file.at != NULL) return 1;
    PyErr_Format(PyExc_ValueError, "RecordWriter.%s(): the record %R is closed", method,
                 self->path);
    return 0;
}

/* --- what is recorded --- */

/* None: there is no reading. */
static int
take_number(PyObject *given, const char *what, uint64_t *out)
{
    *out = MT_UNKNOWN;
    if (given == Py_None) return 0;
    if (PyLong_Check(given)) {
        *out = PyLong_AsUnsignedLongLong(given);
        if (*out != MT_UNKNOWN) return 0;
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s must be 0 to 2**64 - 2 or None, got %R", what, given);
        return -1;
    }
    PyErr_Format(PyExc_TypeError, "%s must be an int or None, not %s", what,
                 Py_TYPE(given)->tp_name);
    return -1;
}

/* As take_number, where None is the clock's time now. */
static int
take_time(PyObject *given, uint64_t *out)
{
    if (given != Py_None) return take_number(given, "time_ns", out);
    *out = mt_now_ns();
    return 0;
}

static PyObject *
recordwriter_append(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    RecordWriter *self = (RecordWriter *)op;
    uint64_t values[MT_SERIES_COLUMNS_MAX], time_ns;
    size_t columns = self->record.size.series.columns;
    PyObject *items;
    int fault = 0;

    if (n != 2)
        return PyErr_Format(PyExc_TypeError, "append() takes time_ns and values, got %zd", n);
    if (!recordwriter_is_open(self, "append") || take_time(args[0], &time_ns) < 0) return NULL;
    if ((items = mt_py_tuple(args[1], "values is a sequence of int or None")) == NULL) return NULL;
    if ((size_t)PyTuple_GET_SIZE(items) != columns) {
        PyErr_Format(PyExc_ValueError, "append(): %zd values, the record has %zu columns",
                     PyTuple_GET_SIZE(items), columns);
        fault = -1;
    }
    for (size_t c = 0; fault == 0 && c < columns; c++)
        fault = take_number(PyTuple_GET_ITEM(items, (Py_ssize_t)c), "a value", &values[c]);
    Py_DECREF(items);
    if (fault < 0) return NULL;
    mt_record_append(&self->record, time_ns, values);
    Py_RETURN_NONE;
}

static PyObject *
recordwriter_event(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kind", "text", "step", "time_ns", "duration_ns", NULL};
    PyObject *kind, *text, *step = Py_None, *time = Py_None, *duration = NULL;
    RecordWriter *self = (RecordWriter *)op;
    Py_ssize_t kind_bytes;
    mt_record_event e = {.duration_ns = 0};
    mt_error err;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOO:event", names, &kind, &text, &step,
                                     &time, &duration))
        return NULL;
    if (!recordwriter_is_open(self, "event")) return NULL;
    if (mt_recordfile_check(&self->file, &err) != MT_OK) return raise_file(&err, self->path);
    if ((e.kind = text_of(kind, "kind", &kind_bytes)) == NULL) return NULL;
    if (take_body(self, text, &e) < 0) return NULL;
    if (take_number(step, "step", &e.step) < 0 || take_time(time, &e.time_ns) < 0) return NULL;
    if (duration != NULL && take_number(duration, "duration_ns", &e.duration_ns) < 0) return NULL;
    if (e.duration_ns == MT_UNKNOWN) e.duration_ns = 0;
    e.kind_bytes = (size_t)kind_bytes;
    mt_record_write_event(&self->record, &e);
    Py_RETURN_NONE;
}

static PyObject *
recordwriter_phase(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "duration_ns", "peak_bytes", NULL};
    PyObject *name, *duration, *peak = Py_None;
    RecordWriter *self = (RecordWriter *)op;
    uint64_t ns, most;
    const char *utf8;
    Py_ssize_t n;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O:phase", names, &name, &duration, &peak))
        return NULL;
    if (!recordwriter_is_open(self, "phase") || (utf8 = text_of(name, "name", &n)) == NULL)
        return NULL;
    if (n == 0) {
        PyErr_SetString(PyExc_ValueError, "phase(): a phase needs a name, got \"\"");
        return NULL;
    }
    if (take_number(duration, "duration_ns", &ns) < 0) return NULL;
    if (take_number(peak, "peak_bytes", &most) < 0) return NULL;
    mt_record_phase(&self->record, utf8, (size_t)n, ns == MT_UNKNOWN ? 0 : ns, most);
    Py_RETURN_NONE;
}

static PyObject *
recordwriter_get_closed(PyObject *op, void *Py_UNUSED(which))
{
    return PyBool_FromLong(((RecordWriter *)op)->file.at == NULL);
}

static PyObject *
get_nbytes(PyObject *op, void *Py_UNUSED(which))
{
    return PyLong_FromSize_t(((RecordWriter *)op)->file.bytes);
}

static PyObject *
get_kept(PyObject *op, void *Py_UNUSED(which))
{
    PyObject *kept = ((RecordWriter *)op)->kept;

    return Py_NewRef(kept == NULL ? Py_None : kept);
}

static PyObject *
get_path(PyObject *op, void *Py_UNUSED(which))
{
    return Py_NewRef(((RecordWriter *)op)->path);
}

static PyGetSetDef getters[] = {
    {"closed", recordwriter_get_closed, NULL, "True after close().", NULL},
    {"kept", get_kept, NULL, "The new name of the record that was there before; None without one.",
     NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of the file, the same from its beginning to its end.",
     NULL},
    {"path", get_path, NULL, "Where it was made, as text.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    MT_PY_METHOD(recordwriter, append, METH_FASTCALL,
                 "append($self, time_ns, values, /)\n--\n\n"
                 "Add a sample: one int (0 to 2**64 - 2) or None for each column. time_ns: of "
                 "time.monotonic_ns(); None for now."),
    MT_PY_METHOD(
        recordwriter, event, METH_VARARGS | METH_KEYWORDS,
        "event($self, /, kind, text, *, step=None, time_ns=None, duration_ns=0)\n--\n\n"
        "Add an event, or with a duration a span that began at time_ns. Cut at 16 bytes of "
        "kind, 192 of text. A text of type bytes is a payload of at most 64 KiB, which is read "
        "back as it is, or not at all."),
    MT_PY_METHOD(recordwriter, phase, METH_VARARGS | METH_KEYWORDS,
                 "phase($self, /, name, duration_ns, peak_bytes=None)\n--\n\n"
                 "Count one passage of a phase. The name is cut at 40 bytes."),
    {"_close_at_exit", recordwriter_close_at_exit, METH_VARARGS,
     "_close_at_exit($self, failed, time_ns, /)\n--\n\n"
     "When the process ends, as the last of all, write the exit code as an end event of the time "
     "time_ns and close; where the code is 1, the payload `failed` (see memtools/_record/kinds.py) "
     "in its place, unless that is empty. May be called again with another payload and time. Not "
     "where a signal or os._exit ends it."},
    {"_mark_signals", recordwriter_mark_signals, METH_NOARGS,
     "_mark_signals($self, /)\n--\n\n"
     "Until close(), write into the record by which signal the process ends, where the program has "
     "no handler for it."},
    MT_PY_METHOD(recordwriter, close, METH_NOARGS,
                 "close($self, /)\n--\n\nMark the record as complete; idempotent."),
    {"__enter__", recordwriter_enter, METH_NOARGS, "__enter__($self, /)\n--\n\n"},
    {"__exit__", recordwriter_exit, METH_VARARGS, "__exit__($self, /, *exception)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "Writes a run.mem: see docs/internals/record.md. Any thread may call it; in a forked child "
     "nothing is written."},
    {Py_tp_new, recordwriter_new},
    {Py_tp_dealloc, recordwriter_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {0, NULL},
};

/* No Py_TPFLAGS_HAVE_GC: it holds text alone, so it cannot be in a cycle. */
static PyType_Spec spec = {
    .name = "memtools._core.RecordWriter",
    .basicsize = sizeof(RecordWriter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_recordwriter_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->RecordWriter);
}
