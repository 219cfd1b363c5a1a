#include "record/writer.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/size.h"
#include "base/utf8.h"
#include "record/words.h"

/* --- begin and end --- */

static uint64_t *
word_at(const mt_record *r, size_t word)
{
    return (uint64_t *)(void *)r->at + word;
}

static void
put_start(mt_record *r, const mt_record_start *start)
{
    size_t command = mt_size_min(start->command_bytes, MT_RECORD_COMMAND);
    const uint64_t words[] = {
        [MT_RECORD_AT_VERSION] = MT_RECORD_VERSION,      [MT_RECORD_AT_BYTES] = r->parts.end,
        [MT_RECORD_AT_COLUMNS] = r->size.series.columns, [MT_RECORD_AT_ROWS] = r->size.series.rows,
        [MT_RECORD_AT_BUCKETS] = r->size.series.buckets, [MT_RECORD_AT_EVENTS] = r->size.events,
        [MT_RECORD_AT_PHASES] = r->size.phases,          [MT_RECORD_AT_START] = start->wall_ns,
        [MT_RECORD_AT_CLOCK] = start->clock_ns,          [MT_RECORD_AT_PID] = start->pid,
        [MT_RECORD_AT_PAGE] = start->page_bytes,         [MT_RECORD_AT_COMMAND_BYTES] = command,
        [MT_RECORD_AT_PAYLOADS] = r->size.payloads,
    };

    memcpy(r->at, words, sizeof words);
    if (command > 0) memcpy(r->at + MT_RECORD_COMMAND_FROM, start->command, command);
}

void
mt_record_init(mt_record *r, void *region, const mt_record_size *size,
               const mt_record_column *columns, const mt_record_start *start, const mt_birth *birth)
{
    *r = (mt_record){.birth = *birth, .at = region, .size = *size};
    mt_lock_init(&r->lock);
    r->parts = mt_record_parts_of(size);
    memset(region, 0, r->parts.end);
    put_start(r, start);
    assert(mt_record_columns_fault(columns, size->series.columns) == NULL);
    memcpy(r->at + r->parts.columns, columns, size->series.columns * sizeof *columns);
    mt_series_init(&r->series, r->at + r->parts.series, &size->series);
    memcpy(region, MT_RECORD_MAGIC, 8);
    mt_word_put(word_at(r, MT_RECORD_AT_CRC), mt_record_crc(region, size->series.columns));
}

/* Takes the lock when the record may be written. */
static bool
record_begin(mt_record *r)
{
    if (!mt_birth_is_here(&r->birth))
        return false; /* before the lock, which another thread held at the fork */
    mt_lock_take(&r->lock);
    if (r->at != NULL) return true;
    mt_lock_give(&r->lock);
    return false;
}

bool
mt_record_close(mt_record *r, uint64_t time_ns)
{
    if (!record_begin(r)) return false;
    mt_word_put(word_at(r, MT_RECORD_AT_CLOSED), time_ns > 0 ? time_ns : 1);
    r->at = NULL;
    mt_lock_give(&r->lock);
    return true;
}

void
mt_record_mark_signal(void *region, uint64_t number, uint64_t time_ns)
{
    uint64_t *words = region;

    mt_word_put(words + MT_RECORD_AT_SIGNAL_NS, time_ns);
    mt_word_put(words + MT_RECORD_AT_SIGNAL, number);
}

void
mt_record_fini(mt_record *r)
{
    mt_lock_fini(&r->lock);
}

/* --- what is recorded --- */

bool
mt_record_append(mt_record *r, uint64_t time_ns, const uint64_t *values)
{
    _Atomic uint64_t *signal;
    bool goes_on;

    if (!record_begin(r)) return false;
    signal = (_Atomic uint64_t *)word_at(r, MT_RECORD_AT_SIGNAL);
    /* A handler may mark a signal, on this thread or another one: no sample comes after it. */
    goes_on = atomic_load_explicit(signal, memory_order_relaxed) == 0;
    if (goes_on) mt_series_append(&r->series, time_ns, values);
    mt_lock_give(&r->lock);
    return goes_on;
}

size_t
mt_record_payload_most(const mt_record_size *size)
{
    size_t among = mt_size_min(size->payloads, MT_RECORD_PAYLOAD);

    return among < MT_RECORD_TEXT ? MT_RECORD_TEXT : among;
}

/* Writes a long payload over the oldest ones; in the slot it is found by its place and its check.
 */
