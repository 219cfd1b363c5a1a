/* The shared memory of a job: whose a file of /dev/shm is, what counts once, mappings without a
 * name, processes of other users, and calls that fail. */
#define _GNU_SOURCE /* mkdtemp, memfd_create, MAP_ANONYMOUS */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/port/probe.h"
#include "os/monitor/shm.h"
#include "kit/proctree.h"

enum { KIB = 1024 };

typedef struct job {
    proctree t;
    mt_children *children;
    mt_shm *shm;
} job;

static void
plant_status(const proctree *t, const char *pid, unsigned shared_kib)
{
    char path[64], text[64];

    snprintf(path, sizeof path, "proc/%s/status", pid);
    snprintf(text, sizeof text, "Name:\tx\nRssShmem:\t %u kB\n", shared_kib);
    plant(t, path, text);
}

static void
plant_process(const proctree *t, const char *pid)
{
    char path[64];

    plant_status(t, pid, 0);
    snprintf(path, sizeof path, "proc/%s/fd/.keep", pid);
    plant(t, path, "");
    snprintf(path, sizeof path, "proc/%s/task/1/children", pid);
    plant(t, path, "");
    snprintf(path, sizeof path, "proc/%s/statm", pid);
    plant(t, path, "9 8 1 0 0 0 0\n");
}

static void
link_to(const proctree *t, const char *pid, int number, const char *target)
{
    char path[256];

    snprintf(path, sizeof path, "%s/proc/%s/fd/%d", t->root, pid, number);
    unlink(path);
    CHECK(symlink(target, path) == 0);
}

/* A file of the tree's /dev/shm, opened by one of its processes. */
static void
link_to_name(const proctree *t, const char *pid, int number, const char *name)
{
    char path[256];

    snprintf(path, sizeof path, "%s/dev/shm/%s", t->root, name);
    link_to(t, pid, number, path);
}

static void
plant_bytes(const proctree *t, const char *path, size_t kib)
{
    static char text[64 * KIB];

    memset(text, 'x', sizeof text);
    text[kib * KIB] = 0;
    plant(t, path, text);
}

/* This process with the children 10 and 11, and a stranger 77. */
static void
job_begin(job *j)
{
    tree_begin(&j->t);
    plant_process(&j->t, "self");
    plant_process(&j->t, "10");
    plant_process(&j->t, "11");
    plant_process(&j->t, "77");
    plant(&j->t, "proc/self/task/1/children", "10 11 ");
    plant(&j->t, "dev/shm/.hidden", "");
    CHECK(mt_children_new(&mt_alloc_libc, &faulty_proc, j->t.root, &j->children, NULL) == MT_OK);
    CHECK(mt_shm_new(&mt_alloc_libc, &faulty_proc, j->t.root, &j->shm, NULL) == MT_OK);
}

static void
job_end(job *j)
{
    mt_shm_free(j->shm);
    mt_children_free(j->children);
    CHECK(proc_faults.live == 0);
    tree_end(&j->t);
}

static mt_shm_bytes
look_since(job *j, uint64_t since)
{
    mt_shm_bytes found;

    mt_children_scan(j->children);
    mt_shm_look(j->shm, j->children, since, &found);
    return found;
}

static bool
counts(job *j, uint64_t kib)
{
    return look_since(j, 0).all == kib * KIB;
}

static void
a_name_with_the_pid_of_the_job_is_the_jobs(void)
{
    char mine[64];
    job j;

    job_begin(&j);
    CHECK(counts(&j, 0));
    snprintf(mine, sizeof mine, "dev/shm/torch_%d_12_0", getpid());
    plant_bytes(&j.t, mine, 8);
    plant_bytes(&j.t, "dev/shm/torch_10_3_1", 16);
    plant_bytes(&j.t, "dev/shm/pym-11-abc", 4);
    plant_bytes(&j.t, "dev/shm/torch_77_3_1", 32); /* of a stranger who lives */
    plant_bytes(&j.t, "dev/shm/torch_78_3_1", 32); /* and of one who has ended */
    plant_bytes(&j.t, "dev/shm/psm_0123abcd", 32);
    plant_bytes(&j.t, "dev/shm/torch_", 4);
    plant_bytes(&j.t, "dev/shm/torch_x", 4);
    CHECK(counts(&j, 28));
    plant(&j.t, "proc/self/task/1/children", "11 "); /* the maker has ended, its file is there */
    CHECK(counts(&j, 28));
    plant(&j.t, "dev/shm/torch_10_3_1", NULL);
    CHECK(counts(&j, 12));
    plant_bytes(&j.t, mine, 24); /* it grows */
    CHECK(counts(&j, 28));
    mt_shm_clear(j.shm);
    CHECK(counts(&j, 28));
    CHECK(look_since(&j, UINT64_MAX / 2).all == 0); /* older than the job */
    job_end(&j);
}

