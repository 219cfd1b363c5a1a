/* A record says by which signal its process ended; the process ends as it would without that. */
#define _GNU_SOURCE
#include "kit/check.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/record/layout.h"
#include "os/record/busguard.h"
#include "os/record/endmark.h"

enum { WORDS = 32 };

static uint64_t *region; /* shared with the children that end */

static uint64_t
marked(void)
{
    CHECK((region[MT_RECORD_AT_SIGNAL] == 0) == (region[MT_RECORD_AT_SIGNAL_NS] == 0));
    return region[MT_RECORD_AT_SIGNAL];
}

/* How a child ends that does so. */
static int
status_of(void (*what)(void))
{
    int status;
    pid_t pid;

    memset(region, 0, WORDS * sizeof *region);
    if ((pid = fork()) == 0) {
        for (int n = 1; n < 32; n++)
            signal(n, SIG_DFL); /* a sanitizer has handlers for faults */
        what();
        _exit(7);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    return status;
}

static bool
ended_by(int status, int number)
{
    return WIFSIGNALED(status) && WTERMSIG(status) == number;
}

static int number; /* of the signal that a test is about */

static void
be_sent(void)
{
    CHECK(mt_endmark_add(region));
    kill(getpid(), number);
}

/* As C code that runs for long. TSan gives a signal to the program at its next call only. */
static void
run_on(void)
{
    for (;;) {
#if defined(__SANITIZE_THREAD__)
        usleep(1000);
#endif
    }
}

static void
loop_until_sent(void)
{
    if (!mt_endmark_add(region)) _exit(8);
    if (fork() == 0) {
        kill(getppid(), number);
        _exit(0);
    }
    run_on();
}

static void
each_signal_marks_and_ends_the_process_as_by_default(void)
{
    static const int all[] = {SIGTERM, SIGHUP, SIGINT,  SIGQUIT, SIGABRT, SIGSEGV,
                              SIGFPE,  SIGILL, SIGXCPU, SIGALRM, SIGUSR1, SIGUSR2};

    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        number = all[i];
        CHECK(ended_by(status_of(be_sent), number) && marked() == (uint64_t)number);
        CHECK(ended_by(status_of(loop_until_sent), number) && marked() == (uint64_t)number);
    }
}

static void
fault(void)
{
    if (!mt_endmark_add(region)) _exit(8);
    *(volatile char *)mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) = 1;
}

static void
abort_it(void)
{
    if (!mt_endmark_add(region)) _exit(8);
    abort();
}

static void
faults_and_aborts_are_marked(void)
{
    CHECK(ended_by(status_of(fault), SIGSEGV) && marked() == SIGSEGV);
    CHECK(ended_by(status_of(abort_it), SIGABRT) && marked() == SIGABRT);
}

/* --- a record whose file was cut --- */

static uint64_t *
record_without_its_page(void)
{
    char name[] = "/tmp/mt_endmark_XXXXXX";
    uint64_t *at;
    int fd = mkstemp(name);

    CHECK(fd >= 0 && unlink(name) == 0 && ftruncate(fd, 4096) == 0);
    at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED && ftruncate(fd, 0) == 0);
    return at;
}

/* The handler of SIGBUS is there, and cannot replace the page of `gone`. */
static uint64_t *
add_one_that_is_gone_and_one_that_is_not(void)
{
    static char elsewhere[16];
    uint64_t *gone = record_without_its_page();

    CHECK(mt_busguard_add(elsewhere, sizeof elsewhere));
    CHECK(mt_endmark_add(gone) && mt_endmark_add(region));
    return gone;
}

static void
be_sent_without_the_page(void)
{
    add_one_that_is_gone_and_one_that_is_not();
    kill(getpid(), number);
}

static void
store_without_the_page(void)
{
    *(volatile uint64_t *)add_one_that_is_gone_and_one_that_is_not() = 1;
}

static void
a_record_that_is_gone_keeps_no_other_from_its_mark(void)
{
    number = SIGTERM;
    CHECK(ended_by(status_of(be_sent_without_the_page), SIGTERM) && marked() == SIGTERM);
    number = SIGBUS;
    CHECK(ended_by(status_of(be_sent_without_the_page), SIGBUS) && marked() == SIGBUS);
    CHECK(ended_by(status_of(store_without_the_page), SIGBUS) && marked() == SIGBUS);
}

/* --- what is left alone --- */

static void
exit_6(int n)
{
    (void)n;
    _exit(6);
}

static void
with_a_handler_before(void)
{
    signal(SIGTERM, exit_6);
    be_sent();
}

static void
with_a_handler_later(void)
{
    CHECK(mt_endmark_add(region));
    signal(SIGTERM, exit_6);
    kill(getpid(), SIGTERM);
}

