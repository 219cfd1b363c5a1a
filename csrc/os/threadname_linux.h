/* threadname_linux.h -- the name by which top, gdb and /proc/<pid>/task show our thread. */
#ifndef MT_THREADNAME_LINUX_H
#define MT_THREADNAME_LINUX_H

/* Names the calling thread "memtools". */
void mt_threadname_set(void);

#endif
