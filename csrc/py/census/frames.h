/* frames.h -- what running functions hold in their variables.
 *
 * A running frame is not an object of the collector, so a heap pass does not see `history` in
 *
 *     def train():
 *         history = []          # held by a variable of a running frame and by nothing else
 *         while True: ...
 *
 * Reading frame.f_locals would show it, and in 3.11 leaves a dict behind in the frame that keeps
 * the values alive. These functions leave nothing behind: 3.11 reads the frame, which takes the
 * interpreter's internal header for the layout; later versions have PyFrame_GetVar. */
#ifndef MT_PY_CENSUS_FRAMES_H
#define MT_PY_CENSUS_FRAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* name is a str, or NULL for a value that is only on a frame's stack. Nonzero ends the walk. */
typedef int (*mt_py_frame_visitor)(void *ctx, PyObject *code, PyObject *name, PyObject *value);

/* Shows each variable (cells are shown as cells in 3.11, as their content later) of each running
 * frame of every thread. Returns what ended the walk: 0, the visitor's number, or -1 with an
 * error. */
int mt_py_frames_visit(mt_py_frame_visitor visit, void *ctx);

/* The same for one frame object, of a generator or a traceback, say. */
int mt_py_frame_visit(PyFrameObject *frame, mt_py_frame_visitor visit, void *ctx);

#endif