static void
put_payload(mt_record *r, const mt_record_event *event, uint64_t *slot)
{
    size_t n = (event->payload_bytes + 7) / 8;
    size_t at = r->next_payload + n > r->size.payloads / 8 ? 0 : r->next_payload;
    uint64_t *to = word_at(r, r->parts.payloads / 8) + at, check = 0;

    for (size_t i = 0; i < n; i++) {
        uint64_t word = 0; /* the last one is filled up by zero bytes */
        memcpy(&word, (const char *)event->payload + 8 * i,
               mt_size_min(8, event->payload_bytes - 8 * i));
        mt_word_put(to + i, word);
        check += word * mt_check_factor(i);
    }
    slot[MT_EVENT_BODY] = at;
    slot[MT_EVENT_CHECK] = check;
    r->next_payload = at + n;
}

bool
mt_record_write_event(mt_record *r, const mt_record_event *event)
{
    uint64_t slot[MT_EVENT_WORDS] = {0}, *to;
    size_t bytes = event->payload_bytes;
    const void *body = event->payload;

    slot[1] = event->time_ns;
    slot[2] = event->duration_ns;
    slot[3] = event->step;
    memcpy(slot + MT_EVENT_KIND, event->kind,
           mt_utf8_cut(event->kind, event->kind_bytes, MT_RECORD_KIND));
    if (body == NULL) {
        bytes = mt_utf8_cut(event->text, event->text_bytes, MT_RECORD_TEXT);
        body = event->text;
    }
    assert(bytes <= mt_record_payload_most(&r->size));
    slot[MT_EVENT_FORM] = bytes | (event->payload == NULL ? 0 : MT_EVENT_IS_PAYLOAD);
    if (bytes <= MT_RECORD_TEXT) memcpy(slot + MT_EVENT_BODY, body, bytes);
    if (!record_begin(r)) return false;
    if (bytes > MT_RECORD_TEXT) put_payload(r, event, slot);
    to = word_at(r, r->parts.events / 8) + r->events % r->size.events * MT_EVENT_STRIDE;
    slot[0] = ++r->events;
    mt_words_replace(to, slot, MT_EVENT_WORDS);
    mt_lock_give(&r->lock);
    return true;
}

static uint64_t *
phase_at(const mt_record *r, size_t i)
{
    return word_at(r, r->parts.phases / 8) + i * MT_RECORD_PHASE_STRIDE;
}

/* The phase of that name, a new one, or the last one where there is no room for a new one. */
static uint64_t *
find_phase(mt_record *r, const uint64_t name[MT_RECORD_PHASE_NAME_WORDS])
{
    uint64_t others[MT_RECORD_PHASE_NAME_WORDS] = {0}, *to;

    for (size_t i = 0; i < r->phases; i++)
        if (memcmp(phase_at(r, i), name, MT_RECORD_PHASE) == 0) return phase_at(r, i);
    if (r->phases == r->size.phases) return phase_at(r, r->phases - 1);
    memcpy(others, MT_RECORD_OTHERS, sizeof MT_RECORD_OTHERS);
    if (r->phases + 1 == r->size.phases) name = others;
    to = phase_at(r, r->phases);
    for (size_t i = 0; i < MT_RECORD_PHASE_NAME_WORDS; i++)
        mt_word_put(to + i, name[i]);
    mt_word_put(word_at(r, MT_RECORD_AT_PHASES_USED), ++r->phases);
    return to;
}

/* Of a phase's two halves the newer is read and the older written. */
static void
count_passage(uint64_t *phase, uint64_t ns, uint64_t peak)
{
    uint64_t *half[2] = {phase + MT_RECORD_PHASE_NAME_WORDS,
                         phase + MT_RECORD_PHASE_NAME_WORDS + MT_RECORD_PHASE_WORDS + 1};
    const uint64_t *now = half[half[1][0] > half[0][0]];
    uint64_t most = now[3] + 1 > peak + 1 ? now[3] : peak; /* MT_UNKNOWN + 1 is the least */
    uint64_t next[MT_RECORD_PHASE_WORDS] = {now[0] + 1, now[1] + 1, now[2] + ns, most};

    if (now[0] == 0) next[3] = peak;
    mt_words_replace(half[now == half[0]], next, MT_RECORD_PHASE_WORDS);
}

bool
mt_record_phase(mt_record *r, const char *name, size_t name_bytes, uint64_t ns, uint64_t peak)
{
    uint64_t field[MT_RECORD_PHASE_NAME_WORDS] = {0};

    memcpy(field, name, mt_utf8_cut(name, name_bytes, MT_RECORD_PHASE));
    if (!record_begin(r)) return false;
    count_passage(find_phase(r, field), ns, peak);
    mt_lock_give(&r->lock);
    return true;
}
