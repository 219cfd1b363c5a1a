/* mt_stage over csrc/cuda and the fake CUDA runtime, whose streams run in any legal order.
 *
 * MT_FAKE_CUDART names libfakecudart.so. */
#include <stdint.h>
#include <string.h>

#include "core/gate/stage.h"
#include "cuda/runtime.h"
#include "../../fake_cuda/fakecudart.h"
#include "kit/check.h"
#include "kit/faulty.h"
#include "kit/rng.h"

enum {
    CAPACITY = 4096,
    ITEMS = 6,
    STREAMS = 3,
    BAD = 719,       /* cudaErrorLaunchFailure */
    FIRST_RECORD = 5 /* the number of the call, within a push, that records on the producer */
};

static const mt_dev_ops *dev;
static void *producer[STREAMS]; /* streams */
static fake_cuda fake;
static faulty heap = {.fail_at = -1};
static rng dice = {.state = 1};

static uint32_t
roll(uint32_t sides)
{
    return (uint32_t)rng_below(&dice, sides);
}

static void
fail_at(long n)
{
    fake.fake_cuda_fail_at(n, BAD);
}

static mt_stage *
make_stage(size_t capacity, size_t items)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_stage *s = NULL;

    CHECK(mt_stage_new(&mem, dev, 0, capacity, items, &s, NULL) == MT_OK);
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
    fake.fake_cuda_write(tensor, wanted, bytes, stream);
    st = mt_stage_push(s, tensor, bytes, stream, tag, err);
    fill(wanted, bytes, value + 1);
    fake.fake_cuda_write(tensor, wanted, bytes, stream);
    fake.fake_cuda_free_later(tensor, bytes + 1, stream);
    free(wanted);
    CHECK(mt_stage_check(s));
    return st;
}

static mt_status
push(mt_stage *s, uint32_t value, size_t bytes)
{
    return push_to(s, producer[0], value, bytes, NULL);
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
    CHECK(fake.fake_cuda_live() == live_before);
    CHECK(fake.fake_cuda_busy_frees() == 0);
    CHECK(heap.live == 0);
    fake.fake_cuda_run(SIZE_MAX); /* the tensors' own frees */
    fake.fake_cuda_reset();
}

/* The dumb queue: what was pushed and not yet popped. */
typedef struct model {
    uint32_t value[600];
    size_t bytes[600];
    size_t first, last;
} model;

/* Pushes something on some stream; every third time, some device call fails on the way. */
static void
model_push(mt_stage *s, model *m, uint32_t value)
{
    size_t bytes = roll(4) == 0 ? roll(CAPACITY + 1) : roll(900);
    long fired = fake.fake_cuda_faults();
    mt_status st;

    fail_at(roll(3) == 0 ? (long)roll(20) : -1);
    st = push_to(s, producer[roll(STREAMS)], value, bytes, NULL);
    if (st == MT_OK) {
        m->value[m->last] = value;
        m->bytes[m->last++] = bytes;
    } else if (st == MT_EAGAIN) {
        CHECK(m->last > m->first);
    } else {
        CHECK(fake.fake_cuda_faults() > fired);
    }
    fail_at(-1);
}

static void
model_pop(mt_stage *s, model *m)
{
    mt_stage_item item;
    bool ready = false;

    CHECK(mt_stage_peek(s, roll(4) == 0, &item, &ready, NULL) == MT_OK);
    if (!ready) return;
    check_item(&item, m->value[m->first], m->bytes[m->first]);
    mt_stage_pop(s);
    m->first++;
}

