/* policy.c -- memtools._core.Policy: see csrc/core/cleanup/policy.h.
 *
 * How this file works. An mt_policy counts and decides; this object feeds it with what Python gives
 * (rules and results, which cleanup/engine.py makes) and with readings of memory, and calls `act`
 * where it asks for something:
 *
 *   tick ──► due? ──► read memory ──► decide ──► act(mask, clock)        Python: does what is due
 *                                                     └─► done(action, ...)
 *
 * The GIL is its lock. It is held while memory is read, as torch holds it for its own statistics: a
 * thread that gives it up may wait 5 ms to have it again. act gives it up, so that `acts` keeps
 * others out meanwhile. In a forked child all goes on, but for the devices, which are the parent's.
 * */
#include "py/cleanup/policy.h"

#include <structmember.h>

#include "py/monitor/devices.h"
#include "py/monitor/probe.h"
#include "py/base/errors.h"
#include "py/base/number.h"
#include "py/base/objects.h"
#include "core/base/clock.h"
#include "core/cleanup/policy.h"
#include "os/base/forks.h"
#include "os/port/store.h"
#include "os/monitor/probe.h"

typedef struct Policy {
    PyObject_HEAD
    mt_state *state; /* kept alive by the type */
    mt_policy policy;
    PyObject *act;
    mt_birth birth; /* of the process that ticked last */
    mt_probe_ops probe;
    uint64_t limit; /* MT_UNLIMITED: none is given */
    int devices;    /* 0 in a forked child */
    bool acts;
    unsigned long thread; /* that acts, or did */
    uint64_t look_ns;
    mt_sample job;    /* the newest reading of children and shared memory */
    uint64_t job_due; /* when they are read again */
} Policy;

enum { JOB_SHARE = 200 }; /* of the time, for that reading: one part in so many */

/* The number of a clock or an action, 0 to count - 1; -1 with an error. */
static int
take_index(PyObject *arg, int count)
{
    int overflow;
    long index = PyLong_AsLongAndOverflow(arg, &overflow);

    if (index >= 0 && index < count) return (int)index;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "clocks and actions are 0 to %d, got %R", count - 1, arg);
    return -1;
}

/* --- life ------------------------------------------------------------------------------------- */

/* (act, pressure, max_cost, strict, together, limit, devices, root); a limit of 0 is none.
 * CleanupPolicy has checked what its user gave; only what memory depends on is checked here. */
static PyObject *
policy_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    mt_state *st = mt_state_of_type(type);
    char place[MT_PATH_ROOM];
    mt_policy_setup with;
    unsigned long long together, limit;
    mt_error err = {0};
    PyObject *act;
    const char *root;
    int strict, devices;
    Policy *self;

    if (st == NULL ||
        !PyArg_ParseTuple(args, "OddpKKis:Policy", &act, &with.pressure, &with.max_cost, &strict,
                          &together, &limit, &devices, &root) ||
        !mt_py_root(root, "Policy", place))
        return NULL;
    if (devices < 0 || devices > MT_SAMPLE_DEVICES || together > MT_POLICY_EVERY)
        return PyErr_Format(PyExc_ValueError, "Policy(): devices or together is out of range");
    if (devices > 0 && mt_state_connect(st) < 0) return NULL;
    if ((self = (Policy *)type->tp_alloc(type, 0)) == NULL) return NULL;
    with.strict = strict != 0;
    with.together = together;
    self->state = st;
    self->act = Py_NewRef(act);
    self->limit = limit == 0 ? MT_UNLIMITED : limit;
    self->devices = devices;
    mt_policy_init(&self->policy, &with, mt_now_ns());
    self->birth = mt_birth_now();
    if (mt_py_open_probe(st, place, &mt_probe_ages_usual, devices, &self->probe, &err) == MT_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    return mt_py_raise(st, &err, "Policy()");
}

static int
policy_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((Policy *)op)->act);
    return 0;
}

