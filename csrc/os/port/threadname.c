#include "os/port/threadname.h"

#include <sys/prctl.h>

void
mt_threadname_set(void)
{
    prctl(PR_SET_NAME, (unsigned long)"memtools", 0ul, 0ul, 0ul);
}
