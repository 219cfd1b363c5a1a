/* census.h -- functions of memtools._core that look at the whole heap: see heap.h. */
#ifndef MT_PY_CENSUS_CENSUS_H
#define MT_PY_CENSUS_CENSUS_H

#include "py/base/state.h"

/* _census(tensor, shim) -> (types, groups, tensors, seen, objects)
 *   types    [(type, how many, whether tensors)]
 *   groups   by the shim: [(one of them, how many, bytes)] by (type, shape, dtype, device); else []
 *   tensors  without it: each tensor
 *   seen     a filter of the addresses, for _fresh
 *   objects  how many are tracked
 * tensor is torch.Tensor or None. */
PyObject *mt_py_census(PyObject *module, PyObject *args);

/* _fresh(type, seen, limit) -> the last `limit` objects of exactly this type that are not in seen.
 * The filter takes about one new object of 300 for an old one, and no old one for a new. */
PyObject *mt_py_fresh(PyObject *module, PyObject *args);

/* _instances(classes) -> the objects of exactly one of these types, which are in a tuple. One pass:
 * 30 ms for 280,000 objects. */
PyObject *mt_py_instances(PyObject *module, PyObject *classes);

/* _held(types) -> the objects of these types, or of types derived from them, that containers and
 * variables of running functions refer to: see held.c. */
PyObject *mt_py_held(PyObject *module, PyObject *types);

/* _referrers(targets) -> (containers, frames, unaccounted): see referrers.c. */
PyObject *mt_py_referrers(PyObject *module, PyObject *args);

/* _place(container, value) -> the key or the index where value itself lies, or None;
 * _frame_variables(frame) -> [(name, value)] of a function that runs, cells as frames.h says. */
PyObject *mt_py_place(PyObject *module, PyObject *args);
PyObject *mt_py_frame_variables(PyObject *module, PyObject *frame);

/* _module_of(namespace) -> the name of the module whose __dict__ it is, the first in sys.modules, or
 * None. Takes 10 us. */
PyObject *mt_py_module_of(PyObject *module, PyObject *namespace);

/* _instance_dict(object) -> its __dict__ itself, whatever its class says, or None. */
PyObject *mt_py_instance_dict(PyObject *module, PyObject *object);

/* memtools._core.GrowthTable: see growth.c.
 * _look(step, deque, cache, ndarray, tensor, shim, libraries, package, own,
 *       users) -> (rows, nodes, cut, bytes)
 *   rows   [(way, what, count, length, longer, pace, since, until, rises, fell, kept)], which only
 *          ever gained, by bytes a step: way is [the thing, what holds it, ...], up to a namespace
 *          or to (code, name) of a variable; of count > 1 it is what these lie in; kept is how many
 *          nodes of autograd's graphs its entries keep
 *   nodes  that the walk made
 *   cut    whether it left things out, as it would have taken too long
 *   bytes  of all that was reached */
int mt_py_growthtable_register(PyObject *module, mt_state *st);

#endif
