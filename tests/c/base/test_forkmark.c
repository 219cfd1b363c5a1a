/* The mark is set here, and in no child or grandchild. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit/check.h"
#include "os/base/forkmark.h"

static int
status_of(pid_t child)
{
    int status;

    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void
children_are_told_apart_from_their_parent(void)
{
    mt_forkmark *mark;
    pid_t child;

    CHECK(mt_forkmark_new(&mark, NULL) == MT_OK);
    CHECK(mt_forkmark_is_home(mark));
    if ((child = fork()) == 0) {
        pid_t grandchild = fork();
        if (grandchild == 0) _exit(mt_forkmark_is_home(mark) ? 1 : 2);
        _exit(!mt_forkmark_is_home(mark) && status_of(grandchild) == 2 ? 0 : 1);
    }
    CHECK(status_of(child) == 0);
    CHECK(mt_forkmark_is_home(mark));
    mt_forkmark_free(mark);
    mt_forkmark_free(NULL);
}

static void
a_childs_own_mark_is_set(void)
{
    pid_t child = fork();

    if (child == 0) {
        mt_forkmark *mark;
        _exit(mt_forkmark_new(&mark, NULL) == MT_OK && mt_forkmark_is_home(mark) ? 0 : 1);
    }
    CHECK(status_of(child) == 0);
}

/* Marks come and go beside a thread that forks: in each child all that were there are 0. */
static void *
make_and_free(void *stop)
{
    mt_forkmark *marks[8] = {NULL};

    for (unsigned i = 0; !atomic_load((atomic_bool *)stop); i++) {
        mt_forkmark **m = &marks[i * 5 % 8];

        mt_forkmark_free(*m);
        *m = NULL;
        CHECK(mt_forkmark_new(m, NULL) == MT_OK);
    }
    for (int i = 0; i < 8; i++)
        mt_forkmark_free(marks[i]);
    return NULL;
}

static void
a_fork_while_marks_are_made_finds_them_all(void)
{
    mt_forkmark *first, *last;
    unsigned *zeros;
    atomic_bool stop = false;
    pthread_t thread;

    CHECK(mt_forkmark_new(&first, NULL) == MT_OK);
    CHECK(mt_forkmark_zeros(sizeof *zeros, (void **)&zeros, NULL) == MT_OK && *zeros == 0);
    CHECK(pthread_create(&thread, NULL, make_and_free, &stop) == 0);
    CHECK(mt_forkmark_new(&last, NULL) == MT_OK);
    *zeros = 7;
    for (int i = 0; i < 50; i++) {
        pid_t child = fork();

        if (child == 0) {
            bool all = !mt_forkmark_is_home(first) && !mt_forkmark_is_home(last) && *zeros == 0;
            mt_forkmark_free(first); /* as an object does that the child drops */
            _exit(all ? 0 : 1);
        }
        CHECK(status_of(child) == 0);
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    CHECK(mt_forkmark_is_home(first) && mt_forkmark_is_home(last) && *zeros == 7);
    mt_forkmark_free(first);
    mt_forkmark_free(last);
    mt_forkmark_free_zeros(zeros);
}

int
main(void)
{
    RUN(children_are_told_apart_from_their_parent);
    RUN(a_childs_own_mark_is_set);
    RUN(a_fork_while_marks_are_made_finds_them_all);
    CHECK_DONE();
}
