/* The open table of addresses: against a model that keeps all of them in a list, with addresses of
 * which many have the same slot, and with an allocator that fails at each call. */
#include "kit/check.h"
#include "core/base/addrs.h"
#include "kit/faulty.h"
#include "kit/rng.h"

#include <stdbool.h>

enum { ADDRESSES = 4000, ROUNDS = 80000 };

typedef struct known {
    uint64_t address, number, twice;
} known;

/* Some lie side by side, and some 64 KiB apart. */
static uint64_t
address_of(size_t n)
{
    return UINT64_C(0x7F0000000000) + (n % 2 == 0 ? 16 * n : UINT64_C(65536) * n);
}

static void
check_model(const mt_addrs *a, const uint64_t *numbers)
{
    size_t n = 0, visited = 0;

    for (size_t i = 0; i < ADDRESSES; i++) {
        const known *k = mt_addrs_find(a, address_of(i));
        CHECK((k != NULL) == (numbers[i] != 0));
        if (k == NULL) continue;
        CHECK(k->address == address_of(i) && k->number == numbers[i]);
        CHECK(k->twice == 2 * numbers[i]);
        n++;
    }
    for (const known *k = NULL; (k = mt_addrs_next(a, k)) != NULL;)
        visited++;
    CHECK(a->n == n && visited == n);
}

static void
any_order_of_adds_and_removes_is_as_in_the_model(void)
{
    static uint64_t numbers[ADDRESSES];
    rng r = rng_seeded(11);
    mt_addrs a;

    mt_addrs_init(&a, &mt_alloc_libc, sizeof(known));
    CHECK(mt_addrs_find(&a, 16) == NULL && mt_addrs_next(&a, NULL) == NULL && a.slots == NULL);
    for (size_t i = 0; i < ROUNDS; i++) {
        size_t n = rng_below(&r, ADDRESSES);
        known *k = mt_addrs_find(&a, address_of(n));
        bool is_add = rng_below(&r, 100) < (i < ROUNDS / 2 ? 80 : 20);
        if (is_add) {
            known *added = mt_addrs_add(&a, address_of(n));
            CHECK(added != NULL && added->number == numbers[n]);
            CHECK(k == NULL || k == added);
            added->number = numbers[n] = 1 + rng_below(&r, 1000);
            added->twice = 2 * numbers[n];
        } else if (k != NULL) {
            mt_addrs_remove(&a, k);
            numbers[n] = 0;
        }
        if (i % 5003 == 0) check_model(&a, numbers);
    }
    check_model(&a, numbers);
    mt_addrs_drop(&a);
    CHECK(a.n == 0 && a.room == 0 && mt_addrs_find(&a, address_of(1)) == NULL);
}

static void
without_memory_nothing_changes(void)
{
    for (long fail_at = 0; fail_at < 3; fail_at++) {
        faulty f = {.fail_at = fail_at};
        mt_alloc mem = faulty_alloc(&f);
        size_t added = 0;
        mt_addrs a;

        mt_addrs_init(&a, &mem, sizeof(known));
        for (size_t n = 0; n < ADDRESSES; n++) {
            size_t before = a.n;
            known *k = mt_addrs_add(&a, address_of(n));
            CHECK(a.n == before + (k != NULL));
            if (k != NULL) k->number = ++added;
        }
        CHECK(a.n == added && added < ADDRESSES + 1);
        for (size_t n = 0; n < ADDRESSES; n++) {
            const known *k = mt_addrs_find(&a, address_of(n));
            CHECK(k == NULL || k->address == address_of(n));
            added -= k != NULL;
        }
        CHECK(added == 0);
        mt_addrs_drop(&a);
        CHECK(f.live == 0);
    }
}

int
main(void)
{
    RUN(any_order_of_adds_and_removes_is_as_in_the_model);
    RUN(without_memory_nothing_changes);
    CHECK_DONE();
}
