/* The ring against a dumb model: an array of byte vectors, the oldest first. */
#include <string.h>

#include "kit/check.h"
#include "core/gate/ring.h"
#include "core/base/size.h"
#include "kit/faulty.h"
#include "os/port/vmem.h"
#include "kit/rng.h"

enum { MODEL_ENTRIES = 64, MODEL_BYTES = 512 };

typedef struct vector {
    size_t n;
    uint32_t rows, dtype;
    unsigned char bytes[MODEL_BYTES];
} vector;

/* A ring and what should be in it. */
typedef struct pair {
    mt_ring ring;
    faulty fault;
    mt_vmem_ops vm;
    vector model[MODEL_ENTRIES];
    size_t len, bytes;
    size_t peak, largest; /* most bytes ever live, longest entry ever */
    uint64_t seq;
    rng r;
} pair;

static void
begin(pair *p, uint64_t seed, size_t max_entries, size_t capacity)
{
    *p = (pair){.fault = {.fail_at = -1}, .r = rng_seeded(seed)};
    p->vm = faulty_vmem(&p->fault);
    CHECK(mt_ring_init(&p->ring, &p->vm, max_entries, capacity, NULL) == MT_OK);
}

static void
end(pair *p)
{
    mt_ring_fini(&p->ring);
    CHECK(p->fault.live == 0 && p->ring.base == NULL);
    mt_ring_fini(&p->ring); /* again is harmless */
}

/* Reads an entry in two pieces, split anywhere. */
static void
entry_is(pair *p, size_t i)
{
    const mt_slot *slot = mt_ring_slot(&p->ring, i);
    const vector *v = &p->model[i];
    const unsigned char *direct = mt_ring_direct(&p->ring, slot);
    unsigned char got[MODEL_BYTES + 1];
    size_t cut = rng_below(&p->r, v->n + 1);

    CHECK(slot->bytes == v->n && slot->rows == v->rows && slot->dtype == v->dtype);
    got[v->n] = 0xEE;
    mt_ring_read(&p->ring, slot, 0, got, cut);
    mt_ring_read(&p->ring, slot, cut, got + cut, v->n - cut);
    CHECK(memcmp(got, v->bytes, v->n) == 0 && got[v->n] == 0xEE);
    CHECK(direct == NULL || memcmp(direct, v->bytes, v->n) == 0);
    CHECK((direct == NULL) == (slot->at + slot->bytes > p->ring.extent));
}

static void
agrees(pair *p)
{
    const mt_ring *r = &p->ring;
    size_t roomy = mt_size_max(p->peak + p->peak / 2, p->peak + p->largest);

    CHECK(mt_ring_check(r));
    CHECK(r->len == p->len && r->bytes == p->bytes && r->seq == p->seq);
    CHECK(r->extent >= r->bytes && r->extent <= mt_size_min(roomy, r->capacity));
    for (size_t i = 0; i < p->len; i++)
        entry_is(p, i);
}

static void
claim(pair *p, size_t n)
{
    vector *v = &p->model[p->len];
    const mt_slot *slot;
    size_t cut = rng_below(&p->r, n + 1), before = p->ring.extent;

    v->n = n;
    v->rows = (uint32_t)rng_next(&p->r);
    v->dtype = (uint32_t)rng_next(&p->r);
    for (size_t i = 0; i < n; i++)
        v->bytes[i] = (unsigned char)rng_next(&p->r);
    CHECK(mt_ring_claim(&p->ring, (mt_slot){12345, n, v->rows, v->dtype}) == p->seq);
    slot = mt_ring_slot(&p->ring, p->len);
    mt_ring_write(&p->ring, slot, cut, v->bytes + cut, n - cut);
    mt_ring_write(&p->ring, slot, 0, v->bytes, cut);
    p->len++;
    p->seq++;
    p->bytes += n;
    p->peak = mt_size_max(p->peak, p->bytes);
    p->largest = mt_size_max(p->largest, n);
    CHECK(p->ring.extent == before || p->bytes > before); /* grows only when it must */
    agrees(p);
}