static void
ignored(void)
{
    signal(SIGHUP, SIG_IGN); /* nohup */
    CHECK(mt_endmark_add(region));
    kill(getpid(), SIGHUP);
}

static void
in_a_forked_child(void)
{
    int status;
    pid_t pid;

    CHECK(mt_endmark_add(region));
    if ((pid = fork()) == 0) {
        kill(getpid(), SIGTERM);
        _exit(9);
    }
    _exit(waitpid(pid, &status, 0) == pid && ended_by(status, SIGTERM) ? 7 : 8);
}

static void
in_a_child_with_a_record_of_its_own(void)
{
    int status;
    pid_t pid;

    CHECK(mt_endmark_add(region + 1)); /* another one */
    if ((pid = fork()) == 0) {
        mt_endmark_remove(region + 1); /* it is the parent's */
        number = SIGTERM;
        be_sent();
        _exit(9);
    }
    _exit(waitpid(pid, &status, 0) == pid && ended_by(status, SIGTERM) ? 7 : 8);
}

static void
after_the_last_record(void)
{
    struct sigaction now;

    CHECK(mt_endmark_add(region));
    mt_endmark_remove(NULL);
    mt_endmark_remove(region + 2);
    CHECK(sigaction(SIGTERM, NULL, &now) == 0 && now.sa_handler != SIG_DFL);
    mt_endmark_remove(region);
    mt_endmark_remove(region);
    CHECK(sigaction(SIGTERM, NULL, &now) == 0 && now.sa_handler == SIG_DFL);
    kill(getpid(), SIGTERM);
}

static void
added_twice(void)
{
    struct sigaction now;

    CHECK(mt_endmark_add(region) && mt_endmark_add(region));
    mt_endmark_remove(region);
    CHECK(sigaction(SIGTERM, NULL, &now) == 0 && now.sa_handler == SIG_DFL);
    kill(getpid(), SIGTERM);
}

static void
what_is_not_its_own_is_left_alone(void)
{
    number = SIGTERM;
    CHECK(WEXITSTATUS(status_of(with_a_handler_before)) == 6 && marked() == 0);
    CHECK(WEXITSTATUS(status_of(with_a_handler_later)) == 6 && marked() == 0);
    CHECK(WEXITSTATUS(status_of(ignored)) == 7 && marked() == 0);
    CHECK(WEXITSTATUS(status_of(in_a_forked_child)) == 7 && marked() == 0);
    CHECK(WEXITSTATUS(status_of(in_a_child_with_a_record_of_its_own)) == 7 && marked() == SIGTERM);
    CHECK(ended_by(status_of(after_the_last_record), SIGTERM) && marked() == 0);
    CHECK(ended_by(status_of(added_twice), SIGTERM) && marked() == 0);
}

/* --- a program that puts the default action back --- */

static void
round_trip(void)
{
    CHECK(signal(SIGTERM, exit_6) != exit_6 && signal(SIGTERM, SIG_DFL) == exit_6);
}

static void
after_a_round_trip(void)
{
    CHECK(mt_endmark_add(region));
    round_trip();
    mt_endmark_renew();
    kill(getpid(), SIGTERM);
}

static void
with_a_handler_when_renewed(void)
{
    CHECK(mt_endmark_add(region));
    signal(SIGTERM, exit_6);
    mt_endmark_renew();
    kill(getpid(), SIGTERM);
}

static void
renewed_without_a_record(void)
{
    CHECK(mt_endmark_add(region));
    mt_endmark_remove(region);
    mt_endmark_renew();
    CHECK(signal(SIGTERM, exit_6) == SIG_DFL);
}

static void
renewed_in_a_child(void)
{
    int status;

    CHECK(mt_endmark_add(region));
    if (fork() == 0) {
        round_trip();
        mt_endmark_renew();
        _exit(signal(SIGTERM, exit_6) == SIG_DFL ? 5 : 9);
    }
    _exit(wait(&status) > 0 && WEXITSTATUS(status) == 5 ? 7 : 8);
}

static void (*just_before)(void);

/* The system's, but that something can happen just before a handler of SIGTERM is installed: as on
 * another thread. */
int
sigaction(int n, const struct sigaction *act, struct sigaction *old)
{
    int (*real)(int, const struct sigaction *, struct sigaction *);
    void (*what)(void) = just_before;

    *(void **)&real = dlsym(RTLD_NEXT, "sigaction");
    if (n == SIGTERM && act != NULL && what != NULL) {
        just_before = NULL;
        what();
    }
    return real(n, act, old);
}

static void
install_one_of_its_own(void)
{
    signal(SIGTERM, exit_6);
}

static void
exit_5(int n)
{
    (void)n;
    _exit(5);
}

