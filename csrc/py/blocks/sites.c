/* sites.c -- how this file works.
 *
 * mt_sites_here() goes from the innermost frame outwards. Each frame's code object and instruction
 * lead by a hash to its place, which knows whether it is the user's; the first three that are make
 * the key of the site. Nothing keeps a code object alive: a place holds copies of the names of its file
 * and its function and of its first line. By these it distinguishes
 * another code object at the same address. */
#define Py_BUILD_CORE_MODULE /* the layout of frames */
#include "py/blocks/sites.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/alloc.h"

#if PY_VERSION_HEX < 0x030E0000
#include <internal/pycore_frame.h>
#define KNOWS_FRAMES
#endif

enum {
    MOST_DEPTH = 256, /* frames that are looked at */
    MOST = 1 << 16,   /* places, and sites */
};

struct mt_place {
    const void *code, *file_object, *name_object;
    int instruction, first_line, line;
    char *file, *function; /* UTF-8 */
    bool is_users, is_entry, is_torchs;
};

struct mt_site {
    uint32_t places[MT_SITE_FRAMES]; /* 0: no further frame */
};

void
mt_sites_init(mt_sites *sites)
{
    *sites = (mt_sites){.folders_n = 0};
    mt_lock_init(&sites->lock);
}

/* --- tables ------------------------------------------------------------------------------------- */

static mt_place *
place_at(const mt_sites *s, uint32_t i)
{
    return (mt_place *)s->places.entries + i;
}

static mt_site *
site_at(const mt_sites *s, uint32_t i)
{
    return (mt_site *)s->all.entries + i;
}

static void
sites_forget(mt_site_table *t)
{
    free(t->entries);
    mt_index_drop(&t->index, &mt_alloc_libc);
    *t = (mt_site_table){.n = 0};
}

/* --- texts ------------------------------------------------------------------------------------- */

static size_t
put_utf8(char *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xC0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xE0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3F));
        out[2] = (char)(0x80 | (c & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3F));
    out[2] = (char)(0x80 | (c >> 6 & 0x3F));
    out[3] = (char)(0x80 | (c & 0x3F));
    return 4;
}

/* A str as new UTF-8, read without the GIL: a str never changes. Surrogates are kept. NULL without
 * memory. */
static char *
copy_text(PyObject *text)
{
    size_t n = (size_t)PyUnicode_GET_LENGTH(text), at = 0;
    int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    char *copy = malloc(4 * n + 1);

    if (copy == NULL) return NULL;
    for (size_t i = 0; i < n; i++)
        at += put_utf8(copy + at, PyUnicode_READ(kind, data, (Py_ssize_t)i));
    copy[at] = '\0';
    return copy;
}

/* --- places ------------------------------------------------------------------------------------ */

#ifdef KNOWS_FRAMES

static bool
sites_begins_with(const char *text, const char *begin)
{
    return strncmp(text, begin, strlen(begin)) == 0;
}

static bool
is_users(const mt_sites *sites, const char *file)
{
    if (file[0] == '<' || strstr(file, "torchinductor_") != NULL) return false;
    for (size_t i = 0; i < sites->folders_n; i++)
        if (sites_begins_with(file, sites->texts[i])) return i < sites->users_n;
    return true;
}

/* Whether a function of a file is a method by which programs enter a trainer. */
static bool
is_entry(const mt_sites *sites, const char *file, const char *function)
{
    size_t bytes = strlen(file);

    for (size_t i = sites->folders_n; i < sites->texts_n; i++) {
        const char *entry = sites->texts[i], *method = strrchr(entry, ':');
        if (method == NULL || strcmp(function, method + 1) != 0) continue;
        size_t end = (size_t)(method - entry);
        if (end <= bytes && memcmp(file + bytes - end, entry, end) == 0) return true;
    }
    return false;
}

