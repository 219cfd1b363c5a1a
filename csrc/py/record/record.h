/* record.h -- RecordWriter for other native parts: a sampler thread writes without the GIL. */
#ifndef MT_PY_RECORD_RECORD_H
#define MT_PY_RECORD_RECORD_H

#include "py/base/state.h"
#include "core/record/writer.h"

/* The record that a RecordWriter writes, borrowed: hold a reference to the object as long as it is
 * used, from whatever thread. After close() its functions do nothing. NULL with a TypeError for
 * another object. */
mt_record *mt_py_record(mt_state *st, PyObject *writer);

int mt_py_recordwriter_register(PyObject *module, mt_state *st);

#endif
