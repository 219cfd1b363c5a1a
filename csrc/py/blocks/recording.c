/* recording.c -- how this file works.
 *
 * Where a thread is lies in one word of its own, which begun() returns and ended() puts back: so an end
 * that never comes, or comes in another order, is corrected by the next one around it.
 *
 *     bit  63        34      33          32       31    16 15       0
 *         [ recording ][ in foreach ][ in step ][  node  ][ operator ]    names of the journal, or 0
 *
 * The word of another recording is ignored. A second word has the modules whose calls run: the name of
 * the path of their classes, and whether one of them is not torch's. */
#include "py/blocks/recording.h"

#include <stdio.h>
#include <string.h>

#include "core/blocks/journal.h"
#include "py/base/objects.h"

enum {
    NODE_SHIFT = 16,
    STEP_SHIFT = 32,
    FOREACH_SHIFT = 33,
    RECORDING_SHIFT = 34,
    OWN_SHIFT = 32, /* of the word of modules: in a class that is not torch's */
    PATH_BYTES = 512,
    NAME_MASK = 0xFFFF,
    FIELDS = 13, /* of Contents */
};

_Static_assert(NAME_MASK / MT_JOURNAL_NAMES_MOST >= 1, "a name fits into its bits");

/* Categories of Blocks.mark() that a read knows of; memtools/_blocks/peak.py has all of them. */
enum { PARAMETER = 1, GRADIENT = 2 };

static const char NODE_PREFIX[] = "autograd::engine::evaluate_function: ";
static const char STEP_PREFIX[] = "Optimizer.step#";
/* Operators that get memory for the one around them, and one that asks others for each tensor. */
static const char *const GETTERS[] = {"aten::empty", "aten::new_empty", "aten::resize_"};
static const char FOREACH[] = "aten::_foreach_";

static mt_journal journal;
static int (*in_backward)(void); /* the shim's; set before the first recording */
static atomic_uint recordings;   /* how many have begun: the number of the one that runs */

static _Thread_local uint64_t here, module_here;

void
mt_py_recording_init(const mt_birth *birth)
{
    mt_journal_init(&journal, &mt_alloc_libc, birth);
}

/* --- where a thread is ---------------------------------------------------------------------------- */

/* A word as it counts in the recording that runs. */
static uint64_t
now_of(uint64_t word)
{
    uint64_t now = (uint64_t)atomic_load_explicit(&recordings, memory_order_relaxed)
                   << RECORDING_SHIFT;

    return word >> RECORDING_SHIFT == now >> RECORDING_SHIFT ? word : now;
}

static uint64_t
where(void)
{
    return now_of(here);
}

static uint32_t
operator_of(uint64_t place)
{
    return (uint32_t)(place & NAME_MASK);
}

static uint32_t
node_of(uint64_t place)
{
    return (uint32_t)(place >> NODE_SHIFT & NAME_MASK);
}

static bool
recording_begins_with(const char *text, const char *begin)
{
    return strncmp(text, begin, strlen(begin)) == 0;
}

static bool
is_getter(const char *name)
{
    for (size_t i = 0; i < sizeof GETTERS / sizeof *GETTERS; i++)
        if (recording_begins_with(name, GETTERS[i])) return true;
    return false;
}

static uint64_t
with_operator(uint64_t place, const char *name)
{
    uint64_t foreach = UINT64_C(1) << FOREACH_SHIFT;

    if (operator_of(place) != 0 && ((place & foreach) != 0 || is_getter(name))) return place;
    place = (place & ~(foreach | NAME_MASK)) | mt_journal_name_of(&journal, name);
    return recording_begins_with(name, FOREACH) ? place | foreach : place;
}

static uint64_t
with_node(uint64_t place, const char *name)
{
    uint64_t names = NAME_MASK | (uint64_t)NAME_MASK << NODE_SHIFT;

    return (place & ~names) | (uint64_t)mt_journal_name_of(&journal, name) << NODE_SHIFT;
}

