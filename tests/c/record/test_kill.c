/* A writer killed at any instruction. Not at random ones: a child is run one machine instruction at
 * a time, and whenever one of them changed the region, the region is read as if the child had been
 * killed there. */
#define _DEFAULT_SOURCE
#include "record/rig.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BEFORE = 21, DURING = 14 }; /* samples; the ring of 5 wraps, 4 buckets fold at 32 */

typedef struct story {
    mt_record_size size;
    size_t bytes;
    unsigned char *region, *seen, *copy;
    void (*act)(mt_record *r, uint64_t k);
    uint64_t done; /* acts that are surely whole, of what `act` does */
    uint64_t states;
} story;

static void
begin_shared(story *s)
{
    s->size = rig_roomy(5, 4, 3, 4);
    s->bytes = mt_record_parts_of(&s->size).end;
    s->region = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(s->region != MAP_FAILED);
    s->seen = calloc(1, s->bytes);
    s->copy = malloc(s->bytes);
}

/* Stops for the parent after each act, so that it knows how many there were. */
static void
child(story *s, mt_record *r)
{
    CHECK(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0);
    raise(SIGSTOP);
    for (uint64_t k = BEFORE; k < BEFORE + DURING; k++) {
        s->act(r, k);
        raise(SIGUSR1);
    }
    _exit(0);
}

/* What a reader finds now is what `done` acts left, or one more. */
static void
read_it(story *s)
{
    uint64_t rows, events, passages;
    mt_recordview v;

    memcpy(s->copy, s->region, s->bytes);
    CHECK(mt_record_open(&v, s->copy, s->bytes, NULL) == MT_OK);
    rig_check_rows(&v, 1);
    rig_check_buckets(&v.series, v.rows_end);
    rig_check_events(&v, 1);
    rows = s->act == rig_append ? s->done : BEFORE;
    events = s->act == rig_event ? s->done : BEFORE;
    passages = s->act == rig_phase ? s->done : BEFORE;
    CHECK(v.rows_end == rows || (s->act == rig_append && v.rows_end == rows + 1));
    CHECK(v.events_end == events || (s->act == rig_event && v.events_end == events + 1));
    rows = rig_check_phases(&v);
    CHECK(rows == passages || (s->act == rig_phase && rows == passages + 1));
    s->states++;
}

static void
follow(story *s, pid_t pid)
{
    int status, deliver = 0;

    CHECK(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status));
    for (;;) {
        CHECK(ptrace(PTRACE_SINGLESTEP, pid, 0, deliver) == 0);
        CHECK(waitpid(pid, &status, 0) == pid);
        if (WIFEXITED(status)) break;
        CHECK(WIFSTOPPED(status));
        s->done += WSTOPSIG(status) == SIGUSR1; /* not delivered: it only says so */
        CHECK(WSTOPSIG(status) == SIGTRAP || WSTOPSIG(status) == SIGUSR1);
        if (memcmp(s->seen, s->region, s->bytes) == 0) continue;
        memcpy(s->seen, s->region, s->bytes);
        read_it(s);
    }
    CHECK(WEXITSTATUS(status) == 0);
}

static uint64_t
states_of(void (*act)(mt_record *r, uint64_t k))
{
    story s = {.act = act, .done = BEFORE};
    mt_record r;
    pid_t pid;

    begin_shared(&s);
    rig_init(&r, s.region, &s.size);
    for (uint64_t k = 0; k < BEFORE; k++) {
        rig_append(&r, k);
        rig_event(&r, k);
        rig_phase(&r, k);
    }
    if ((pid = fork()) == 0) child(&s, &r);
    CHECK(pid > 0);
    follow(&s, pid);
    CHECK(s.done == BEFORE + DURING);
    mt_record_fini(&r);
    munmap(s.region, s.bytes);
    free(s.seen);
    free(s.copy);
    return s.states;
}

/* Each act stores more words than these: it was really followed. */
static void
at_any_instruction_of_an_append(void)
{
    CHECK(states_of(rig_append) > DURING * 10);
}

static void
at_any_instruction_of_an_event(void)
{
    CHECK(states_of(rig_event) > DURING * 10);
}

static void
at_any_instruction_of_a_phase(void)
{
    CHECK(states_of(rig_phase) > DURING * 5);
}

int
main(void)
{
    RUN(at_any_instruction_of_an_append);
    RUN(at_any_instruction_of_an_event);
    RUN(at_any_instruction_of_a_phase);
    CHECK_DONE();
}
