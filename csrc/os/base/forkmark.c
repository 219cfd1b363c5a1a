/* forkmark.c -- how this file works: all marks of the process stand in one list, and a handler of
 * pthread_atfork fills them with zeros in a child, before anything else runs there. The kernel's
 * MADV_WIPEONFORK does the same for a page, but gVisor and kernels before 4.14 refuse it. */
#include "os/base/forkmark.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct wiped {
    struct wiped *next, **link; /* *link is this one */
    size_t bytes;
    _Alignas(max_align_t) unsigned char data[]; /* what the callers have */
} wiped;

static wiped *marks; /* under `guard` */
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t handlers_once = PTHREAD_ONCE_INIT;
static int handlers_error; /* constant after that; 0: the handlers are there */

static void
before_fork(void)
{
    pthread_mutex_lock(&guard); /* so that the list is whole in the child */
}

static void
after_in_parent(void)
{
    pthread_mutex_unlock(&guard);
}

static void
after_in_child(void)
{
    for (wiped *m = marks; m != NULL; m = m->next)
        memset(m->data, 0, m->bytes);
    pthread_mutex_unlock(&guard);
}

static void
install_handlers(void)
{
    handlers_error = pthread_atfork(before_fork, after_in_parent, after_in_child);
}

mt_status
mt_forkmark_zeros(size_t bytes, void **out, mt_error *err)
{
    wiped *m;

    pthread_once(&handlers_once, install_handlers);
    if (handlers_error != 0) return mt_fail(err, MT_ENOMEM, "pthread_atfork", handlers_error);
    if ((m = calloc(1, offsetof(wiped, data) + bytes)) == NULL)
        return mt_fail(err, MT_ENOMEM, "calloc", ENOMEM);
    m->bytes = bytes;
    pthread_mutex_lock(&guard);
    m->next = marks;
    m->link = &marks;
    if (marks != NULL) marks->link = &m->next;
    marks = m;
    pthread_mutex_unlock(&guard);
    *out = m->data;
    return MT_OK;
}

void
mt_forkmark_free_zeros(void *zeros)
{
    wiped *m;

    if (zeros == NULL) return;
    m = (wiped *)(void *)((char *)zeros - offsetof(wiped, data));
    pthread_mutex_lock(&guard);
    *m->link = m->next;
    if (m->next != NULL) m->next->link = m->link;
    pthread_mutex_unlock(&guard);
    free(m);
}

mt_status
mt_forkmark_new(mt_forkmark **out, mt_error *err)
{
    void *zeros = NULL;
    mt_status st = mt_forkmark_zeros(1, &zeros, err);

    if (zeros == NULL) return st;
    *(unsigned char *)zeros = 1;
    *out = zeros;
    return MT_OK;
}

void
mt_forkmark_free(mt_forkmark *mark)
{
    mt_forkmark_free_zeros((void *)(uintptr_t)mark /* not volatile any more */);
}

/* The byte is zero in a child, writable there, and zero again in a child of that. */
static mt_status
get_home(mt_home **out, mt_error *err)
{
    mt_forkmark *mark = NULL;
    mt_status st = mt_forkmark_new(&mark, err);

    if (st == MT_OK) *out = (mt_home *)(uintptr_t)mark;
    return st;
}

static void
put_home(mt_home *home)
{
    mt_forkmark_free((mt_forkmark *)(uintptr_t)home);
}

const mt_home_ops mt_home_linux = {.get = get_home, .put = put_home};