static mt_torch_begun
observe_begun(void *Py_UNUSED(ctx), int kind, const char *name)
{
    uint64_t before = where();
    uint32_t order = mt_journal_order(&journal);

    if (kind == MT_TORCH_RANGE)
        here =
            recording_begins_with(name, STEP_PREFIX) ? before | UINT64_C(1) << STEP_SHIFT : before;
    else if (kind == MT_TORCH_NODE)
        here = with_node(before, name);
    else if (recording_begins_with(name, NODE_PREFIX))
        here = with_node(before, name + strlen(NODE_PREFIX));
    else
        here = with_operator(before, name);
    return (mt_torch_begun){.place = before, .order = order};
}

static void
observe_made(void *Py_UNUSED(ctx), mt_torch_begun begun, const void *block, size_t bytes, int dtype,
             const int64_t *sizes, int dims)
{
    mt_journal_shape(&journal, block, bytes, (uint32_t)begun.order, dtype, sizes, dims);
}

static void
observe_ended(void *Py_UNUSED(ctx), mt_torch_begun begun)
{
    here = begun.place;
}

static const mt_torch_observer observer = {
    .begun = observe_begun, .made = observe_made, .ended = observe_ended};

/* --- calls of modules ----------------------------------------------------------------------------- */

/* Whether a class is one of torch's own. Keeps no error. */
static bool
is_torchs(PyTypeObject *type)
{
    PyObject *module = PyObject_GetAttrString((PyObject *)type, "__module__");
    const char *name = module != NULL && PyUnicode_Check(module) ? PyUnicode_AsUTF8(module) : NULL;
    bool is =
        name != NULL && (recording_begins_with(name, "torch.nn.") || strcmp(name, "torch") == 0);

    PyErr_Clear();
    Py_XDECREF(module);
    return is;
}

/* The word within a call of a module of this class. */
static uint64_t
within(uint64_t word, PyTypeObject *type)
{
    uint64_t own = UINT64_C(1) << OWN_SHIFT;
    /* This comes first: a metaclass may run code that restarts the recording. */
    bool is_own = !is_torchs(type);
    const char *outer = mt_journal_text(&journal, operator_of(word));
    const char *class = strrchr(type->tp_name, '.');
    char path[PATH_BYTES];

    if ((word & own) != 0 && !is_own) return word;
    class = class == NULL ? type->tp_name : class + 1;
    /* What is too long is cut, as the journal does. */
    (void)snprintf(path, sizeof path, "%s%s%s", outer, outer[0] == '\0' ? "" : ".", class);
    word = (word & ~(uint64_t)NAME_MASK) | mt_journal_name_of(&journal, path);
    return is_own ? word | own : word;
}

uint64_t
mt_py_recording_enter(PyObject *module)
{
    uint64_t before = module_here;
    PyTypeObject *type = Py_TYPE(module);

    if (!mt_journal_is_on(&journal)) return before;
    Py_INCREF(type); /* code of a metaclass may give the module another class */
    module_here = within(now_of(before), type);
    Py_DECREF(type);
    return before;
}

void
mt_py_recording_leave(uint64_t before)
{
    module_here = before;
}

/* --- reports -------------------------------------------------------------------------------------- */

static mt_phase
recording_phase_at(uint64_t place)
{
    if (in_backward()) return MT_PHASE_BACKWARD;
    return place >> STEP_SHIFT & 1 ? MT_PHASE_OPTIMIZER : MT_PHASE_FORWARD;
}

bool
mt_py_recording_is_on(void)
{
    return mt_journal_is_on(&journal);
}

void
mt_py_recording_born(const void *block, size_t bytes, uint32_t site)
{
    uint64_t place = where();
    mt_journal_birth birth = {.phase = recording_phase_at(place),
                              .site = site,
                              .module = operator_of(now_of(module_here))};

    birth.maker = birth.phase == MT_PHASE_BACKWARD ? node_of(place) : 0;
    if (birth.maker == 0) birth.maker = operator_of(place);
    mt_journal_born(&journal, block, bytes, birth);
}