static void
drop(pair *p, size_t n)
{
    size_t extent = p->ring.extent;

    for (size_t i = 0; i < n; i++)
        p->bytes -= p->model[i].n;
    memmove(p->model, p->model + n, (p->len - n) * sizeof *p->model);
    p->len -= n;
    mt_ring_drop(&p->ring, n);
    CHECK(p->ring.extent == extent);
    agrees(p);
}

/* A claim of at most `longest` bytes if there is room, otherwise drops. Now and then the owner
 * allows more. */
static void
random_step(pair *p, size_t longest)
{
    size_t more = p->ring.capacity - p->ring.bound, room = p->ring.bound - p->bytes;
    size_t n = rng_below(&p->r, 4) == 0 ? 0 : rng_below(&p->r, longest + 1);

    if (more > 0 && rng_below(&p->r, 20) == 0) p->ring.bound += rng_below(&p->r, more + 1);
    if (rng_below(&p->r, 16) == 0) n = mt_size_min(room, MODEL_BYTES); /* exactly full */
    if (rng_below(&p->r, 3) != 0 && p->len < p->ring.max_entries && n <= room)
        claim(p, n);
    else if (rng_below(&p->r, 32) == 0)
        drop(p, p->len);
    else
        drop(p, rng_below(&p->r, mt_size_min(p->len, 4) + 1));
}

static void
any_claims_and_drops_match_the_model(void)
{
    static pair p;

    for (uint64_t seed = 0; seed < 300; seed++) {
        rng r = rng_seeded(seed);
        size_t capacity = 1 + rng_below(&r, seed % 2 ? 40 : MODEL_BYTES);
        size_t longest = 1 + rng_below(&r, mt_size_min(capacity, seed % 3 ? 24 : MODEL_BYTES));
        begin(&p, seed, 1 + rng_below(&r, seed % 5 ? MODEL_ENTRIES : 3), capacity);
        if (seed % 7 < 3) p.ring.bound = rng_below(&r, capacity + 1);
        for (int step = 0; step < 250; step++)
            random_step(&p, longest);
        end(&p);
    }
}

static void
an_emptied_ring_starts_over_where_its_pages_are_warm(void)
{
    static pair p;

    begin(&p, 8, 4, 100);
    claim(&p, 50);
    drop(&p, 1);
    for (int i = 0; i < 3; i++) {
        claim(&p, 20);
        CHECK(mt_ring_slot(&p.ring, 0)->at == 0);
        drop(&p, 1);
    }
    end(&p);
}

static void
equal_entries_use_exactly_their_own_bytes(void)
{
    static pair p;

    for (size_t kept = 1; kept <= 20; kept++) {
        begin(&p, kept, kept, MODEL_BYTES);
        for (int i = 0; i < 100; i++) {
            if (p.len == kept) drop(&p, i % 7 ? 1 : (kept + 1) / 2);
            claim(&p, 16);
        }
        CHECK(p.ring.extent == kept * 16);
        end(&p);
    }
}

static void
sizes_that_do_not_fit_are_refused(void)
{
    static const size_t asks[][2] = {
        {SIZE_MAX / 8, 1}, {1, SIZE_MAX}, {1, SIZE_MAX - 63}, {SIZE_MAX / sizeof(mt_slot), 1}};
    faulty f = {.fail_at = -1};
    mt_vmem_ops vm = faulty_vmem(&f);

    for (size_t i = 0; i < sizeof asks / sizeof *asks; i++) {
        mt_error err = {0};
        mt_ring ring;
        memset(&ring, 0xA5, sizeof ring);
        CHECK(mt_ring_init(&ring, &vm, asks[i][0], asks[i][1], &err) == MT_EOVERFLOW);
        CHECK(err.status == MT_EOVERFLOW && f.calls == 0 && ring.slots == NULL);
        mt_ring_fini(&ring);
    }
}

