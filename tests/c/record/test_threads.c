/* A record that several threads write, and that others copy meanwhile; also run under the thread
 * sanitiser. */
#include "record/rig.h"

#include <pthread.h>
#include <stdatomic.h>

enum { WRITERS = 2, ROUNDS = 40000 };

typedef struct shared {
    mt_record r;
    mt_record_size size;
    size_t bytes;
    uint64_t *region;
    _Atomic int running;
    uint64_t copies, whole; /* of the reader's */
} shared;

/* The one that samples. */
static void *
sample(void *arg)
{
    shared *s = arg;

    for (uint64_t k = 0; k < ROUNDS; k++)
        rig_append(&s->r, k);
    s->running--;
    return NULL;
}

/* Events whose number is not known beforehand: the text names the thread's own count. */
static void *
tell(void *arg)
{
    shared *s = arg;
    char text[MT_RECORD_TEXT] = "";
    mt_record_event e = {.kind = "round", .kind_bytes = 5, .text = text, .step = MT_UNKNOWN};

    for (uint64_t k = 0; k < ROUNDS; k++) {
        e.text_bytes = (size_t)snprintf(text, sizeof text, "%0*d", (int)(1 + k % 150), 7);
        e.time_ns = e.duration_ns = e.text_bytes;
        CHECK(mt_record_write_event(&s->r, &e));
        CHECK(mt_record_phase(&s->r, "round", 5, 3, k));
    }
    s->running--;
    return NULL;
}

/* In the order of addresses, word by word, as another process's read() may see it. */
static uint64_t
copy(const shared *s, uint64_t *to)
{
    for (size_t i = 0; i < s->bytes / 8; i++)
        to[i] = atomic_load_explicit((_Atomic uint64_t *)&s->region[i], memory_order_acquire);
    return atomic_load((_Atomic uint64_t *)&s->region[(size_t)(s->r.parts.series / 8)]);
}

static void
check_copy(shared *s, uint64_t *words)
{
    mt_recordview v;
    mt_event_view e;
    mt_phase_view p;

    CHECK(mt_record_open(&v, words, s->bytes, NULL) == MT_OK);
    rig_check_rows(&v, v.size.series.rows); /* some may be in flight; none may be wrong */
    for (uint64_t k = v.events_from; k < v.events_end; k++)
        if (mt_recordview_event(&v, k, &e))
            CHECK(e.text_bytes == e.duration_ns && e.text[e.text_bytes - 1] == '7');
    for (size_t i = 0; i < v.phases; i++)
        if (mt_recordview_phase(&v, i, &p)) CHECK(p.ns == 3 * p.count);
    s->whole++;
}

static void *
look(void *arg)
{
    shared *s = arg;
    uint64_t *words = malloc(s->bytes);

    while (s->running > 0 || s->whole == 0) {
        uint64_t after = copy(s, words);
        s->copies++;
        if (mt_series_folds(words[s->r.parts.series / 8]) == mt_series_folds(after))
            check_copy(s, words);
    }
    free(words);
    return NULL;
}

static void
all_at_once(void)
{
    shared s = {.size = rig_size(32, 8, 16, 4), .running = 1 + WRITERS};
    pthread_t thread[2 + WRITERS];
    mt_recordview v;
    mt_phase_view p;

    s.bytes = mt_record_parts_of(&s.size).end;
    s.region = rig_region(&s.size);
    rig_init(&s.r, s.region, &s.size);
    CHECK(pthread_create(&thread[0], NULL, look, &s) == 0);
    CHECK(pthread_create(&thread[1], NULL, sample, &s) == 0);
    for (int i = 0; i < WRITERS; i++)
        CHECK(pthread_create(&thread[2 + i], NULL, tell, &s) == 0);
    for (int i = 0; i < 2 + WRITERS; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
    CHECK(mt_record_open(&v, s.region, s.bytes, NULL) == MT_OK);
    rig_check_rows(&v, 0);
    rig_check_buckets(&v.series, ROUNDS);
    CHECK(v.events_end == WRITERS * ROUNDS);
    CHECK(v.phases == 1 && mt_recordview_phase(&v, 0, &p) && p.count == WRITERS * ROUNDS);
    CHECK(p.peak == ROUNDS - 1 && s.copies > 0);
    mt_record_fini(&s.r);
    free(s.region);
}

/* Another thread closes it while one samples: the region is not touched afterwards. */
static void *
sample_until_closed(void *arg)
{
    shared *s = arg;
    uint64_t values[RIG_COLUMNS] = {1, 2, 3};

    while (mt_record_append(&s->r, 1, values))
        s->running = 0; /* the first is in */
    return NULL;
}

static void
closed_under_a_writer(void)
{
    shared s = {.size = rig_size(32, 8, 16, 4), .running = 1};
    pthread_t thread;

    s.region = rig_region(&s.size);
    rig_init(&s.r, s.region, &s.size);
    CHECK(pthread_create(&thread, NULL, sample_until_closed, &s) == 0);
    while (s.running > 0) {}
    CHECK(mt_record_close(&s.r, 1));
    free(s.region); /* a sanitiser sees who comes too late */
    CHECK(pthread_join(thread, NULL) == 0);
    mt_record_fini(&s.r);
}

int
main(void)
{
    RUN(all_at_once);
    RUN(closed_under_a_writer);
    CHECK_DONE();
}
