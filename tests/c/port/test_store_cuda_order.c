/* The CUDA store over the fake driver: what waits for what, on streams and beside CUDA graphs. */
#include "kit/cudarig.h"

/* ---- waiting and order ---- */

static void
a_mapping_is_taken_away_after_the_work_on_it(void)
{
    rig r = rig_of(4);

    take_and_map(&r, 4);
    write_later(&r, 0, 1, NULL);
    CHECK(map(&r, 0, 3, 1, NULL) == MT_OK && fake.fake_cuda_host_syncs() == 1);
    write_later(&r, 1, 2, NULL);
    CHECK(map_zero(&r, 1, 1, NULL) == MT_OK && fake.fake_cuda_host_syncs() == 2);
    write_later(&r, 2, 3, NULL);
    unmap(&r, 2, 1);
    CHECK(fake.fake_cuda_host_syncs() == 3);
    CHECK(read_byte(window(&r, 0)) == 1 && *window(&r, 1) == 2 && *window(&r, 2) == 3);
    rig_close(&r);
}

static void
a_page_goes_after_the_work_in_its_window(void)
{
    rig r = rig_of(2);
    char *at;

    CHECK(take(&r, 0, 2, NULL) == MT_OK);
    drop(&r, 0, 1);
    CHECK(fake.fake_cuda_host_syncs() == 0); /* nobody could have touched it */
    at = window(&r, 1);
    CHECK(r.ops.zero(r.ops.ctx, at, PAGE, NULL) == MT_OK);
    drop(&r, 1, 1);
    CHECK(fake.fake_cuda_host_syncs() == 1 && fake.fake_cuda_live_pages() == 0);
    rig_close(&r);
}

static void
work_that_an_earlier_stream_got_late_is_waited_for(void)
{
    rig r = rig_of(2);
    void *a = new_stream(), *b = new_stream();

    take_and_map(&r, 2);
    CHECK(use(&r, a) == MT_OK && use(&r, b) == MT_OK);
    write_later(&r, 1, 5, a); /* nothing on b is behind it */
    unmap(&r, 1, 1);
    CHECK(read_byte(window(&r, 1)) == 5);
    rig_close(&r);
    fake.fake_cuda_drop_stream(a);
    fake.fake_cuda_drop_stream(b);
}

/* Whatever order the device takes. */
static void
a_stream_runs_behind_the_one_before_it(void)
{
    for (unsigned seed = 1; seed < 40; seed++) {
        rig r = rig_of(3);
        void *a = new_stream(), *b = new_stream();

        fake.fake_cuda_seed(seed);
        take_and_map(&r, 3);
        CHECK(use(&r, a) == MT_OK);
        write_later(&r, 0, 1, a);
        CHECK(use(&r, b) == MT_OK);
        CHECK(r.ops.copy(r.ops.ctx, r.base + PAGE, r.base, PAGE, NULL) == MT_OK);
        write_later(&r, 0, 2, b);
        CHECK(use(&r, NULL) == MT_OK);
        CHECK(r.ops.copy(r.ops.ctx, r.base + 2 * PAGE, r.base, PAGE, NULL) == MT_OK);
        CHECK(read_byte(r.base + PAGE) == 1 && r.base[2 * PAGE] == 2);
        rig_close(&r);
        fake.fake_cuda_drop_stream(a);
        fake.fake_cuda_drop_stream(b);
    }
}

static void
the_stream_in_use_stays_when_changing_it_fails(void)
{
    rig r = rig_of(1);
    void *a = new_stream(), *b = new_stream();

    take_and_map(&r, 1);
    fake.fake_cuda_run_all();
    for (long n = 0;; n++) {
        mt_status st;

        fake.fake_cuda_fail_at(n, LAUNCH_FAILURE);
        st = use(&r, a);
        fake.fake_cuda_fail_at(-1, 0);
        if (fake.fake_cuda_faults() == n) break;
        if (st == MT_OK) {
            CHECK(use(&r, NULL) == MT_OK);
            fake.fake_cuda_run_all();
            continue;
        }
        CHECK(r.ops.zero(r.ops.ctx, r.base, PAGE, NULL) == MT_OK);
        fake.fake_cuda_set_device(1);
        CHECK(fake.fake_cuda_run_stream(NULL, SIZE_MAX) > 0 && fake.fake_cuda_queued() == 0);
        fake.fake_cuda_set_device(0);
    }
    heap.fail_at = heap.calls;
    CHECK(use(&r, b) == MT_ENOMEM); /* remembering it takes memory, and comes first */
    heap.fail_at = -1;
    rig_close(&r);
    fake.fake_cuda_drop_stream(a);
    fake.fake_cuda_drop_stream(b);
}

