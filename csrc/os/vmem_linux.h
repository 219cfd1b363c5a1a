/* vmem_linux.h -- mt_vmem_ops by mmap. */
#ifndef MT_VMEM_LINUX_H
#define MT_VMEM_LINUX_H

#include "core/port/vmem.h"

/* Anonymous private memory, not charged against overcommit before it is touched. */
extern const mt_vmem_ops mt_vmem_linux;

#endif
