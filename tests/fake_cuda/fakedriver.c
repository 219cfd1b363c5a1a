/* fakedriver.c -- the driver's virtual memory over one memfd per device.
 *
 *   range (reserved)   |----|map |map |--------|     PROT_NONE, where nothing is mapped
 *                              \    |
 *   page (memfd)            [ 7 ][ 8 ]  [ 9 ]        made full of 0xFF; gone when it is released
 * and no map shows it */
#define _GNU_SOURCE /* memfd_create, fallocate */
#include "machine.h"

#include <cuda.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct page {
    struct page *next; /* by offset */
    CUmemGenericAllocationHandle handle;
    int device;
    size_t offset, bytes;
    long maps;
    bool released;
} page;

typedef struct map {
    struct map *next;
    char *at;
    page *of;
} map;

typedef struct range {
    struct range *next;
    char *base;
    size_t bytes;
} range;

static struct {
    page *pages[MAX_DEVICES];
    map *maps;
    range *ranges;
    int files[MAX_DEVICES]; /* 0: not opened yet */
    CUmemGenericAllocationHandle handles;
    const char *hidden;
} vm;

/* ---- what calls begin and end with ---- */

typedef enum call {
    GET_GRANULARITY,
    ADDRESS_RESERVE,
    ADDRESS_FREE,
    CREATE,
    RELEASE,
    MAP,
    UNMAP,
    SET_ACCESS,
    CALLS
} call;

static long called[CALLS];

/* The call needs the context of `device`, or of any where that is -1. */
static CUresult
arrive_at(call which, int device)
{
    cudaError_t rc = arrive_unsafe();

    called[which]++;
    if (rc != cudaSuccess) return (CUresult)rc;
    if (current_context >= 0 && (device < 0 || device == current_context)) return CUDA_SUCCESS;
    gpu.misuses++;
    return CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult
unlock(CUresult rc)
{
    pthread_mutex_unlock(&gpu.lock);
    return rc;
}

static CUresult
misuse(void)
{
    gpu.misuses++;
    return unlock(CUDA_ERROR_INVALID_VALUE);
}

static bool
is_multiple(size_t bytes)
{
    return bytes > 0 && bytes % gpu.granularity == 0;
}

/* ---- pages ---- */

static int
file_of(int device)
{
    if (vm.files[device] == 0) vm.files[device] = memfd_create("fake-gpu", MFD_CLOEXEC);
    return vm.files[device];
}

static void
fill_with_garbage(int file, size_t offset, size_t bytes)
{
    static char garbage[1 << 16];

    memset(garbage, 0xFF, sizeof garbage);
    for (size_t done = 0; done < bytes; done += sizeof garbage) {
        size_t part = bytes - done < sizeof garbage ? bytes - done : sizeof garbage;

        if (pwrite(file, garbage, part, (off_t)(offset + done)) != (ssize_t)part) abort();
    }
}

static size_t
used_bytes(int device)
{
    size_t sum = 0;

    for (page *p = vm.pages[device]; p != NULL; p = p->next)
        sum += p->bytes;
    return sum;
}

static page *
find_page(CUmemGenericAllocationHandle handle)
{
    for (int d = 0; d < MAX_DEVICES; d++)
        for (page *p = vm.pages[d]; p != NULL; p = p->next)
            if (p->handle == handle && !p->released) return p;
    return NULL;
}

static void
free_unused(page *p)
{
    page **at = &vm.pages[p->device];

    if (!p->released || p->maps > 0) return;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    fallocate(file_of(p->device), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p->offset,
              (off_t)p->bytes);
    free(p);
}

/* In the first gap that is large enough. */
static page *
make_page(int device, size_t bytes)
{
    page **at = &vm.pages[device], *new = calloc(1, sizeof *new);
    size_t end = 0;

    if (new == NULL) abort();
    for (; *at != NULL && (*at)->offset - end < bytes; at = &(*at)->next)
        end = (*at)->offset + (*at)->bytes;
    *new = (page){.next = *at, .handle = ++vm.handles, .device = device, .offset = end};
    new->bytes = bytes;
    fill_with_garbage(file_of(device), end, bytes);
    return *at = new;
}

CUresult
cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop,
                              CUmemAllocationGranularity_flags option)
{
    CUresult rc = arrive_at(GET_GRANULARITY, -1);

    (void)option;
    if (rc != CUDA_SUCCESS) return unlock(rc);
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return misuse();
    *out = gpu.granularity;
    return unlock(rc);
}