void
mt_py_recording_died(const void *block)
{
    mt_journal_died(&journal, block, recording_phase_at(where()));
}

/* --- begin and end -------------------------------------------------------------------------------- */

int
mt_py_recording_begin(const mt_torch_ops *shim, mt_live *live)
{
    in_backward = shim->in_backward;
    atomic_fetch_add(&recordings, 1);
    if (mt_journal_begin(&journal, live) && shim->observe(&observer)) return 0;
    mt_py_recording_end(shim);
    mt_py_recording_forget();
    PyErr_NoMemory();
    return -1;
}

void
mt_py_recording_end(const mt_torch_ops *shim)
{
    (void)shim->observe(NULL);
    mt_journal_end(&journal);
}

void
mt_py_recording_forget(void)
{
    mt_journal_clear(&journal);
}

/* --- marks ---------------------------------------------------------------------------------------- */

typedef struct marked {
    size_t address, bytes;
} marked;

/* -1 with an error. */
static int
parse_marked(PyObject *item, Py_ssize_t i, marked *out)
{
    PyObject *address = NULL, *bytes = NULL;

    if (PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 2) {
        address = PyTuple_GET_ITEM(item, 0);
        bytes = PyTuple_GET_ITEM(item, 1);
    }
    if (address == NULL || !PyLong_Check(address) || !PyLong_Check(bytes)) {
        PyErr_Format(PyExc_TypeError,
                     "Blocks.mark(): blocks holds a tuple (address, bytes) of two int for each "
                     "block; item %zd is none",
                     i);
        return -1;
    }
    out->address = PyLong_AsSize_t(address);
    if (PyErr_Occurred()) return -1;
    out->bytes = PyLong_AsSize_t(bytes);
    return PyErr_Occurred() ? -1 : 0;
}

/* NULL with an error; n > 0. */
static marked *
parse_all(PyObject *items, Py_ssize_t n)
{
    marked *all = PyMem_Calloc((size_t)n, sizeof *all);

    if (all == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; all != NULL && i < n; i++) {
        if (parse_marked(PyTuple_GET_ITEM(items, i), i, &all[i]) == 0) continue;
        PyMem_Free(all);
        all = NULL;
    }
    return all;
}

PyObject *
mt_py_recording_mark(PyObject *blocks, long category)
{
    PyObject *items;
    unsigned long older = 0;
    marked *all;
    Py_ssize_t n;

    if (category < 1 || category >= MT_JOURNAL_CATEGORIES)
        return PyErr_Format(PyExc_ValueError,
                            "Blocks.mark(): category must be from 1 to %d, got %ld",
                            MT_JOURNAL_CATEGORIES - 1, category);
    if ((items = PySequence_Tuple(blocks)) == NULL) return NULL;
    n = PyTuple_GET_SIZE(items);
    all = n == 0 ? NULL : parse_all(items, n);
    Py_DECREF(items);
    if (n > 0 && all == NULL) return NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (all[i].address == 0) continue; /* an empty storage has no block */
        older += mt_journal_mark(&journal, (const void *)all[i].address, all[i].bytes,
                                 (uint32_t)category) == MT_MARK_OLDER;
    }
    PyMem_Free(all);
    return PyLong_FromUnsignedLong(older);
}

/* --- contents ------------------------------------------------------------------------------------- */

typedef struct reading {
    const mt_state *st;
    const mt_journal_contents *contents;
    PyObject *names; /* a tuple of all names of the journal, each at its number */
} reading;

static PyObject *
name_at(const reading *t, uint32_t name)
{
    return PyTuple_GET_ITEM(t->names, (Py_ssize_t)name);
}