static void
a_file_without_a_pid_counts_while_the_job_holds_it(void)
{
    job j;

    job_begin(&j);
    plant_bytes(&j.t, "dev/shm/psm_1", 8);
    plant_bytes(&j.t, "dev/shm/psm_2", 16);
    plant_bytes(&j.t, "dev/shm/torch_77_3_1", 32);
    plant_bytes(&j.t, "dev/shm/torch_78_3_1", 4); /* whose maker has ended */
    link_to_name(&j.t, "self", 5, "psm_1");
    link_to_name(&j.t, "self", 6, "psm_1");
    link_to_name(&j.t, "10", 5, "psm_1");
    link_to_name(&j.t, "77", 5, "psm_2");
    link_to_name(&j.t, "self", 7, "torch_77_3_1");
    link_to_name(&j.t, "11", 7, "torch_78_3_1");
    CHECK(counts(&j, 12));
    link_to_name(&j.t, "self", 5, "psm_2");
    CHECK(counts(&j, 28));
    link_to(&j.t, "self", 5, "/dev/null");
    link_to(&j.t, "self", 6, "gone");
    link_to(&j.t, "10", 5, "/dev/null");
    CHECK(counts(&j, 4));
    job_end(&j);
}

static void
what_has_no_name_counts_where_it_is_open(void)
{
    char path[128], link[64];
    int unlinked, memory;
    job j;

    job_begin(&j);
    plant_bytes(&j.t, "dev/shm/brief", 8);
    snprintf(path, sizeof path, "%s/dev/shm/brief", j.t.root);
    CHECK((unlinked = open(path, O_RDWR)) >= 0 && unlink(path) == 0);
    snprintf(link, sizeof link, "/proc/self/fd/%d", unlinked);
    link_to(&j.t, "self", 5, link);
    link_to(&j.t, "11", 9, link);
    CHECK(counts(&j, 8) && look_since(&j, UINT64_MAX / 2).all == 0);
    CHECK((memory = memfd_create("x", 0)) >= 0 && ftruncate(memory, 1 << 20) == 0);
    CHECK(pwrite(memory, "x", 1, 70000) == 1);
    snprintf(link, sizeof link, "/proc/self/fd/%d", memory);
    link_to(&j.t, "10", 6, link);
    CHECK(counts(&j, 12) && look_since(&j, UINT64_MAX / 2).all == 4 * KIB);
    CHECK(close(unlinked) == 0 && close(memory) == 0 && counts(&j, 0));
    job_end(&j);
}

static size_t
put_mapping(char *to, const void *at, size_t pages, size_t offset, const struct stat *is,
            const char *name)
{
    uintptr_t start = (uintptr_t)at;

    return (size_t)sprintf(to, "%lx-%lx rw-s %08lx %02x:%02x %lu    %s\n", (unsigned long)start,
                           (unsigned long)(start + pages * 4096), (unsigned long)offset * 4096,
                           (unsigned)(is->st_dev >> 8), (unsigned)(is->st_dev & 255),
                           (unsigned long)is->st_ino, name);
}

static void
put_words(const proctree *t, const char *path, uint64_t first, const uint64_t *words, size_t n)
{
    char full[256];
    int fd;

    snprintf(full, sizeof full, "%s/%s", t->root, path);
    CHECK((fd = open(full, O_RDWR | O_CREAT, 0600)) >= 0);
    CHECK(pwrite(fd, words, n * sizeof *words, (off_t)(first * sizeof *words)) ==
          (ssize_t)(n * sizeof *words));
    CHECK(close(fd) == 0);
}