static void
items_arrive_in_order_as_in_a_dumb_queue(void)
{
    for (unsigned round = 0; round < 20; round++) {
        long live = fake.fake_cuda_live();
        mt_stage *s = make_stage(CAPACITY, ITEMS);
        model m = {.first = 0};

        fake.fake_cuda_seed(round * 77 + 1);
        for (uint32_t step = 0; step < 600; step++) {
            switch (roll(4)) {
            case 0:
                fake.fake_cuda_run(roll(12));
                break;
            case 1:
                model_pop(s, &m);
                break;
            default:
                model_push(s, &m, step);
                break;
            }
            CHECK(mt_stage_len(s) == m.last - m.first);
            CHECK(mt_stage_check(s));
        }
        CHECK(m.first > 20);
        for (; round % 2 == 0 && m.first < m.last; m.first++) /* else it goes with all in flight */
            take(s, m.value[m.first], m.bytes[m.first]);
        finish(s, live);
    }
}

static void
a_later_write_in_place_changes_nothing(void)
{
    unsigned char tensor[64], first[64], second[64];
    uint64_t tag[2] = {5, ~(uint64_t)5};
    long live = fake.fake_cuda_live();
    mt_stage *s = make_stage(CAPACITY, ITEMS);

    fill(first, sizeof first, 5);
    fill(second, sizeof second, 6);
    fake.fake_cuda_write(tensor, first, sizeof first, producer[1]);
    CHECK(mt_stage_push(s, tensor, sizeof tensor, producer[1], tag, NULL) == MT_OK);
    fake.fake_cuda_write(tensor, second, sizeof second, producer[1]);
    fake.fake_cuda_run_stream(producer[1],
                              SIZE_MAX); /* the producer is done before the side stream begins */
    fake.fake_cuda_run(SIZE_MAX);
    take(s, 5, sizeof first);
    CHECK(memcmp(tensor, second, sizeof second) == 0);
    finish(s, live);
}

static void
a_full_stage_says_so_and_recovers(void)
{
    long live = fake.fake_cuda_live();
    mt_stage *s = make_stage(1024, 3);
    mt_error err = {0};

    CHECK(push(s, 1, 256) == MT_OK);
    CHECK(push(s, 2, 512) == MT_OK);
    CHECK(push_to(s, NULL, 3, 257, &err) == MT_EAGAIN); /* 512 bytes, 256 are left */
    CHECK(err.status == MT_EAGAIN && err.native == 0 && mt_stage_len(s) == 2);
    CHECK(push(s, 3, 200) == MT_OK);
    CHECK(push(s, 4, 0) == MT_EAGAIN); /* three items */
    take(s, 1, 256);
    CHECK(push(s, 4, 512) == MT_EAGAIN);
    CHECK(push(s, 4, 256) == MT_OK); /* at the start again */
    take(s, 2, 512);
    CHECK(push(s, 5, 513) == MT_EAGAIN); /* would have to go round item 3 */
    CHECK(push(s, 5, 512) == MT_OK);
    take(s, 3, 200);
    take(s, 4, 256);
    take(s, 5, 512);
    CHECK(push(s, 6, 1024) == MT_OK); /* an empty stage takes all that it holds */
    take(s, 6, 1024);
    finish(s, live);
}

static void
more_than_the_capacity_never_fits(void)
{
    long live = fake.fake_cuda_live();
    mt_stage *s = make_stage(1000, 3);
    mt_error err = {0};

    CHECK(mt_stage_capacity(s) == 1024);
    CHECK(mt_stage_device(s) == 0);
    CHECK(push_to(s, NULL, 1, 1025, &err) == MT_ELIMIT);
    CHECK(err.asked == 1025 && err.limit == 1024);
    CHECK(mt_stage_push(s, NULL, SIZE_MAX, NULL, (uint64_t[2]){0, 0}, &err) == MT_ELIMIT);
    CHECK(mt_stage_len(s) == 0);
    finish(s, live);
}

static void
an_empty_item_keeps_its_place(void)
{
    uint64_t tag[2] = {2, ~(uint64_t)2};
    long live = fake.fake_cuda_live();
    mt_stage *s = make_stage(CAPACITY, ITEMS);

    CHECK(push(s, 1, 10) == MT_OK);
    CHECK(mt_stage_push(s, NULL, 0, producer[0], tag, NULL) == MT_OK);
    CHECK(push(s, 3, 10) == MT_OK);
    take(s, 1, 10);
    take(s, 2, 0);
    take(s, 3, 10);
    finish(s, live);
}

