/* The CUDA backend over the fake runtime, libfakecudart.so, which MT_FAKE_CUDART names. */
#include "cuda/runtime.h"

#include <string.h>

#include "../../fake_cuda/fakecudart.h"
#include "kit/check.h"
#include "kit/faulty.h"

enum { OUT_OF_MEMORY = 2, LAUNCH_FAILURE = 719 }; /* as cudaError_t has them */

static const char *path;
static fake_cuda fake;
static faulty heap = {.fail_at = -1};

static mt_cudart *
open_fake(void)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_cudart *rt = NULL;

    fake.fake_cuda_reset();
    CHECK(mt_cudart_open(&mem, path, &rt, NULL) == MT_OK);
    return rt;
}

static void
check_refused(const char *library, const char *call)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_cudart *rt = NULL;
    mt_error err = {0};

    CHECK(mt_cudart_open(&mem, library, &rt, &err) == MT_EDEVICE);
    CHECK(rt == NULL && heap.live == 0);
    CHECK(err.status == MT_EDEVICE && err.native == 0 && strcmp(err.call, call) == 0);
    CHECK(mt_cudart_open(&mem, library, &rt, NULL) == MT_EDEVICE);
}

static void
a_bad_path_is_refused(void)
{
    check_refused("/nonexistent/libcudart.so", "dlopen libcudart");
    mt_cudart_close(NULL);
}

static void
a_missing_entry_point_is_named(void)
{
    check_refused("libm.so.6", "dlsym cudaRuntimeGetVersion");
}

static void
no_memory_is_reported(void)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_cudart *rt = NULL;

    heap = (faulty){.fail_at = 0};
    CHECK(mt_cudart_open(&mem, path, &rt, NULL) == MT_ENOMEM && rt == NULL);
    heap = (faulty){.fail_at = -1};
}

/* The fake's soname is libcudart.so.13, as torch's is: NULL finds what the process has. */
static void
a_loaded_runtime_is_found(void)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_cudart *rt = NULL;
    int runtime, driver, devices;
    long calls;

    CHECK(mt_cudart_open(&mem, NULL, &rt, NULL) == MT_OK);
    calls = fake.fake_cuda_calls();
    CHECK(mt_cudart_info(rt, &runtime, &driver, &devices, NULL) == MT_OK);
    CHECK(fake.fake_cuda_calls() == calls + 3);
    mt_cudart_close(rt);
    CHECK(heap.live == 0);
}

static void
info_counts_devices(void)
{
    mt_cudart *rt = open_fake();
    int runtime = 0, driver = 0, devices = -1;
    mt_error err = {0};

    CHECK(mt_cudart_info(rt, &runtime, &driver, &devices, &err) == MT_OK);
    CHECK(runtime >= 11000 && driver >= 11000 && devices == 2);
    fake.fake_cuda_set_devices(0);
    CHECK(mt_cudart_info(rt, &runtime, &driver, &devices, &err) == MT_OK && devices == 0);
    CHECK(err.status == MT_OK && fake.fake_cuda_last_error() == 0);
    for (long n = 0; n < 3; n++) {
        devices = -1;
        fake.fake_cuda_fail_at(n, LAUNCH_FAILURE);
        CHECK(mt_cudart_info(rt, &runtime, &driver, &devices, &err) == MT_EDEVICE);
        CHECK(err.native == LAUNCH_FAILURE && devices == -1);
    }
    mt_cudart_close(rt);
}

static void
strerror_gives_the_runtimes_sentence(void)
{
    mt_cudart *rt = open_fake();

    CHECK(strcmp(mt_cudart_strerror(rt, OUT_OF_MEMORY), "out of memory") == 0);
    CHECK(mt_cudart_strerror(rt, 987654) != NULL);
    mt_cudart_close(rt);
}

/* Everything that a table can make, of which the n-th call fails; then all of it is freed. */
static mt_status
make_one_of_each(const mt_dev_ops *dev, int device, mt_error *err)
{
    void *host = NULL, *block = NULL, *stream = NULL, *event = NULL;
    mt_status st;
    bool yes;

    if ((st = dev->host_alloc(dev->ctx, device, 64, &host, err)) != MT_OK) goto done;
    if ((st = dev->dev_alloc(dev->ctx, device, 64, &block, err)) != MT_OK) goto done;
    if ((st = dev->stream_new(dev->ctx, device, &stream, err)) != MT_OK) goto done;
    if ((st = dev->event_new(dev->ctx, device, &event, err)) != MT_OK) goto done;
    if ((st = dev->stream_capturing(dev->ctx, device, stream, &yes, err)) != MT_OK) goto done;
    CHECK(!yes);
    if ((st = dev->copy_d2d(dev->ctx, device, block, block, 8, stream, err)) != MT_OK) goto done;
    if ((st = dev->zero(dev->ctx, device, block, 8, stream, err)) != MT_OK) goto done;
    if ((st = dev->copy_d2h(dev->ctx, device, host, block, 8, stream, err)) != MT_OK) goto done;
    if ((st = dev->event_record(dev->ctx, device, event, stream, err)) != MT_OK) goto done;
    if ((st = dev->stream_wait(dev->ctx, device, stream, event, err)) != MT_OK) goto done;
    if ((st = dev->event_done(dev->ctx, device, event, &yes, err)) != MT_OK) goto done;
    CHECK(!yes);
    if ((st = dev->event_wait(dev->ctx, device, event, err)) != MT_OK) goto done;
    if ((st = dev->event_done(dev->ctx, device, event, &yes, err)) != MT_OK) goto done;
    CHECK(yes);
done: /* the rest is NULL, which the table ignores */
    fake.fake_cuda_fail_at(-1, 0);
    fake.fake_cuda_run_all();
    dev->event_free(dev->ctx, device, event);
    dev->stream_free(dev->ctx, device, stream);
    dev->dev_free(dev->ctx, device, block);
    dev->host_free(dev->ctx, device, host);
    return st;
}