static void
a_failed_reservation_leaves_nothing(void)
{
    for (long fail_at = 0;; fail_at++) {
        faulty f = {.fail_at = fail_at};
        mt_vmem_ops vm = faulty_vmem(&f);
        static const mt_ring zeros;
        mt_error err = {0};
        mt_ring ring;
        mt_status st = mt_ring_init(&ring, &vm, 10, 1000, &err);
        if (st != MT_OK)
            CHECK(st == MT_ENOMEM && err.status == st && memcmp(&ring, &zeros, sizeof ring) == 0);
        mt_ring_fini(&ring);
        CHECK(f.live == 0);
        if (st != MT_OK) continue;
        CHECK(fail_at == 1); /* one reservation holds all */
        return;
    }
}

static void
real_address_space_is_zero_aligned_and_only_paid_for_where_touched(void)
{
    mt_ring ring;
    unsigned char got[5];
    const mt_slot *slot;

    CHECK(mt_ring_init(&ring, &mt_vmem_linux, 1000, (size_t)4 << 30, NULL) == MT_OK);
    CHECK((uintptr_t)ring.slots % 4096 == 0 && (uintptr_t)ring.base % 64 == 0);
    mt_ring_claim(&ring, (mt_slot){.bytes = 5});
    slot = mt_ring_slot(&ring, 0);
    mt_ring_read(&ring, slot, 0, got, 5);
    CHECK(memcmp(got, "\0\0\0\0", 5) == 0);
    mt_ring_write(&ring, slot, 0, "gates", 5);
    mt_ring_read(&ring, slot, 0, got, 5);
    CHECK(memcmp(got, "gates", 5) == 0 && mt_ring_check(&ring));
    mt_ring_fini(&ring);
}

static void
a_vacated_ring_gives_its_pages_back_and_goes_on(void)
{
    unsigned char in[40000], out[40000];
    mt_ring ring;

    memset(in, 7, sizeof in);
    CHECK(mt_ring_init(&ring, &mt_vmem_linux, 3, 3 * sizeof in, NULL) == MT_OK);
    ring.bound = sizeof in + 10;
    for (int round = 0; round < 5; round++) { /* slot after slot, so the array of them goes round */
        mt_ring_claim(&ring, (mt_slot){.bytes = sizeof in});
        mt_ring_read(&ring, mt_ring_slot(&ring, 0), 0, out, sizeof out);
        CHECK(memchr(out + 4096, 7, sizeof out - 2 * 4096) ==
              NULL); /* new pages between the ends */
        mt_ring_write(&ring, mt_ring_slot(&ring, 0), 0, in, sizeof in);
        mt_ring_claim(&ring, (mt_slot){.bytes = 10});
        CHECK(mt_ring_check(&ring) && ring.extent == ring.bound);
        mt_ring_vacate(&ring);
        CHECK(mt_ring_check(&ring) && ring.len == 0 && ring.extent == 0);
    }
    mt_ring_vacate(&ring); /* of nothing */
    mt_ring_fini(&ring);
}

static void
address_space_that_is_not_there_is_refused(void)
{
    mt_error err = {0};
    mt_ring ring;

    CHECK(mt_ring_init(&ring, &mt_vmem_linux, 1, (size_t)1 << 60, &err) == MT_ENOMEM);
    CHECK(err.native != 0 && strcmp(err.call, "mmap") == 0 && err.asked > (size_t)1 << 60);
    mt_ring_fini(&ring);
}

int
main(void)
{
    RUN(any_claims_and_drops_match_the_model);
    RUN(an_emptied_ring_starts_over_where_its_pages_are_warm);
    RUN(equal_entries_use_exactly_their_own_bytes);
    RUN(sizes_that_do_not_fit_are_refused);
    RUN(a_failed_reservation_leaves_nothing);
    RUN(real_address_space_is_zero_aligned_and_only_paid_for_where_touched);
    RUN(a_vacated_ring_gives_its_pages_back_and_goes_on);
    RUN(address_space_that_is_not_there_is_refused);
    CHECK_DONE();
}