static void
sizes_that_do_not_fit_are_refused(void)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_stage *s = NULL;
    mt_error err = {0};

    CHECK(mt_stage_new(&mem, dev, 0, SIZE_MAX, 1, &s, &err) == MT_EOVERFLOW);
    CHECK(mt_stage_new(&mem, dev, 0, 1, SIZE_MAX / 2, &s, &err) == MT_EOVERFLOW);
    CHECK(s == NULL && err.status == MT_EOVERFLOW && heap.live == 0);
    mt_stage_free(NULL);
    mt_stage_abandon(NULL);
}

/* Makes a stage while the n-th device call fails; says whether that call was reached. */
static bool
new_failing_at(long n)
{
    mt_alloc mem = faulty_alloc(&heap);
    long live = fake.fake_cuda_live(), before = fake.fake_cuda_faults();
    mt_stage *s = NULL;
    mt_error err = {0};
    mt_status st;
    bool fired;

    fail_at(n);
    st = mt_stage_new(&mem, dev, 0, 512, 2, &s, &err);
    fired = fake.fake_cuda_faults() > before;
    fail_at(-1);
    CHECK((st == MT_OK) == (s != NULL));
    CHECK(st == MT_OK || (fired && err.status == st && err.call != NULL && err.native != 0));
    mt_stage_free(s);
    CHECK(fake.fake_cuda_live() == live && heap.live == 0);
    fake.fake_cuda_reset();
    return fired;
}

static void
a_failed_new_keeps_nothing(void)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_stage *s = NULL;
    long n = 0;

    while (new_failing_at(n))
        n++;
    CHECK(n >= 6); /* two blocks, a stream, three events */
    for (n = 0; n < 2; n++) {
        heap = (faulty){.fail_at = n};
        CHECK(mt_stage_new(&mem, dev, 0, 512, 2, &s, NULL) == MT_ENOMEM && s == NULL);
        CHECK(heap.live == 0);
    }
    heap = (faulty){.fail_at = -1};
}

/* Pushes while the n-th device call fails. The failed push may have left a copy on the way, on a
 * slow stream: another stream then gets the same slot (`again`), or nobody does. */
static bool
push_failing_at(long n, bool again)
{
    long live = fake.fake_cuda_live(), before = fake.fake_cuda_faults();
    mt_stage *s = make_stage(1024, 3);
    mt_error err = {0};
    mt_status st;
    bool fired;

    CHECK(push_to(s, producer[0], 1, 100, NULL) == MT_OK);
    fail_at(n);
    st = push_to(s, producer[1], 2, 300, &err);
    fired = fake.fake_cuda_faults() > before;
    fail_at(-1);
    CHECK(st == MT_OK || (fired && err.status == st && err.native != 0));
    CHECK(mt_stage_len(s) == (st == MT_OK ? 2 : 1));
    if (again) CHECK(push_to(s, producer[2], 3, 300, NULL) == MT_OK);
    fake.fake_cuda_run_stream(producer[2], SIZE_MAX);
    fake.fake_cuda_run_stream(producer[1], SIZE_MAX);
    take(s, 1, 100);
    if (st == MT_OK) take(s, 2, 300);
    if (again) take(s, 3, 300);
    CHECK(push_to(s, producer[0], 4, 1024, NULL) == MT_OK);
    take(s, 4, 1024);
    finish(s, live);
    return fired;
}

static void
a_failed_push_changes_nothing(void)
{
    long n = 0;

    while (push_failing_at(n, false) && push_failing_at(n, true))
        n++;
    CHECK(n >= 6); /* capturing? copy, record, wait, copy, record */
}

