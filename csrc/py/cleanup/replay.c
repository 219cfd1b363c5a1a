/* replay.c -- memtools._core.PolicyReplay: a cleanup policy that is told what time it is and
 * what memory there was, so that a record shows what it would have decided.
 *
 *   advance(clock, ticks, from, to, reading) ──► (ticks, time, actions): where something is asked
 *   done(action, time, what it cost and freed)    for, or at the end of these ticks
 *
 * It reads no memory and no clock: the same calls give the same answers on any machine. */
#include "py/base/state.h"

#include <string.h>

#include "py/cleanup/args.h"
#include "core/monitor/limit.h"
#include "core/cleanup/policy.h"

enum { HOST_FIELDS = 8, DEVICE_FIELDS = 5 };

typedef struct PolicyReplay {
    PyObject_HEAD mt_policy core;
    uint64_t limit; /* given; MT_UNLIMITED: none */
} PolicyReplay;

/* --- arguments ------------------------------------------------------------------------------- */

/* At most `most` ints of a tuple; how many there are, or -1 with an error. */
static Py_ssize_t
numbers_of(PyObject *tuple, uint64_t *out, Py_ssize_t most, const char *what)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > most) {
        PyErr_Format(PyExc_TypeError, "%s is a tuple of at most %zd ints", what, most);
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        out[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(tuple, i));
        if (out[i] == UINT64_MAX && PyErr_Occurred()) return -1;
    }
    return PyTuple_GET_SIZE(tuple);
}

static bool
is_index(unsigned number, unsigned most, const char *what)
{
    if (number < most) return true;
    PyErr_Format(PyExc_ValueError, "%s is 0 to %u, got %u", what, most - 1, number);
    return false;
}

static int
set_rules(mt_policy *core, PyObject *rules)
{
    PyObject *all = PySequence_Fast(rules, "PolicyReplay(): rules is a sequence");
    int failed = all == NULL ? -1 : 0;
    mt_policy_rule rule;

    for (Py_ssize_t i = 0; failed == 0 && i < PySequence_Fast_GET_SIZE(all); i++) {
        if (!is_index((unsigned)i, MT_POLICY_ACTIONS, "an action"))
            failed = -1;
        else if ((failed = mt_py_policy_rule_of(PySequence_Fast_GET_ITEM(all, i), i, &rule)) == 0)
            mt_policy_rule_set(core, (unsigned)i, &rule);
    }
    Py_XDECREF(all);
    return failed;
}

/* (rss, private, cgroup_used, cgroup_limit, available, total, heap_free, children_private), then
 * (allocated, reserved, free, total, inactive_split) of each device; 2**64 - 1 for no reading. */
static int
take_reading(PyObject *tuple, uint64_t now, mt_sample *out)
{
    uint64_t n[HOST_FIELDS + DEVICE_FIELDS * MT_SAMPLE_DEVICES];
    Py_ssize_t many = numbers_of(tuple, n, (Py_ssize_t)(sizeof n / sizeof *n), "a reading");

    if (many < 0) return -1;
    if (many < HOST_FIELDS || (many - HOST_FIELDS) % DEVICE_FIELDS != 0) {
        PyErr_Format(PyExc_ValueError, "a reading has %d numbers and %d for each device, got %zd",
                     HOST_FIELDS, DEVICE_FIELDS, many);
        return -1;
    }
    mt_sample_clear(out);
    memset(out->device, 0xff, sizeof out->device); /* MT_UNKNOWN */
    out->time_ns = now;
    out->rss = n[0], out->priv = n[1], out->cgroup_used = n[2], out->cgroup_limit = n[3];
    out->available = n[4], out->total = n[5], out->heap_free = n[6], out->children_priv = n[7];
    out->devices = (uint64_t)(many - HOST_FIELDS) / DEVICE_FIELDS;
    for (uint64_t i = 0; i < out->devices; i++) {
        const uint64_t *from = n + HOST_FIELDS + DEVICE_FIELDS * i;
        mt_device_sample *d = &out->device[i];
        d->allocated = from[0], d->reserved = from[1], d->free = from[2];
        d->total = from[3], d->inactive_split = from[4];
    }
    return 0;
}

/* --- time goes on ---------------------------------------------------------------------------- */

/* `from` to `to` in `of` steps: the time of the i-th. pre: from <= to, i <= of. */
static uint64_t
time_of(uint64_t from, uint64_t to, uint64_t i, uint64_t of)
{
    return from + (uint64_t)((double)(to - from) * ((double)i / (double)of));
}

/* Ticks up to the one at which there is something to decide, `left` at most. pre: left > 0. */
static uint64_t
until_next(const mt_policy *p, unsigned clock, uint64_t left)
{
    uint64_t ticks = p->ticks[clock], next = p->next[clock];

    if (next <= ticks) return 1;
    return next - ticks < left ? next - ticks : left;
}

static unsigned
decide(PolicyReplay *self, unsigned clock, uint64_t now, const mt_sample *reading)
{
    mt_limit limit = mt_limit_of(reading, self->limit);
    bool look = mt_policy_reads(&self->core, clock, now) != 0;

    return mt_policy_decide(&self->core, clock, now, look ? reading : NULL, limit);
}

