#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "os/port/vmem.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static mt_status
linux_reserve(void *ctx, size_t bytes, void **out, mt_error *err)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    (void)ctx;
    if (base == MAP_FAILED) {
        mt_fail(err, MT_ENOMEM, "mmap", errno);
        if (err != NULL) err->asked = bytes;
        return MT_ENOMEM;
    }
    *out = base;
    return MT_OK;
}

static void
linux_release(void *ctx, void *base, size_t bytes)
{
    (void)ctx;
    if (base != NULL) munmap(base, bytes);
}

static void
linux_forget(void *ctx, void *at, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t skip = (page - (uintptr_t)at % page) % page; /* to the first whole page */

    (void)ctx;
    if (bytes < skip + page) return;
    madvise((char *)at + skip, (bytes - skip) / page * page, MADV_DONTNEED);
}

const mt_vmem_ops mt_vmem_linux = {
    .reserve = linux_reserve, .release = linux_release, .forget = linux_forget, .ctx = NULL};
