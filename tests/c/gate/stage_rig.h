/* stage_rig.h -- the two devices that test_stage.c runs on, behind one table, and its helpers.
 *
 *   on.run, on.fail_at, ...  -->  latedev.h                  one queue, in the order of enqueuing
 *                            -->  csrc/cuda + fakecudart     real streams, in any legal order */
#ifndef MT_TESTS_GATE_STAGE_RIG_H
#define MT_TESTS_GATE_STAGE_RIG_H

#include <stdint.h>
#include <string.h>

#include "core/gate/stage.h"
#include "cuda/runtime.h"
#include "../../fake_cuda/fakecudart.h"
#include "kit/check.h"
#include "kit/latedev.h"
#include "kit/rng.h"

enum { STREAMS = 3, BAD = 719 /* cudaErrorLaunchFailure */ };

/* What a case needs to know of the device under the stage. */
typedef struct rig {
    const mt_dev_ops *dev;
    void *stream[STREAMS]; /* producers */
    void (*reset)(void);
    void (*shuffle)(unsigned seed);
    size_t (*run)(size_t n);
    size_t (*run_stream)(void *stream, size_t n);
    void (*write)(void *dst, const void *src, size_t bytes, void *stream);
    void (*free_later)(void *block, size_t bytes, void *stream);
    void (*fail_at)(long n);
    void (*capture)(void *stream, bool on);
    long (*calls)(void);
    long (*fired)(void); /* injected failures so far */
    long (*live)(void);
    long (*syncs)(void);
    long (*busy_frees)(void);
    long first_record; /* the number of the call, within a push, that records on the producer */
} rig;

static rig on;
static fake_cuda fake;
static faulty heap;
static rng dice = {.state = 1};

static uint32_t
roll(uint32_t sides)
{
    return (uint32_t)rng_below(&dice, sides);
}

static void
late_fail_at(long n)
{
    late.faults.fail_at = n < 0 ? -1 : late.faults.calls + n;
}

static void
late_capture(void *stream, bool yes)
{
    late.capturing = yes ? stream : NULL;
}

static long
late_calls(void)
{
    return late.faults.calls;
}

static long
late_live(void)
{
    return late.faults.live;
}

static long
late_syncs(void)
{
    return late.syncs;
}

/* Here the sanitizer finds them. */
static long
late_busy_frees(void)
{
    return 0;
}

static long
late_fired(void)
{
    return late.faults.fail_at >= 0 && late.faults.calls > late.faults.fail_at;
}

static void
late_shuffle(unsigned seed)
{
    (void)seed;
}

static size_t
late_run_stream(void *stream, size_t n)
{
    (void)stream;
    (void)n;
    return 0;
}

static void
use_late_device(void)
{
    static char streams[STREAMS];

    on = (rig){.dev = &late_dev,
               .stream = {&streams[0], &streams[1], &streams[2]},
               .reset = late_reset,
               .shuffle = late_shuffle,
               .run = late_run,
               .run_stream = late_run_stream,
               .write = late_write,
               .free_later = late_free_later,
               .fail_at = late_fail_at,
               .capture = late_capture,
               .calls = late_calls,
               .fired = late_fired,
               .live = late_live,
               .syncs = late_syncs,
               .busy_frees = late_busy_frees,
               .first_record = 2};
}

static void
fake_fail_at(long n)
{
    fake.fake_cuda_fail_at(n, BAD);
}

static void
use_fake_runtime(mt_cudart *rt)
{
    on = (rig){.dev = mt_cudart_dev_ops(rt),
               .stream = {NULL, fake.fake_cuda_stream(), fake.fake_cuda_stream()},
               .reset = fake.fake_cuda_reset,
               .shuffle = fake.fake_cuda_seed,
               .run = fake.fake_cuda_run,
               .run_stream = fake.fake_cuda_run_stream,
               .write = fake.fake_cuda_write,
               .free_later = fake.fake_cuda_free_later,
               .fail_at = fake_fail_at,
               .capture = fake.fake_cuda_set_capturing,
               .calls = fake.fake_cuda_calls,
               .fired = fake.fake_cuda_faults,
               .live = fake.fake_cuda_live,
               .syncs = fake.fake_cuda_host_syncs,
               .busy_frees = fake.fake_cuda_busy_frees,
               .first_record = 5};
}

static mt_stage *
make_stage(size_t capacity, size_t items)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_stage *s = NULL;

    CHECK(mt_stage_new(&mem, on.dev, 0, capacity, items, &s, NULL) == MT_OK);
    CHECK(mt_stage_check(s));
    return s;
}

static void
fill(unsigned char *to, size_t bytes, uint32_t value)
{
    for (size_t i = 0; i < bytes; i++)
        to[i] = (unsigned char)(value * 31u + i * 7u + (i >> 8));
}

/* Pushes a tensor the way training treats one: a kernel writes it on the stream, it is pushed, then
 * overwritten and freed, all in the stream's order. */
static mt_status
push_to(mt_stage *s, void *stream, uint32_t value, size_t bytes, mt_error *err)
{
    unsigned char *tensor = calloc(1, bytes + 1), *wanted = calloc(1, bytes + 1);
    uint64_t tag[2] = {value, ~(uint64_t)value};
    mt_status st;

    CHECK(tensor != NULL && wanted != NULL);
    fill(wanted, bytes, value);
    on.write(tensor, wanted, bytes, stream);
    st = mt_stage_push(s, tensor, bytes, stream, tag, err);
    fill(wanted, bytes, value + 1);
    on.write(tensor, wanted, bytes, stream);
    on.free_later(tensor, bytes + 1, stream);
    free(wanted);
    CHECK(mt_stage_check(s));
    return st;
}

static mt_status
push(mt_stage *s, uint32_t value, size_t bytes)
{
    return push_to(s, on.stream[0], value, bytes, NULL);
}

static bool
arrived(mt_stage *s)
{
    mt_stage_item item;
    bool ready;

    CHECK(mt_stage_peek(s, false, &item, &ready, NULL) == MT_OK);
    return ready;
}

static void
check_item(const mt_stage_item *item, uint32_t value, size_t bytes)
{
    unsigned char *wanted = calloc(1, bytes + 1);

    CHECK(wanted != NULL);
    fill(wanted, bytes, value);
    CHECK(item->bytes == bytes);
    CHECK(item->tag[0] == value && item->tag[1] == ~(uint64_t)value);
    CHECK((uintptr_t)item->host % 256 == 0);
    CHECK(memcmp(item->host, wanted, bytes) == 0);
    free(wanted);
}

static void
take(mt_stage *s, uint32_t value, size_t bytes)
{
    mt_stage_item item;
    bool ready = false;

    CHECK(mt_stage_peek(s, true, &item, &ready, NULL) == MT_OK);
    CHECK(ready);
    check_item(&item, value, bytes);
    mt_stage_pop(s);
    CHECK(mt_stage_check(s));
}

/* Frees the stage and says that everything is back, and was idle when it went. */
static void
finish(mt_stage *s, long live_before)
{
    mt_stage_free(s);
    CHECK(on.live() == live_before);
    CHECK(on.busy_frees() == 0);
    CHECK(heap.live == 0);
    on.run(SIZE_MAX); /* the tensors' own frees */
    on.reset();
}

#endif