/* A mapping of 10 pages, of which this process has touched three; all that is known is its line. */
static void
a_mapping_without_a_file_counts_once(void)
{
    static const uint64_t used[4] = {(uint64_t)1 << 63, 0, (uint64_t)1 << 62, (uint64_t)1 << 63};
    char text[1024], *at;
    struct stat is;
    int memory = memfd_create("x", 0);
    size_t len;
    job j;

    CHECK(memory >= 0 && ftruncate(memory, 10 * 4096) == 0 && fstat(memory, &is) == 0);
    at = mmap(NULL, 10 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    CHECK(at != MAP_FAILED);
    at[0] = at[4096] = at[9 * 4096] = 1;
    job_begin(&j);
    plant_status(&j.t, "self", 12);
    len = (size_t)sprintf(text, "55-what\n");
    len += put_mapping(text + len, at, 10, 0, &is, "/dev/zero (deleted)");
    plant(&j.t, "proc/self/maps", text);
    CHECK(counts(&j, 12) && look_since(&j, 0).mapped == 12 * KIB);
    len += put_mapping(text + len, at, 6, 0, &is, "/dev/zero (deleted)"); /* a part of it again */
    plant(&j.t, "proc/self/maps", text);
    CHECK(counts(&j, 12));
    is.st_ino++; /* one that only the child maps */
    put_mapping(text, (void *)(16 * 4096ul), 4, 0, &is, "/dev/zero (deleted)");
    plant_status(&j.t, "10", 8);
    plant(&j.t, "proc/10/maps", text);
    put_words(&j.t, "proc/10/pagemap", 16, used, 4);
    CHECK(counts(&j, 24));
    plant_status(&j.t, "self", 0); /* it maps nothing: its list is not read */
    plant(&j.t, "proc/self/maps", NULL);
    CHECK(counts(&j, 12));
    CHECK(munmap(at, 10 * 4096) == 0 && close(memory) == 0);
    job_end(&j);
}

/* The resident set counts another's file that this process maps; what is the job's of it does not.
 */
static void
anothers_file_is_none_of_what_is_mapped(void)
{
    char text[512], path[128];
    struct stat is;
    size_t len;
    job j;

    job_begin(&j);
    plant_status(&j.t, "self", 24);
    plant_bytes(&j.t, "dev/shm/torch_77_3_1", 16);
    plant_bytes(&j.t, "dev/shm/psm_1", 8);
    snprintf(path, sizeof path, "%s/dev/shm/torch_77_3_1", j.t.root);
    CHECK(stat(path, &is) == 0);
    len = put_mapping(text, (void *)4096, 4, 0, &is, path);
    snprintf(path, sizeof path, "%s/dev/shm/psm_1", j.t.root);
    CHECK(stat(path, &is) == 0);
    put_mapping(text + len, (void *)(64 * 4096ul), 2, 0, &is, path);
    plant(&j.t, "proc/self/maps", text);
    CHECK(look_since(&j, 0).all == 8 * KIB && look_since(&j, 0).mapped == 8 * KIB);
    job_end(&j);
}

static void
what_is_hidden_is_not_known(void)
{
    mt_shm_bytes found;
    job j;

    job_begin(&j);
    plant(&j.t, "proc/self/task/1/children", "10 x");
    CHECK(look_since(&j, 0).all == MT_UNKNOWN);
    plant(&j.t, "proc/self/task/1/children", "10 12 "); /* 12 has ended */
    CHECK(counts(&j, 0));
    plant_status(&j.t, "self", 4); /* it maps something, and its list cannot be read */
    CHECK(look_since(&j, 0).all == MT_UNKNOWN);
    plant(&j.t, "proc/self/maps", "");
    CHECK(counts(&j, 0));
    plant(&j.t, "proc/self/status", "Name:\tx\n"); /* a kernel that does not tell */
    found = look_since(&j, 0);
    CHECK(found.all == MT_UNKNOWN && found.mapped == MT_UNKNOWN);
    job_end(&j);
}

/* Whatever fails: the right figure, or none; and right the next time. */
static void
any_call_may_fail(void)
{
    static const int errors[] = {EMFILE, EIO, EACCES};
    struct stat is;
    char text[512];
    job j;

    job_begin(&j);
    plant_bytes(&j.t, "dev/shm/torch_10_3_1", 16);
    plant_bytes(&j.t, "dev/shm/psm_1", 8);
    link_to_name(&j.t, "11", 5, "psm_1");
    CHECK(stat(j.t.root, &is) == 0);
    put_mapping(text, (void *)4096, 4, 0, &is, "/x");
    plant_status(&j.t, "self", 8);
    plant(&j.t, "proc/self/maps", text);
    for (size_t e = 0; e < sizeof errors / sizeof *errors; e++) {
        for (long at = 0;; at++) {
            mt_shm_bytes found;
            long calls;
            proc_errno = errors[e];
            proc_faults = (faulty){.fail_at = at, .live = proc_faults.live};
            found = look_since(&j, 0);
            calls = proc_faults.calls;
            CHECK(found.all == 24 * KIB || found.all == MT_UNKNOWN);
            CHECK(calls > at || found.all == 24 * KIB);
            proc_faults.fail_at = -1;
            CHECK(counts(&j, 24));
            if (calls <= at) break;
        }
    }
    job_end(&j);
}

/* On this machine: what this process and its forks tell of counts, and nothing else. */
static void
what_the_job_tells_of_is_its_own(void)
{
    static const char *const names[] = {"here", "there", "other"};
    char name[3][64], path[256];
    mt_shm_bytes before, after;
    mt_children *children;
    mt_shm *shm;
    int fd[3];
    pid_t child;

    CHECK(mt_shm_share_notes() && mt_shm_share_notes());
    CHECK(mt_children_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &children, NULL) == MT_OK);
    CHECK(mt_shm_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &shm, NULL) == MT_OK);
    CHECK(mt_children_scan(children));
    mt_shm_look(shm, children, 0, &before);
    CHECK(before.all != MT_UNKNOWN);
    for (int i = 0; i < 3; i++) {
        snprintf(name[i], sizeof name[i], "/mt_test_%s_%d", names[i], getpid());
        snprintf(path, sizeof path, "/dev/shm%s", name[i]);
        CHECK((fd[i] = open(path, O_RDWR | O_CREAT | O_EXCL, 0600)) >= 0);
    }
    mt_shm_note(name[0]);
    if ((child = fork()) == 0) {
        mt_shm_note(name[1]);
        _exit(0);
    }
    CHECK(waitpid(child, NULL, 0) == child);
    mt_shm_note("mt_test_that_is_not_there");
    for (int i = 0; i < 3; i++)
        CHECK(pwrite(fd[i], "x", 1, 5000 * i) == 1 && close(fd[i]) == 0);
    mt_shm_note(name[2]); /* it is not empty: another has made it */
    CHECK(mt_children_scan(children));
    mt_shm_look(shm, children, 0, &after);
    CHECK(after.all == before.all + 8 * KIB);
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "/dev/shm%s", name[i]);
        CHECK(unlink(path) == 0);
    }
    mt_shm_look(shm, children, 0, &after);
    CHECK(after.all == before.all);
    mt_shm_free(shm);
    mt_shm_free(NULL);
    mt_children_free(children);
}

