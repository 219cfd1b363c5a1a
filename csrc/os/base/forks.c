#include "os/base/forks.h"

#include <pthread.h>

static mt_forks forks;
static pthread_once_t handler_was_asked_for = PTHREAD_ONCE_INIT;
static int fault; /* of pthread_atfork; constant after that */

static void
count_in_child(void)
{
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
}

static void
forks_install_handler(void)
{
    fault = pthread_atfork(NULL, NULL, count_in_child);
}

mt_status
mt_birth_now(mt_birth *out, mt_error *err)
{
    pthread_once(&handler_was_asked_for, forks_install_handler);
    if (fault != 0) return mt_fail(err, MT_ENOMEM, "pthread_atfork", fault);
    *out = (mt_birth){&forks, atomic_load_explicit(&forks, memory_order_relaxed)};
    return MT_OK;
}
