/* Descendants: made-up trees, lists longer than a buffer, numbers used again, and real
 * children that come and go by the thousand. */
#define _GNU_SOURCE /* mkdtemp */
#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/port/probe.h"
#include "os/monitor/children.h"
#include "kit/proctree.h"

static mt_children *
children_on(const char *root)
{
    mt_children *ch;

    CHECK(mt_children_new(&mt_alloc_libc, &faulty_proc, root, &ch, NULL) == MT_OK);
    return ch;
}

static void
plant_process(const proctree *t, unsigned pid, unsigned pages, const char *children)
{
    char path[64], text[64];

    snprintf(path, sizeof path, "proc/%u/statm", pid);
    snprintf(text, sizeof text, "%u %u 1 0 0 0 0\n", pages + 5, pages + 1);
    plant(t, path, text);
    snprintf(path, sizeof path, "proc/%u/task/%u/children", pid, pid);
    plant(t, path, children);
}

static bool
reads(mt_children *ch, uint64_t count, uint64_t pages)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), got, priv;

    mt_children_read(ch, &got, &priv);
    return got == count && priv == (pages == MT_UNKNOWN ? MT_UNKNOWN : pages * page);
}

static void
a_tree_is_walked_through_threads_and_grandchildren(void)
{
    mt_children *ch;
    proctree t;

    tree_begin(&t);
    plant(&t, "proc/self/task/1/children", "10 11 ");
    plant(&t, "proc/self/task/2/children", "12");
    plant_process(&t, 10, 100, "20 ");
    plant_process(&t, 11, 200, "");
    plant_process(&t, 12, 300, "");
    plant_process(&t, 20, 400, "21 ");
    plant_process(&t, 21, 500, "");
    ch = children_on(t.root);
    CHECK(mt_children_scan(ch) && reads(ch, 5, 1500));
    plant(&t, "proc/self/task/1/children", "10 ");
    plant(&t, "proc/10/statm", "9 8 1 0 0 0 0\n");
    CHECK(reads(ch, 5, 1500) && mt_children_scan(ch) && reads(ch, 4, 1207));
    plant(&t, "proc/21/statm", "0 0 0 0 0 0 0\n"); /* a zombie */
    CHECK(mt_children_scan(ch) && reads(ch, 3, 707));
    plant(&t, "proc/12/statm", "what?");
    CHECK(mt_children_scan(ch) && reads(ch, 3, MT_UNKNOWN));
    plant(&t, "proc/self/task/1/children", "10 x");
    CHECK(!mt_children_scan(ch) && reads(ch, MT_UNKNOWN, MT_UNKNOWN));
    plant(&t, "proc/self/task/1/children", "");
    CHECK(mt_children_scan(ch) && reads(ch, 1, MT_UNKNOWN));
    mt_children_free(ch);
    CHECK(proc_faults.live == 0);
    tree_end(&t);
}

static void
long_lists_are_read(void)
{
    static char list[20000];
    mt_children *ch;
    size_t len = 0;
    proctree t;

    tree_begin(&t);
    for (unsigned pid = 100000; pid < 101500; pid++)
        len += (size_t)sprintf(list + len, "%u ", pid);
    plant(&t, "proc/self/task/1/children", list);
    for (unsigned pid = 100000; pid < 101500; pid++)
        plant_process(&t, pid, 2, "");
    ch = children_on(t.root);
    CHECK(mt_children_scan(ch) && reads(ch, 1500, 2 * 1500));
    CHECK(proc_faults.live == 0);
    mt_children_clear(ch);
    CHECK(reads(ch, MT_UNKNOWN, MT_UNKNOWN));
    mt_children_free(ch);
    tree_end(&t);
}

/* More than one list holds, and each with its memory: the sum is right, and what is more than the
 * table holds makes it unknown. */
static void
ten_thousand_workers_are_summed(void)
{
    enum { FIRST = 100000, WORKERS = 10000 };
    static char list[8 * (MT_CHILDREN_MOST + 2)];
    mt_children *ch;
    size_t len = 0;
    proctree t;

    strcpy(t.root, "/dev/shm/mt_tree_XXXXXX"); /* on a disk it would take seconds */
    CHECK(mkdtemp(t.root) != NULL);
    for (unsigned pid = FIRST; pid < FIRST + WORKERS; pid++) {
        char path[64];
        len += (size_t)sprintf(list + len, "%u ", pid);
        snprintf(path, sizeof path, "proc/%u/statm", pid);
        plant(&t, path, "7 3 1 0 0 0 0\n");
    }
    plant(&t, "proc/self/task/1/children", list);
    ch = children_on(t.root);
    CHECK(mt_children_scan(ch) && reads(ch, WORKERS, 2 * WORKERS));
    CHECK(mt_children_len(ch) == WORKERS && mt_children_known(ch));
    list[7 * (WORKERS / 2)] = 0; /* half of them end */
    plant(&t, "proc/self/task/1/children", list);
    CHECK(mt_children_scan(ch) && reads(ch, WORKERS / 2, WORKERS));
    CHECK(mt_children_pid(ch, 0) == FIRST && mt_children_priv(ch, 7) == 8192);
    for (len = 0; len < 7 * (MT_CHILDREN_MOST + 1);)
        len += (size_t)sprintf(list + len, "%u ", FIRST + (unsigned)len / 7);
    plant(&t, "proc/self/task/1/children", list);
    CHECK(mt_children_scan(ch) && !mt_children_known(ch)); /* those without statm have ended */
    mt_children_free(ch);
    tree_end(&t);
}

