#include "machine.h"

#include <stdlib.h>
#include <string.h>

enum { UNTOUCHED = 0xA5, FREED = 0x5A };

machine gpu = {.lock = PTHREAD_MUTEX_INITIALIZER,
               .held_changed = PTHREAD_COND_INITIALIZER,
               .devices = 2,
               .fail_at = -1,
               .granularity = FAKE_GRANULARITY,
               .capacity = SIZE_MAX};
_Thread_local int current_device;
_Thread_local int current_context = -1;

stream *
stream_of(void *handle)
{
    gpu.defaults[current_device].device = current_device;
    return handle != NULL ? handle : &gpu.defaults[current_device];
}

stream *
next_stream(const stream *at)
{
    if (at == NULL) return &gpu.defaults[0];
    if (at == &gpu.defaults[MAX_DEVICES - 1]) return gpu.streams;
    if (at >= gpu.defaults && at < gpu.defaults + MAX_DEVICES)
        return &gpu.defaults[at - gpu.defaults + 1];
    return at->next;
}

static mark *
mark_ref(mark *m)
{
    if (m != NULL) m->refs++;
    return m;
}

static void
mark_drop(mark *m)
{
    if (m != NULL && --m->refs == 0) free(m);
}

static bool
runnable(const stream *s)
{
    return s->first != NULL && (s->first->kind != OP_WAIT || s->first->mark->reached);
}

static void
run_first(stream *s)
{
    op *o = s->first;

    switch (o->kind) {
    case OP_COPY:
        memmove(o->dst, o->src, o->bytes);
        break;
    case OP_ZERO:
        memset(o->dst, 0, o->bytes);
        break;
    case OP_WRITE:
        memcpy(o->dst, o->src, o->bytes);
        free((void *)(uintptr_t)o->src);
        break;
    case OP_FREE:
        memset(o->dst, FREED, o->bytes);
        free(o->dst);
        break;
    case OP_RECORD:
        o->mark->reached = true;
        break;
    case OP_WAIT:
        break;
    }
    mark_drop(o->mark);
    s->first = o->next;
    gpu.queued--;
    free(o);
}

static uint32_t
roll(void)
{
    gpu.dice ^= gpu.dice << 13;
    gpu.dice ^= gpu.dice >> 17;
    gpu.dice ^= gpu.dice << 5;
    return gpu.dice;
}

/* The runnable stream whose turn it is; NULL when all are empty or stalled. */
static stream *
pick(void)
{
    stream *chosen = NULL;
    uint32_t seen = 0;

    for (stream *s = next_stream(NULL); s != NULL; s = next_stream(s)) {
        if (!runnable(s)) continue;
        seen++;
        if (chosen == NULL ||
            (gpu.dice != 0 ? roll() % seen == 0 : s->first->number < chosen->first->number))
            chosen = s;
    }
    return chosen;
}

static void
reap_streams(void)
{
    for (stream **at = &gpu.streams; *at != NULL;) {
        stream *s = *at;

        if (s->destroyed && s->first == NULL) {
            *at = s->next;
            free(s);
        } else {
            at = &s->next;
        }
    }
}

size_t
run_some(size_t n)
{
    size_t ran = 0;
    stream *s;

    while (ran < n && (s = pick()) != NULL) {
        run_first(s);
        ran++;
    }
    reap_streams();
    return ran;
}

size_t
run_stream(stream *s, size_t n)
{
    size_t ran = 0;

    for (; ran < n && runnable(s); ran++)
        run_first(s);
    return ran;
}

void
enqueue(stream *to, op what)
{
    op *o = malloc(sizeof *o);

    if (o == NULL) abort();
    *o = what;
    o->next = NULL;
    o->number = ++gpu.enqueued;
    *(to->first != NULL ? &to->last->next : &to->first) = o;
    to->last = o;
    gpu.queued++;
    if (gpu.eager) run_some(SIZE_MAX);
}

/* Runs just what the mark needs: its stream up to it and, where that waits, the same there. It
 * ends, since a wait refers to a record enqueued earlier. */
static void
reach(mark *m)
{
    while (!m->reached) {
        op *o = m->stream->first;

        if (o->kind == OP_WAIT) reach(o->mark);
        run_first(m->stream);
    }
}