static void
write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");

    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0);
}

/* Paths are told before their files are there, by whatever name, also in new folders. */
static void
what_is_written_under_a_told_path_is_the_jobs(void)
{
    char folder[64], path[3][128];
    mt_shm_bytes before, after;
    mt_children *children;
    mt_shm *shm;

    CHECK(mt_shm_share_notes());
    CHECK(mt_children_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &children, NULL) == MT_OK);
    CHECK(mt_shm_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &shm, NULL) == MT_OK);
    CHECK(mt_children_scan(children));
    mt_shm_look(shm, children, 0, &before);
    snprintf(folder, sizeof folder, "/dev/shm/mt_test_%d", getpid());
    CHECK(mkdir(folder, 0700) == 0);
    snprintf(path[0], sizeof path[0], "%s.bin", folder);
    snprintf(path[1], sizeof path[1], "%s/in.bin", folder);
    snprintf(path[2], sizeof path[2], "%s/stray.bin", folder);
    for (int i = 0; i < 2; i++)
        mt_shm_note_path(path[i]);
    mt_shm_note_path("/tmp/not-there");
    mt_shm_look(shm, children, 0, &after); /* comes between the word and the file */
    for (int i = 0; i < 3; i++)
        write_file(path[i], "x");
    mt_shm_look(shm, children, 0, &after);
    CHECK(after.all == before.all + 8 * KIB);
    CHECK(mt_shm_saw_strays());
    for (int i = 0; i < 3; i++) { /* what was known to be ours stays so */
        mt_shm_look(shm, children, 0, &after);
        CHECK(after.all == before.all + 8 * KIB);
    }
    for (int i = 0; i < 3; i++)
        CHECK(unlink(path[i]) == 0);
    CHECK(rmdir(folder) == 0);
    mt_shm_look(shm, children, 0, &after);
    CHECK(after.all == before.all);
    mt_shm_free(shm);
    mt_children_free(children);
}

