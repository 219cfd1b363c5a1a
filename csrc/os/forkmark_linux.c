#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, madvise */
#include "forkmark_linux.h"

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
mt_forkmark_new(mt_forkmark **out, mt_error *err)
{
    unsigned char *page =
        mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED) return mt_fail(err, MT_ENOMEM, "mmap", errno);
    if (madvise(page, page_bytes(), MADV_WIPEONFORK) != 0) {
        mt_status st = mt_fail(err, MT_ENOMEM, "madvise(MADV_WIPEONFORK)", errno);
        munmap(page, page_bytes());
        return st;
    }
    *page = 1;
    *out = page;
    return MT_OK;
}

void
mt_forkmark_free(mt_forkmark *mark)
{
    if (mark != NULL) munmap((void *)(uintptr_t)mark /* not volatile any more */, page_bytes());
}