/* Counts the calls whose failure is reported; the current device is 0. */
static long
count_failures(const mt_dev_ops *dev, int device, int code)
{
    bool fired = true;
    long failures = 0;

    for (long n = 0; fired; n++) {
        mt_error err = {0};
        mt_status st;

        fake.fake_cuda_reset();
        fake.fake_cuda_fail_at(n, code);
        st = make_one_of_each(dev, device, &err);
        fired = fake.fake_cuda_faults() > 0;
        CHECK(fake.fake_cuda_live() == 0 && fake.fake_cuda_busy_frees() == 0);
        CHECK(fake.fake_cuda_last_error() == 0);
        if (st == MT_OK) continue; /* what only puts the thread back may fail unseen */
        CHECK(fired && st == (code == OUT_OF_MEMORY ? MT_ENOMEM : MT_EDEVICE));
        CHECK(err.native == code && strncmp(err.call, "cuda", 4) == 0);
        CHECK(fake.fake_cuda_device() == 0 && !fake.fake_cuda_relaxed());
        failures++;
    }
    return failures;
}

static void
each_failed_call_is_named_and_keeps_nothing(void)
{
    mt_cudart *rt = open_fake();
    const mt_dev_ops *dev = mt_cudart_dev_ops(rt);

    /* Thirteen functions: get the device (and set it), relax the capture mode (seven), the call. */
    CHECK(count_failures(dev, 0, OUT_OF_MEMORY) == 13 + 7 + 13);
    CHECK(count_failures(dev, 1, LAUNCH_FAILURE) == 13 + 13 + 7 + 13);
    mt_cudart_close(rt);
    CHECK(heap.live == 0);
}

static void
nothing_is_written_on_failure(void)
{
    mt_cudart *rt = open_fake();
    const mt_dev_ops *dev = mt_cudart_dev_ops(rt);
    void *out = &heap;
    bool yes = true;

    for (long n = 0; n < 3; n++) { /* get the device, relax, the call */
        fake.fake_cuda_fail_at(n, LAUNCH_FAILURE);
        CHECK(dev->host_alloc(dev->ctx, 0, 64, &out, NULL) == MT_EDEVICE && out == &heap);
        fake.fake_cuda_fail_at(n, LAUNCH_FAILURE);
        CHECK(dev->dev_alloc(dev->ctx, 0, 64, &out, NULL) == MT_EDEVICE && out == &heap);
        fake.fake_cuda_fail_at(n, LAUNCH_FAILURE);
        CHECK(dev->stream_new(dev->ctx, 0, &out, NULL) == MT_EDEVICE && out == &heap);
        fake.fake_cuda_fail_at(n, LAUNCH_FAILURE);
        CHECK(dev->event_new(dev->ctx, 0, &out, NULL) == MT_EDEVICE && out == &heap);
        fake.fake_cuda_fail_at(n % 2, LAUNCH_FAILURE);
        CHECK(dev->stream_capturing(dev->ctx, 0, NULL, &yes, NULL) == MT_EDEVICE && yes);
    }
    mt_cudart_close(rt);
}

static void
an_unknown_device_is_refused(void)
{
    mt_cudart *rt = open_fake();
    const mt_dev_ops *dev = mt_cudart_dev_ops(rt);
    void *out = &heap;
    mt_error err = {0};

    CHECK(dev->dev_alloc(dev->ctx, 5, 64, &out, &err) == MT_EDEVICE);
    CHECK(out == &heap && err.native != 0 && strcmp(err.call, "cudaSetDevice") == 0);
    CHECK(fake.fake_cuda_device() == 0 && fake.fake_cuda_live() == 0);
    mt_cudart_close(rt);
}

int
main(void)
{
    path = getenv("MT_FAKE_CUDART");
    RUN(a_bad_path_is_refused);
    RUN(a_missing_entry_point_is_named);
    CHECK(path != NULL && fake_cuda_load(path, &fake));
    RUN(no_memory_is_reported);
    RUN(a_loaded_runtime_is_found);
    RUN(info_counts_devices);
    RUN(strerror_gives_the_runtimes_sentence);
    RUN(each_failed_call_is_named_and_keeps_nothing);
    RUN(nothing_is_written_on_failure);
    RUN(an_unknown_device_is_refused);
    CHECK_DONE();
}
