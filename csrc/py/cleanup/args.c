#include "py/cleanup/args.h"

#include "py/monitor/probe.h"

/* --- rules ------------------------------------------------------------------------------------ */

static int
refuse_rule(Py_ssize_t action, const char *what, PyObject *got)
{
    PyErr_Format(PyExc_ValueError, "Policy: rule %zd: %s, got %R", action, what, got);
    return -1;
}

/* 0: never. */
static int
take_every(PyObject *every, Py_ssize_t action, uint64_t out[MT_POLICY_CLOCKS])
{
    Py_ssize_t n;

    if (!PyTuple_Check(every) || (n = PyTuple_GET_SIZE(every)) > MT_POLICY_CLOCKS)
        return refuse_rule(action, "every is a tuple of at most 16 numbers, one for each clock",
                           every);
    for (Py_ssize_t c = 0; c < n; c++) {
        PyObject *item = PyTuple_GET_ITEM(every, c);
        long long value = PyLong_Check(item) ? PyLong_AsLongLong(item) : -1;

        if (value < 0 || value > (long long)MT_POLICY_EVERY) {
            PyErr_Clear();
            return refuse_rule(action, "a cadence is 0 (never) to 2**48 ticks", item);
        }
        out[c] = (uint64_t)value;
    }
    return 0;
}

int
mt_py_policy_rule(PyObject *every, long triggers, int later, Py_ssize_t action, mt_policy_rule *out)
{
    *out = (mt_policy_rule){.triggers = (unsigned)triggers, .later = later != 0};
    if (triggers < 0 || triggers >= MT_WHEN_DUE) {
        PyErr_Format(PyExc_ValueError, "Policy: rule %zd: triggers are bits 1 to 16, got %ld",
                     action, triggers);
        return -1;
    }
    return take_every(every, action, out->every);
}

int
mt_py_policy_rule_of(PyObject *rule, Py_ssize_t action, mt_policy_rule *out)
{
    PyObject *every;
    long triggers;
    int later;

    if (!PyTuple_Check(rule) || PyTuple_GET_SIZE(rule) != 3)
        return refuse_rule(action, "a rule is (every, triggers, later)", rule);
    if (!PyArg_ParseTuple(rule, "Olp", &every, &triggers, &later)) return -1;
    return mt_py_policy_rule(every, triggers, later, action, out);
}

/* --- a new policy ----------------------------------------------------------------------------- */

/* PyErr_Format knows no doubles. */
static int
refuse_number(const char *what, double got)
{
    PyObject *number = PyFloat_FromDouble(got);

    if (number != NULL) PyErr_Format(PyExc_ValueError, "Policy(): %s, got %R", what, number);
    Py_XDECREF(number);
    return -1;
}

static int
check_numbers(const mt_policy_args *w)
{
    if (!(w->with.pressure > 0 && w->with.pressure <= 1))
        return refuse_number("pressure is a part of the limit, above 0 and at most 1",
                             w->with.pressure);
    if (!(w->with.max_cost >= 0 && w->with.max_cost <= 1))
        return refuse_number("max_cost is a part of the time, 0 to 1", w->with.max_cost);
    if (w->together < 0 || w->together > (long long)MT_POLICY_EVERY)
        PyErr_Format(PyExc_ValueError, "Policy(): sync_every is 0 to 2**48 updates, got %lld",
                     w->together);
    else if (w->devices < 0 || w->devices > MT_SAMPLE_DEVICES)
        PyErr_Format(PyExc_ValueError, "Policy(): devices is 0 to %d, got %d", MT_SAMPLE_DEVICES,
                     w->devices);
    else if (!PyCallable_Check(w->act))
        PyErr_Format(PyExc_TypeError, "Policy(): act is to be callable, got %R", w->act);
    return PyErr_Occurred() ? -1 : 0;
}

/* (act, rules, *, pressure, max_cost, strict, sync_every, limit, devices, root) */
int
mt_py_policy_args(PyObject *args, PyObject *kwargs, mt_policy_args *w)
{
    static char *names[] = {"act",        "rules", "pressure", "max_cost", "strict",
                            "sync_every", "limit", "devices",  "root",     NULL};
    PyObject *limit = Py_None;
    const char *root = "/";

    *w = (mt_policy_args){.with = {.pressure = 0.85, .max_cost = 0.003}};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$ddpLOis:Policy", names, &w->act, &w->rules,
                                     &w->with.pressure, &w->with.max_cost, &w->strict, &w->together,
                                     &limit, &w->devices, &root))
        return -1;
    if (check_numbers(w) < 0 || !mt_py_limit(limit, "Policy", &w->limit)) return -1;
    w->with.strict = w->strict != 0;
    w->with.together = (uint64_t)w->together;
    return mt_py_root(root, "Policy", w->root) ? 0 : -1;
}

int
mt_py_policy_clock(PyObject *arg, const char *who)
{
    long clock = PyLong_AsLong(arg);

    if (clock >= 0 && clock < MT_POLICY_CLOCKS) return (int)clock;
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s(): a clock is 0 to %d, got %R", who,
                     MT_POLICY_CLOCKS - 1, arg);
    }
    return -1;
}

int
mt_py_policy_action(PyObject *arg, const char *who)
{
    long action = PyLong_AsLong(arg);

    if (action >= 0 && action < MT_POLICY_ACTIONS) return (int)action;
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s(): an action is 0 to %d, got %R", who,
                     MT_POLICY_ACTIONS - 1, arg);
    }
    return -1;
}

/* None is unknown. */
static int
take_bytes(PyObject *arg, const char *what, uint64_t *out)
{
    *out = MT_UNKNOWN;
    if (arg == Py_None) return 0;
    *out = PyLong_AsUnsignedLongLong(arg);
    if (*out != (uint64_t)-1 || !PyErr_Occurred()) return 0;
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return -1;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "done(): %s is 0 or more, or None, got %R", what, arg);
    return -1;
}

int
mt_py_policy_result(PyObject *const *args, mt_policy_result *out)
{
    static const char *const names[] = {"ns",          "host_before",   "host_after",
                                        "host_total",  "device_before", "device_after",
                                        "device_total"};
    uint64_t *const to[] = {&out->ns,          &out->host_before,   &out->host_after,
                            &out->host_total,  &out->device_before, &out->device_after,
                            &out->device_total};

    for (int i = 0; i < 7; i++)
        if (take_bytes(args[i], names[i], to[i]) < 0) return -1;
    if (out->ns != MT_UNKNOWN) return 0;
    PyErr_SetString(PyExc_ValueError, "done(): ns is how long the action took, got None");
    return -1;
}