static void
install_another_of_its_own(void)
{
    signal(SIGTERM, exit_5);
}

static void
install_one_after_another(void)
{
    install_one_of_its_own();
    just_before = install_another_of_its_own;
}

static void
with_two_handlers_meanwhile(void)
{
    CHECK(mt_endmark_add(region));
    round_trip();
    just_before = install_one_after_another;
    mt_endmark_renew();
    CHECK(just_before == NULL);
    kill(getpid(), SIGTERM);
}

static void
with_a_handler_meanwhile(void)
{
    CHECK(mt_endmark_add(region));
    round_trip();
    just_before = install_one_of_its_own;
    mt_endmark_renew();
    CHECK(just_before == NULL);
    kill(getpid(), SIGTERM);
}

static void
remove_it(void)
{
    mt_endmark_remove(region);
}

static void
removed_meanwhile(void)
{
    CHECK(mt_endmark_add(region));
    round_trip();
    just_before = remove_it;
    mt_endmark_renew();
    CHECK(signal(SIGTERM, exit_6) == SIG_DFL);
}

static void
where_the_default_is_back_the_handler_is_too(void)
{
    CHECK(ended_by(status_of(after_a_round_trip), SIGTERM) && marked() == SIGTERM);
    CHECK(WEXITSTATUS(status_of(with_a_handler_when_renewed)) == 6 && marked() == 0);
    CHECK(WEXITSTATUS(status_of(renewed_without_a_record)) == 7);
    CHECK(WEXITSTATUS(status_of(renewed_in_a_child)) == 7);
    CHECK(WEXITSTATUS(status_of(with_a_handler_meanwhile)) == 6 && marked() == 0);
    CHECK(WEXITSTATUS(status_of(with_two_handlers_meanwhile)) == 5 && marked() == 0);
    CHECK(WEXITSTATUS(status_of(removed_meanwhile)) == 7);
}

static void
there_is_room_for_64_records(void)
{
    uint64_t *many = calloc(MT_ENDMARK_RECORDS + 1, WORDS * sizeof *many);

    for (int i = 0; i < MT_ENDMARK_RECORDS; i++)
        CHECK(mt_endmark_add(many + (size_t)i * WORDS));
    CHECK(!mt_endmark_add(region));
    mt_endmark_now(3);
    for (int i = 0; i < MT_ENDMARK_RECORDS; i++) {
        CHECK(many[(size_t)i * WORDS + MT_RECORD_AT_SIGNAL] == 3);
        mt_endmark_remove(many + (size_t)i * WORDS);
    }
    free(many);
}

/* --- what is called before the end --- */

static void
see_the_mark(void)
{
    region[0]++;
    region[2] = region[MT_RECORD_AT_SIGNAL];
    kill(getpid(), SIGTERM); /* it waits */
    region[3]++;
}

static void
be_sent_with_a_call(void)
{
    mt_endmark_before_end(see_the_mark);
    be_sent();
}

static void
be_sent_without_the_call(void)
{
    mt_endmark_before_end(see_the_mark);
    mt_endmark_before_end(NULL);
    be_sent();
}

static void
with_a_call_and_a_handler(void)
{
    mt_endmark_before_end(see_the_mark);
    signal(SIGTERM, exit_6);
    be_sent();
}

static void
sigterm_and_sighup_call_between_the_mark_and_the_end(void)
{
    static const int calls[] = {SIGTERM, SIGHUP}, others[] = {SIGINT, SIGUSR1, SIGABRT};

    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        number = calls[i];
        CHECK(ended_by(status_of(be_sent_with_a_call), SIGTERM) || number == SIGHUP);
        CHECK(marked() == (uint64_t)number && region[2] == (uint64_t)number);
        CHECK(region[0] == 1 && region[3] == 1);
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        number = others[i];
        CHECK(ended_by(status_of(be_sent_with_a_call), number) && region[0] == 0);
    }
    number = SIGTERM;
    CHECK(ended_by(status_of(be_sent_without_the_call), SIGTERM) && region[0] == 0);
    CHECK(WEXITSTATUS(status_of(with_a_call_and_a_handler)) == 6 && region[0] == 0);
}

int
main(void)
{
    region = mmap(NULL, WORDS * sizeof *region, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                  -1, 0);
    CHECK(region != MAP_FAILED);
    RUN(each_signal_marks_and_ends_the_process_as_by_default);
    RUN(faults_and_aborts_are_marked);
    RUN(a_record_that_is_gone_keeps_no_other_from_its_mark);
    RUN(what_is_not_its_own_is_left_alone);
    RUN(where_the_default_is_back_the_handler_is_too);
    RUN(there_is_room_for_64_records);
    RUN(sigterm_and_sighup_call_between_the_mark_and_the_end);
    CHECK_DONE();
}