static uint64_t
sites_hash_of(const void *key, size_t bytes)
{
    const unsigned char *at = key;
    uint64_t h = bytes, word = 0;

    for (size_t i = 0; i < bytes; i += sizeof word) {
        memcpy(&word, at + i, bytes - i < sizeof word ? bytes - i : sizeof word);
        h = (h ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        h ^= h >> 29;
    }
    return h;
}

static bool
is_same_place(const mt_place *a, const mt_place *b)
{
    return a->code == b->code && a->instruction == b->instruction &&
           a->file_object == b->file_object && a->name_object == b->name_object &&
           a->first_line == b->first_line;
}

/* The number of a new entry of `bytes`, to be filled; 0 without memory. Entry 0 is none. */
static uint32_t
new_entry(mt_site_table *t, size_t bytes, uint64_t hash)
{
    void *entries = mt_alloc_grown(&mt_alloc_libc, t->entries, &t->room, t->n + 2, bytes);

    if (entries == NULL) return 0;
    t->entries = entries;
    if (t->n >= MOST || !mt_index_make_room(&t->index, &mt_alloc_libc)) return 0;
    if (t->n == 0) t->n = 1;
    mt_index_add(&t->index, hash, (uint32_t)t->n);
    return (uint32_t)t->n++;
}

/* The place of the code's instruction, or 0 without memory. */
static uint32_t
sites_place_of(mt_sites *s, PyCodeObject *code, int instruction)
{
    mt_place place = {.code = code,
                      .file_object = code->co_filename,
                      .name_object = code->co_qualname,
                      .instruction = instruction,
                      .first_line = code->co_firstlineno};
    const uint64_t key[2] = {(uint64_t)(uintptr_t)code, (uint64_t)instruction};
    uint64_t hash = sites_hash_of(key, sizeof key);
    size_t at = mt_index_half(hash);
    uint32_t found;

    while ((found = mt_index_next(&s->places.index, hash, &at)) != MT_INDEX_NONE)
        if (is_same_place(place_at(s, found), &place)) return found;
    /* It reads the line table, which lives as long as the code; from Python 3.12 on, where a debugger
     * follows the code's lines, a table of sys.monitoring, which another thread that has the GIL might
     * be changing: this one may not have it. */
    place.line = PyCode_Addr2Line(code, instruction);
    place.file = copy_text(code->co_filename);
    place.function = copy_text(code->co_qualname);
    found = place.file == NULL || place.function == NULL
                ? 0
                : new_entry(&s->places, sizeof place, hash);
    if (found == 0) {
        free(place.file);
        free(place.function);
        return 0;
    }
    place.is_users = is_users(s, place.file);
    place.is_entry = is_entry(s, place.file, place.function);
    place.is_torchs = strstr(place.file, "-packages/torch/") != NULL;
    *place_at(s, found) = place;
    return found;
}

/* --- frames ------------------------------------------------------------------------------------ */

static _PyInterpreterFrame *
innermost(PyThreadState *thread)
{
#if PY_VERSION_HEX >= 0x030D0000
    return thread->current_frame;
#else
    return thread->cframe == NULL ? NULL : thread->cframe->current_frame;
#endif
}

/* NULL for a frame that runs no code of Python's: one that is being made, or a step of the interpreter
 * itself. */
static PyCodeObject *
code_of(_PyInterpreterFrame *f)
{
#if PY_VERSION_HEX >= 0x030D0000
    if (f->owner == FRAME_OWNED_BY_CSTACK || !PyCode_Check(f->f_executable)) return NULL;
    if (_PyFrame_IsIncomplete(f)) return NULL;
    return (PyCodeObject *)f->f_executable;
#elif PY_VERSION_HEX >= 0x030C0000
    if (f->owner == FRAME_OWNED_BY_CSTACK || _PyFrame_IsIncomplete(f)) return NULL;
    return f->f_code;
#else
    return _PyFrame_IsIncomplete(f) ? NULL : f->f_code;
#endif
}

/* pre: the lock is held. */
static mt_site
frames_here(mt_sites *s)
{
    PyThreadState *thread = PyGILState_GetThisThreadState();
    _PyInterpreterFrame *f = thread == NULL ? NULL : innermost(thread);
    mt_site site = {{0}};
    uint32_t library = 0, beyond_torch = 0;
    size_t n = 0;

    for (int depth = 0; f != NULL && depth < MOST_DEPTH && n < MT_SITE_FRAMES; depth++) {
        PyCodeObject *code = code_of(f);
        if (code != NULL) {
            int instruction = _PyInterpreterFrame_LASTI(f) * (int)sizeof(_Py_CODEUNIT);
            uint32_t place = sites_place_of(s, code, instruction);
            if (place == 0) break;
            const mt_place *at = place_at(s, place);
            if (at->is_entry) {
                if (beyond_torch != 0) library = beyond_torch;
                break;
            }
            if (at->is_users)
                site.places[n++] = place;
            else if (library == 0)
                library = place;
            if (!at->is_users && !at->is_torchs && beyond_torch == 0) beyond_torch = place;
        }
        f = f->previous;
    }
    if (n == 0) site.places[0] = library;
    return site;
}

uint32_t
mt_sites_here(mt_sites *s)
{
    uint32_t found = 0;
    mt_site site;

    mt_lock_take(&s->lock);
    site = frames_here(s);
    if (site.places[0] != 0) {
        uint64_t hash = sites_hash_of(site.places, sizeof site.places);
        size_t at = mt_index_half(hash);

        while ((found = mt_index_next(&s->all.index, hash, &at)) != MT_INDEX_NONE)
            if (memcmp(site_at(s, found), &site, sizeof site) == 0) break;
        if (found == MT_INDEX_NONE) {
            found = new_entry(&s->all, sizeof site, hash);
            if (found != 0) *site_at(s, found) = site;
        }
    }
    mt_lock_give(&s->lock);
    return found;
}

#else

uint32_t
mt_sites_here(mt_sites *Py_UNUSED(sites))
{
    return 0;
}

#endif

/* --- queries ---------------------------------------------------------------------------------- */

static void
forget_all(mt_sites *s)
{
    for (uint32_t i = 1; i < s->places.n; i++) {
        free(place_at(s, i)->file);
        free(place_at(s, i)->function);
    }
    for (size_t i = 0; i < s->texts_n; i++)
        free(s->texts[i]);
    free((void *)s->texts);
    s->texts = NULL;
    s->texts_n = s->folders_n = s->users_n = 0;
    sites_forget(&s->places);
    sites_forget(&s->all);
}

int
mt_sites_reset(mt_sites *s, PyObject *libraries, PyObject *users, PyObject *entries)
{
    PyObject *given[] = {users, libraries, entries};
    size_t ends[3], n = 0;

    for (size_t k = 0; k < 3; k++)
        ends[k] = n += (size_t)PyTuple_GET_SIZE(given[k]);
    char **copies = n == 0 ? NULL : (char **)calloc(n, sizeof *copies);
    bool is_done = copies != NULL || n == 0;

    for (size_t k = 0, i = 0; k < 3; k++)
        for (Py_ssize_t at = 0; is_done && i < ends[k]; i++, at++)
            is_done = (copies[i] = copy_text(PyTuple_GET_ITEM(given[k], at))) != NULL;
    mt_lock_take(&s->lock);
    forget_all(s);
    if (is_done) {
        s->texts = copies;
        s->users_n = ends[0];
        s->folders_n = ends[1];
        s->texts_n = n;
    }
    mt_lock_give(&s->lock);
    if (is_done) return 0;
    for (size_t i = 0; copies != NULL && i < n; i++)
        free(copies[i]);
    free((void *)copies);
    PyErr_NoMemory();
    return -1;
}

size_t
mt_sites_count(mt_sites *s)
{
    size_t n;

    mt_lock_take(&s->lock);
    n = s->all.n == 0 ? 1 : s->all.n;
    mt_lock_give(&s->lock);
    return n;
}

typedef struct frame_texts {
    PyObject *file, *function;
    int line;
} frame_texts;

static PyObject *
sites_text_of(const char *utf8)
{
    return PyUnicode_DecodeUTF8(utf8, (Py_ssize_t)strlen(utf8), "surrogatepass");
}

/* Only texts are made while the lock is held: a tuple may start a collection, which runs code of the
 * program, and that may allocate a block of torch. Returns the number of frames. */
static Py_ssize_t
site_frame_texts(mt_sites *s, uint32_t number, frame_texts texts[MT_SITE_FRAMES])
{
    Py_ssize_t n = 0;

    mt_lock_take(&s->lock);
    if (number > 0 && number < s->all.n) {
        const mt_site *site = site_at(s, number);
        for (; n < MT_SITE_FRAMES && site->places[n] != 0; n++) {
            const mt_place *place = place_at(s, site->places[n]);
            texts[n] = (frame_texts){sites_text_of(place->file), sites_text_of(place->function),
                                     place->line};
        }
    }
    mt_lock_give(&s->lock);
    return n;
}

PyObject *
mt_sites_frames(mt_sites *s, uint32_t number)
{
    frame_texts texts[MT_SITE_FRAMES];
    Py_ssize_t n = site_frame_texts(s, number, texts);
    PyObject *frames = PyTuple_New(n);

    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *frame = NULL;
        if (texts[i].file != NULL && texts[i].function != NULL && frames != NULL)
            frame = Py_BuildValue("(OiO)", texts[i].file, texts[i].line, texts[i].function);
        Py_XDECREF(texts[i].file);
        Py_XDECREF(texts[i].function);
        if (frame != NULL)
            PyTuple_SET_ITEM(frames, i, frame);
        else
            Py_CLEAR(frames);
    }
    return frames;
}