static PyObject *
replay_advance(PyObject *op, PyObject *args)
{
    PolicyReplay *self = (PolicyReplay *)op;
    unsigned long long ticks, from, to;
    unsigned clock, asked = 0;
    uint64_t now = 0, i = 0, turns = 0;
    PyObject *reading;
    mt_sample x;

    if (!PyArg_ParseTuple(args, "IKKKO:advance", &clock, &ticks, &from, &to, &reading) ||
        !is_index(clock, MT_POLICY_CLOCKS, "a clock") || take_reading(reading, from, &x) < 0)
        return NULL;
    if (to < from)
        return PyErr_Format(PyExc_ValueError, "advance(): it ends at %llu ns, before %llu", to,
                            from);
    for (now = from; i < ticks && asked == 0;) {
        uint64_t many = until_next(&self->core, clock, ticks - i);
        if (++turns % 4096 == 0 && PyErr_CheckSignals() < 0) return NULL; /* Ctrl-C ends it */
        now = time_of(from, to, i += many, ticks);
        if (mt_policy_tick_many(&self->core, clock, many)) asked = decide(self, clock, now, &x);
    }
    return Py_BuildValue("(KKI)", (unsigned long long)i, (unsigned long long)now, asked);
}

static PyObject *
replay_done(PyObject *op, PyObject *args)
{
    unsigned long long n[8];
    unsigned action;

    if (!PyArg_ParseTuple(args, "IKKKKKKKK:done", &action, &n[0], &n[1], &n[2], &n[3], &n[4], &n[5],
                          &n[6], &n[7]) ||
        !is_index(action, MT_POLICY_ACTIONS, "an action"))
        return NULL;
    mt_policy_done(&((PolicyReplay *)op)->core, action, n[0],
                   &(mt_policy_result){n[1], n[2], n[3], n[4], n[5], n[6], n[7]}, NULL);
    Py_RETURN_NONE;
}

/* (why it was asked for last, times, of these paid, skipped, back-off, nanoseconds that did not
 * pay) */
static PyObject *
replay_figures(PyObject *op, PyObject *number)
{
    unsigned long action = PyLong_AsUnsignedLong(number);
    const mt_policy_action *a;

    if (PyErr_Occurred()) return NULL;
    if (!is_index(action < UINT32_MAX ? (unsigned)action : UINT32_MAX, MT_POLICY_ACTIONS,
                  "an action"))
        return NULL;
    a = &((PolicyReplay *)op)->core.action[action];
    return Py_BuildValue("(IKKKKK)", a->why, (unsigned long long)a->count,
                         (unsigned long long)a->paid, (unsigned long long)a->skipped,
                         (unsigned long long)a->backoff, (unsigned long long)a->unpaid_ns);
}

/* --- the type -------------------------------------------------------------------------------- */

static PyObject *
replay_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"",         "pressure", "max_cost", "strict",
                            "together", "limit",    "start_ns", NULL};
    mt_policy_setup with = {.pressure = 0.85, .max_cost = 0.003};
    unsigned long long together = 0, start = 0, limit = MT_UNLIMITED;
    PolicyReplay *self;
    PyObject *rules;
    int strict = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$ddpKKK:PolicyReplay", names, &rules,
                                     &with.pressure, &with.max_cost, &strict, &together, &limit,
                                     &start))
        return NULL;
    if (!(with.pressure > 0 && with.pressure <= 1 && with.max_cost >= 0))
        return PyErr_Format(PyExc_ValueError, "PolicyReplay(): pressure is above 0 and at most 1, "
                                              "max_cost is 0 or more");
    with.strict = strict;
    with.together = together;
    if ((self = (PolicyReplay *)type->tp_alloc(type, 0)) == NULL) return NULL;
    self->limit = limit;
    mt_policy_init(&self->core, &with, start);
    if (set_rules(&self->core, rules) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void
replay_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"advance", replay_advance, METH_VARARGS,
     "advance($self, clock, ticks, from_ns, to_ns, reading, /)\n--\n\n"
     "Counts ticks, spread over that time, until actions are asked for or the ticks are over.\n"
     "Returns (ticks counted, the time of the last, the actions as bits)."},
    {"done", replay_done, METH_VARARGS,
     "done($self, action, now_ns, ns, host_before, host_after, host_total, device_before,\n"
     "     device_after, device_total, /)\n--\n\n"
     "An action was done; it is judged at once. 2**64 - 1 for bytes that are not known."},
    {"figures", replay_figures, METH_O,
     "figures($self, action, /)\n--\n\n"
     "(why it was asked for last, times, of these paid, skipped, back-off, unpaid nanoseconds)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A cleanup policy that is told the time and the readings: for replays of records."},
    {Py_tp_new, replay_new},
    {Py_tp_dealloc, replay_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

/* It holds no object, so it cannot be in a cycle. */
static PyType_Spec spec = {
    .name = "memtools._core.PolicyReplay",
    .basicsize = sizeof(PolicyReplay),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_policyreplay_register(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int failed = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);

    Py_XDECREF(type);
    return failed;
}