CUresult
cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop,
            unsigned long long flags)
{
    CUresult rc = arrive_at(CREATE, prop->location.id);

    if (rc != CUDA_SUCCESS) return unlock(rc);
    if (!is_multiple(bytes) || flags != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return misuse();
    if (used_bytes(prop->location.id) + bytes > gpu.capacity)
        return unlock(CUDA_ERROR_OUT_OF_MEMORY);
    *out = make_page(prop->location.id, bytes)->handle;
    return unlock(rc);
}

CUresult
cuMemRelease(CUmemGenericAllocationHandle handle)
{
    CUresult rc = arrive_at(RELEASE, -1);
    page *p = find_page(handle);

    if (rc != CUDA_SUCCESS) return unlock(rc);
    if (p == NULL) return misuse();
    p->released = true;
    free_unused(p);
    return unlock(rc);
}

/* ---- addresses ---- */

static bool
overlaps(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    return a < b + b_bytes && b < a + a_bytes;
}

static bool
is_reserved(const char *at, size_t bytes)
{
    for (range *r = vm.ranges; r != NULL; r = r->next)
        if (at >= r->base && at + bytes <= r->base + r->bytes) return true;
    return false;
}

static bool
is_mapped(const char *at, size_t bytes)
{
    for (map *m = vm.maps; m != NULL; m = m->next)
        if (overlaps(m->at, m->of->bytes, at, bytes)) return true;
    return false;
}

/* Whether the bytes are whole maps, without a gap. */
static bool
is_whole(const char *at, size_t bytes)
{
    size_t sum = 0;

    for (map *m = vm.maps; m != NULL; m = m->next) {
        if (!overlaps(m->at, m->of->bytes, at, bytes)) continue;
        if (m->at < at || m->at + m->of->bytes > at + bytes) return false;
        sum += m->of->bytes;
    }
    return sum == bytes;
}

static void
make_unreachable(char *at, size_t bytes)
{
    if (mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0) != at)
        abort();
}

CUresult
cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t align, CUdeviceptr hint,
                    unsigned long long flags)
{
    CUresult rc = arrive_at(ADDRESS_RESERVE, -1);
    size_t unit = align > gpu.granularity ? align : gpu.granularity;
    char *around, *base;
    range *new;

    if (rc != CUDA_SUCCESS) return unlock(rc);
    if (!is_multiple(bytes) || (align & (align - 1)) != 0 || hint != 0 || flags != 0)
        return misuse();
    around =
        mmap(NULL, bytes + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (around == MAP_FAILED) return unlock(CUDA_ERROR_OUT_OF_MEMORY);
    base = (char *)(((uintptr_t)around + unit - 1) & ~(uintptr_t)(unit - 1));
    if (base > around) munmap(around, (size_t)(base - around));
    munmap(base + bytes, unit - (size_t)(base - around));
    if ((new = malloc(sizeof *new)) == NULL) abort();
    *new = (range){.next = vm.ranges, .base = base, .bytes = bytes};
    vm.ranges = new;
    *out = (CUdeviceptr)(uintptr_t)base;
    return unlock(rc);
}

CUresult
cuMemAddressFree(CUdeviceptr at, size_t bytes)
{
    CUresult rc = arrive_at(ADDRESS_FREE, -1);
    char *base = (char *)(uintptr_t)at;

    if (rc != CUDA_SUCCESS) return unlock(rc);
    for (range **slot = &vm.ranges; *slot != NULL; slot = &(*slot)->next) {
        range *r = *slot;

        if (r->base != base || r->bytes != bytes || is_mapped(base, bytes)) continue;
        munmap(base, bytes);
        *slot = r->next;
        free(r);
        return unlock(rc);
    }
    return misuse();
}

CUresult
cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
         unsigned long long flags)
{
    CUresult rc = arrive_at(MAP, -1);
    char *base = (char *)(uintptr_t)at;
    page *of = find_page(handle);
    map *new;

    if (rc != CUDA_SUCCESS) return unlock(rc);
    if (of == NULL || of->bytes != bytes || offset != 0 || flags != 0 ||
        at % gpu.granularity != 0 || !is_reserved(base, bytes) || is_mapped(base, bytes))
        return misuse();
    if (mmap(base, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_of(of->device),
             (off_t)of->offset) != base)
        abort();
    if ((new = malloc(sizeof *new)) == NULL) abort();
    *new = (map){.next = vm.maps, .at = base, .of = of};
    vm.maps = new;
    of->maps++;
    return unlock(rc);
}