static PyObject *
shape_of(const mt_journal_block *block)
{
    PyObject *shape, *size;

    if (!block->kind.has_shape) return Py_NewRef(Py_None);
    shape = PyTuple_New(block->dims);
    for (int i = 0; shape != NULL && i < block->dims; i++) {
        if ((size = PyLong_FromLongLong(block->sizes[i])) == NULL)
            Py_CLEAR(shape);
        else
            PyTuple_SET_ITEM(shape, i, size);
    }
    return shape;
}

static PyObject *
block_at(const void *from, size_t i)
{
    const reading *t = from;
    const mt_journal_block *b = &t->contents->blocks[i];
    const char *dtype = b->kind.has_shape ? t->st->shim->dtype_name(b->dtype) : "";
    PyObject *shape = shape_of(b);

    if (shape == NULL) return NULL;
    return Py_BuildValue("(KIiiiOOIsN)", (unsigned long long)b->bytes, (unsigned)b->kind.category,
                         (int)b->kind.birth, (int)b->death, (int)b->kind.backward,
                         name_at(t, b->maker), name_at(t, b->module), (unsigned)b->site, dtype,
                         shape);
}

static PyObject *
rest_at(const void *from, size_t i)
{
    const mt_journal_rest *r = &((const reading *)from)->contents->rest[i];

    return Py_BuildValue("(KIiiNK)", (unsigned long long)r->bytes, (unsigned)r->kind.category,
                         (int)r->kind.birth, (int)r->kind.backward,
                         PyBool_FromLong(r->kind.has_shape), (unsigned long long)r->blocks);
}

static PyObject *
journal_interval_at(const void *from, size_t i)
{
    const mt_journal_interval *s = &((const reading *)from)->contents->intervals[i];

    return Py_BuildValue("(KiK)", (unsigned long long)s->order, (int)s->phase,
                         (unsigned long long)s->bytes);
}

static PyObject *
layer_at(const void *from, size_t i)
{
    const mt_journal_contents *c = ((const reading *)from)->contents;
    const mt_journal_layer *layer = &c->layers[i];
    PyObject *bytes = PyTuple_New((Py_ssize_t)c->intervals_n), *item;

    for (size_t at = 0; bytes != NULL && at < c->intervals_n; at++) {
        if ((item = PyLong_FromUnsignedLongLong(layer->bytes[at])) == NULL)
            Py_CLEAR(bytes);
        else
            PyTuple_SET_ITEM(bytes, (Py_ssize_t)at, item);
    }
    if (bytes == NULL) return NULL;
    return Py_BuildValue("(IiiNN)", (unsigned)layer->kind.category, (int)layer->kind.birth,
                         (int)layer->kind.backward, PyBool_FromLong(layer->kind.has_shape), bytes);
}

static PyObject *
recording_address_at(const void *from, size_t i)
{
    return PyLong_FromSize_t((size_t)((const reading *)from)->contents->blocks[i].address);
}

static PyObject *
tuple_of(size_t n, mt_py_item *item, const reading *from)
{
    PyObject *list = mt_py_list(n, item, from), *tuple;

    if (list == NULL) return NULL;
    tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    return tuple;
}

static PyObject *
contents_object(const mt_state *st, const mt_journal_contents *c, PyObject *names)
{
    reading from = {st, c, names};
    /* A peak before the first event belongs to the forward pass that follows. */
    int phase = c->phase == MT_PHASE_BEFORE ? MT_PHASE_FORWARD : (int)c->phase;
    PyObject *made = PyStructSequence_New(st->Contents);
    PyObject *items[FIELDS] = {PyLong_FromUnsignedLongLong(c->peak_bytes),
                               PyLong_FromUnsignedLongLong(c->base_bytes),
                               PyLong_FromLong(phase),
                               Py_NewRef(name_at(&from, c->maker)),
                               PyLong_FromUnsignedLong(c->site),
                               PyBool_FromLong(c->had_backward),
                               tuple_of(c->blocks_n, block_at, &from),
                               tuple_of(c->rest_n, rest_at, &from),
                               PyLong_FromUnsignedLongLong(c->lost),
                               PyLong_FromUnsignedLongLong(c->events),
                               tuple_of(c->intervals_n, journal_interval_at, &from),
                               tuple_of(c->layers_n, layer_at, &from),
                               tuple_of(c->blocks_n, recording_address_at, &from)};

    for (Py_ssize_t i = 0; i < FIELDS; i++) {
        if (made != NULL && items[i] != NULL) {
            PyStructSequence_SetItem(made, i, items[i]);
        } else {
            Py_XDECREF(items[i]);
            Py_CLEAR(made);
        }
    }
    return made;
}

