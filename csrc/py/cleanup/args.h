/* args.h -- what Python gives a Policy, checked. Each refuses with an error. */
#ifndef MT_PY_CLEANUP_ARGS_H
#define MT_PY_CLEANUP_ARGS_H

#include "py/base/state.h"

#include "core/cleanup/policy.h"
#include "os/monitor/procfile.h"

typedef struct mt_policy_args {
    PyObject *act, *rules; /* borrowed */
    uint64_t limit;        /* MT_UNLIMITED: none is given */
    mt_policy_setup with;
    long long together;
    int strict, devices;
    char root[MT_PATH_ROOM];
} mt_policy_args;

/* (act, rules, *, pressure, max_cost, strict, sync_every, limit, devices, root) */
int mt_py_policy_args(PyObject *args, PyObject *kwargs, mt_policy_args *out);

/* `action` is for the sentence. */
int mt_py_policy_rule(PyObject *every, long triggers, int later, Py_ssize_t action,
                      mt_policy_rule *out);
/* From (every, triggers, later). */
int mt_py_policy_rule_of(PyObject *rule, Py_ssize_t action, mt_policy_rule *out);

/* Of ns and six numbers of bytes or None. */
int mt_py_policy_result(PyObject *const *args, mt_policy_result *out);

/* -1 with an error, which begins with `who`. */
int mt_py_policy_clock(PyObject *arg, const char *who);
int mt_py_policy_action(PyObject *arg, const char *who);

#endif
