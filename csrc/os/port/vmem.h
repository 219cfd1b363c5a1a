/* vmem.h -- mt_vmem_ops by mmap. */
#ifndef MT_OS_PORT_VMEM_H
#define MT_OS_PORT_VMEM_H

#include "core/port/vmem.h"

/* Anonymous private memory, not charged against overcommit before it is touched. */
extern const mt_vmem_ops mt_vmem_linux;

#endif
