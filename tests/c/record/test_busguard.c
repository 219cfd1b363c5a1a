/* What a store into a mapped file does when its page has gone, inside a guarded region and outside,
 * and who else hears of it. Each case is a process of its own: a handler cannot be taken back. */
#define _GNU_SOURCE
#include "kit/check.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/record/busguard.h"

enum { PAGES = 4, PAGE = 4096, BYTES = PAGES * PAGE };

static int fd;

/* A file with all its pages, mapped. */
static char *
mapped(void)
{
    char name[] = "/tmp/mt_busguard_XXXXXX", *at;

    CHECK((fd = mkstemp(name)) >= 0 && unlink(name) == 0 && posix_fallocate(fd, 0, BYTES) == 0);
    at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED);
    memset(at, 1, BYTES);
    return at;
}

static void
store(char *to, char value)
{
    *(volatile char *)to = value;
}

/* The signal that ended the child, or 0 when it ended well. */
static int
ended_by(void (*what)(void))
{
    const struct rlimit none = {0, 0};
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        setrlimit(RLIMIT_CORE, &none);
        signal(SIGBUS, SIG_DFL); /* a sanitiser has its own */
        what();
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void
cut_and_store(void)
{
    char *at = mapped();

    CHECK(mt_busguard_add(at, BYTES) && !mt_busguard_hit(at));
    CHECK(ftruncate(fd, PAGE) == 0);
    store(at, 5);
    CHECK(!mt_busguard_hit(at));
    errno = 77;
    store(at + 2 * PAGE + 9, 6);
    CHECK(errno == 77 && mt_busguard_hit(at));
    CHECK(at[0] == 5 && at[2 * PAGE + 9] == 6 && at[2 * PAGE] == 0);
    store(at + 3 * PAGE, 7); /* each page anew */
    CHECK(at[3 * PAGE] == 7);
    mt_busguard_remove(at);
    CHECK(!mt_busguard_hit(at) && munmap(at, BYTES) == 0);
}

static void
store_outside(void)
{
    char *guarded = mapped(), *other = mapped();

    CHECK(mt_busguard_add(guarded, BYTES) && ftruncate(fd, 0) == 0);
    store(other, 1);
}

static void
store_after_removal(void)
{
    char *at = mapped();

    CHECK(mt_busguard_add(at, BYTES) && ftruncate(fd, 0) == 0);
    store(at, 1);
    mt_busguard_remove(at);
    store(at + PAGE, 1);
}

static void
store_in_a_child(void)
{
    char *at = mapped();
    int status;

    CHECK(mt_busguard_add(at, BYTES) && ftruncate(fd, 0) == 0);
    if (fork() == 0) {
        CHECK(!mt_busguard_hit(at));
        mt_busguard_remove(at); /* the parent's */
        store(at, 1);
        _exit(0);
    }
    CHECK(wait(&status) > 0);
    store(at, 1);
    CHECK(mt_busguard_hit(at));
    raise(WTERMSIG(status));
}

static void
sent(void)
{
    CHECK(mt_busguard_add(mapped(), BYTES) && raise(SIGBUS) == 0);
}

static void
only_stores_into_the_region_are_caught(void)
{
    CHECK(ended_by(cut_and_store) == 0);
    CHECK(ended_by(store_outside) == SIGBUS);
    CHECK(ended_by(store_after_removal) == SIGBUS);
    CHECK(ended_by(store_in_a_child) == SIGBUS);
    CHECK(ended_by(sent) == SIGBUS);
}

/* --- forks --- */

/* As a record's pages, which a child does not get: those of its own may come to lie there. */
static void
store_where_the_parent_has_a_region(void)
{
    char *at = mapped(), *own;
    int status;

    CHECK(mt_busguard_add(at, BYTES) && madvise(at, BYTES, MADV_DONTFORK) == 0);
    if (fork() == 0) {
        own = mapped();
        if (own != at) CHECK(mremap(own, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, at) == at);
        CHECK(mt_busguard_add(at, BYTES) && ftruncate(fd, 0) == 0);
        store(at + PAGE, 1);
        CHECK(mt_busguard_hit(at) && at[PAGE] == 1);
        _exit(0);
    }
    CHECK(wait(&status) > 0);
    if (WIFSIGNALED(status)) raise(WTERMSIG(status));
    CHECK(WEXITSTATUS(status) == 0);
}

static void
fill_the_table_and_fork(void)
{
    static char page[MT_BUSGUARD_REGIONS][16];
    int status;

    for (int i = 0; i < MT_BUSGUARD_REGIONS; i++)
        CHECK(mt_busguard_add(page[i], 16));
    if (fork() == 0) {
        for (int i = 0; i < MT_BUSGUARD_REGIONS; i++)
            CHECK(mt_busguard_add(page[i], 16));
        CHECK(!mt_busguard_add(page[0], 16));
        _exit(0);
    }
    CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    mt_busguard_remove(page[3]);
    CHECK(mt_busguard_add(page[3], 16));
}

static void (*in_child_of_installation)(void);

/* The system's, but that a child can be forked as soon as a handler of SIGBUS is there, before
 * whoever installs it has gone on: as another thread may. */
int
sigaction(int number, const struct sigaction *act, struct sigaction *old)
{
    int (*real)(int, const struct sigaction *, struct sigaction *);
    void (*what)(void) = in_child_of_installation;
    int done, status;

    *(void **)&real = dlsym(RTLD_NEXT, "sigaction");
    done = real(number, act, old);
    if (number != SIGBUS || act == NULL || what == NULL) return done;
    in_child_of_installation = NULL;
    if (fork() == 0) {
        what();
        _exit(0);
    }
    CHECK(wait(&status) > 0);
    if (WIFSIGNALED(status)) raise(WTERMSIG(status));
    CHECK(WEXITSTATUS(status) == 0);
    return done;
}

static void
fork_while_the_handler_is_installed(void)
{
    in_child_of_installation = store_outside;
    CHECK(mt_busguard_add(mapped(), BYTES));
}

static void
a_child_has_its_own_regions(void)
{
    CHECK(ended_by(store_where_the_parent_has_a_region) == 0);
    CHECK(ended_by(fill_the_table_and_fork) == 0);
    CHECK(ended_by(fork_while_the_handler_is_installed) == SIGBUS);
}

/* --- the handler before --- */

static sigjmp_buf out;
static void *heard;

static void
with_address(int number, siginfo_t *info, void *context)
{
    (void)number, (void)context;
    heard = info->si_addr;
    siglongjmp(out, 1);
}

static void
plain(int number)
{
    (void)number;
    siglongjmp(out, 2);
}

static void
both_ways_with(const struct sigaction *earlier, int wanted)
{
    char *guarded, *other;

    CHECK(sigaction(SIGBUS, earlier, NULL) == 0);
    guarded = mapped();
    CHECK(mt_busguard_add(guarded, BYTES) && ftruncate(fd, 0) == 0);
    other = mapped();
    CHECK(ftruncate(fd, 0) == 0);
    if (sigsetjmp(out, 1) == 0) {
        store(guarded, 1);
        store(other + PAGE, 1);
        CHECK(false);
    } else {
        CHECK(mt_busguard_hit(guarded) && wanted != 0);
        CHECK(wanted != 1 || heard == other + PAGE);
    }
}

static void
one_with_address(void)
{
    both_ways_with(&(struct sigaction){.sa_sigaction = with_address, .sa_flags = SA_SIGINFO}, 1);
}

static void
a_plain_one(void)
{
    both_ways_with(&(struct sigaction){.sa_handler = plain}, 2);
}

static void
ignored(void)
{
    CHECK(signal(SIGBUS, SIG_IGN) != SIG_ERR && mt_busguard_add(mapped(), BYTES));
    CHECK(raise(SIGBUS) == 0); /* what was sent stays ignored */
}

static void
an_earlier_handler_hears_of_all_else(void)
{
    CHECK(ended_by(one_with_address) == 0);
    CHECK(ended_by(a_plain_one) == 0);
    CHECK(ended_by(ignored) == 0);
}

/* --- room --- */

static void
fill_the_table(void)
{
    static char page[MT_BUSGUARD_REGIONS + 1][16];

    for (int i = 0; i < MT_BUSGUARD_REGIONS; i++)
        CHECK(mt_busguard_add(page[i], 16));
    CHECK(!mt_busguard_add(page[MT_BUSGUARD_REGIONS], 16));
    mt_busguard_remove(page[3]);
    mt_busguard_remove(page[3]);
    CHECK(mt_busguard_add(page[MT_BUSGUARD_REGIONS], 16));
    for (int i = 0; i <= MT_BUSGUARD_REGIONS; i++)
        mt_busguard_remove(page[i]);
}

static void
beyond_the_last_region_none_is_guarded(void)
{
    CHECK(ended_by(fill_the_table) == 0);
}

/* A hole in a file on a full disk: what a file system that copies on write comes to. Not everybody
 * may mount one. */
static void
store_on_a_full_disk(void)
{
    char folder[] = "/tmp/mt_busguard_XXXXXX", name[64], *at;

    CHECK(mkdtemp(folder) != NULL);
    if (mount("none", folder, "tmpfs", 0, "size=4k") != 0) {
        CHECK((errno == EPERM || errno == EACCES) && rmdir(folder) == 0);
        return;
    }
    snprintf(name, sizeof name, "%s/file", folder);
    CHECK((fd = open(name, O_RDWR | O_CREAT, 0600)) >= 0 && ftruncate(fd, BYTES) == 0);
    at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED && mt_busguard_add(at, BYTES));
    for (int i = 0; i < PAGES; i++)
        store(at + i * PAGE, (char)i);
    CHECK(mt_busguard_hit(at) && at[3 * PAGE] == 3);
    mt_busguard_remove(at);
    CHECK(munmap(at, BYTES) == 0 && close(fd) == 0 && umount(folder) == 0 && rmdir(folder) == 0);
}

static void
a_disk_that_is_full_after_all(void)
{
    CHECK(ended_by(store_on_a_full_disk) == 0);
}

int
main(void)
{
    RUN(only_stores_into_the_region_are_caught);
    RUN(a_child_has_its_own_regions);
    RUN(an_earlier_handler_hears_of_all_else);
    RUN(beyond_the_last_region_none_is_guarded);
    RUN(a_disk_that_is_full_after_all);
    CHECK_DONE();
}