static bool wait_fails;

static mt_status
wait_unless(void *ctx, int device, void *event, mt_error *err)
{
    if (wait_fails) return mt_fail(err, MT_EDEVICE, "event_wait", BAD);
    return dev->event_wait(ctx, device, event, err);
}

/* The push fails, and then the wait for what it left under way. */
static void
a_copy_that_nobody_can_wait_for_ends_the_stage(void)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_dev_ops ops = *dev;
    mt_error err = {0};
    long live = fake.fake_cuda_live();
    mt_stage *s = NULL;

    ops.event_wait = wait_unless;
    CHECK(mt_stage_new(&mem, &ops, 0, 1024, 3, &s, NULL) == MT_OK);
    wait_fails = true;
    fail_at(FIRST_RECORD);
    CHECK(push_to(s, producer[0], 1, 300, NULL) == MT_EDEVICE);
    fail_at(-1);
    wait_fails = false;
    CHECK(push_to(s, producer[1], 2, 300, &err) == MT_EDEVICE && mt_stage_len(s) == 0);
    CHECK(strcmp(err.call, "append after the device failed") == 0);
    fake.fake_cuda_run(SIZE_MAX);
    finish(s, live);
}

/* After a failed push the stage is freed at once: nothing may be under way in what it frees. */
static void
a_failed_push_is_waited_for_by_free(void)
{
    bool fired = true;

    for (long n = 0; fired; n++) {
        long live = fake.fake_cuda_live(), before = fake.fake_cuda_faults();
        mt_stage *s = make_stage(1024, 3);

        fail_at(n);
        push_to(s, producer[1], 2, 300, NULL);
        fired = fake.fake_cuda_faults() > before;
        fail_at(-1);
        finish(s, live);
    }
}

static void
push_never_waits(void)
{
    long live = fake.fake_cuda_live(), syncs;
    mt_stage *s = make_stage(1024, 2);

    syncs = fake.fake_cuda_host_syncs();
    CHECK(push(s, 1, 300) == MT_OK);
    CHECK(push(s, 2, 300) == MT_OK);
    CHECK(push(s, 3, 300) == MT_EAGAIN);
    CHECK(!arrived(s));
    CHECK(fake.fake_cuda_host_syncs() == syncs);
    take(s, 1, 300);
    CHECK(fake.fake_cuda_host_syncs() == syncs + 1);
    finish(s, live);
}

static void
a_stream_under_capture_is_refused(void)
{
    long live = fake.fake_cuda_live();
    mt_stage *s = make_stage(1024, 2);
    mt_error err = {0};

    CHECK(push(s, 1, 8) == MT_OK);
    fake.fake_cuda_set_capturing(producer[1], true);
    CHECK(push_to(s, producer[1], 2, 8, &err) == MT_EDEVICE);
    CHECK(err.native == 0 && strcmp(err.call, "append during CUDA graph capture") == 0);
    CHECK(mt_stage_len(s) == 1);
    fake.fake_cuda_set_capturing(producer[1], false);
    CHECK(push_to(s, producer[1], 3, 8, &err) == MT_OK);
    take(s, 1, 8);
    take(s, 3, 8);
    finish(s, live);
}

static void
an_item_is_ready_when_it_has_arrived(void)
{
    mt_stage_item item = {.bytes = 77};
    bool ready = true;
    long live = fake.fake_cuda_live(), calls;
    mt_stage *s = make_stage(1024, 3);

    CHECK(mt_stage_peek(s, true, &item, &ready, NULL) == MT_OK && !ready); /* empty */
    CHECK(push(s, 1, 8) == MT_OK);
    CHECK(!arrived(s));
    CHECK(item.bytes == 77);
    while (!arrived(s))
        CHECK(fake.fake_cuda_run(1) == 1);
    calls = fake.fake_cuda_calls();
    CHECK(arrived(s) && fake.fake_cuda_calls() == calls); /* known: not asked again */
    take(s, 1, 8);
    CHECK(fake.fake_cuda_calls() == calls);
    finish(s, live);
}

