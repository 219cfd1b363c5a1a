/* The CUDA store over the fake driver: the suite of every store, and what is CUDA's own. */
#include <sys/wait.h>
#include <unistd.h>

#include "kit/cudarig.h"
#include "kit/store_suite.h"

/* ---- making one ---- */

static void
a_page_is_the_granularity_or_a_power_of_two_times_it(void)
{
    const size_t bad[] = {PAGE / 2, 3 * PAGE, PAGE + 1};
    mt_store_ops ops;
    mt_error err = {0};

    fake.fake_cuda_reset();
    CHECK(make(0, &ops, NULL) == MT_OK && ops.page_bytes == FAKE_GRANULARITY);
    ops.close(ops.ctx);
    fake.fake_cuda_set_granularity(PAGE);
    CHECK(make(8 * PAGE, &ops, NULL) == MT_OK && ops.page_bytes == 8 * PAGE);
    CHECK(!ops.lazy && !ops.private_writes && ops.max_maps == SIZE_MAX);
    ops.close(ops.ctx);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK(make(bad[i], &ops, &err) == MT_ESHAPE);
        CHECK(err.asked == bad[i] && err.limit == PAGE && err.shape == MT_SHAPE_PAGE_BYTES);
    }
    check_manners();
    CHECK(fake.fake_cuda_live() == 0 && heap.live == 0);
}

static void
a_driver_without_an_entry_point_is_refused_by_its_name(void)
{
    mt_store_ops ops;
    mt_error err = {0};

    fake.fake_cuda_reset();
    fake.fake_cuda_hide("cuMemUnmap");
    CHECK(make(0, &ops, &err) == MT_EDEVICE && err.native == 0);
    CHECK(strcmp(err.call, "dlsym cuMemUnmap") == 0);
    fake.fake_cuda_hide(NULL);
    CHECK(fake.fake_cuda_live() == 0 && heap.live == 0);
}

/* Where the store's device is the thread's, too, nothing else would make its context. */
static void
a_thread_without_a_context_gets_one(void)
{
    mt_store_ops ops;

    fake.fake_cuda_reset();
    fake.fake_cuda_set_device(1);
    CHECK(make(0, &ops, NULL) == MT_OK && fake.fake_cuda_misuses() == 0);
    ops.close(ops.ctx);
    CHECK(fake.fake_cuda_device() == 1);
    fake.fake_cuda_set_device(0);
}

/* ---- pages and mappings ---- */

static void
a_stretch_takes_one_call_for_access_and_one_for_zeros(void)
{
    rig r = rig_of(8);
    long calls;

    CHECK(take(&r, 0, 8, NULL) == MT_OK && fake.fake_cuda_called("cuMemCreate") == 8);
    calls = fake.fake_cuda_queued();
    CHECK(map(&r, 0, 0, 8, NULL) == MT_OK && fake.fake_cuda_called("cuMemMap") == 8);
    CHECK(fake.fake_cuda_called("cuMemSetAccess") == 1 && fake.fake_cuda_queued() == calls + 1);
    CHECK(fake.fake_cuda_host_syncs() == 0); /* nobody waits for addresses that showed nothing */
    rig_close(&r);
}

static void
a_new_page_is_zeroed_before_work_that_comes_after(void)
{
    rig r = rig_of(3);

    take_and_map(&r, 2);
    write_later(&r, 1, 7, NULL); /* behind the zeros, on the same stream */
    CHECK(read_byte(r.base + PAGE) == 7 && r.base[PAGE + 1] == 0);
    unmap(&r, 0, 2);
    CHECK(map(&r, 0, 0, 2, NULL) == MT_OK);
    CHECK(read_byte(r.base + PAGE) == 7); /* zeroed once, not at each map */
    unmap(&r, 1, 1);
    drop(&r, 1, 1);
    CHECK(take(&r, 1, 1, NULL) == MT_OK && read_byte(window(&r, 1)) == 0);
    CHECK(map(&r, 2, 1, 1, NULL) == MT_OK && read_byte(r.base + 2 * PAGE) == 0);
    rig_close(&r);
}