/* The page that forked children share: a count, and the entries. */
static uint64_t *
shared_page(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    unsigned long start = 0, found = 0;

    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL)
        if (strstr(line, "rw-s") != NULL && strstr(line, "/memfd:memtools") != NULL &&
            sscanf(line, "%lx-", &start) == 1)
            found = start;
    fclose(maps);
    CHECK(found != 0);
    return (uint64_t *)found; /* NOLINT(performance-no-int-to-ptr): it comes as text */
}

/* A look may come between a writer's count and its entry. */
static void
what_is_told_during_a_look_is_found_by_the_next(void)
{
    char path[128];
    mt_shm_bytes before, after;
    mt_children *children;
    mt_shm *shm;
    uint64_t *page, *entry, told;

    CHECK(mt_shm_share_notes());
    CHECK(mt_children_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &children, NULL) == MT_OK);
    CHECK(mt_shm_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &shm, NULL) == MT_OK);
    CHECK(mt_children_scan(children));
    mt_shm_look(shm, children, 0, &before);
    snprintf(path, sizeof path, "/dev/shm/mt_test_late_%d", getpid());
    mt_shm_note_path(path);
    page = shared_page();
    entry = &page[page[0]]; /* the count comes first, so the newest entry has its index */
    told = *entry;
    *entry = 0;
    mt_shm_look(shm, children, 0, &after);
    write_file(path, "x");
    *entry = told;
    mt_shm_look(shm, children, 0, &after);
    CHECK(after.all == before.all + 4 * KIB);
    CHECK(unlink(path) == 0);
    mt_shm_free(shm);
    mt_children_free(children);
}

/* A child has it mapped as well. */
static void
the_ring_of_notes_counts_nowhere(void)
{
    mt_children *children;
    mt_shm_bytes found;
    mt_shm *shm;
    int ends[2];
    pid_t child;
    char byte;

    CHECK(mt_shm_share_notes());
    CHECK(pipe(ends) == 0);
    if ((child = fork()) == 0) {
        close(ends[1]);
        mt_shm_note_path("/dev/shm/x");
        _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);
    }
    CHECK(mt_children_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &children, NULL) == MT_OK);
    CHECK(mt_shm_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &shm, NULL) == MT_OK);
    for (int mapped = 0; mapped < 2; mapped++) {
        void *page =
            mapped ? mmap(NULL, KIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)
                   : MAP_FAILED;
        if (mapped) *(volatile char *)page = 1;
        mt_children_scan(children);
        mt_shm_look(shm, children, 0, &found);
        CHECK(found.all == (mapped ? 4 * KIB : 0));
        if (mapped) munmap(page, KIB);
    }
    close(ends[1]);
    close(ends[0]);
    CHECK(waitpid(child, NULL, 0) == child);
    mt_shm_free(shm);
    mt_children_free(children);
}

static void
memory_may_be_short(void)
{
    mt_shm *shm = NULL;
    faulty fault = {.fail_at = 0};
    mt_alloc mem = faulty_alloc(&fault);

    CHECK(mt_shm_new(&mem, &faulty_proc, "", &shm, NULL) == MT_ENOMEM && shm == NULL);
}

int
main(void)
{
    RUN(a_name_with_the_pid_of_the_job_is_the_jobs);
    RUN(a_file_without_a_pid_counts_while_the_job_holds_it);
    RUN(what_has_no_name_counts_where_it_is_open);
    RUN(a_mapping_without_a_file_counts_once);
    RUN(anothers_file_is_none_of_what_is_mapped);
    RUN(what_is_hidden_is_not_known);
    RUN(any_call_may_fail);
    RUN(what_the_job_tells_of_is_its_own);
    RUN(what_is_written_under_a_told_path_is_the_jobs);
    RUN(what_is_told_during_a_look_is_found_by_the_next);
    RUN(the_ring_of_notes_counts_nowhere);
    RUN(memory_may_be_short);
    CHECK_DONE();
}