static void
reading_waits_for_the_oldest_alone(void)
{
    long live = fake.fake_cuda_live();
    mt_stage *s = make_stage(1024, 3);

    CHECK(push(s, 1, 8) == MT_OK);
    CHECK(push(s, 2, 8) == MT_OK);
    take(s, 1, 8);
    CHECK(!arrived(s));
    take(s, 2, 8);
    finish(s, live);
}

static void
a_failed_peek_leaves_the_item(void)
{
    mt_stage_item item = {.bytes = 77};
    bool ready = true;
    long live = fake.fake_cuda_live();
    mt_stage *s = make_stage(1024, 3);

    CHECK(push(s, 1, 8) == MT_OK);
    for (int wait = 0; wait < 2; wait++) {
        mt_error err = {0};

        fail_at(0);
        CHECK(mt_stage_peek(s, wait != 0, &item, &ready, &err) == MT_EDEVICE);
        CHECK(err.native != 0 && item.bytes == 77 && ready && mt_stage_len(s) == 1);
        fail_at(-1);
    }
    take(s, 1, 8);
    finish(s, live);
}

static void
free_waits_for_work_in_flight(void)
{
    long live = fake.fake_cuda_live(), syncs;
    mt_stage *s = make_stage(1024, 3);

    CHECK(push_to(s, producer[0], 1, 8, NULL) == MT_OK);
    CHECK(push_to(s, producer[1], 2, 8, NULL) == MT_OK);
    syncs = fake.fake_cuda_host_syncs();
    mt_stage_free(s);
    CHECK(fake.fake_cuda_host_syncs() > syncs && fake.fake_cuda_busy_frees() == 0);
    CHECK(fake.fake_cuda_live() == live && heap.live == 0);
    fake.fake_cuda_run(SIZE_MAX);
    fake.fake_cuda_reset();
}

static void
a_child_of_fork_makes_no_device_call(void)
{
    mt_stage *s = make_stage(1024, 3);
    long calls, live;

    CHECK(push(s, 1, 8) == MT_OK);
    calls = fake.fake_cuda_calls();
    live = fake.fake_cuda_live();
    mt_stage_abandon(s);
    CHECK(fake.fake_cuda_calls() == calls && fake.fake_cuda_live() == live);
    CHECK(heap.live == 0);
    fake.fake_cuda_run(SIZE_MAX);
    fake.fake_cuda_reset();
}

static void
another_device_is_left_current(void)
{
    mt_alloc mem = faulty_alloc(&heap);
    long live = fake.fake_cuda_live();
    mt_stage *s = NULL;
    mt_stage_item item;
    mt_status st;
    bool ready;

    CHECK(mt_stage_new(&mem, dev, 1, 1024, 3, &s, NULL) == MT_OK);
    CHECK(mt_stage_device(s) == 1 && fake.fake_cuda_device() == 0);
    fake.fake_cuda_set_device(1); /* the "kernels" of push_to run there */
    CHECK(push_to(s, NULL, 1, 8, NULL) == MT_OK);
    CHECK(fake.fake_cuda_device() == 1);
    fake.fake_cuda_set_device(0);
    CHECK(!arrived(s) && fake.fake_cuda_device() == 0);
    take(s, 1, 8);
    CHECK(fake.fake_cuda_device() == 0);
    for (long n = 0; n < 24; n++) {
        fake.fake_cuda_fail_at(n, BAD);
        st = mt_stage_push(s, NULL, 0, NULL, (uint64_t[2]){0, 0}, NULL);
        fake.fake_cuda_fail_at(-1, 0);
        CHECK(st == MT_OK || fake.fake_cuda_device() == 0);
        fake.fake_cuda_set_device(0); /* where the call that failed was the one to put it back */
        if (st == MT_OK) {
            CHECK(mt_stage_peek(s, true, &item, &ready, NULL) == MT_OK && ready);
            mt_stage_pop(s);
        }
    }
    finish(s, live);
    CHECK(fake.fake_cuda_device() == 0);
}

