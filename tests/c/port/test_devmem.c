/* A device's memory, by the fake driver: only where the program has a context, and with everything
 * put back whichever call fails. */
#include <string.h>

#include "cuda/memory.h"

#include "../../fake_cuda/fakecudart.h"
#include "kit/check.h"
#include "kit/faulty.h"

enum { LAUNCH_FAILURE = 719, CAPACITY = 64 << 20 };

static const char *path;
static fake_cuda fake;
static faulty heap = {.fail_at = -1};

typedef struct rig {
    mt_cudart *rt;
    mt_devmem *dm;
} rig;

static rig
rig_new(void)
{
    mt_alloc mem = faulty_alloc(&heap);
    rig r;

    CHECK(mt_cudart_open(&mem, path, &r.rt, NULL) == MT_OK);
    CHECK(mt_devmem_new(&mem, r.rt, &r.dm, NULL) == MT_OK);
    fake.fake_cuda_reset();
    fake.fake_cuda_set_capacity(CAPACITY);
    return r;
}

static void
rig_free(rig *r)
{
    mt_devmem_free(r->dm);
    mt_cudart_close(r->rt);
    CHECK(heap.live == 0);
    CHECK(fake.fake_cuda_misuses() == 0 && fake.fake_cuda_spoiled_captures() == 0);
    CHECK(fake.fake_cuda_retained() == 0 && !fake.fake_cuda_relaxed());
    CHECK(fake.fake_cuda_last_error() == 0);
}

/* Uses the device, as torch would. */
static void
use(rig *r, int device)
{
    const mt_dev_ops *dev = mt_cudart_dev_ops(r->rt);
    void *event;

    CHECK(dev->event_new(dev->ctx, device, &event, NULL) == MT_OK);
    dev->event_free(dev->ctx, device, event);
}

static void
it_makes_no_context(void)
{
    uint64_t left = 7, all = 8;
    rig r = rig_new();

    CHECK(!mt_devmem_read(r.dm, 0, &left, &all) && !mt_devmem_read(r.dm, 1, &left, &all));
    CHECK(!fake.fake_cuda_has_context(0) && !fake.fake_cuda_has_context(1));
    CHECK(left == 7 && all == 8);
    use(&r, 1);
    CHECK(mt_devmem_read(r.dm, 1, &left, &all) && left == CAPACITY && all == CAPACITY);
    CHECK(!mt_devmem_read(r.dm, 5, &left, &all) && !mt_devmem_read(r.dm, -1, &left, &all));
    CHECK(fake.fake_cuda_contexts_made() == 0 && fake.fake_cuda_device() == 0);
    rig_free(&r);
}

static void
a_capture_is_not_spoilt(void)
{
    uint64_t left, all;
    rig r = rig_new();

    use(&r, 0);
    fake.fake_cuda_set_capturing(NULL, true);
    CHECK(mt_devmem_read(r.dm, 0, &left, &all));
    rig_free(&r);
}

/* Nothing is asked of a runtime before the first reading. */
static void
nothing_is_called_before_it_is_read(void)
{
    uint64_t left, all;
    rig r = rig_new();

    CHECK(fake.fake_cuda_calls() == 0);
    CHECK(!mt_devmem_read(r.dm, 0, &left, &all));
    CHECK(fake.fake_cuda_calls() == 8 + 2); /* eight look-ups, then: the device, its state */
    CHECK(!mt_devmem_read(r.dm, 0, &left, &all) && fake.fake_cuda_calls() == 12);
    rig_free(&r);
}

static void
each_call_may_fail(void)
{
    uint64_t left, all;
    long failed = 0;

    for (long n = 0;; n++) {
        rig r = rig_new();
        long before;
        bool ok;
        use(&r, 0);
        before = fake.fake_cuda_calls();
        fake.fake_cuda_fail_at(n, LAUNCH_FAILURE);
        left = 7;
        ok = mt_devmem_read(r.dm, 0, &left, &all);
        CHECK(ok == (left == CAPACITY) && (ok || left == 7));
        failed += !ok;
        if (fake.fake_cuda_faults() == 0) {
            CHECK(ok && fake.fake_cuda_calls() - before == 8 + 8 + 1);
            rig_free(&r);
            break;
        }
        if (n < 8) CHECK(!mt_devmem_read(r.dm, 0, &left, &all)); /* and does not ask again */
        rig_free(&r);
    }
    CHECK(failed == 8 + 6); /* what only puts things back may fail unseen */
}

static void
a_missing_call_is_no_answer(void)
{
    uint64_t left, all;
    rig r = rig_new();

    use(&r, 0);
    fake.fake_cuda_hide("cuMemGetInfo");
    CHECK(!mt_devmem_read(r.dm, 0, &left, &all) && !mt_devmem_read(r.dm, 0, &left, &all));
    rig_free(&r);
}

static void
without_memory_nothing_is_made(void)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_devmem *dm = NULL;

    heap = (faulty){.fail_at = 0};
    CHECK(mt_devmem_new(&mem, NULL, &dm, NULL) == MT_ENOMEM && dm == NULL && heap.live == 0);
    mt_devmem_free(NULL);
    heap = (faulty){.fail_at = -1};
}

int
main(void)
{
    path = getenv("MT_FAKE_CUDART");
    CHECK(path != NULL && fake_cuda_load(path, &fake));
    RUN(it_makes_no_context);
    RUN(a_capture_is_not_spoilt);
    RUN(nothing_is_called_before_it_is_read);
    RUN(each_call_may_fail);
    RUN(a_missing_call_is_no_answer);
    RUN(without_memory_nothing_is_made);
    CHECK_DONE();
}
