/* children.h -- the living descendants of this process and their own memory.
 *
 *   /proc/self/task/<thread>/children ──► pids ──► /proc/<pid>/task/<thread>/children ──► ...
 *                                          │
 *                                          ├──► /proc/<pid>/statm         their memory
 *                                          ├──► /proc/<pid>/stat          now and then: is it a fork?
 *                                          └──► /proc/<pid>/smaps_rollup  then what of it is its
 *                                                                         alone
 *
 * A scan lists the tree and reads the memory of each process in it. Zombies have no memory and do
 * not count. A child whose parent has ended before a scan saw it belongs to another process by
 * then, and is not found.
 *
 * A forked child has the pages of its parent until one of the two writes to them, and statm counts
 * them in both: ten workers of a program of 1 GiB would be 10 GiB. Only smaps_rollup shows the
 * difference, and it takes the kernel 4 ms for a child of 200 MiB and 15 ms for one of 1 GiB. So a
 * scan weighs with it those children that it has time for (0.3 % of the time, 50 ms at the start),
 * the new ones first, and keeps what each shares: the private bytes are then statm's less that. A
 * child that was not weighed yet shares what the last one of about its size did.
 *
 * Forks of one another, whose stacks have one address, are a family: the first of it counts
 * all that it has and the others what is their own alone. This process is the first of its family.
 * A child that began another program is the first of its own, and need not be weighed.
 *
 * A page that a child shares becomes its own once one of the family writes to it. That is no growth
 * of the child: there are only so many, and they are seen in leaps, when it is weighed. So it is also
 * known what a child has made: what it had alone when it was weighed first, and has more since.
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
    MT_CHILDREN_MOST = 16384, /* with more than these the sum is unknown, and the count is right */
    MT_CHILD_NAME = 16,       /* bytes of a name, with its final 0 */
};

typedef struct mt_children mt_children;

/* root and sys stay valid. *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_children_new(const mt_alloc *mem, const mt_proc_sys *sys, const char *root,
                          mt_children **out, mt_error *err);
void mt_children_free(mt_children *ch); /* NULL is ignored */
/* Forgets all, in a forked child for example. */
void mt_children_clear(mt_children *ch);

/* Lists the tree again. False when something other than a process that just ended hid a part of it:
 * the count is then unknown. */
bool mt_children_scan(mt_children *ch);

/* Lets the next scan weigh all of them, for as long as at the start, because no later one will. */
void mt_children_weigh_all(mt_children *ch);
/* Processor time of the last scan that was weighing, which has an allowance of its own. */
uint64_t mt_children_weighing_ns(const mt_children *ch);

/* How many live, and their private bytes in sum, by the last scan. Either
 * is MT_UNKNOWN when it could not be found out. */
void mt_children_read(const mt_children *ch, uint64_t *count, uint64_t *priv);

/* What all of them have made, in sum; MT_UNKNOWN as their private bytes are. */
uint64_t mt_children_made_by_all(const mt_children *ch);

/* What of them is swapped out, in sum, read now: a page that was swapped out before a fork counts in
 * both. MT_UNKNOWN as their private bytes are. */
uint64_t mt_children_swap(const mt_children *ch);

/* Whether the last scan saw all of them. */
bool mt_children_known(const mt_children *ch);
/* How many are known one by one; 0 where the last scan did not see all. */
size_t mt_children_len(const mt_children *ch);
/* The number of the i-th, in the order of the last scan. pre: i < mt_children_len. */
uint64_t mt_children_pid(const mt_children *ch, size_t i);
/* Its private bytes, or MT_UNKNOWN. pre: as above. */
uint64_t mt_children_priv(const mt_children *ch, size_t i);
/* What it has made, as above; its private bytes while it was not weighed. pre: as above. */
uint64_t mt_children_made(const mt_children *ch, size_t i);
/* Reads the name that the kernel has of it ("" where it has ended). pre: as above. */
void mt_children_name(const mt_children *ch, size_t i, char out[MT_CHILD_NAME]);

#endif