static void
closing_waits_for_the_work_on_every_stream(void)
{
    rig r = rig_of(3);
    void *a = new_stream();

    take_and_map(&r, 2);
    CHECK(use(&r, a) == MT_OK && map_zero(&r, 2, 1, NULL) == MT_OK);
    write_later(&r, 0, 1, NULL);
    write_later(&r, 1, 1, a);
    r.ops.close(r.ops.ctx);
    check_manners();
    CHECK(fake.fake_cuda_live() == 0 && fake.fake_cuda_queued() == 0);
    fake.fake_cuda_drop_stream(a);
}

/* ---- CUDA graphs ---- */

static void
check_refused(mt_status st, const mt_error *err)
{
    CHECK(st == MT_EDEVICE && err->native == 0 && strstr(err->call, "CUDA graph capture") != NULL);
}

static void
a_capture_is_not_spoiled_and_what_needs_the_stream_is_refused(void)
{
    rig r = rig_of(6);
    void *a = new_stream(), *at;
    mt_error err;
    long queued;

    take_and_map(&r, 4);
    unmap(&r, 3, 1);
    fake.fake_cuda_set_capturing(a, true);
    queued = fake.fake_cuda_queued();
    CHECK(use(&r, a) == MT_OK);
    check_refused(r.ops.zero(r.ops.ctx, r.base, PAGE, &err), &err);
    check_refused(r.ops.copy(r.ops.ctx, r.base, r.base + PAGE, PAGE, &err), &err);
    check_refused(map(&r, 0, 1, 1, &err), &err); /* replaces */
    check_refused(map_zero(&r, 5, 1, &err), &err);
    CHECK(take(&r, 4, 2, NULL) == MT_OK);
    check_refused(map(&r, 4, 4, 2, &err), &err); /* new pages want zeros */
    check_refused(r.ops.window(r.ops.ctx, 4 * PAGE, PAGE, &at, &err), &err);
    CHECK(map(&r, 3, 3, 1, NULL) == MT_OK);
    CHECK(fake.fake_cuda_queued() == queued);
    check_manners();
    fake.fake_cuda_set_capturing(a, false);
    CHECK(map(&r, 4, 4, 2, NULL) == MT_OK && map(&r, 0, 1, 1, NULL) == MT_OK);
    CHECK(read_byte(r.base + 4 * PAGE) == 0);
    rig_close(&r);
    fake.fake_cuda_drop_stream(a);
}

static void
a_stream_takes_its_place_in_the_order_when_its_capture_has_ended(void)
{
    rig r = rig_of(1);
    void *a = new_stream();

    take_and_map(&r, 1);
    fake.fake_cuda_set_capturing(a, true);
    CHECK(use(&r, a) == MT_OK);
    fake.fake_cuda_set_capturing(a, false);
    write_later(&r, 0, 1, NULL);
    CHECK(use(&r, a) == MT_OK);
    write_later(&r, 0, 2, a);
    CHECK(fake.fake_cuda_run_stream(a, SIZE_MAX) == 0); /* stands behind the default stream */
    CHECK(read_byte(r.base) == 2);
    rig_close(&r);
    fake.fake_cuda_drop_stream(a);
}

static void
a_stream_that_is_captured_elsewhere_is_not_waited_for(void)
{
    rig r = rig_of(2);
    void *a = new_stream();

    take_and_map(&r, 2);
    CHECK(use(&r, a) == MT_OK);
    fake.fake_cuda_set_capturing(a, true);
    CHECK(use(&r, NULL) == MT_OK); /* which no event orders behind a */
    write_later(&r, 0, 4, NULL);
    unmap(&r, 0, 1);
    CHECK(use(&r, a) == MT_OK && use(&r, NULL) == MT_OK);
    CHECK(read_byte(window(&r, 0)) == 4);
    check_manners();
    fake.fake_cuda_set_capturing(a, false);
    rig_close(&r);
    fake.fake_cuda_drop_stream(a);
}

int
main(void)
{
    rig_open_fake();
    RUN(a_mapping_is_taken_away_after_the_work_on_it);
    RUN(a_page_goes_after_the_work_in_its_window);
    RUN(work_that_an_earlier_stream_got_late_is_waited_for);
    RUN(a_stream_runs_behind_the_one_before_it);
    RUN(the_stream_in_use_stays_when_changing_it_fails);
    RUN(closing_waits_for_the_work_on_every_stream);
    RUN(a_capture_is_not_spoiled_and_what_needs_the_stream_is_refused);
    RUN(a_stream_takes_its_place_in_the_order_when_its_capture_has_ended);
    RUN(a_stream_that_is_captured_elsewhere_is_not_waited_for);
    mt_cudart_close(rt);
    CHECK_DONE();
}
