/* busguard.h -- a store into a mapped file must not end the program when the file has no page there
 * any more, because it was truncated, its disk is full after all, or its server has gone.
 *
 *   store ──► no page ──► SIGBUS ──┬─ in a guarded region: a page of memory takes the place, and
 *                                  │  the store is repeated and lands there
 *                                  └─ anywhere else: the handler that was there before
 *
 * What is stored there from then on is lost, which mt_busguard_hit reports. A signal handler has no
 * argument, so that the regions and the handler before are the process's: the one place where this
 * library keeps such a thing. The handler is installed with the first region and stays, for another
 * may have been put on top of it. One that is put on top later and does not pass faults on, as
 * faulthandler's does not, is the program's own choice: then SIGBUS ends it as it would without. */
#ifndef MT_OS_RECORD_BUSGUARD_H
#define MT_OS_RECORD_BUSGUARD_H

#include <stdbool.h>
#include <stddef.h>

enum { MT_BUSGUARD_REGIONS = 64 };

/* Guards whole pages at `at` until mt_busguard_remove, in this process, not in its children. Any
 * thread may call it. False, and nothing is guarded, when 64 regions are or the system refuses. */
bool mt_busguard_add(void *at, size_t bytes);

/* Nothing happens where `at` is not guarded. Before the region is unmapped. */
void mt_busguard_remove(const void *at);

/* Whether a page of the region at `at` was replaced. */
bool mt_busguard_hit(const void *at);

#endif