CUresult
cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *desc, size_t count)
{
    CUresult rc = arrive_at(SET_ACCESS, -1);
    char *base = (char *)(uintptr_t)at;

    if (rc != CUDA_SUCCESS) return unlock(rc);
    if (count != 1 || desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || !is_whole(base, bytes))
        return misuse();
    for (map *m = vm.maps; m != NULL; m = m->next)
        if (overlaps(m->at, m->of->bytes, base, bytes) && m->of->device != desc->location.id)
            return misuse(); /* a peer's access: nobody here asks for it */
    if (mprotect(base, bytes, PROT_READ | PROT_WRITE) != 0) abort();
    return unlock(rc);
}

CUresult
cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    CUresult rc = arrive_at(UNMAP, -1);
    char *base = (char *)(uintptr_t)at;

    if (rc != CUDA_SUCCESS) return unlock(rc);
    if (!is_whole(base, bytes)) return misuse();
    if (is_busy(base, bytes)) finish_busy();
    for (map **slot = &vm.maps; *slot != NULL;) {
        map *m = *slot;

        if (!overlaps(m->at, m->of->bytes, base, bytes)) {
            slot = &m->next;
            continue;
        }
        *slot = m->next;
        m->of->maps--;
        free_unused(m->of);
        free(m);
    }
    make_unreachable(base, bytes);
    return unlock(rc);
}

/* ---- entry points by name; totals ---- */

#define NAMED(call, function) [call] = {#function, (void (*)(void))function}

static const struct entry {
    const char *name;
    void (*function)(void);
} entries[CALLS] = {
    NAMED(GET_GRANULARITY, cuMemGetAllocationGranularity),
    NAMED(ADDRESS_RESERVE, cuMemAddressReserve),
    NAMED(ADDRESS_FREE, cuMemAddressFree),
    NAMED(CREATE, cuMemCreate),
    NAMED(RELEASE, cuMemRelease),
    NAMED(MAP, cuMemMap),
    NAMED(UNMAP, cuMemUnmap),
    NAMED(SET_ACCESS, cuMemSetAccess),
};

static const struct entry *
find_entry(const char *name)
{
    for (size_t i = 0; i < CALLS; i++)
        if (strcmp(entries[i].name, name) == 0) return &entries[i];
    return NULL;
}

cudaError_t
cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version,
                                 unsigned long long flags,
                                 enum cudaDriverEntryPointQueryResult *status)
{
    cudaError_t rc = arrive();
    const struct entry *found = find_entry(symbol);
    void (*other)(void) = context_entry(symbol);

    if (rc == cudaSuccess && (version < 10020 || flags != 0)) rc = cudaErrorInvalidValue;
    if (rc == cudaSuccess) {
        *out = NULL;
        if (found != NULL) other = found->function;
        if (vm.hidden != NULL && strcmp(symbol, vm.hidden) == 0) other = NULL;
        if (other != NULL) memcpy(out, &other, sizeof *out);
        if (status != NULL)
            *status = other ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    }
    pthread_mutex_unlock(&gpu.lock);
    return rc;
}

void
fake_cuda_hide(const char *driver_call)
{
    vm.hidden = driver_call;
}

void
reset_driver(void)
{
    memset(called, 0, sizeof called);
    vm.hidden = NULL;
}

long
count_calls(const char *name)
{
    const struct entry *found = find_entry(name);

    return found != NULL ? called[found - entries] : -1;
}

long
count_pages(void)
{
    long n = 0;

    for (int d = 0; d < MAX_DEVICES; d++)
        for (page *p = vm.pages[d]; p != NULL; p = p->next)
            n++;
    return n;
}

long
count_device_page_bytes(int device)
{
    return (long)used_bytes(device);
}

long
count_page_bytes(void)
{
    size_t sum = 0;

    for (int d = 0; d < MAX_DEVICES; d++)
        sum += used_bytes(d);
    return (long)sum;
}

long
count_maps(void)
{
    long n = 0;

    for (map *m = vm.maps; m != NULL; m = m->next)
        n++;
    return n;
}

long
count_ranges(void)
{
    long n = 0;

    for (range *r = vm.ranges; r != NULL; r = r->next)
        n++;
    return n;
}