static void
plant_fork(const proctree *t, const char *pid, unsigned stack, unsigned dirty_kib)
{
    char path[64], text[400];

    snprintf(path, sizeof path, "proc/%s/stat", pid);
    snprintf(text, sizeof text,
             "%s (a) b) S 1 1 1 -1 -1 4194304 9 0 0 0 3 1 0 0 20 0 1 0 777 5 6 7 8 9 %u 0 0 0\n",
             pid, stack);
    plant(t, path, text);
    snprintf(path, sizeof path, "proc/%s/smaps_rollup", pid);
    snprintf(text, sizeof text,
             "55-77 ---p 00000000 00:00 0   [rollup]\nPss_Anon: %u kB\nPrivate_Dirty: %u kB\n"
             "Anonymous:  4000 kB\n",
             dirty_kib + 4, dirty_kib);
    plant(t, path, text);
    snprintf(path, sizeof path, "proc/%s/comm", pid);
    plant(t, path, "pt_data_worker\n");
}

/* Forks of this process count what is theirs alone; a program that they began counts as a whole,
 * and its forks again what is theirs. */
static void
what_a_family_shares_counts_once(void)
{
    char name[MT_CHILD_NAME];
    mt_children *ch;
    proctree t;

    tree_begin(&t);
    plant(&t, "proc/self/task/1/children", "10 11 12 ");
    plant_fork(&t, "self", 5000, 0);
    plant_process(&t, 10, 1000, "");
    plant_process(&t, 11, 1000, "20 ");
    plant_process(&t, 12, 1000, "");
    plant_process(&t, 20, 1000, "");
    plant_process(&t, 21, 1000, "");
    plant_fork(&t, "10", 5000, 40);
    plant_fork(&t, "11", 6000, 80);
    plant_fork(&t, "20", 6000, 120);
    plant_fork(&t, "21", 5000, 40);
    ch = children_on(t.root);
    CHECK(mt_children_scan(ch) && mt_children_len(ch) == 4);
    CHECK(mt_children_priv(ch, 0) == 40 << 10 && mt_children_priv(ch, 1) == 1000 << 12);
    CHECK(mt_children_priv(ch, 2) == 1000 << 12); /* nothing is told of its stack */
    CHECK(mt_children_pid(ch, 3) == 20 && mt_children_priv(ch, 3) == 120 << 10);
    mt_children_name(ch, 0, name);
    CHECK(strcmp(name, "pt_data_worker") == 0);
    mt_children_name(ch, 2, name);
    CHECK(strcmp(name, "") == 0);
    plant(&t, "proc/10/statm", "1105 1011 1 0 0 0 0\n"); /* 10 pages more are its own */
    CHECK(mt_children_scan(ch) && reads(ch, 4, 20 + 2000 + 30) &&
          mt_children_priv(ch, 0) == 80 << 10);
    CHECK(mt_children_made(ch, 0) == 80 << 10 && mt_children_made(ch, 1) == 1000 << 12);
    plant_fork(&t, "10", 5000, 400); /* a page that it wrote to is its own: seen when it is due */
    CHECK(mt_children_scan(ch) && mt_children_priv(ch, 0) == 80 << 10);
    CHECK(mt_children_made_by_all(ch) == (80 << 10) + (2000 << 12) + (120 << 10));
    mt_children_weigh_all(ch);
    CHECK(mt_children_scan(ch) && mt_children_priv(ch, 0) == 400 << 10);
    CHECK(mt_children_made(ch, 0) == 80 << 10); /* what it copies is no growth of it */
    plant(&t, "proc/self/task/1/children", "10 11 12 21 ");
    CHECK(mt_children_scan(ch) && mt_children_len(ch) == 5);
    CHECK(mt_children_pid(ch, 3) == 21 && mt_children_priv(ch, 3) == 40 << 10);
    mt_children_clear(ch);
    plant(&t, "proc/10/smaps_rollup", NULL); /* of another user: it counts as a whole */
    CHECK(mt_children_scan(ch) && mt_children_priv(ch, 0) == 1010 << 12);
    mt_children_free(ch);
    tree_end(&t);
}

