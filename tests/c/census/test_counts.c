/* The counts by key, against a list that is searched from the front. */
#include "kit/check.h"
#include "core/census/counts.h"
#include "kit/faulty.h"
#include "kit/rng.h"

enum { KEYS = 3000, WORDS = 5 };

/* Key k: k % WORDS + 1 words, told apart by the last, so that most of a key is like another's. */
static size_t
key_of(size_t k, int64_t out[WORDS])
{
    size_t words = k % WORDS + 1;

    for (size_t i = 0; i < words; i++)
        out[i] = -7;
    out[words - 1] = (int64_t)k << 40;
    return words;
}

static mt_status
add(mt_counts *t, size_t k, size_t *line)
{
    int64_t key[WORDS];
    size_t words = key_of(k, key);
    mt_error err;
    mt_status st = mt_counts_line_of(t, key, words, line, &err);

    if (st == MT_OK) t->lines[*line].count++;
    return st;
}

static void
counts_like_a_list(void)
{
    static uint64_t expected[KEYS];
    static size_t line_of[KEYS];
    faulty f = {.fail_at = -1};
    mt_alloc mem = faulty_alloc(&f);
    rng r = rng_seeded(1);
    size_t met = 0, line;
    mt_counts t;

    mt_counts_init(&t, &mem);
    for (int i = 0; i < 20000; i++) {
        size_t k = (size_t)(rng_next(&r) % KEYS);
        CHECK(add(&t, k, &line) == MT_OK);
        if (expected[k]++ == 0) line_of[k] = met++;
        CHECK(line == line_of[k] && t.lines[line].count == expected[k] && t.n == met);
    }
    for (size_t k = 0; k < KEYS; k++) {
        int64_t key[WORDS];
        size_t words = key_of(k, key);
        if (expected[k] == 0) continue;
        CHECK(t.lines[line_of[k]].words == words);
        CHECK(memcmp(mt_counts_key(&t, line_of[k]), key, words * sizeof *key) == 0);
        CHECK(t.lines[line_of[k]].bytes == 0 && t.lines[line_of[k]].tag == 0);
    }
    mt_counts_fini(&t);
    CHECK(f.live == 0);
    mt_counts_fini(&t); /* empty again: nothing to give back */
}

static void
a_prefix_is_another_key(void)
{
    const int64_t key[] = {1, 2, 3};
    mt_counts t;
    size_t a, b;

    mt_counts_init(&t, &mt_alloc_libc);
    CHECK(mt_counts_line_of(&t, key, 2, &a, NULL) == MT_OK);
    CHECK(mt_counts_line_of(&t, key, 3, &b, NULL) == MT_OK);
    CHECK(a != b);
    CHECK(mt_counts_compare(&t, a, b) < 0 && mt_counts_compare(&t, b, a) > 0);
    CHECK(mt_counts_compare(&t, a, a) == 0);
    mt_counts_fini(&t);
}

static void
keys_compare_by_their_words(void)
{
    const int64_t low[] = {-5, 9}, high[] = {3};
    mt_counts t;
    size_t a, b;

    mt_counts_init(&t, &mt_alloc_libc);
    CHECK(mt_counts_line_of(&t, high, 1, &b, NULL) == MT_OK);
    CHECK(mt_counts_line_of(&t, low, 2, &a, NULL) == MT_OK);
    CHECK(mt_counts_compare(&t, a, b) < 0 && mt_counts_compare(&t, b, a) > 0);
    mt_counts_fini(&t);
}

/* Whatever allocation fails, the counts so far stand and the same key may be tried again. */
static void
no_memory_changes_nothing(void)
{
    for (long fail_at = 0;; fail_at++) {
        faulty f = {.fail_at = fail_at};
        mt_alloc mem = faulty_alloc(&f);
        size_t failed = 0, line;
        mt_counts t;
        mt_counts_init(&t, &mem);
        for (size_t k = 0; k < 500; k++) {
            size_t before = t.n;
            if (add(&t, k, &line) == MT_OK) continue;
            failed++;
            CHECK(t.n == before);
            CHECK(add(&t, k, &line) == MT_OK && line == k);
        }
        for (size_t k = 0; k < 500; k++)
            CHECK(t.lines[k].count == 1 && t.n == 500);
        mt_counts_fini(&t);
        CHECK(f.live == 0);
        if (failed == 0) break;
        CHECK(failed == 1);
    }
}

int
main(void)
{
    RUN(counts_like_a_list);
    RUN(a_prefix_is_another_key);
    RUN(keys_compare_by_their_words);
    RUN(no_memory_changes_nothing);
    CHECK_DONE();
}
