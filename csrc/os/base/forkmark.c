#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, madvise */
#include "os/base/forkmark.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t
page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

mt_status
mt_forkmark_zeros(void **out, mt_error *err)
{
    void *page =
        mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED) return mt_fail(err, MT_ENOMEM, "mmap", errno);
    if (madvise(page, page_bytes(), MADV_WIPEONFORK) != 0) {
        mt_status st = mt_fail(err, MT_ENOMEM, "madvise(MADV_WIPEONFORK)", errno);
        munmap(page, page_bytes());
        return st;
    }
    *out = page;
    return MT_OK;
}

void
mt_forkmark_free_zeros(void *page)
{
    if (page != NULL) munmap(page, page_bytes());
}

mt_status
mt_forkmark_new(mt_forkmark **out, mt_error *err)
{
    void *page = NULL;
    mt_status st = mt_forkmark_zeros(&page, err);

    if (page == NULL) return st;
    *(unsigned char *)page = 1;
    *out = page;
    return MT_OK;
}

void
mt_forkmark_free(mt_forkmark *mark)
{
    mt_forkmark_free_zeros((void *)(uintptr_t)mark /* not volatile any more */);
}

/* The page is the kernel's zeros in a child, writable there, and zeros again in a child of that. */
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
