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
    uint64_t copies;
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
static void
copy(const shared *s, uint64_t *to)
{
    for (size_t i = 0; i < s->bytes / 8; i++)
        to[i] = atomic_load_explicit((_Atomic uint64_t *)&s->region[i], memory_order_acquire);
}

/* Some rows may be in flight; none may be wrong. */
static void
check_rows(const uint64_t *words, uint64_t from, uint64_t end)
{
    for (uint64_t k = from; k < end; k++) {
        const uint64_t *row = view_row(words, k);
        for (size_t c = 0; row != NULL && c < RIG_COLUMNS; c++)
            CHECK(row[0] == rig_time(k) && row[1 + c] == rig_value(k, c));
    }
}

/* Of the newest of a ring of events, whose numbers are not known: by the stamp of each slot. */
static void
check_events(const shared *s, const uint64_t *words)
{
    const uint64_t *slots = words + s->r.parts.events / 8;

    for (size_t i = 0; i < s->size.events; i++) {
        uint64_t stamp = slots[i * MT_EVENT_STRIDE];
        const uint64_t *event = stamp == 0 ? NULL : view_event(words, stamp - 1);
        size_t bytes;
        if (event == NULL) continue;
        CHECK(view_body(event, &bytes)[event[2] - 1] == '7' && bytes == event[2]);
    }
}

static void *
look(void *arg)
{
    shared *s = arg;
    uint64_t *words = malloc(s->bytes);

    do {
        uint64_t samples;
        copy(s, words);
        samples = view_samples(words);
        check_rows(words, samples < 2 * s->size.series.rows ? 0 : samples - s->size.series.rows,
                   samples + s->size.series.rows);
        check_events(s, words);
        s->copies++;
    } while (s->running > 0);
    free(words);
    return NULL;
}

static void
all_at_once(void)
{
    shared s = {.size = rig_size(32, 8, 16, 4), .running = 1 + WRITERS};
    pthread_t thread[2 + WRITERS];
    const uint64_t *phase;

    s.bytes = mt_record_parts_of(&s.size).end;
    s.region = rig_region(&s.size);
    rig_init(&s.r, s.region, &s.size);
    CHECK(pthread_create(&thread[0], NULL, look, &s) == 0);
    CHECK(pthread_create(&thread[1], NULL, sample, &s) == 0);
    for (int i = 0; i < WRITERS; i++)
        CHECK(pthread_create(&thread[2 + i], NULL, tell, &s) == 0);
    for (int i = 0; i < 2 + WRITERS; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
    CHECK(view_samples(s.region) == ROUNDS && view_row(s.region, ROUNDS - 1) != NULL);
    check_rows(s.region, ROUNDS - s.size.series.rows, ROUNDS);
    CHECK(view_event(s.region, WRITERS * ROUNDS - 1) != NULL);
    CHECK(s.region[MT_RECORD_AT_PHASES_USED] == 1 && s.copies > 0);
    /* The halves of a phase take turns: one of them has the last count. */
    phase = s.region + s.r.parts.phases / 8 + MT_RECORD_PHASE_NAME_WORDS;
    CHECK(phase[1] == WRITERS * ROUNDS || phase[MT_RECORD_PHASE_WORDS + 2] == WRITERS * ROUNDS);
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
