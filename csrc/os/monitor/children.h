/* children.h -- the living descendants of this process and their own memory.
 *
 *   /proc/self/task/<thread>/children ──► pids ──► /proc/<pid>/task/<thread>/children ──► ...
 *                                          │
 *                                          └──► /proc/<pid>/statm    kept open for the first 64
 *
 * A scan lists the tree; between scans only the kept descriptors are read, one call a child. Such a
 * descriptor means one process for ever: when that has ended, reading fails, also where its number
 * was given to another. What could not be kept is read during a scan only, right after it was
 * listed. Zombies have no memory and do not count. A child whose parent has ended before a scan saw
 * it belongs to another process by then, and is not found.
 *
 * A kernel without CONFIG_PROC_CHILDREN has no such lists: nothing is known of children there. */
#ifndef MT_OS_MONITOR_CHILDREN_H
#define MT_OS_MONITOR_CHILDREN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/alloc.h"
#include "core/base/status.h"
#include "os/monitor/procfile.h"

enum {
    MT_CHILDREN_KEPT = 64,   /* descriptors */
    MT_CHILDREN_MOST = 1024, /* whose memory is summed; further ones are counted, but for theirs */
};

typedef struct mt_children mt_children;

/* root and sys stay valid. *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_children_new(const mt_alloc *mem, const mt_proc_sys *sys, const char *root,
                          mt_children **out, mt_error *err);
void mt_children_free(mt_children *ch); /* NULL is ignored */
/* Forgets all, in a forked child for example. */
void mt_children_clear(mt_children *ch);

/* Lists the tree anew. False when something other than a process that just ended hid a part of it:
 * the count is then unknown. */
bool mt_children_scan(mt_children *ch);

/* How many live, and their private bytes in sum, by the last scan and the descriptors kept. Either
 * is MT_UNKNOWN when it could not be found out. */
void mt_children_read(mt_children *ch, uint64_t *count, uint64_t *priv);

#endif
