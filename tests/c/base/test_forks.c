/* What is made here is here, and in no child or grandchild. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit/check.h"
#include "os/base/forks.h"

static int
status_of(pid_t child)
{
    int status;

    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Each line of descent has its own numbers: what a child makes is there, and nowhere else. */
static int
children_know(const mt_birth *made, int more)
{
    pid_t child = fork();

    if (child == 0) {
        mt_birth mine = mt_birth_now();
        bool good = !mt_birth_is_here(made) && mt_birth_is_here(&mine) &&
                    (more == 0 || children_know(&mine, more - 1) == 0) &&
                    (more == 0 || children_know(made, more - 1) == 0) && mt_birth_is_here(&mine);
        _exit(good ? 0 : 1);
    }
    return status_of(child);
}

static void
children_are_told_apart_from_their_parent(void)
{
    mt_birth made = mt_birth_now();

    CHECK(mt_birth_is_here(&made) && mt_forks_count());
    CHECK(children_know(&made, 2) == 0);
    CHECK(children_know(&made, 2) == 0); /* the second child has the number of the first */
    CHECK(mt_birth_is_here(&made));
}

static void
what_takes_no_notice_of_forks_is_always_here(void)
{
    mt_birth none = {.forks = NULL};
    pid_t child = fork();

    if (child == 0) _exit(mt_birth_is_here(&none) ? 0 : 1);
    CHECK(status_of(child) == 0 && mt_birth_is_here(&none));
}

static void *
make(void *stop)
{
    while (!atomic_load((atomic_bool *)stop)) {
        mt_birth made = mt_birth_now();
        CHECK(mt_birth_is_here(&made));
    }
    return NULL;
}

static void
a_fork_beside_threads_that_make_objects_is_noticed(void)
{
    atomic_bool stop = false;
    pthread_t thread;
    mt_birth made = mt_birth_now();

    CHECK(pthread_create(&thread, NULL, make, &stop) == 0);
    for (int i = 0; i < 50; i++)
        CHECK(children_know(&made, 0) == 0);
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    CHECK(mt_birth_is_here(&made));
}

int
main(void)
{
    RUN(children_are_told_apart_from_their_parent);
    RUN(what_takes_no_notice_of_forks_is_always_here);
    RUN(a_fork_beside_threads_that_make_objects_is_noticed);
    CHECK_DONE();
}
