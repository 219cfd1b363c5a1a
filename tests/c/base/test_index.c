/* The index against a model that compares every key, with hashes of which many are the same, and
 * with an allocator that fails. */
#include "kit/check.h"
#include "core/base/index.h"
#include "kit/faulty.h"
#include "kit/rng.h"

enum { KEYS = 3000, ROUNDS = 20000 };

/* Some keys share the half that the index keeps, some all of it. */
static uint64_t
hash_of(uint64_t key)
{
    return key % 3 == 0 ? key / 30 : key * UINT64_C(0x9E3779B97F4A7C15);
}

static uint32_t
find(const mt_index *index, const uint64_t *keys, uint64_t key)
{
    size_t at = mt_index_half(hash_of(key));
    uint32_t i;

    while ((i = mt_index_next(index, hash_of(key), &at)) != MT_INDEX_NONE)
        if (keys[i] == key) return i;
    return MT_INDEX_NONE;
}

static void
each_key_is_found_under_its_number(void)
{
    static uint32_t number[KEYS];
    static uint64_t keys[KEYS];
    faulty fault = {.fail_at = -1};
    mt_alloc mem = faulty_alloc(&fault);
    mt_index index = {.n = 0};
    rng r = rng_seeded(5);
    uint32_t n = 0;

    for (size_t round = 0; round < ROUNDS; round++) {
        uint64_t key = rng_below(&r, KEYS);
        uint32_t found = find(&index, keys, key);

        CHECK(found == (number[key] == 0 ? MT_INDEX_NONE : number[key] - 1));
        if (found != MT_INDEX_NONE) continue;
        fault.fail_at = rng_below(&r, 2) == 0 ? fault.calls : -1;
        if (!mt_index_make_room(&index, &mem)) {
            CHECK(index.n == n && find(&index, keys, key) == MT_INDEX_NONE);
            continue; /* nothing has changed: the next rounds find all that is in it */
        }
        keys[n] = key;
        mt_index_add(&index, hash_of(key), n);
        number[key] = ++n;
        CHECK(index.n == n && 4 * n <= 3 * index.room);
    }
    CHECK(n > KEYS / 2);
    for (uint64_t key = 0; key < KEYS; key++)
        CHECK(find(&index, keys, key) == (number[key] == 0 ? MT_INDEX_NONE : number[key] - 1));
    mt_index_drop(&index, &mem);
    CHECK(fault.live == 0 && find(&index, keys, 0) == MT_INDEX_NONE);
    mt_index_drop(&index, &mem);
}

int
main(void)
{
    RUN(each_key_is_found_under_its_number);
    CHECK_DONE();
}