/* From here on nothing is done any more: see decide_and_act(). */
static int
policy_clear(PyObject *op)
{
    Py_CLEAR(((Policy *)op)->act);
    return 0;
}

static void
policy_dealloc(PyObject *op)
{
    Policy *self = (Policy *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    policy_clear(op);
    if (self->probe.close != NULL) self->probe.close(self->probe.ctx);
    type->tp_free(op);
    Py_DECREF(type);
}

/* --- readings --------------------------------------------------------------------------------- */

/* Children, shared memory and what is swapped out count where the limit is given, see limit.h. What
 * was expensive to read is read again later. */
static void
read_job(Policy *self, mt_sample *out)
{
    uint64_t began = mt_now_ns();

    if (began >= self->job_due) {
        self->probe.read(self->probe.ctx, MT_READ_CHILDREN | MT_READ_SHM, &self->job);
        self->job_due = began + JOB_SHARE * (mt_now_ns() - began);
    }
    out->children = self->job.children;
    out->children_priv = self->job.children_priv;
    out->children_swap = self->job.children_swap;
    out->shm = self->job.shm;
    out->shm_mapped = self->job.shm_mapped;
}

static void
read_memory(Policy *self, unsigned mask, mt_sample *out)
{
    bool of_job = self->limit != MT_UNLIMITED && mask & MT_READ_CGROUP;

    if (self->devices == 0 || !mt_birth_is_here(&self->birth)) mask &= ~(unsigned)MT_READ_DEVICES;
    if (of_job) mask |= MT_READ_SWAP;
    self->probe.read(self->probe.ctx, mask & ~(unsigned)MT_READ_HEAP, out);
    if (of_job) read_job(self, out);
    mt_sample_count_once(out, mt_store_linux_mapped_again());
}

/* Apart, because it may take milliseconds, and how long is to be known. */
static void
read_heap(Policy *self, mt_sample *out)
{
    uint64_t start = mt_now_ns(), end;
    mt_sample heap;

    self->probe.read(self->probe.ctx, MT_READ_HEAP, &heap);
    end = mt_now_ns();
    out->heap_used = heap.heap_used;
    out->heap_free = heap.heap_free;
    mt_policy_heap_read(&self->policy, end, end - start);
}

/* --- ticks ------------------------------------------------------------------------------------ */

/* After a fork: another thread that acted is not in this process. */
static void
forget_parents_thread(Policy *self)
{
    if (mt_birth_is_here(&self->birth)) return;
    self->birth = mt_birth_now();
    self->devices = 0;
    self->job_due = 0;
    if (self->thread != PyThread_get_thread_ident()) self->acts = false;
}

/* False where a thread acts, this one included. */
static bool
begin_actions(Policy *self)
{
    forget_parents_thread(self);
    if (self->acts) return false;
    self->acts = true;
    self->thread = PyThread_get_thread_ident();
    return true;
}

/* pre: entered. */
static unsigned
decide(Policy *self, unsigned clock, bool now)
{
    mt_policy *p = &self->policy;
    uint64_t start = mt_now_ns();
    unsigned reads = now ? mt_policy_reads_now(p, start) : mt_policy_reads(p, clock, start), mask;
    mt_limit limit = {MT_UNKNOWN, MT_UNKNOWN, ""};
    mt_sample sample;

    if (reads != 0) {
        read_memory(self, reads, &sample);
        if (reads & MT_READ_HEAP) read_heap(self, &sample);
        limit = mt_limit_of(&sample, self->limit);
    }
    mask = mt_policy_decide(p, clock, start, reads != 0 ? &sample : NULL, limit);
    self->look_ns += mt_now_ns() - start;
    return mask;
}

static int
decide_and_act(Policy *self, unsigned clock)
{
    PyObject *act = self->act;
    unsigned mask;
    int status = 0;

    if (act == NULL || !begin_actions(self)) return 0;
    Py_INCREF(act);
    Py_INCREF(self);
    mask = decide(self, clock, false);
    if (mask != 0 || self->policy.with.together > 0) {
        PyObject *done = PyObject_CallFunction(act, "II", mask, clock);

        status = done == NULL ? -1 : 0;
        Py_XDECREF(done);
    }
    self->acts = false;
    Py_DECREF(self);
    Py_DECREF(act);
    return status;
}

int
mt_py_policy_tick(PyObject *policy, unsigned clock)
{
    Policy *self = (Policy *)policy;

    return mt_policy_tick(&self->policy, clock, 1) ? decide_and_act(self, clock) : 0;
}

/* (clock=0, n=1, /) */
static PyObject *
policy_tick(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    Policy *self = (Policy *)op;
    int clock = 0;
    mt_py_whole times = MT_PY_WHOLE("n", 0, (Py_ssize_t)MT_POLICY_EVERY, 1);

    if (n > 2) return PyErr_Format(PyExc_TypeError, "tick() takes two arguments, got %zd", n);
    if (n > 0 && (clock = take_index(args[0], MT_POLICY_CLOCKS)) < 0) return NULL;
    if (n > 1 && !mt_py_whole_take(args[1], &times)) return NULL;
    if (times.value > 0 && mt_policy_tick(&self->policy, (unsigned)clock, (uint64_t)times.value) &&
        decide_and_act(self, (unsigned)clock) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* --- rules and results ------------------------------------------------------------------------ */

/* (action, every, triggers, later): `every` has a number for each of the first clocks. */
static PyObject *
policy_set_rule(PyObject *op, PyObject *args)
{
    mt_policy_rule rule = {0};
    PyObject *number, *every;
    int action, later;

    if (!PyArg_ParseTuple(args, "OO!Ip:set_rule", &number, &PyTuple_Type, &every, &rule.triggers,
                          &later) ||
        (action = take_index(number, MT_POLICY_ACTIONS)) < 0)
        return NULL;
    rule.later = later != 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(every); i++) {
        uint64_t ticks = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(every, i));

        if (PyErr_Occurred()) return NULL;
        if (i == MT_POLICY_CLOCKS || ticks > MT_POLICY_EVERY)
            return PyErr_Format(PyExc_ValueError, "set_rule(): at most 16 counts up to 2**48");
        rule.every[i] = ticks;
    }
    rule.triggers &= MT_WHEN_DUE - 1u;
    mt_policy_rule_set(&((Policy *)op)->policy, (unsigned)action, &rule);
    Py_RETURN_NONE;
}

/* (action, ns, host_before, host_after, host_total, device_before, device_after, device_total);
 * bytes that are not known are -1, which is MT_UNKNOWN. */
static PyObject *
policy_done(PyObject *op, PyObject *args)
{
    Policy *self = (Policy *)op;
    unsigned long long ns, host[3], device[3];
    mt_policy_level level;
    PyObject *number;
    bool later;
    int action;

    if (!PyArg_ParseTuple(args, "OKKKKKKK:done", &number, &ns, &host[0], &host[1], &host[2],
                          &device[0], &device[1], &device[2]) ||
        (action = take_index(number, MT_POLICY_ACTIONS)) < 0)
        return NULL;
    later = self->policy.action[action].rule.later;
    if (later) {
        mt_sample sample;
        read_memory(self, MT_READ_RSS | MT_READ_DEVICES, &sample);
        level = mt_policy_level_of(&sample);
    }
    mt_policy_done(
        &self->policy, (unsigned)action, mt_now_ns(),
        &(mt_policy_result){ns, host[0], host[1], host[2], device[0], device[1], device[2]},
        later ? &level : NULL);
    Py_RETURN_NONE;
}

/* Where another thread is at it, or this one, what it knows already. */
static PyObject *
policy_look(PyObject *op, PyObject *Py_UNUSED(none))
{
    Policy *self = (Policy *)op;
    unsigned mask;

    if (!begin_actions(self)) return PyLong_FromUnsignedLong(self->policy.asked);
    mask = decide(self, self->policy.clock, true);
    self->acts = false;
    return PyLong_FromUnsignedLong(mask);
}

static PyObject *
policy_forget(PyObject *op, PyObject *Py_UNUSED(none))
{
    mt_policy_forget(&((Policy *)op)->policy, mt_now_ns());
    Py_RETURN_NONE;
}

/* --- what it knows ---------------------------------------------------------------------------- */

static PyObject *
policy_why(PyObject *op, PyObject *arg)
{
    int action = take_index(arg, MT_POLICY_ACTIONS);

    return action < 0 ? NULL : PyLong_FromUnsignedLong(((Policy *)op)->policy.action[action].why);
}

static PyObject *
policy_ticks(PyObject *op, PyObject *arg)
{
    int clock = take_index(arg, MT_POLICY_CLOCKS);

    return clock < 0 ? NULL : PyLong_FromUnsignedLongLong(((Policy *)op)->policy.ticks[clock]);
}

static PyObject *
policy_figures(PyObject *op, PyObject *arg)
{
    int action = take_index(arg, MT_POLICY_ACTIONS);
    const mt_policy_action *a;

    if (action < 0) return NULL;
    a = &((Policy *)op)->policy.action[action];
    return Py_BuildValue("(KKK)", a->paid, a->skipped, a->backoff);
}

static PyObject *
get_seconds(PyObject *op, void *Py_UNUSED(which))
{
    return PyFloat_FromDouble((double)(mt_now_ns() - ((Policy *)op)->policy.start_ns) * 1e-9);
}

static PyGetSetDef getters[] = {
    {"seconds", get_seconds, NULL, "Since it was made, or forget().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"looks", T_ULONGLONG, offsetof(Policy, policy.looks), READONLY,
     "How often memory was read for a decision."},
    {"look_ns", T_ULONGLONG, offsetof(Policy, look_ns), READONLY,
     "Nanoseconds spent on looks and decisions."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    MT_PY_METHOD(
        policy, tick, METH_FASTCALL,
        "tick($self, clock=0, n=1, /)\n--\n\n"
        "Count n ticks of a clock; call act(mask, clock) when something is to be done, on this "
        "thread. Raises what act does. From within act, and while another thread is in it, a "
        "tick only counts."),
    MT_PY_METHOD(policy, set_rule, METH_VARARGS,
                 "set_rule($self, action, every, triggers, later, /)\n--\n\n"
                 "Say when an action is due: at how many ticks of each clock, 0 for never, and by "
                 "which triggers."),
    MT_PY_METHOD(policy, done, METH_VARARGS,
                 "done($self, action, ns, host_before, host_after, host_total, device_before, "
                 "device_after, device_total, /)\n--\n\n"
                 "An action was done, and what it cost and freed; -1 where bytes are unknown."),
    MT_PY_METHOD(
        policy, look, METH_NOARGS,
        "look($self, /)\n--\n\n"
        "Read memory and decide now: the mask of what is asked for, which the next tick asks "
        "for as well."),
    MT_PY_METHOD(policy, why, METH_O,
                 "why($self, action, /)\n--\n\n"
                 "What the action was asked for last: bits of the triggers, 32 for a cadence."),
    MT_PY_METHOD(policy, ticks, METH_O,
                 "ticks($self, clock, /)\n--\n\nHow often that clock ticked."),
    MT_PY_METHOD(policy, figures, METH_O,
                 "figures($self, action, /)\n--\n\n"
                 "(how often it paid, cadences that were skipped, back-off)."),
    MT_PY_METHOD(policy, forget, METH_NOARGS,
                 "forget($self, /)\n--\n\n"
                 "Restart time, budget and back-off. Ticks, rules and figures stay."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Decides when to clean up, by counted ticks and by memory."},
    {Py_tp_new, policy_new},
    {Py_tp_dealloc, policy_dealloc},
    {Py_tp_traverse, policy_traverse},
    {Py_tp_clear, policy_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memtools._core.Policy",
    .basicsize = sizeof(Policy),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mt_py_policy_register(PyObject *module, mt_state *st)
{
    return mt_py_add_type(module, &spec, &st->Policy);
}