static void
without_lists_nothing_is_known(void)
{
    mt_children *ch;
    proctree t;

    tree_begin(&t);
    plant(&t, "proc/self/task/5/statm", "");
    ch = children_on(t.root);
    CHECK(!mt_children_scan(ch) && reads(ch, MT_UNKNOWN, MT_UNKNOWN));
    plant(&t, "proc/self/task/6/children", "");
    CHECK(mt_children_scan(ch) && reads(ch, 0, 0));
    mt_children_free(ch);
    CHECK(proc_faults.live == 0);
    tree_end(&t);
}

/* Whatever fails: the right figures, or none. */
static void
any_call_may_fail(void)
{
    static const int errors[] = {EMFILE, EACCES, EIO};
    proctree t;

    tree_begin(&t);
    plant_process(&t, 9, 2, "7 ");
    plant_process(&t, 7, 4, "");
    plant(&t, "proc/7/status", "VmSize: 9 kB\nVmSwap: 2 kB\n");
    plant(&t, "proc/9/status", "VmSize: 9 kB\nVmSwap: 3 kB\n");
    plant(&t, "proc/self/task/5/children", "9 ");
    for (size_t e = 0; e < 3; e++) {
        for (long at = 0;; at++) {
            mt_children *ch = children_on(t.root);
            uint64_t count, priv, swap, page = (uint64_t)sysconf(_SC_PAGESIZE);
            long before;
            proc_errno = errors[e];
            proc_faults = (faulty){.fail_at = at};
            mt_children_scan(ch);
            mt_children_read(ch, &count, &priv);
            swap = mt_children_swap(ch);
            CHECK(count == 2 || count == MT_UNKNOWN);
            CHECK(priv == 6 * page || priv == MT_UNKNOWN);
            CHECK(swap == 5 * 1024 || swap == MT_UNKNOWN);
            if (proc_faults.calls <= at) CHECK(count == 2 && priv == 6 * page && swap == 5 * 1024);
            before = proc_faults.calls;
            CHECK(mt_children_scan(ch) || (before <= at && at < proc_faults.calls));
            mt_children_free(ch);
            CHECK(proc_faults.live == 0);
            if (proc_faults.calls <= at) break;
        }
    }
    proc_faults.fail_at = -1;
    tree_end(&t);
}

static void
memory_may_be_short(void)
{
    mt_children *ch = NULL;
    faulty fault = {.fail_at = 0};
    mt_alloc mem = faulty_alloc(&fault);

    CHECK(mt_children_new(&mem, &faulty_proc, "", &ch, NULL) == MT_ENOMEM && ch == NULL);
}

static size_t
open_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    size_t n = 0;

    while (readdir(dir) != NULL)
        n++;
    closedir(dir);
    return n;
}

static void
a_thousand_short_lives_leave_nothing_open(void)
{
    mt_children *ch = children_on("");
    size_t before = open_descriptors();
    uint64_t count, priv;
    int wait_for[2], ready[2];
    char byte;
    pid_t child;

    CHECK(pipe(wait_for) == 0 && pipe(ready) == 0);
    if ((child = fork()) == 0) { /* one that stays, with a child of its own */
        close(wait_for[1]);
        if (fork() == 0) _exit(read(wait_for[0], &byte, 1) == 0 ? 0 : 1);
        if (write(ready[1], "", 1) != 1) _exit(2);
        _exit(read(wait_for[0], &byte, 1) == 0 ? 0 : 1);
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    for (int i = 0; i < 1000; i++) {
        pid_t brief = fork();
        if (brief == 0) _exit(0);
        CHECK(mt_children_scan(ch));
        mt_children_read(ch, &count, &priv);
        CHECK(count >= 2 && count <= 3 && open_descriptors() == before + 4);
        CHECK(waitpid(brief, NULL, 0) == brief);
    }
    CHECK(mt_children_scan(ch));
    mt_children_read(ch, &count, &priv);
    CHECK(count == 2 && priv > 0 && priv != MT_UNKNOWN);
    close(wait_for[1]);
    CHECK(waitpid(child, NULL, 0) == child);
    close(wait_for[0]);
    close(ready[0]);
    close(ready[1]);
    CHECK(mt_children_scan(ch));
    mt_children_read(ch, &count, &priv);
    CHECK(count == 0 && priv == 0 && open_descriptors() == before);
    mt_children_free(ch);
    mt_children_free(NULL);
}

int
main(void)
{
    RUN(a_tree_is_walked_through_threads_and_grandchildren);
    RUN(long_lists_are_read);
    RUN(ten_thousand_workers_are_summed);
    RUN(what_a_family_shares_counts_once);
    RUN(without_lists_nothing_is_known);
    RUN(any_call_may_fail);
    RUN(memory_may_be_short);
    RUN(a_thousand_short_lives_leave_nothing_open);
    CHECK_DONE();
}
