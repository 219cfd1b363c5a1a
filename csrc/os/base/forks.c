#include "os/base/forks.h"

#include <pthread.h>

static mt_forks forks;
static pthread_once_t handler_was_asked_for = PTHREAD_ONCE_INIT;
static bool counts; /* constant after that */

static void
count_in_child(void)
{
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
}

static void
forks_install_handler(void)
{
    counts = pthread_atfork(NULL, NULL, count_in_child) == 0;
}

bool
mt_forks_count(void)
{
    pthread_once(&handler_was_asked_for, forks_install_handler);
    return counts;
}

mt_birth
mt_birth_now(void)
{
    (void)mt_forks_count();
    return (mt_birth){&forks, atomic_load_explicit(&forks, memory_order_relaxed)};
}
