/* frames.c -- variables of running frames: see frames.h. */
#define Py_BUILD_CORE_MODULE /* for 3.11: the layout of its frames */
#include "py/census/frames.h"

#if PY_VERSION_HEX < 0x030C0000
#include <internal/pycore_frame.h>

static int
visit_one(_PyInterpreterFrame *f, mt_py_frame_visitor visit, void *ctx)
{
    PyCodeObject *code = f->f_code;
    int named = code->co_nlocalsplus, n = f->stacktop > named ? f->stacktop : named, found = 0;

    for (int i = 0; found == 0 && i < n; i++) {
        PyObject *name = i < named ? PyTuple_GET_ITEM(code->co_localsplusnames, i) : NULL;
        if (f->localsplus[i] != NULL) found = visit(ctx, (PyObject *)code, name, f->localsplus[i]);
    }
    return found;
}

int
mt_py_frame_visit(PyFrameObject *frame, mt_py_frame_visitor visit, void *ctx)
{
    return visit_one(frame->f_frame, visit, ctx);
}

static int
visit_thread(PyThreadState *thread, mt_py_frame_visitor visit, void *ctx)
{
    _PyInterpreterFrame *f = thread->cframe == NULL ? NULL : thread->cframe->current_frame;
    int found = 0;

    for (; found == 0 && f != NULL; f = f->previous) {
        /* The collector walks a generator's frame while its stack is known. */
        if (f->owner == FRAME_OWNED_BY_GENERATOR && f->stacktop >= 0) continue;
        found = visit_one(f, visit, ctx);
    }
    return found;
}

#else

static int
visit_named(PyFrameObject *frame, PyObject *code, PyObject *names, mt_py_frame_visitor visit,
            void *ctx)
{
    int found = 0;

    if (names == NULL) return -1;
    for (Py_ssize_t i = 0; found == 0 && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i), *value = PyFrame_GetVar(frame, name);
        if (value == NULL) { /* not bound now */
            if (!PyErr_ExceptionMatches(PyExc_NameError)) found = -1;
            if (found == 0) PyErr_Clear();
            continue;
        }
        found = visit(ctx, code, name, value);
        Py_DECREF(value);
    }
    Py_DECREF(names);
    return found;
}

int
mt_py_frame_visit(PyFrameObject *frame, mt_py_frame_visitor visit, void *ctx)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *op = (PyObject *)code;
    int found = 0;

    if (code->co_flags & CO_OPTIMIZED) { /* others have a dict, which is an object like any other */
        found = visit_named(frame, op, PyCode_GetVarnames(code), visit, ctx);
        if (found == 0) found = visit_named(frame, op, PyCode_GetCellvars(code), visit, ctx);
        if (found == 0) found = visit_named(frame, op, PyCode_GetFreevars(code), visit, ctx);
    }
    Py_DECREF(code);
    return found;
}

static int
visit_thread(PyThreadState *thread, mt_py_frame_visitor visit, void *ctx)
{
    PyFrameObject *frame = PyThreadState_GetFrame(thread), *back;
    int found = 0;

    while (frame != NULL) {
        if (found == 0) found = mt_py_frame_visit(frame, visit, ctx);
        back = found == 0 ? PyFrame_GetBack(frame) : NULL;
        Py_DECREF(frame);
        frame = back;
    }
    return found;
}

#endif

int
mt_py_frames_visit(mt_py_frame_visitor visit, void *ctx)
{
    PyThreadState *thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    int found = 0;

    for (; found == 0 && thread != NULL; thread = PyThreadState_Next(thread))
        found = visit_thread(thread, visit, ctx);
    return found;
}
