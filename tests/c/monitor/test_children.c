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
    CHECK(proc_faults.live == 5);
    plant(&t, "proc/self/task/1/children", "10 ");
    plant(&t, "proc/10/statm", "9 8 1 0 0 0 0\n"); /* read by what is kept, without a scan */
    CHECK(reads(ch, 5, 1407) && mt_children_scan(ch) && reads(ch, 4, 1207));
    plant(&t, "proc/21/statm", "0 0 0 0 0 0 0\n"); /* a zombie */
    CHECK(reads(ch, 3, 707) && mt_children_scan(ch) && reads(ch, 3, 707));
    plant(&t, "proc/12/statm", "what?");
    CHECK(reads(ch, 3, MT_UNKNOWN));
    plant(&t, "proc/self/task/1/children", "10 x");
    CHECK(!mt_children_scan(ch) && reads(ch, MT_UNKNOWN, MT_UNKNOWN));
    plant(&t, "proc/self/task/1/children", "");
    CHECK(mt_children_scan(ch) && reads(ch, 1, MT_UNKNOWN));
    mt_children_free(ch);
    CHECK(proc_faults.live == 0);
    tree_end(&t);
}

/* A descriptor of a process that ended fails for ever; the number may be somebody else's by then.
 */
static void
a_number_used_again_is_another_process(void)
{
    mt_children *ch;
    proctree t;

    tree_begin(&t);
    plant(&t, "proc/self/task/1/children", "10 ");
    plant_process(&t, 10, 100, "");
    ch = children_on(t.root);
    CHECK(mt_children_scan(ch) && reads(ch, 1, 100));
    plant(&t, "proc/10/statm", NULL);
    plant_process(&t, 10, 700, "");
    proc_errno = ESRCH;
    proc_faults.fail_at = proc_faults.calls;
    CHECK(reads(ch, 0, 0) && proc_faults.live == 0);
    CHECK(mt_children_scan(ch) && reads(ch, 1, 700));
    proc_faults.fail_at = -1;
    mt_children_free(ch);
    tree_end(&t);
}

static void
long_lists_take_few_descriptors(void)
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
    CHECK(mt_children_scan(ch) && reads(ch, 1500, 2 * MT_CHILDREN_MOST));
    CHECK(proc_faults.live == MT_CHILDREN_KEPT);
    mt_children_clear(ch);
    CHECK(proc_faults.live == 0 && reads(ch, MT_UNKNOWN, MT_UNKNOWN));
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
    plant(&t, "proc/self/task/5/children", "9 ");
    for (size_t e = 0; e < 3; e++) {
        for (long at = 0;; at++) {
            mt_children *ch = children_on(t.root);
            uint64_t count, priv, page = (uint64_t)sysconf(_SC_PAGESIZE);
            long before;
            proc_errno = errors[e];
            proc_faults = (faulty){.fail_at = at};
            mt_children_scan(ch);
            mt_children_read(ch, &count, &priv);
            CHECK(count == 2 || count == MT_UNKNOWN);
            CHECK(priv == 6 * page || priv == MT_UNKNOWN);
            if (proc_faults.calls <= at) CHECK(count == 2 && priv == 6 * page);
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
        CHECK(count >= 2 && count <= 3 && open_descriptors() <= before + 4 + 3);
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
    RUN(a_number_used_again_is_another_process);
    RUN(long_lists_take_few_descriptors);
    RUN(without_lists_nothing_is_known);
    RUN(any_call_may_fail);
    RUN(memory_may_be_short);
    RUN(a_thousand_short_lives_leave_nothing_open);
    CHECK_DONE();
}