/* The number that docs/internals/gpu.md states: six calls, and a look at the current device before
 * each. */
static void
push_makes_twelve_runtime_calls(void)
{
    long live = fake.fake_cuda_live(), calls;
    mt_stage *s = make_stage(1024, 3);

    calls = fake.fake_cuda_calls();
    CHECK(push(s, 1, 8) == MT_OK);
    CHECK(fake.fake_cuda_calls() == calls + 12);
    finish(s, live);
}

static void
somebody_elses_capture_is_not_spoiled(void)
{
    long live = fake.fake_cuda_live();
    mt_stage *s;

    fake.fake_cuda_set_capturing(producer[2], true);
    s = make_stage(1024, 3);
    CHECK(push(s, 1, 8) == MT_OK);
    CHECK(!arrived(s));
    take(s, 1, 8);
    mt_stage_free(s);
    CHECK(fake.fake_cuda_spoiled_captures() == 0 && !fake.fake_cuda_relaxed());
    CHECK(fake.fake_cuda_live() == live);
    fake.fake_cuda_set_capturing(producer[2], false);
    fake.fake_cuda_run(SIZE_MAX);
    fake.fake_cuda_reset();
}

static void
no_error_is_left_for_others_to_find(void)
{
    long live = fake.fake_cuda_live();
    mt_stage *s = make_stage(1024, 3);

    CHECK(push(s, 1, 8) == MT_OK);
    CHECK(!arrived(s)); /* cudaErrorNotReady */
    CHECK(fake.fake_cuda_last_error() == 0);
    fail_at(3);
    CHECK(push_to(s, producer[1], 2, 8, NULL) == MT_EDEVICE);
    CHECK(fake.fake_cuda_last_error() == 0);
    finish(s, live);
}

int
main(void)
{
    const char *path = getenv("MT_FAKE_CUDART");
    mt_cudart *rt = NULL;

    CHECK(path != NULL && fake_cuda_load(path, &fake));
    CHECK(mt_cudart_open(&mt_alloc_libc, path, &rt, NULL) == MT_OK);
    dev = mt_cudart_dev_ops(rt);
    producer[1] = fake.fake_cuda_stream(); /* producer[0] is the default one */
    producer[2] = fake.fake_cuda_stream();
    RUN(items_arrive_in_order_as_in_a_dumb_queue);
    RUN(a_later_write_in_place_changes_nothing);
    RUN(a_full_stage_says_so_and_recovers);
    RUN(more_than_the_capacity_never_fits);
    RUN(an_empty_item_keeps_its_place);
    RUN(sizes_that_do_not_fit_are_refused);
    RUN(a_failed_new_keeps_nothing);
    RUN(a_failed_push_changes_nothing);
    RUN(a_copy_that_nobody_can_wait_for_ends_the_stage);
    RUN(a_failed_push_is_waited_for_by_free);
    RUN(push_never_waits);
    RUN(a_stream_under_capture_is_refused);
    RUN(an_item_is_ready_when_it_has_arrived);
    RUN(reading_waits_for_the_oldest_alone);
    RUN(a_failed_peek_leaves_the_item);
    RUN(free_waits_for_work_in_flight);
    RUN(a_child_of_fork_makes_no_device_call);
    RUN(another_device_is_left_current);
    RUN(push_makes_twelve_runtime_calls);
    RUN(somebody_elses_capture_is_not_spoiled);
    RUN(no_error_is_left_for_others_to_find);
    fake.fake_cuda_drop_stream(producer[1]);
    fake.fake_cuda_drop_stream(producer[2]);
    mt_cudart_close(rt);
    CHECK_DONE();
}
