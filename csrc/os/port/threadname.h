/* threadname.h -- the name by which top, gdb and /proc/<pid>/task show our thread. */
#ifndef MT_OS_PORT_THREADNAME_H
#define MT_OS_PORT_THREADNAME_H

/* Names the calling thread "memtools". */
void mt_threadname_set(void);

#endif
