/* The mark is set here, and in no child or grandchild. */
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

int
main(void)
{
    RUN(children_are_told_apart_from_their_parent);
    RUN(a_childs_own_mark_is_set);
    CHECK_DONE();
}
