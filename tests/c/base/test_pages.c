/* Tables of any size are whole, and what a large one took is the system's again at once. */
#include <malloc.h>
#include <string.h>
#include <sys/mman.h>

#include "kit/check.h"
#include "os/base/pages.h"

static void
blocks_of_all_sizes_are_whole(void)
{
    static const size_t sizes[] = {1, 4095, 65535, 65536, 65537, 1 << 20};
    const mt_alloc *mem = &mt_alloc_pages;

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        unsigned char *block = mem->zeroed(mem->ctx, sizes[i]);
        CHECK(block != NULL && block[0] == 0 && block[sizes[i] - 1] == 0);
        memset(block, 0xAB, sizes[i]);
        mem->put(mem->ctx, block, sizes[i]);
        CHECK((block = mem->get(mem->ctx, sizes[i])) != NULL);
        memset(block, 0xCD, sizes[i]);
        mem->put(mem->ctx, block, sizes[i]);
    }
    mem->put(mem->ctx, NULL, 1 << 20);
    mem->put(mem->ctx, NULL, 0);
    CHECK(mem->get(mem->ctx, (size_t)1 << 62) == NULL);
}

static void
an_array_grows_from_a_small_block_to_pages(void)
{
    size_t room = 0, *numbers = NULL;

    for (size_t i = 0; i < 40000; i++) {
        numbers = mt_alloc_grown(&mt_alloc_pages, numbers, &room, i + 1, sizeof *numbers);
        CHECK(numbers != NULL);
        numbers[i] = i;
    }
    for (size_t i = 0; i < 40000; i++)
        CHECK(numbers[i] == i);
    mt_alloc_pages.put(mt_alloc_pages.ctx, numbers, room * sizeof *numbers);
}

static void
a_large_block_leaves_the_heap_and_the_address_space_as_they_were(void)
{
    const mt_alloc *mem = &mt_alloc_pages;
    struct mallinfo2 before = mallinfo2(), after;
    char *block = mem->get(mem->ctx, 1 << 20);

    CHECK(block != NULL);
    after = mallinfo2();
    CHECK(after.uordblks == before.uordblks && after.hblkhd == before.hblkhd);
    mem->put(mem->ctx, block, 1 << 20);
    CHECK(msync(block, 4096, MS_ASYNC) == -1); /* it is not mapped any more */
}

int
main(void)
{
    RUN(blocks_of_all_sizes_are_whole);
    RUN(an_array_grows_from_a_small_block_to_pages);
    RUN(a_large_block_leaves_the_heap_and_the_address_space_as_they_were);
    CHECK_DONE();
}