/* Fills a tuple of MT_JOURNAL_NAMES_MOST items; -1 with an error. A str does not start a collection,
 * so no code can restart the journal, which frees the texts. */
static int
copy_names(PyObject *names)
{
    for (uint32_t i = 0; i < MT_JOURNAL_NAMES_MOST; i++) {
        const char *text = mt_journal_text(&journal, i);
        PyObject *name = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");

        if (name == NULL) return -1;
        PyTuple_SET_ITEM(names, (Py_ssize_t)i, name);
    }
    return 0;
}

/* The names are copied with the contents, before any tuple is made. */
PyObject *
mt_py_recording_contents(const mt_state *st)
{
    mt_journal_contents *contents = PyMem_Malloc(sizeof *contents);
    PyObject *names = PyTuple_New(MT_JOURNAL_NAMES_MOST), *made = NULL;
    mt_journal_read_result result;

    if (contents == NULL || names == NULL) {
        PyMem_Free(contents);
        Py_XDECREF(names);
        return PyErr_NoMemory();
    }
    result =
        mt_journal_read(&journal, (mt_journal_likeness){.of = PARAMETER, .as = GRADIENT}, contents);
    if (result == MT_JOURNAL_READ && copy_names(names) == 0)
        made = contents_object(st, contents, names);
    if (result == MT_JOURNAL_EMPTY) made = Py_NewRef(Py_None);
    if (result == MT_JOURNAL_NO_MEMORY) PyErr_NoMemory();
    mt_journal_contents_drop(&journal, contents);
    PyMem_Free(contents);
    Py_DECREF(names);
    return made;
}

static PyTypeObject *
contents_type(void)
{
    PyStructSequence_Field fields[FIELDS + 1] = {
        {"peak_bytes", "the most that was in use, with older blocks that were marked"},
        {"base_bytes", "in use at the begin, the same way"},
        {"phase", "of the birth that made the peak: 1 forward, 2 backward, 3 optimizer"},
        {"operator",
         "that asked for it, or the node of autograd's in a backward pass; '' for none"},
        {"site", "the lines that asked for it, for Blocks.frames()"},
        {"backward", "whether a backward pass was seen"},
        {"blocks",
         "that lived at the peak, the 4,096 largest: (bytes, category, birth_phase, death_phase, "
         "backward, operator, module, site, dtype, shape)"},
        {"rest", "sums of the others: (bytes, category, birth_phase, backward, shaped, count)"},
        {"lost", "blocks that found no room: if there are any, figures may be too low"},
        {"events", "births and deaths"},
        {"intervals",
         "(order, phase, bytes) of up to 128 that follow each other: the most in use in each"},
        {"layers", "what that was, by kinds of blocks: (category, birth_phase, backward, shaped, "
                   "(bytes of each interval))"},
        {"addresses", "of `blocks`, each; 0 for one that had died by the end"},
        {NULL, NULL},
    };
    PyStructSequence_Desc desc = {"memtools._core.Contents",
                                  "What lived at the peak of a recording.", fields, FIELDS};

    return PyStructSequence_NewType(&desc);
}

int
mt_py_contents_register(PyObject *module, mt_state *st)
{
    if ((st->Contents = contents_type()) == NULL) return -1;
    return PyModule_AddType(module, st->Contents);
}
