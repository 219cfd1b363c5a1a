/* peak.h -- mt_mark_ops by the kernel's own high-water mark of resident memory.
 *
 *   reset   "5" into /proc/self/clear_refs sets the mark to what is resident now
 *   high    getrusage().ru_maxrss, which is the larger of the mark and of a floor
 *
 * The floor: exec() carries the peak of the program that it replaced over into ru_maxrss, for good.
 * A worker that a 20 GB trainer starts reads 20 GB from its first moment on. What was read after a
 * reset bounds the floor from above, so a reading above that bound is the mark itself. One at or
 * below it is believed where as much is resident now; else VmHWM is read from /proc/self/status,
 * at ten times the cost, which knows no floor.
 *
 * The kernel counts pages per processor and adds up now and then: the mark may be off by up to
 * 64 pages a processor. */
#ifndef MT_OS_MONITOR_PEAK_H
#define MT_OS_MONITOR_PEAK_H

#include "core/base/alloc.h"
#include "core/monitor/peaks.h"
#include "os/monitor/procfile.h"

/* Sees how high the mark stands now. What getrusage reports never falls below a floor that was there
 * when the program began; the earlier it was looked at, the lower that is known to be, and only a
 * mark above it is known without a second reading. */
void mt_mark_linux_look(void);

/* root is "" for the machine's own /proc, or a folder that holds a `proc`: the mark is then what
 * its proc/self/status says. sys stays valid until close; root is copied. *out is written on MT_OK
 * only. MT_ENOMEM. */
mt_status mt_mark_linux_new(const mt_alloc *mem, const mt_proc_sys *sys, const char *root,
                            mt_mark_ops *out, mt_error *err);

#endif