static void
memory_goes_back_to_the_driver_when_pages_are_dropped(void)
{
    rig r = rig_of(6);

    take_and_map(&r, 6);
    (void)window(&r, 4);
    CHECK(fake.fake_cuda_page_bytes() == 6 * PAGE && r.ops.physical(r.ops.ctx) == 6 * PAGE);
    unmap(&r, 3, 3);
    drop(&r, 3, 3);
    CHECK(fake.fake_cuda_page_bytes() == 3 * PAGE && r.ops.physical(r.ops.ctx) == 3 * PAGE);
    CHECK(map_zero(&r, 3, 3, NULL) == MT_OK);
    CHECK(fake.fake_cuda_page_bytes() == 4 * PAGE && r.ops.physical(r.ops.ctx) == 3 * PAGE);
    rig_close(&r);
}

static void
what_was_written_to_zeros_is_gone_at_the_next_map_of_zeros(void)
{
    rig r = rig_of(4);

    CHECK(map_zero(&r, 0, 2, NULL) == MT_OK);
    write_later(&r, 0, 9, NULL);
    CHECK(read_byte(r.base + PAGE) == 9); /* there is one page of zeros for all */
    CHECK(map_zero(&r, 3, 1, NULL) == MT_OK);
    CHECK(read_byte(r.base) == 0 && r.base[3 * PAGE] == 0);
    rig_close(&r);
}

static void
no_memory_says_how_much_was_asked_and_takes_nothing(void)
{
    rig r = rig_of(8);
    mt_error err = {0};

    fake.fake_cuda_set_capacity(4 * PAGE);
    CHECK(take(&r, 2, 2, NULL) == MT_OK);
    CHECK(take(&r, 0, 6, &err) == MT_ENOMEM);
    CHECK(strcmp(err.call, "cuMemCreate") == 0 && err.native == OUT_OF_MEMORY);
    CHECK(err.asked == 6 * PAGE);
    CHECK(fake.fake_cuda_page_bytes() == 2 * PAGE && r.ops.physical(r.ops.ctx) == 2 * PAGE);
    CHECK(take(&r, 1, 4, NULL) == MT_OK);
    CHECK(map(&r, 0, 1, 4, NULL) == MT_OK && map_zero(&r, 4, 1, &err) == MT_ENOMEM);
    fake.fake_cuda_set_capacity(5 * PAGE);
    CHECK(map_zero(&r, 4, 1, NULL) == MT_OK);
    rig_close(&r);
}

/* ---- a device that refuses ---- */

/* Fails call after call of unmap and drop: they have no effect or all of it, and say so. */
static void
what_cannot_be_taken_away_is_taken_away_later(void)
{
    long faults = 1;

    for (long n = 0; faults > 0; n++) {
        rig r = rig_of(4);

        take_and_map(&r, 4);
        write_later(&r, 2, 1, NULL);
        (void)window(&r, 2);
        fake.fake_cuda_fail_at(n, LAUNCH_FAILURE);
        unmap(&r, 1, 2);
        drop(&r, 1, 2);
        fake.fake_cuda_fail_at(-1, 0);
        faults = fake.fake_cuda_faults();
        CHECK((size_t)fake.fake_cuda_page_bytes() == r.ops.physical(r.ops.ctx));
        CHECK(take(&r, 1, 2, NULL) == MT_OK && map(&r, 0, 1, 2, NULL) == MT_OK);
        CHECK(read_byte(r.base + PAGE) == 0); /* also where it never went */
        CHECK(map(&r, 1, 1, 2, NULL) == MT_OK && read_byte(r.base + PAGE) == 0);
        unmap(&r, 0, 4);
        drop(&r, 0, 4);
        CHECK(r.ops.physical(r.ops.ctx) == 0 && fake.fake_cuda_live_pages() == 0);
        rig_close(&r);
    }
}

