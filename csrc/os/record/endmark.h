/* endmark.h -- a record says by which signal its process ended, also while C code runs.
 *
 *   SIGTERM ──► handler ──► the mark in each record ──► mt_endmark_before_end's function
 *                                                     ──► default action, and the signal once more
 *
 * The mark is a number in the header: a handler cannot write an event. The reader of the record
 * makes the typed end of it (memtools/_record/record.py).
 *
 * The handler is installed only where a signal would end the process by default, so that what the
 * program installed, before or later, and what it ignores stay as they are. A record whose page has
 * gone (busguard.h) gets no mark, and the process ends as it would. In a process forked
 * since, nothing is marked, and the signal ends it as it would have. The process ends by the same
 * signal as without the handler, so that its parent sees the same. The first process of a container
 * does not die of a signal that it has no handler for: it gets none here.
 *
 * As for busguard.h: a signal handler has no argument, so that the records are the process's.
 */
#ifndef MT_OS_RECORD_ENDMARK_H
#define MT_OS_RECORD_ENDMARK_H

#include <stdbool.h>

enum { MT_ENDMARK_RECORDS = 64 };

/* From now on a signal that ends this process marks the record that mt_record_init made at
 * `region`; once, also when it is added twice. Any thread may call it. False, and nothing is
 * marked, when 64 records are. */
bool mt_endmark_add(void *region);

/* Before the region is unmapped. With the last record, the handlers go. Nothing happens where
 * `region` was not added. */
void mt_endmark_remove(const void *region);

/* Installs the handlers again where the program has put the default action back since, as it does
 * when it restores what it found (Python's signal.signal knows nothing of a handler like this one).
 * To be called now and then; some microseconds. Any thread. Nothing happens without a record, and
 * when a signal is ending the process. */
void mt_endmark_renew(void);

/* Marks all records of this process. Safe in a signal handler. */
void mt_endmark_now(int number);

/* From now on, where SIGTERM or SIGHUP ends a process, also a forked one, `call` is called after the
 * marks, in the handler: it may do what is safe there, and other threads go on meanwhile. NULL: no
 * longer. Any thread. */
void mt_endmark_before_end(void (*call)(void));

#endif