stream *
make_stream(bool counted)
{
    stream *s = calloc(1, sizeof *s);

    if (s == NULL) return NULL;
    use_device(current_device);
    s->device = current_device;
    s->counted = counted;
    s->next = gpu.streams;
    gpu.streams = s;
    gpu.live_streams += counted;
    return s;
}

void
destroy_stream(stream *s)
{
    s->destroyed = true;
    gpu.live_streams -= s->counted;
    gpu.busy_frees += s->first != NULL;
    reap_streams();
}

event *
make_event(void)
{
    event *e = calloc(1, sizeof *e);

    if (e == NULL) return NULL;
    use_device(current_device);
    e->device = current_device;
    e->next = gpu.events;
    return gpu.events = e;
}

cudaError_t
record(event *e, stream *on)
{
    mark *m;

    if (e->device != on->device) return cudaErrorInvalidResourceHandle;
    if ((m = calloc(1, sizeof *m)) == NULL) return cudaErrorMemoryAllocation;
    m->stream = on;
    mark_drop(e->mark);
    e->mark = mark_ref(m);
    enqueue(on, (op){.kind = OP_RECORD, .mark = mark_ref(m)});
    return cudaSuccess;
}

void
wait_for(event *e, stream *on)
{
    if (e->mark != NULL) enqueue(on, (op){.kind = OP_WAIT, .mark = mark_ref(e->mark)});
}

void
reach_event(event *e)
{
    if (e->mark != NULL) reach(e->mark);
    reap_streams();
}

void
free_event(event *e)
{
    event **at = &gpu.events;

    while (*at != e)
        at = &(*at)->next;
    *at = e->next;
    mark_drop(e->mark);
    free(e);
}

long
count_events(void)
{
    long n = 0;

    for (event *e = gpu.events; e != NULL; e = e->next)
        n++;
    return n;
}

cudaError_t
take_block(void **out, size_t bytes, bool pinned)
{
    block *b = malloc(sizeof *b);

    if (b == NULL || (b->base = aligned_alloc(256, (bytes + 255) / 256 * 256)) == NULL) {
        free(b);
        return cudaErrorMemoryAllocation;
    }
    use_device(current_device);
    memset(b->base, UNTOUCHED, bytes);
    b->bytes = bytes;
    b->pinned = pinned;
    b->next = gpu.blocks;
    gpu.blocks = b;
    *out = b->base;
    return cudaSuccess;
}

static bool
inside(const block *b, const void *at)
{
    return (uintptr_t)at - (uintptr_t)b->base < b->bytes;
}

static bool
overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    return (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
}

bool
is_busy(const void *at, size_t bytes)
{
    for (stream *s = next_stream(NULL); s != NULL; s = next_stream(s))
        for (op *o = s->first; o != NULL; o = o->next)
            if (overlap(o->dst, o->bytes, at, bytes) || overlap(o->src, o->bytes, at, bytes))
                return true;
    return false;
}

void
finish_busy(void)
{
    gpu.busy_frees++;
    gpu.host_syncs++;
    run_some(SIZE_MAX);
}

cudaError_t
drop_block(void *base, bool pinned)
{
    for (block **at = &gpu.blocks; *at != NULL; at = &(*at)->next) {
        block *b = *at;

        if (b->base != base || b->pinned != pinned) continue;
        if (is_busy(b->base, b->bytes)) finish_busy();
        *at = b->next;
        free(b->base);
        free(b);
        return cudaSuccess;
    }
    return base == NULL ? cudaSuccess : cudaErrorInvalidValue;
}

bool
is_pinned(const void *at, size_t bytes)
{
    for (block *b = gpu.blocks; b != NULL; b = b->next)
        if (b->pinned && inside(b, at))
            return bytes <= b->bytes && inside(b, (const char *)at + bytes - 1);
    return false;
}

long
sum_blocks(bool device, bool pinned, bool in_bytes)
{
    long sum = 0;

    for (block *b = gpu.blocks; b != NULL; b = b->next)
        if (b->pinned ? pinned : device) sum += in_bytes ? (long)b->bytes : 1;
    return sum;
}