static void
a_window_that_failed_opens_the_next_time(void)
{
    long faults = 1;

    for (long n = 0; faults > 0; n++) {
        rig r = rig_of(2);
        void *at = NULL;
        mt_status st;

        CHECK(take(&r, 0, 2, NULL) == MT_OK);
        fake.fake_cuda_fail_at(n, LAUNCH_FAILURE);
        st = r.ops.window(r.ops.ctx, 0, 2 * PAGE, &at, NULL);
        fake.fake_cuda_fail_at(-1, 0);
        faults = fake.fake_cuda_faults();
        CHECK((st == MT_OK) == (at != NULL));
        CHECK(read_byte(window(&r, 0)) == 0 && read_byte(window(&r, 1)) == 0);
        *window(&r, 1) = 1;
        rig_close(&r);
    }
}

/* What cannot be waited for is left behind rather than taken from under a kernel. */
static void
closing_a_device_that_does_not_answer_frees_the_host_alone(void)
{
    rig r = rig_of(1);
    char *base = r.base;

    take_and_map(&r, 1);
    write_later(&r, 0, 3, NULL);
    fake.fake_cuda_fail_at(0, LAUNCH_FAILURE);
    r.ops.close(r.ops.ctx);
    CHECK(heap.live == 0 && fake.fake_cuda_live_events() == 0 && fake.fake_cuda_live_maps() == 1);
    CHECK(read_byte(base) == 3);
}

static void
a_forked_child_leaves_the_device_alone(void)
{
    rig r = rig_of(2);
    long calls;
    int status = 1;
    pid_t child;

    take_and_map(&r, 2);
    write_later(&r, 1, 6, NULL);
    calls = fake.fake_cuda_calls();
    if ((child = fork()) == 0) {
        r.ops.close(r.ops.ctx);
        _exit(fake.fake_cuda_calls() != calls || heap.live != 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(read_byte(r.base + PAGE) == 6);
    rig_close(&r);
}

/* ---- the suite of every store ---- */

static mt_status
bench_make(void *ctx, mt_store_ops *out)
{
    (void)ctx;
    return make(0, out, NULL);
}

static void
bench_peek(void *ctx, void *to, const void *at, size_t bytes)
{
    (void)ctx;
    fake.fake_cuda_run_all();
    memcpy(to, at, bytes);
}

static void
bench_poke(void *ctx, void *at, const void *from, size_t bytes)
{
    (void)ctx;
    fake.fake_cuda_run_all();
    memcpy(at, from, bytes);
}

static void
bench_fail_at(void *ctx, long n)
{
    (void)ctx;
    fake.fake_cuda_fail_at(n, n % 2 ? LAUNCH_FAILURE : OUT_OF_MEMORY);
}

static long
bench_fired(void *ctx)
{
    (void)ctx;
    return fake.fake_cuda_faults();
}

static long
bench_live(void *ctx)
{
    (void)ctx;
    return fake.fake_cuda_live() + heap.live;
}

static void
it_is_a_store_like_any_other(void)
{
    const store_bench on = {.make = bench_make,
                            .peek = bench_peek,
                            .poke = bench_poke,
                            .fail_at = bench_fail_at,
                            .fired = bench_fired,
                            .live = bench_live,
                            .exact = true};

    fake.fake_cuda_reset();
    fake.fake_cuda_set_granularity(PAGE);
    store_suite(&on);
    check_manners();
}

int
main(void)
{
    rig_open_fake();
    RUN(a_page_is_the_granularity_or_a_power_of_two_times_it);
    RUN(a_driver_without_an_entry_point_is_refused_by_its_name);
    RUN(a_thread_without_a_context_gets_one);
    RUN(a_stretch_takes_one_call_for_access_and_one_for_zeros);
    RUN(a_new_page_is_zeroed_before_work_that_comes_after);
    RUN(memory_goes_back_to_the_driver_when_pages_are_dropped);
    RUN(what_was_written_to_zeros_is_gone_at_the_next_map_of_zeros);
    RUN(no_memory_says_how_much_was_asked_and_takes_nothing);
    RUN(what_cannot_be_taken_away_is_taken_away_later);
    RUN(a_window_that_failed_opens_the_next_time);
    RUN(a_forked_child_leaves_the_device_alone);
    RUN(it_is_a_store_like_any_other);
    RUN(closing_a_device_that_does_not_answer_frees_the_host_alone); /* last: it leaks pages */
    mt_cudart_close(rt);
    CHECK_DONE();
}
