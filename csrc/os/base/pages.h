/* pages.h -- an allocator for tables that are large and soon freed.
 *
 * From 64 KiB on a block is pages of its own, which the system has back as soon as it is put: malloc
 * would keep them, as it raises its threshold with each large block that is freed, so that ten
 * megabytes of a table stay in the heap for good. It also writes between the blocks of the heap,
 * which in a forked process copies pages. Smaller blocks are malloc's. */
#ifndef MT_OS_BASE_PAGES_H
#define MT_OS_BASE_PAGES_H

#include "core/base/alloc.h"

extern const mt_alloc mt_alloc_pages;

#endif
